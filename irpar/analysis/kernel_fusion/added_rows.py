"""Rows that are added by index, as gradients of embeddings are, without a table of zeros that is as wide as the sums.

    %zeros = Expand(0.0, [50257, 768])
    %s = ScatterND(%zeros, %places, %rows) {reduction="add"}
    %c = Cast(%s) {to=BFLOAT16}                                   ->   %y = irpar.AddRows(%ids, %rows, %x)
    %y = Add(%x, %c)

Of an embedding that is a product's matrix too, %x is the gradient as that.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from irpar.ir import DOMAIN, DType, Node, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.ops.facts import ints_attribute, ints_operand, replicated_data, text_attribute

from .attention import unread_with
from .attention_writing import Make

_DTYPES = (DType.F16, DType.BF16, DType.F32)


@dataclass(frozen=True, eq=False)
class AddedRows:
    """The nodes around a ScatterND that adds rows to zeros.

    Attributes:
        members: they, in order.
        indices, rows: of the rows, and they.
        addend: what they are added to, if anything.
        result: what it gives.
    """

    members: tuple[Node, ...]
    indices: Value
    rows: Value
    addend: Value | None
    result: Value

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return (self.indices, self.rows, *(() if self.addend is None else (self.addend,)))

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        attributes = {"length": self.result.shape[0], "to": self.result.dtype.text}
        facts = {"results": [self.result], "domain": DOMAIN, "version": IRPAR_OPSET}
        return [make("AddRows", self.operands(), attributes, **facts)]


def added_rows(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[AddedRows]:
    """The rows that are added to zeros among nodes.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = {node: place for place, node in enumerate(nodes) if node not in taken}
    found = (_found(node, inside, kept) for node in inside if node.identity == ("", "ScatterND"))
    return [one for one in found if one is not None]


def _found(scatter: Node, inside: dict[Node, int], kept: Set[Value]) -> AddedRows | None:
    zeros, places, rows = scatter.operands
    if zeros is None or places is None or rows is None or text_attribute(scatter, "reduction", "none") != "add":
        return None
    indices = _indices(places)
    if indices is None or rows.dtype is not DType.F32 or not rows.is_static or not scatter.result.is_static:
        return None
    if not _is_zero(zeros) or rows.shape != (*indices.shape, *scatter.result.shape[1:]) or not rows.shape:
        return None
    members, result, addend = [scatter], scatter.result, None
    follower = _only_reader(result, inside, kept)
    if follower is not None and follower.identity == ("", "Cast") and follower.result.dtype in _DTYPES:
        members.append(follower)
        result = follower.result
        follower = _only_reader(result, inside, kept)
    if follower is not None and follower.identity == ("", "Add"):
        other = next((value for value in follower.inputs if value is not result), None)
        if other is not None and other.type == result.type == follower.result.type:
            members.append(follower)
            addend, result = other, follower.result
    if len(members) == 1 or len({(node.phase, node.stage, node.place) for node in members}) > 1:
        return None
    needed = {value.node for value in (indices, rows, addend) if value is not None}
    gone = sorted(unread_with(set(members), inside, kept, needed), key=inside.__getitem__)
    return AddedRows(tuple(gone), indices, rows, addend, result)


def _only_reader(value: Value, inside: dict[Node, int], kept: Set[Value]) -> Node | None:
    if value in kept or len(value.uses) != 1:
        return None
    ((reader, _),) = value.uses
    return reader if reader in inside else None


def _indices(places: Value) -> Value | None:
    """What an Unsqueeze made places of one number each of."""
    node = places.node
    if node is None or node.identity != ("", "Unsqueeze") or places.dtype not in (DType.I32, DType.I64):
        return None
    indices = node.operand(0)
    if indices is None or not indices.is_static or not places.is_static:
        return None
    axes = ints_attribute(node, "axes") if len(node.operands) < 2 else ints_operand(node, 1)
    rank = len(places.shape)
    return indices if axes is not None and [axis % rank for axis in axes] == [rank - 1] else None


def _is_zero(value: Value) -> bool:
    """Whether all elements are zero: a constant, or one that is repeated."""
    node = value.node
    if node is not None and node.identity == ("", "Expand"):
        source = node.operand(0)
        return source is not None and _is_zero(source)
    data = replicated_data(value)
    return data is not None and data.size == 1 and not data.numpy().any()
