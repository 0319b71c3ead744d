"""Heads that are put behind each other, and joined: copied once, from where they lie to where they belong.

%qt = Transpose(%q) {perm=[0, 2, 1, 3]}
%qr = Reshape(%qt, [2, 8, 48])               %qt = Transpose(%q) {perm=[0, 2, 1, 3]}
... the same of %k and %v              ->    ... the same of %k and %v
%y = Concat(%qr, %kr, %vr) {axis=2}          %y = irpar.JoinHeads(%qt, %kt, %vt)
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from irpar.analysis.weights.atoms import Atom, Atoms, joined
from irpar.ir import DOMAIN, Node, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.ops.facts import axis_attribute

from .attention_form import View
from .attention_writing import Make, Writer

MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators of ONNX that change no element."""
_MOST_PARTS = 4
"""What the device's kernel joins."""


@dataclass(frozen=True, eq=False)
class JoinedHeads:
    """A Concat, and what moves the heads before it.

    Attributes:
        members: they, in order.
        parts: what is joined: (batch, places, heads, size).
    """

    members: tuple[Node, ...]
    parts: tuple[View, ...]

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return tuple(view.value for view in self.parts)

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        result = self.last.result
        w = Writer(make, self.last.version, result.name)
        parts = [w.moved(view) for view in self.parts]
        w.node("JoinHeads", parts, {}, [result], domain=DOMAIN, version=IRPAR_OPSET)
        return w.nodes


class _Part(NamedTuple):
    """An operand of a Concat, and the nodes that only move what it is made of."""

    nodes: list[Node]
    view: View


def joined_heads(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[JoinedHeads]:
    """The joined heads among nodes.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = {node: place for place, node in enumerate(nodes) if node not in taken}
    found = []
    for node in inside:
        if node.identity != ("", "Concat") or not 2 <= len(node.operands) <= _MOST_PARTS:
            continue
        result = node.result
        if not result.is_static or len(result.shape) != 3 or axis_attribute(node, 3) != 2:
            continue
        parts = [_part(value, inside, kept) for value in node.inputs]
        views = tuple(part.view for part in parts if part is not None)
        if len(views) == len(node.operands) and len({view.shape[3] for view in views}) == 1:
            moves = {move: None for part in parts if part is not None for move in part.nodes}
            members = (*sorted(moves, key=inside.__getitem__), node)
            if len({(one.phase, one.stage, one.place) for one in members}) == 1:
                found.append(JoinedHeads(members, views))
    return found


def _part(value: Value, inside: dict[Node, int], kept: Set[Value]) -> _Part | None:
    """An operand as heads; None where it is none."""
    chain: list[Node] = []
    source = value
    while (node := source.node) is not None and node in inside and not node.domain and node.op_type in MOVES:
        before = node.operand(0)
        if before is None or not before.is_static or len(source.users) > 1 or source in kept:
            break
        chain.append(node)
        source = before
    if not chain or len(source.shape) != 4 or 0 in source.shape:
        return None
    atoms = Atoms(source.shape)
    if not all(map(atoms.apply, reversed(chain))):
        return None
    order = _order(source.shape, [joined(dim) for dim in atoms.dims])
    if order is None:
        return None
    view = View(source).transposed(order)
    batch, places, heads, size = view.shape
    return _Part(chain, view) if value.shape == (batch, places, heads * size) else None


def _order(shape: tuple[int, ...], dims: list[list[Atom]]) -> tuple[int, ...] | None:
    """The dims of a source that are batch, places, heads and size; None where those are no whole dims of it."""
    *outer, inner = dims
    slots = [*outer, inner[:-1], inner[-1:]]
    whole = [[(dim, 1, size)] for dim, size in enumerate(shape) if size > 1]
    if sorted(slot for slot in slots if slot) != whole:
        return None
    ones = [dim for dim, size in enumerate(shape) if size == 1]
    return tuple(slot[0][0] if slot else ones.pop(0) for slot in slots)
