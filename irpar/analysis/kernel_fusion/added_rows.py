"""Rows that are added by index, as gradients of embeddings are, without a table of zeros that is as wide as the sums.

    %zeros = Expand(0.0, [50257, 768])
    %s = ScatterND(%zeros, %places, %rows) {reduction="add"}
    %c = Cast(%s) {to=BFLOAT16}                                   ->   %y = irpar.AddRows(%ids, %rows, %x)
    %y = Add(%x, %c)

Of an embedding that is a product's matrix too, %x is the gradient as that. Rows that are put where they stand already,
as those of positions are, need no more than their dtype.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from irpar.ir import DOMAIN, DType, Node, Strings, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels.expression import Step
from irpar.ops.facts import ints_attribute, ints_operand, replicated_data, text_attribute

from .attention import unread_with
from .attention_writing import Make

_MOST_CONSTANTS = 2**22
"""Numbers of a constant that are looked at."""
_DTYPES = (DType.F16, DType.BF16, DType.F32)


@dataclass(frozen=True, eq=False)
class AddedRows:
    """The nodes around a ScatterND that adds rows to zeros.

    Attributes:
        members: they, in order.
        indices, rows: of the rows, and they; None: each row is put where it stands.
        addend: what they are added to, if anything.
        result: what it gives.
    """

    members: tuple[Node, ...]
    indices: Value | None
    rows: Value
    addend: Value | None
    result: Value

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return tuple(value for value in (self.indices, self.rows, self.addend) if value is not None)

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        facts = {"results": [self.result], "domain": DOMAIN, "version": IRPAR_OPSET}
        if self.indices is None:
            line = Step("y0", "Cast", ("x0",), (("to", self.result.dtype.text),))
            return [make("Fused", [self.rows], {"expression": Strings((str(line),))}, **facts)]
        attributes = {"length": self.result.shape[0], "to": self.result.dtype.text}
        return [make("AddRows", self.operands(), attributes, **facts)]


def added_rows(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[AddedRows]:
    """The rows that are added to zeros among nodes.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = {node: place for place, node in enumerate(nodes) if node not in taken}
    made: list[AddedRows] = []
    for node in nodes:
        one = _found(node, inside, kept) if node in inside and node.identity == ("", "ScatterND") else None
        if one is not None:
            made.append(one)
            for member in one.members:  # Where two are added to each other, the first has the Add.
                del inside[member]
    return made


def _found(scatter: Node, inside: dict[Node, int], kept: Set[Value]) -> AddedRows | None:
    zeros, places, rows = scatter.operands
    if zeros is None or places is None or rows is None or text_attribute(scatter, "reduction", "none") != "add":
        return None
    if rows.dtype is not DType.F32 or not all(value.is_static for value in (places, rows, scatter.result)):
        return None
    indices = _indices(places, inside)
    is_in_place = rows.type == scatter.result.type and _is_each_place(places, rows.shape)
    if not _is_zero(zeros) or rows.shape != (*places.shape[:-1], *scatter.result.shape[1:]):
        return None
    if indices is None and not is_in_place:
        return None
    members, result, addend = [scatter], scatter.result, None
    follower = _only_reader(result, inside, kept)
    if follower is not None and follower.identity == ("", "Cast") and follower.result.dtype in _DTYPES:
        members.append(follower)
        result = follower.result
        follower = _only_reader(result, inside, kept)
    if follower is not None and follower.identity == ("", "Add") and not is_in_place:
        other = next((value for value in follower.inputs if value is not result), None)
        if other is not None and other.type == result.type == follower.result.type:
            members.append(follower)
            addend, result = other, follower.result
    if len(members) == 1 or len({(node.phase, node.stage, node.place) for node in members}) > 1:
        return None
    indices = None if is_in_place else indices
    needed = {value.node for value in (indices, rows, addend) if value is not None}
    gone = sorted(unread_with(set(members), inside, kept, needed), key=inside.__getitem__)
    return AddedRows(tuple(gone), indices, rows, addend, result)


def _only_reader(value: Value, inside: dict[Node, int], kept: Set[Value]) -> Node | None:
    if value in kept or len(value.uses) != 1:
        return None
    ((reader, _),) = value.uses
    return reader if reader in inside else None


def _indices(places: Value, inside: dict[Node, int]) -> Value | None:
    """What an Unsqueeze made places of one number each of, where it is there: a node inside reads it."""
    node = places.node
    if node is None or node.identity != ("", "Unsqueeze") or places.dtype not in (DType.I32, DType.I64):
        return None
    indices = node.operand(0)
    if indices is None or not indices.is_static or not any(user in inside for user in indices.users):
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
    return data is not None and data.size <= _MOST_CONSTANTS and not data.numpy().any()


def _is_each_place(places: Value, shape: tuple[int, ...]) -> bool:
    """Whether places are those of all rows, in order."""
    data = replicated_data(places)
    if data is None or places.shape != (shape[0], 1) or data.size > _MOST_CONSTANTS:
        return False
    return np.array_equal(data.numpy().reshape(-1), np.arange(shape[0]))
