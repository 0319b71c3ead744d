"""What `localize` hooks share: making nodes whose results stand for those of the local node."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Value

from .coords import block_index
from .facts import operand


def typed_like(
    result: Value,
    op_type: str,
    operands: Sequence[Value | None],
    attributes: Mapping[str, Any] | None,
    builder: Builder,
) -> Value:
    """Insert a node whose result has the type, sharding and whole shape of `result`."""
    made = builder.op(op_type, operands, attributes, type=result.type, name=result.name)
    made.sharding = result.sharding
    made.global_shape = result.global_shape
    return made


def set_target(local: Node, index: int, target: Sequence[int], builder: Builder) -> None:
    """Replace an int64 operand by a constant, where its numbers differ."""
    present = operand(local, index)
    if present is not None and present.data is not None and present.data.numpy().tolist() == list(target):
        return
    made = builder.constant(np.asarray(target, np.int64), "shape" if present is None else present.name)
    operands = [*local.operands, *[None] * (index + 1 - len(local.operands))]
    operands[index] = made
    local.set_operands(operands)


def add_bias_once(local: Node, index: int, builder: Builder, neutral: int = 0) -> None:
    """Where the result is partial, give an operand to the first of the devices that reduce theirs, `neutral` to others.

    So a bias counts once where they add up what they have.
    """
    bias, sharding = operand(local, index), local.result.sharding
    if bias is None or sharding is None or not sharding.partial:
        return
    position = block_index(builder, sharding.mesh, sharding.partial)
    zero = builder.constant(np.asarray(0, np.int64), "number_0")
    is_first = builder.op("Equal", [position, zero], type=TensorType(DType.BOOL, ()))
    nothing = builder.constant(np.full((), neutral, bias.dtype.numpy), "neutral")
    once = builder.op("Where", [is_first, bias, nothing], type=bias.type, name=f"{bias.name}_once")
    operands = list(local.operands)
    operands[index] = once
    local.set_operands(operands)
