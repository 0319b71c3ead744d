"""The registry: one definition an operator, and no answer rather than a wrong one."""

from pathlib import Path

import numpy as np
import pytest

from irpar.ir import (
    ArrayTensor,
    DType,
    ExternalTensor,
    Graph,
    LazyTensor,
    Node,
    RefAttribute,
    Tensor,
    TensorType,
    symbol,
)
from irpar.ops import FactorRule, Kind, OpDef, define, definition, definitions, factor_rule, flops, kind_of_rule
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


def reading(op: str, *constants: Tensor, result: tuple[int, ...] = (2, 3, 4), **attributes: object) -> Node:
    """A node of [2, 3, 4] and constants."""
    graph = Graph()
    operands = [graph.add_input("x", TensorType(F32, (2, 3, 4)))]
    operands += [graph.add_constant(data, "c") for data in constants]
    made = graph.append(Node(op, operands, attributes, version=21))
    made.result.type = TensorType(F32, result)
    return made


def in_memory(numbers: list[float] | list[int], dtype: DType = DType.I64) -> LazyTensor:
    array = np.array(numbers, dtype.numpy)
    return LazyTensor(dtype, array.shape, array.copy)


def in_a_file(dtype: DType, *shape: int) -> ExternalTensor:
    return ExternalTensor(dtype, shape, Path("no.data"), "no.data", 0, 0)


def test_nodes_with_other_weights_are_alike_and_no_weight_is_read() -> None:
    for op, shape in [("MatMul", (4, 4)), ("Add", (4,)), ("LayerNormalization", (4,))]:
        nodes = [reading(op, weights) for weights in (in_a_file(F32, *shape), in_a_file(F32, *shape))]
        nodes.append(reading(op, ArrayTensor(np.ones(shape, np.float32))))
        assert len({kind_of_rule(each) for each in nodes}) == 1
        assert len({id(factor_rule(each)) for each in nodes}) == 1
        assert kind_of_rule(nodes[0]) is not None


def test_numbers_that_rules_read_tell_nodes_apart() -> None:
    targets = [reading("Reshape", in_memory(target), result=(6, 4)) for target in ([6, 4], [6, -1], [6, 4])]
    assert kind_of_rule(targets[0]) == kind_of_rule(targets[2]) != kind_of_rule(targets[1])
    assert kind_of_rule(reading("Reshape", in_a_file(DType.I64, 2), result=(6, 4))) is None
    nowhere = in_memory([], DType.F32)
    kept, grown = (
        factor_rule(reading("Resize", nowhere, in_memory(scales, F32), result=result))
        for scales, result in (([1, 1, 1], (2, 3, 4)), ([1, 1, 2], (2, 3, 8)))
    )
    assert kept is not None
    assert grown is not None
    assert kept != grown


def test_what_may_depend_on_elements_or_readers_has_no_kind() -> None:
    assert kind_of_rule(reading("CumSum", in_memory([1]))) is None  # Its local program works along dim 1 of these.
    assert kind_of_rule(reading("Softmax")) is not None
