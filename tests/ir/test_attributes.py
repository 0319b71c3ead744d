"""Plain Python values as attributes, and when two are the same."""

import numpy as np
import pytest

from irpar.ir import (
    ArrayTensor,
    DType,
    Floats,
    Graph,
    Graphs,
    Ints,
    Node,
    RefAttribute,
    Strings,
    Tensors,
    TensorType,
    Types,
    plain_attribute,
    same_attribute,
)
from irpar.ir.attributes import attribute, attributes

TYPE = TensorType(DType.F32, (2,))


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (True, 1),
        (np.int32(3), 3),
        (np.float32(0.5), 0.5),
        ([], Ints()),
        ((1, 2), Ints((1, 2))),
        ([True, np.int64(2)], Ints((1, 2))),
        ([1, 0.5], Floats((1.0, 0.5))),
        (["a", b"\xff"], Strings(("a", b"\xff"))),
        ([TYPE], Types((TYPE,))),
        (Floats(), Floats()),
        (TYPE, TYPE),
    ],
)
def test_plain_values(value: object, made: object) -> None:
    found = attribute(value)
    assert found == made
    assert type(found) is type(made)


def test_arrays_graphs_and_lists_of_them() -> None:
    assert isinstance(attribute(np.zeros(2)), ArrayTensor)
    assert isinstance(attribute([np.zeros(2)]), Tensors)
    assert isinstance(attribute([Graph("a")]), Graphs)
    assert attributes({"a": None, "b": 1}) == {"b": 1}


@pytest.mark.parametrize("value", [None, {1}, object(), [1, "a"], [None], [[1]]])
def test_what_cannot_be_one(value: object) -> None:
    with pytest.raises(TypeError):
        attribute(value)


def test_sameness() -> None:
    assert same_attribute(float("nan"), float("nan"))
    assert not same_attribute(1, 1.0)
    assert not same_attribute(Ints(), Floats())
    assert same_attribute(ArrayTensor([1.0]), ArrayTensor([1.0]).slice([(0, 1)]))
    assert not same_attribute(ArrayTensor([1.0]), ArrayTensor([2.0]))
    assert not same_attribute(Graph("a"), Graph("a"))
    assert same_attribute(Tensors((ArrayTensor([1.0]),)), Tensors((ArrayTensor([1.0]),)))


def test_nested_graphs_know_their_holder() -> None:
    graph = Graph("inner")
    node = Node("If", [], {"body": graph})
    assert graph.parent is node
    other = Graph("other")
    node.set_attribute("body", [other])
    assert other.parent is node
    assert list(node.nested_graphs()) == [other]
    node.set_attribute("body", None)
    assert node.attributes == {}


def test_kernels_get_plain_python_values() -> None:
    assert plain_attribute(3) == 3
    assert plain_attribute(b"\xff") == b"\xff"
    assert type(plain_attribute(Strings(["a", b"\xff"]))) is tuple
    (array,) = plain_attribute(Tensors([ArrayTensor(np.arange(3))]))
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value", [Graph(), Graphs([Graph()]), RefAttribute("alpha", 1)], ids=["graph", "graphs", "ref"]
)
def test_no_kernel_gets_a_graph_or_a_reference(value: object) -> None:
    with pytest.raises(TypeError, match="a kernel cannot take"):
        plain_attribute(value)  # type: ignore[arg-type]
