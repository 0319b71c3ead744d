"""BatchNormalization in training, written out in other operators.

ONNX Runtime (1.31) has it in its training builds alone, or writes the running mean and variance over the ones that it
reads: over constants of a session that several ranks and runs share, and over arrays of whoever calls.
"""

from collections.abc import Mapping

import numpy as np

from irpar.ir import Builder, DType, Node, Value
from irpar.ops.facts import float_attribute, int_attribute

_SINCE = 14
"""The opset from which on an attribute says that it trains."""


def trains(node: Node) -> bool:
    """Whether a node is a BatchNormalization that takes the statistics of its batch."""
    is_one = node.identity == ("", "BatchNormalization") and node.version >= _SINCE
    return is_one and bool(int_attribute(node, "training_mode", 0))


def write_out(node: Node, opsets: Mapping[str, int]) -> dict[Value, Value]:
    """Let other operators take the place of a node that trains.

    Args:
        node: of which the operands have types and the batch a rank.
        opsets: domain to version.

    Returns:
        For each result of the node the value that its readers read now.
    """
    assert node.graph is not None
    builder = Builder(node.graph, opsets, before=node, like=node)
    batch, scale, bias, *running = node.inputs
    dims = [dim for dim in range(batch.tensor_type.rank or 0) if dim != 1]
    wide = batch.dtype if batch.dtype is DType.F64 else DType.F32

    def cast(value: Value, dtype: DType) -> Value:
        return value if value.dtype is dtype else builder.op("Cast", [value], {"to": dtype.value})

    def number(value: float) -> Value:
        return builder.constant(np.asarray(value, wide.numpy), "number")

    is_empty = batch.is_static and 0 in [batch.shape[dim] for dim in dims]

    def mean(value: Value) -> Value:
        if is_empty:  # NaN: 0 / 0. ONNX Runtime's ReduceMean makes 0 of no elements.
            total = builder.op("ReduceSum", [value, builder.constant(dims)], {"keepdims": 1})
            return builder.op("Div", [total, number(0)])
        if opsets[""] < 18:
            return builder.op("ReduceMean", [value], {"axes": tuple(dims), "keepdims": 1})
        return builder.op("ReduceMean", [value, builder.constant(dims)], {"keepdims": 1})

    # A vector is a batch of one channel.
    channels = builder.constant([1, -1, *[1] * (len(dims) - 1)] if batch.tensor_type.rank != 1 else [-1])
    data = cast(batch, wide)
    middle = mean(data)
    centred = builder.op("Sub", [data, middle])
    variance = mean(builder.op("Mul", [centred, centred]))
    epsilon = number(float_attribute(node, "epsilon", 1e-5))
    deviation = builder.op("Sqrt", [builder.op("Add", [variance, epsilon])])
    factor, offset = (builder.op("Reshape", [cast(value, wide), channels]) for value in (scale, bias))
    normal = builder.op("Mul", [centred, builder.op("Div", [factor, deviation])])  # One pass over the data.
    made = [builder.op("Add", [normal, offset])]
    momentum = float_attribute(node, "momentum", 0.9)
    flat = builder.constant([-1])
    for before, found in zip(running, (middle, variance), strict=True):
        kept = builder.op("Mul", [cast(before, wide), number(momentum)])
        added = builder.op("Mul", [builder.op("Reshape", [found, flat]), number(1 - momentum)])
        made.append(builder.op("Add", [kept, added]))
    instead: dict[Value, Value] = {}
    for result, value in zip(node.results, made, strict=False):
        given = value
        if result.dtype is not wide:
            given = builder.op("Cast", [value], {"to": result.dtype.value})
        given.type = result.type
        instead[result] = given
        result.replace_uses(given)
    node.erase()
    return instead
