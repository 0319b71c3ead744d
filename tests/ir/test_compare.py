"""Every fact of a module, changed alone, is a difference that names its place."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from irpar.ir import (
    Annotation,
    ArrayTensor,
    Floats,
    Module,
    RefAttribute,
    Value,
    clone_module,
    read_text,
    same_module,
    same_tensor,
)
from irpar.ir.dtypes import DType
from irpar.ir.tensor import ExternalTensor
from irpar.sharding import Mesh, Sharding

GOLDEN = Path(__file__).parent / "text" / "golden"


def load(name: str) -> Module:
    return read_text(GOLDEN / f"{name}.irpar")


def _set(path: str, value: object) -> Callable[[Module], None]:
    """Set an attribute: "module.doc", "graph.doc", "value.doc" of %c, "node.doc" of the node that makes %d."""
    kind, _, name = path.partition(".")

    def change(module: Module) -> None:
        d = module.graph.value("d")
        target = {"module": module, "graph": module.graph, "value": module.graph.value("c"), "node": d.node}[kind]
        setattr(target, name, value)

    return change


CHANGES = [
    *(
        _set(f"module.{name}", value)
        for name, value in [("ir_version", 1), ("producer", ("a", "b")), ("doc", "x"), ("network", "x")]
    ),
    _set("module.metadata", {"a": "c"}),
    _set("module.opsets", {"": 22}),
    _set("module.fixed", {"c": ArrayTensor(np.ones(2, np.float32))}),
    _set("module.meshes", {"q": Mesh({"a": 2}, name="q")}),
    _set("module.annotations", [Annotation("p", (None,))]),
    *(_set(f"graph.{name}", value) for name, value in [("name", "n"), ("view", "local"), ("ranks", (1,)), ("doc", "")]),
    _set("graph.metadata", None),
    _set("graph.output_names", ["other"]),
    *(
        _set(f"value.{name}", value)
        for name, value in [("name", "n"), ("source", "s"), ("memory", "host"), ("doc", "d")]
    ),
    _set("value.sharding", Sharding.replicated(Mesh({"a": 2}), 1)),
    _set("value.global_shape", (3,)),
    _set("value.metadata", {"k": "v"}),
    *(
        _set(f"node.{name}", value)
        for name, value in [
            *(("op_type", "x"), ("domain", "x"), ("version", 99), ("name", "x"), ("source", "x"), ("scope", "x")),
            *(("phase", "forward"), ("stage", 1), ("place", "host"), ("doc", "x"), ("metadata", None)),
        ]
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_fact_is_a_difference(change: Callable[[Module], None]) -> None:
    module = load("attributes")
    copy = clone_module(module)
    assert same_module(module, copy) is None
    change(copy)
    assert same_module(module, copy) is not None
    assert same_module(copy, module) is not None


def test_structure() -> None:
    def differ(change: Callable[[Module], object]) -> str:
        copy = clone_module(module)
        change(copy)
        found = same_module(module, copy)
        assert found is not None
        return found

    module = load("attributes")
    x, typed = module.graph.inputs[0], module.graph.inputs[3]
    assert x is not typed
    assert differ(lambda m: m.graph.add_input("more")) == "graph @a graph: 5 and 6 inputs"
    assert differ(lambda m: m.graph.value("a").node.erase()) == "graph @a graph: 9 and 8 nodes"  # type: ignore[union-attr]
    assert "operands are" in differ(lambda m: m.graph.value("a").node.set_operand(0, m.graph.inputs[2]))  # type: ignore[union-attr]
    assert "outputs are" in differ(lambda m: m.graph.set_outputs([m.graph.inputs[0]]))
    assert "3 and 4 results" in differ(lambda m: m.graph.value("d").node.add_result(Value("e")))  # type: ignore[union-attr]
    assert "graphs" in differ(lambda m: m.graphs.append(m.graph))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("int", 3),
            ("float", -2e-45),
            ("nan", 0.0),
            ("whole", 2),
            ("string", b"s"),
            ("bytes", "x"),
            ("ints", Floats()),
        ),
        *(("floats", Floats((1.0, 2.0))), ("strings", None), ("new", 1), ("int", RefAttribute("a", 1))),
    ],
)
def test_attributes(name: str, value: object) -> None:
    module = load("attributes")
    copy = clone_module(module)
    node = copy.graph.value("a").node
    assert node is not None
    node.set_attribute(name, value)
    assert same_module(module, copy) is not None


def test_nested_graphs_and_functions() -> None:
    module = load("control_flow")
    copy = clone_module(module)
    copy.graph.value("two").data = ArrayTensor(np.array([2, 3], np.float32))
    assert same_module(module, copy) == "graph @then, constant %two: the numbers differ"
    module = load("functions")
    copy = clone_module(module)
    next(iter(copy.functions.values())).attributes["alpha"] = 2.5
    assert same_module(module, copy) == "function @com.example.Scale, attribute alpha: 1.5 and 2.5"


def test_tensors_of_one_place_are_equal_without_being_read() -> None:
    a = ExternalTensor(DType.F32, (2,), Path("/nowhere/w"), "w", 0, 8)
    b = ExternalTensor(DType.F32, (2,), Path("/nowhere/../nowhere/w"), "other name", 0, 8)
    assert same_tensor(a, b)
    assert same_tensor(a.slice([(0, 1)]), b.slice([(0, 1)]))
    assert not same_tensor(a, ExternalTensor(DType.F32, (1, 2), Path("/nowhere/w"), "w", 0, 8))
    assert same_tensor(ArrayTensor([0.0, 1.0]).slice([(0, 1)]), ArrayTensor([0.0]))
    assert not same_tensor(ArrayTensor([0.0]), ArrayTensor([-0.0]))
