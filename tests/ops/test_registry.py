"""The registry: one definition an operator, and no answer rather than a wrong one."""

import numpy as np
import pytest

from irpar.ir import ArrayTensor, DType, Graph, Node, RefAttribute, TensorType, symbol
from irpar.ops import FactorRule, Kind, OpDef, define, definition, definitions, factor_rule, flops
from irpar.ops.op_def import DEFINITIONS

F32 = DType.F32


def node(op: str, *shapes: tuple[object, ...], result: tuple[object, ...], **attributes: object) -> Node:
    graph = Graph()
    operands = [graph.add_input("x", TensorType(F32, shape)) for shape in shapes]  # type: ignore[arg-type]
    made = graph.append(Node(op, operands, attributes, version=21))
    made.result.type = TensorType(F32, result)  # type: ignore[arg-type]
    return made


def test_a_second_definition_is_refused() -> None:
    definitions()
    with pytest.raises(ValueError, match=r"ai\.onnx\.MatMul is defined twice"):
        define(OpDef("", "MatMul"))


def test_an_unknown_operator_has_nothing() -> None:
    unknown = node("NoSuchOperator", (4,), result=(4,))
    assert definition(unknown) is None
    assert factor_rule(unknown) is None
    assert flops(unknown) == 0


@pytest.mark.parametrize(
    "made",
    [
        node("Relu", (0, 4), result=(0, 4)),
        node("Relu", (symbol("n"), 4), result=(symbol("n"), 4)),
        node("Softmax", (5, 4), result=(5, 4), axis=2),
        node("Softmax", (5, 4), result=(5, 4), axis=RefAttribute("axis", 2)),
        node("Slice", (5, 4), (1,), (1,), result=(2, 4)),
    ],
    ids=["empty", "symbolic", "no such axis", "an attribute of a call", "bounds that are not constant"],
)
def test_what_cannot_be_told_has_no_rule(made: Node) -> None:
    assert definition(made) is not None
    assert factor_rule(made) is None


@pytest.mark.parametrize("op", ["RandomNormal", "RandomNormalLike", "RandomUniform", "Bernoulli", "Multinomial"])
def test_random_operators_have_no_rule(op: str) -> None:
    assert factor_rule(node(op, (4,), result=(4,))) is None


def test_a_dropout_that_may_train_has_no_rule() -> None:
    graph = Graph()
    data, ratio = graph.add_input("x", TensorType(F32, (4,))), graph.add_input("r", TensorType(F32, ()))
    mode = graph.add_input("t", TensorType(DType.BOOL, ()))
    made = graph.append(Node("Dropout", [data, ratio, mode], version=21))
    made.result.type = data.type
    assert factor_rule(made) is None


def test_statistics_of_a_training_batch_are_of_channels() -> None:
    shapes = ((4, 5, 3), (5,), (5,), (5,), (5,))
    trained = factor_rule(node("BatchNormalization", *shapes, result=(4, 5, 3), training_mode=1))
    assert trained is not None
    assert trained.kinds == (Kind.REPLICATE, Kind.PASS, Kind.REPLICATE)
    known = factor_rule(node("BatchNormalization", *shapes, result=(4, 5, 3)))
    assert known is not None
    assert set(known.kinds) == {Kind.PASS}


def reduced(*axes: int, **attributes: object) -> Node:
    """A ReduceSum of [5, 4] over constant axes."""
    graph = Graph()
    data = graph.add_input("x", TensorType(F32, (5, 4)))
    along = graph.add_constant(ArrayTensor(np.array(axes, np.int64)), "axes")
    made = graph.append(Node("ReduceSum", [data, along], attributes, version=21))
    keeps = attributes.get("keepdims", 1)
    shape = [1 if at in axes else size for at, size in enumerate((5, 4)) if keeps or at not in axes]
    made.result.type = TensorType(F32, tuple(shape))
    return made


def test_nodes_that_are_alike_ask_their_rule_once() -> None:
    assert factor_rule(reduced(0)) is factor_rule(reduced(0))


def test_numbers_attributes_and_types_tell_nodes_apart() -> None:
    nodes = [reduced(0), reduced(1), reduced(0, keepdims=0), node("Relu", (5, 4), result=(5, 4))]
    nodes += [node("Relu", (4, 5), result=(4, 5)), node("Softmax", (5, 4), result=(5, 4), axis=0)]
    nodes.append(node("Softmax", (5, 4), result=(5, 4), axis=1))
    assert len({str(factor_rule(each)) + str(factor_rule(each).sizes) for each in nodes}) == len(nodes)  # type: ignore[union-attr]


def test_a_rule_of_another_package_is_asked_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Node] = []

    def rule(made: Node) -> FactorRule:
        asked.append(made)
        return FactorRule((((0,),),), (((0,),),), (4,), (Kind.PASS,))

    definitions()
    made = define(OpDef("", "OfAnother", rule=rule))
    del DEFINITIONS["", "OfAnother"]
    monkeypatch.setitem(DEFINITIONS, ("", "OfAnother"), made)
    for _ in range(2):
        assert factor_rule(node("OfAnother", (4,), result=(4,))) is not None
    assert len(asked) == 2
