"""The registry: one definition an operator, and no answer rather than a wrong one."""

import pytest

from irpar.ir import DType, Graph, Node, RefAttribute, TensorType, symbol
from irpar.ops import Kind, OpDef, define, definition, definitions, factor_rule, flops

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
