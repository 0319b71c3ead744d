"""Slices of what was padded: the slice is taken first, and what is left of the padding put around that.

%p = Pad(%x, [3, 2])             of 4 makes 9     %s = Slice(%x, [1], [4], [0], [2])     of 2
%y = Slice(%p, [0], [9], [0], [2])       of 5     %y = Pad(%s, [2, 1])                   of 5

Nobody writes elements that nobody reads, nor holds them for a view of the others.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from irpar.ir import ArrayTensor, DType, Node, TensorType, Value, inherit
from irpar.ops.facts import ints_operand, text_attribute


class _Part(NamedTuple):
    """What is read along one axis.

    Attributes:
        start, end, step: of the operand.
        before, after: elements of padding around it.
    """

    start: int
    end: int
    step: int
    before: int
    after: int


def slices_first(nodes: Sequence[Node], kept: Set[Value]) -> tuple[list[Node], list[Value]]:
    """Nodes with others in place of Pads that a Slice alone reads, and the constants that these read.

    Args:
        nodes: in order.
        kept: results that are read behind them.
    """
    inside = set(nodes)
    turned: dict[Node, list[Node]] = {}
    gone: set[Node] = set()
    constants: list[Value] = []
    for node in nodes:
        pad = _pad_of(node, kept)
        parts = None if pad is None or pad not in inside else _parts(pad, node)
        if pad is not None and parts is not None:
            turned[pad] = _turned(pad, node, parts, constants)
            gone.add(node)
    return [each for node in nodes if node not in gone for each in turned.get(node, [node])], constants


def _pad_of(node: Node, kept: Set[Value]) -> Node | None:
    """What pads with a number what a node, a Slice, reads a part of; None where it is another node."""
    pad = node.inputs[0].node if node.identity == ("", "Slice") and node.version >= 10 else None
    if pad is None or pad.identity != ("", "Pad") or pad.version < 11 or len(pad.operands) > 3:
        return None
    is_alone = len(pad.result.uses) == 1 and pad.result not in kept
    is_alike = (pad.phase, pad.stage, pad.place) == (node.phase, node.stage, node.place)
    is_known = pad.result.is_static and pad.inputs[0].is_static
    is_plain = text_attribute(pad, "mode", "constant") == "constant"
    return pad if is_alone and is_alike and is_known and is_plain else None


def _parts(pad: Node, node: Node) -> list[_Part] | None:
    """What a Slice reads of each axis of what is padded; None where that is padding alone, or all there is."""
    source, padded = pad.inputs[0].shape, pad.result.shape
    pads, starts, ends = ints_operand(pad, 1), ints_operand(node, 1), ints_operand(node, 2)
    axes = ints_operand(node, 3) if len(node.operands) > 3 else tuple(range(len(starts or ())))
    steps = ints_operand(node, 4) if len(node.operands) > 4 else (1,) * len(starts or ())
    if pads is None or starts is None or ends is None or axes is None or steps is None or min(steps, default=1) < 1:
        return None
    read = {axis: range(size) for axis, size in enumerate(padded)}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        read[axis % len(padded)] = range(padded[axis])[start:end:step]
    found = [_part(size, pads[axis], read[axis]) for axis, size in enumerate(source)]
    parts = [part for part in found if part is not None]
    is_less = sum(map(len, read.values())) < sum(padded)
    return parts if is_less and len(parts) == len(found) else None


def _part(size: int, before: int, read: range) -> _Part | None:
    """What of so many elements, behind so many of padding, some places hold; None where that is padding alone."""
    low = max(0, -((read.start - before) // read.step))
    high = min(len(read), -((read.start - before - size) // read.step))
    if high <= low:
        return None
    start = read.start + low * read.step - before
    return _Part(start, start + (high - low - 1) * read.step + 1, read.step, low, len(read) - high)


def _turned(pad: Node, node: Node, parts: Sequence[_Part], constants: list[Value]) -> list[Node]:
    """Both nodes the other way round; what they read is added to the constants."""

    def listed(*numbers: int) -> Value:
        made = Value(f"{node.result.name}_{len(constants)}", TensorType(DType.I64, (len(numbers),)))
        made.data = ArrayTensor(np.array(numbers, np.int64))
        constants.append(made)
        return made

    source = pad.inputs[0]
    shape = tuple(len(range(part.start, part.end, part.step)) for part in parts)
    sliced = Value(f"{node.result.name}_unpadded", source.tensor_type.with_shape(shape))
    starts, ends, steps = (listed(*column) for column in list(zip(*parts, strict=True))[:3])
    axes = listed(*range(len(parts)))
    pads = listed(*(part.before for part in parts), *(part.after for part in parts))
    first = Node.stand_in("Slice", [source, starts, ends, axes, steps], {}, [sliced], version=node.version)
    last = Node.stand_in("Pad", [sliced, pads, *pad.operands[2:]], {}, [node.result], version=pad.version)
    inherit(first, node)
    inherit(last, node)
    return [first, last]
