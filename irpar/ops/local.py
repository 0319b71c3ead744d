"""What `localize` hooks share: making nodes whose results stand for those of the local node."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Builder, Node, Value

from .facts import operand
from .neutral import first_only


def typed_like(
    result: Value,
    op_type: str,
    operands: Sequence[Value | None],
    attributes: Mapping[str, Any] | None,
    builder: Builder,
    *,
    domain: str = "",
) -> Value:
    """Insert a node whose result has the type, sharding and global shape of `result`."""
    made = builder.op(op_type, operands, attributes, type=result.type, domain=domain, name=result.name)
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


def add_bias_once(local: Node, index: int, builder: Builder) -> None:
    """Where the result is partial, let an operand, such as a bias, count once when devices reduce what they have.

    It may be in parts too, over some of the axes.
    """
    bias, sharding = operand(local, index), local.result.sharding
    if bias is None or sharding is None:
        return
    own = bias.sharding.partial if bias.sharding is not None else ()
    axes = tuple(axis for axis in sharding.partial if axis not in own)
    if not axes:
        return
    once = first_only(bias, sharding.reduce, sharding.mesh, axes, builder, f"{bias.name}_once")
    operands = list(local.operands)
    operands[index] = once
    local.set_operands(operands)
