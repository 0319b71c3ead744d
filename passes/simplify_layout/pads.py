"""Zeros around places, and places that are cut off again, as the pads of what slides over them.

p = Pad(x : [1, 8, 64], [0, 0, 4, 0, 0, 0]) : [1, 8, 68]
h = Conv(p, w : [8, 8, 5]) : [1, 8, 64]                    h = Conv(x, w) {pads=[4, 0]}

h = Conv(x, w) {pads=[4, 4]} : [1, 8, 68]
y = Slice(h, [0], [-4], [2]) : [1, 8, 64]                  y = Conv(x, w) {pads=[4, 0]}

Blocks of a dim that grows and shrinks again lie elsewhere in each of the tensors, and would move from one device to the
next between them. With pads a device fetches what its windows cover, once.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from irpar.ir import Builder, Ints, Node, Value
from irpar.ops.facts import (
    CannotTellError,
    axis_attribute,
    int_attribute,
    ints_attribute,
    needed,
    operand,
    result_shape,
    shape_of,
    text_attribute,
)
from irpar.ops.local_programs.shape import pads_of, slices
from irpar.ops.local_programs.window import flat_pads, place_pads, stride_and_reach

Margins = Mapping[int, tuple[int, int]]
"""Dim to how much stands before and after it."""

_NO_MARGIN = (0, 0)

_MOST_READ = 1 << 20
"""Elements of a constant that are looked at."""

_CONVOLUTIONS = frozenset({("", "Conv"), ("", "ConvTranspose")})


def pad_windows(node: Node) -> bool:
    """Let windows that slide over zeros around a value begin in their pads; False where there is nothing to do."""
    if node.identity not in (("", "Pad"), ("", "Concat")) or not _is_passing(node):
        return False
    uses = node.result.uses
    if not all(index == 0 and _may_pad(user) and user.graph is node.graph for user, index in uses):
        return False
    with suppress(CannotTellError):
        found = _padded(node) if node.op_type == "Pad" else _joined_with_zeros(node)
        if found is None:
            return False
        value, margins = found
        wider = {user: pads for user, _ in uses if (pads := _wider(user, margins)) is not None}
        if len(wider) < len(uses):
            return False
        for user, pads in wider.items():
            user.set_operand(0, value)
            _set_pads(user, pads)
        node.erase()
        return True
    return False


def _may_pad(node: Node) -> bool:
    return node.identity in (("", "Conv"), ("", "AveragePool")) and node.strategy is None


def take_off_windows(node: Node) -> bool:
    """Let a convolution give no more than a Slice leaves of its result; False where there is nothing to do."""
    if node.identity != ("", "Slice") or node.strategy is not None:
        return False
    maker = needed(node, 0).node
    if maker is None or maker.identity not in _CONVOLUTIONS or maker.graph is None or maker.graph is not node.graph:
        return False
    if not _is_passing(maker) or maker.result.use_count != 1:
        return False
    with suppress(CannotTellError):
        pads = _narrower(maker, node)
        if pads is None:
            return False
        builder = Builder(maker.graph, {"": maker.version}, before=node, like=maker)
        name = node.result.name
        less = builder.op(maker.op_type, maker.operands, maker.attributes, type=node.result.type, name=name)
        _set_pads(builder.made[0], pads)
        node.replace([less])
        less.rename(name)
        maker.erase()
        return True
    return False


def _is_passing(node: Node) -> bool:
    """Whether what a node gives is there for its readers alone, and nobody said how it runs."""
    value = node.result
    return node.strategy is None and value.sharding is None and value.has_uses and not value.is_output


def _set_pads(node: Node, pads: Sequence[tuple[int, int]]) -> None:
    node.attributes.pop("auto_pad", None)
    node.set_attribute("pads", Ints(flat_pads(pads)))
    if node.op_type == "AveragePool":
        node.set_attribute("count_include_pad", 1)


# -- zeros around a value -------------------------------------------------------------------------------------------


def _padded(node: Node) -> tuple[Value, Margins] | None:
    """What a Pad puts zeros around, and how many; None where it puts something else there."""
    filled = operand(node, 2)
    if text_attribute(node, "mode", "constant") != "constant" or not (filled is None or _is_zero(filled)):
        return None
    return needed(node, 0), pads_of(node, len(shape_of(node, 0)))


def _joined_with_zeros(node: Node) -> tuple[Value, Margins] | None:
    """What a Concat puts zeros before and after, and how many; None where it joins more than that."""
    axis = axis_attribute(node, len(result_shape(node)), 0)
    others = [index for index, value in enumerate(node.inputs) if value.sharding is not None or not _is_zero(value)]
    if len(others) != 1:
        return None
    (place,) = others
    before, after = (
        sum(value.shape[axis] for value in values) for values in (node.inputs[:place], node.inputs[place + 1 :])
    )
    return node.inputs[place], {axis: (before, after)}


def _is_zero(value: Value) -> bool:
    data = value.data
    return data is not None and data.dtype.is_float and data.size <= _MOST_READ and not data.numpy().any()


# -- windows --------------------------------------------------------------------------------------------------------


def _wider(node: Node, margins: Margins) -> list[tuple[int, int]] | None:
    """The pads of windows over a value as they are over it with zeros around it; None where none say that."""
    own = place_pads(node)
    if any(dim < 2 or min(margin) < 0 for dim, margin in margins.items() if margin != _NO_MARGIN):
        return None
    more = [margins.get(dim, _NO_MARGIN) for dim in range(2, len(own) + 2)]
    pads = [(pair[0] + margin[0], pair[1] + margin[1]) for pair, margin in zip(own, more, strict=True)]
    return pads if node.op_type == "Conv" or _counts_zeros(node, own, pads) else None


def _counts_zeros(node: Node, own: Sequence[tuple[int, int]], pads: Sequence[tuple[int, int]]) -> bool:
    """Whether a mean may take pads for zeros: its own, if it has any, count already, and each window has elements."""
    if int_attribute(node, "ceil_mode", 0) or (any(map(any, own)) and not int_attribute(node, "count_include_pad", 0)):
        return False
    kernel = ints_attribute(node, "kernel_shape") or ()
    return all(max(pair) < size for pair, size in zip(pads, kernel, strict=True))


def _narrower(node: Node, cut: Node) -> list[tuple[int, int]] | None:
    """The pads with which a convolution gives what a Slice leaves of its result; None where no pads do."""
    is_transposed = node.op_type == "ConvTranspose"
    if is_transposed and (
        text_attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in node.attributes
    ):
        return None
    shape = result_shape(node)
    pads = dict(enumerate(place_pads(node), 2))
    for dim, (start, end, step) in slices(cut, len(shape)).items():
        left = range(shape[dim])[start:end]
        if step != 1 or not left:
            return None
        off = left.start, shape[dim] - left.stop
        if off == _NO_MARGIN:
            continue
        if dim not in pads:
            return None
        # The pads of a ConvTranspose are what is cut off already.
        places = -1 if is_transposed else stride_and_reach(node, dim)[0]
        before, after = (pad - places * count for pad, count in zip(pads[dim], off, strict=True))
        if min(before, after) < 0:
            return None
        pads[dim] = before, after
    return list(pads.values())
