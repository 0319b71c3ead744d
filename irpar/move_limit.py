"""A limit for what a redistribution may send: an unexpected large move is an error that names its cause."""

from dataclasses import dataclass
from typing import Any

from irpar.analysis.plan import Plan
from irpar.ir import Conflict, Module, Node, Value
from irpar.ops.collectives import KINDS, collective_axes
from irpar.sharding import IrparError

from .display import bytes_text

MEGABYTE = 10**6
_REDUCING = frozenset({"all_reduce", "reduce_scatter"})
"""Kinds that bring partial values together; what follows them is a redistribution again."""
_MOST_NAMED = 5


class LargeMoveError(IrparError):
    """A redistribution that sends more than was allowed."""


@dataclass
class _Move:
    """The collectives of one redistribution.

    Attributes:
        value: what is moved, as it lies at first.
        conflict: the two sides that it stands between; None where no annotation is in the way of another.
        entries: of the plan, one for each collective.
    """

    value: Value
    conflict: Conflict | None
    entries: list[dict[str, Any]]

    @property
    def sent_bytes(self) -> int:
        """That a device sends, each time that the tensor is moved."""
        return sum(entry["sent_bytes"] for entry in self.entries)

    @property
    def title(self) -> str:
        """What is moved, and how large it is."""
        type_ = self.value.tensor_type.with_shape(self.value.whole_shape)
        size = -(-self.value.dtype.bits * _count(self.value) // 8)
        return f"{self.value.source_name} {type_}, {bytes_text(size)}"


def _count(value: Value) -> int:
    total = 1
    for size in value.whole_shape:
        total *= size
    return total


def check_moves(module: Module, plan: Plan, most_mb: float) -> None:
    """Refuse a plan of which one redistribution sends too much.

    The reduction of partial values is none; of a value that is reduced and then moved on, the rest counts.

    Args:
        module: after localize, with its log.
        plan: made of it.
        most_mb: megabytes (10^6 bytes) that a device may send for any one redistribution, each time that it is done.

    Raises:
        LargeMoveError: naming the tensor, both sides of the conflict, and the annotation that avoids it.
        IrparError: the limit is no number from 0 on.
    """
    if not most_mb >= 0:
        raise IrparError(f"a redistribution cannot send {most_mb} MB at most", do="give a number of MB, 0 or more")
    moves = [move for move in _moves(module, plan) if move.sent_bytes > most_mb * MEGABYTE]
    if not moves:
        return
    moves.sort(key=lambda move: -move.sent_bytes)
    first, *others = moves
    notes = [*_sides(first)]
    notes += [f"also {bytes_text(move.sent_bytes)}: {move.title}" for move in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        notes.append(f"and {len(others) - _MOST_NAMED} more")
    raise LargeMoveError(
        f"a redistribution sends {bytes_text(first.sent_bytes)} a device, more than the {most_mb:g} MB allowed",
        where=f"{first.title}: {_how(first)}",
        notes=tuple(notes),
        do=f"{_way_out(module, first)}, or allow more: --max-redistribution-mb",
    )


def _moves(module: Module, plan: Plan) -> list[_Move]:
    """The redistributions of a plan, in its order."""
    entries = {entry["id"]: entry for entry in plan.collectives}
    found: dict[object, _Move] = {}
    for graph in module.graphs:
        for node in graph.walk():
            if node.domain != "irpar" or node.op_type not in KINDS:
                continue
            entry = entries.pop(node.attributes["id"], None)  # type: ignore[arg-type]
            if entry is None or entry["kind"] in _REDUCING:
                continue
            conflict = module.conflicts.get(node.results[0].name)
            move = found.setdefault(_key(node, conflict), _Move(node.inputs[0], conflict, []))
            move.entries.append(entry)
    return list(found.values())


def _key(node: Node, conflict: Conflict | None) -> object:
    """What the steps of one redistribution have in common."""
    if conflict is not None:
        return conflict.value, conflict.lies, conflict.node, conflict.needed
    value = node.inputs[0]
    while value.node is not None and value.node.domain == "irpar" and KINDS[value.node.op_type] not in _REDUCING:
        value = value.node.inputs[0]
    return value


def _how(move: _Move) -> str:
    return ", then ".join(f"{entry['kind']} over {','.join(entry['axes'])}" for entry in move.entries)


def _sides(move: _Move) -> list[str]:
    """Why it is moved: how it lies and is needed, each with its cause."""
    conflict = move.conflict
    if conflict is None:
        return [str(move.entries[0]["reason"])]
    return [
        f"it lies as {conflict.lies}" + (f": {conflict.because}" if conflict.because else ""),
        f"{conflict.node} has it as {conflict.needed}: {conflict.needed_because}",
    ]


def _way_out(module: Module, move: _Move) -> str:
    """The annotation that avoids a move."""
    if move.conflict is not None:
        return move.conflict.avoid
    origins: dict[str, None] = {}
    for node in (user for user in move.value.users if user.domain == "irpar" and user.op_type in KINDS):
        for axis in collective_axes(node):
            chain = module.chain(move.value.name, axis.name)
            annotation = module.annotated.get(chain[-1][0]) if chain else None
            if annotation is not None:
                origins[annotation.title] = None
    if origins:
        return f"leave out the annotation {' or '.join(origins)}"
    return f'annotate "{move.value.source_name}" as [{", ".join(["null"] * len(move.value.shape))}]'
