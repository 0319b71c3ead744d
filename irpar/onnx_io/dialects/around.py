"""Collectives along any dim, of operators that have the first alone: what is done to operand and result.

A member's blocks of the dim that is cut come to lie one after the other, are sent, and go where they belong:

    all-gather of f32[4, 6] along dim 1, 2 members:    Transpose [6, 4], gather [12, 4], Transpose [4, 12]
    all-to-all of f32[4, 6] from dim 1 to dim 0, of 2: Reshape [4, 2, 3], Transpose [2, 4, 3], send, Reshape [8, 3]
"""

from collections.abc import Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Step(NamedTuple):
    """A Transpose by an order, or a Reshape to a shape.

    Attributes:
        op_type: which.
        sizes: the order or the shape.
    """

    op_type: str
    sizes: Shape


class Around(NamedTuple):
    """What stands before and after.

    Attributes:
        before, after: steps.
        sent: the shape of what the operator gives.
    """

    before: list[Step]
    after: list[Step]
    sent: Shape


def around(dims: Sequence[int], operand: Shape, result: Shape, members: int) -> Around:
    """What it takes to have a dim first, or two.

    Args:
        dims: of a gather or a scatter the one; of an all-to-all those that are cut and joined.
        operand, result: the shapes.
        members: how many there are.
    """
    if not any(dims):
        return Around([], [], result)
    if len(dims) == 1:
        order = (dims[0], *(dim for dim in range(len(operand)) if dim != dims[0]))
        back = tuple(order.index(dim) for dim in range(len(order)))
        return Around([Step("Transpose", order)], [Step("Transpose", back)], tuple(result[dim] for dim in order))
    return _all_to_all(dims[0], dims[1], operand, result, members)


def _all_to_all(cut: int, joined: int, operand: Shape, result: Shape, members: int) -> Around:
    blocks = (*operand[:cut], members, operand[cut] // members, *operand[cut + 1 :])
    order = (cut, *(dim for dim in range(len(blocks)) if dim != cut))
    sent = tuple(blocks[dim] for dim in order)
    back = (*range(1, joined + 1), 0, *range(joined + 1, len(sent)))
    before = [Step("Reshape", blocks), Step("Transpose", order)]
    after = [Step("Transpose", back), Step("Reshape", result)]
    return Around(_without_idle(before), _without_idle(after), sent)


def _without_idle(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.op_type != "Transpose" or step.sizes != tuple(range(len(step.sizes)))]
