"""A limit for what a redistribution may send: an unexpected large move is an error that names its cause."""

from collections.abc import Callable, Sequence

from irpar.ir import Module
from irpar.output.plan_record import Plan
from irpar.pass_manager import Pass
from irpar.sharding import IrparError
from irpar.units import bytes_text

from .redistribution_advice import Advisor, may_avoid
from .redistributions import MEGABYTE, Redistribution, redistributions_of

_MOST_NAMED = 5


class LargeRedistributionError(IrparError):
    """A redistribution that sends more than was allowed."""


def check_redistributions(
    module: Module, plan: Plan, most_mb: float, prepared: Callable[[], Module], passes: Sequence[Pass]
) -> None:
    """Refuse a plan of which one redistribution sends too much.

    The reduction of partial values is none; of a value that is reduced and then moved on, the rest counts.

    Args:
        module: after localize, with its log.
        plan: made of it.
        most_mb: megabytes (10^6 bytes) that a device may send for any one redistribution, each time that it is done.
        prepared: makes the annotated module that the passes began with, to try other annotations.
        passes: that made it.

    Raises:
        LargeRedistributionError: naming the tensor, both sides of the conflict, and annotations that avoid it, if any
            was found.
        IrparError: the limit is no number from 0 on.
    """
    if not most_mb >= 0:
        raise IrparError(f"a redistribution cannot send {most_mb} MB at most", do="give a number of MB, 0 or more")
    moves = redistributions_of(module, plan.collectives)
    # A quotient, so that the number that the message tells is one that is allowed.
    large = [move for move in moves if move.sent_bytes / MEGABYTE > most_mb]
    if not large:
        return
    first, *others = large
    notes = [*_sides(first)]
    notes += [f"also {bytes_text(move.sent_bytes)}: {move.title}" for move in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        notes.append(f"and {len(others) - _MOST_NAMED} more")
    advisor = Advisor(most_mb, prepared, passes)
    raise LargeRedistributionError(
        f"a redistribution sends {bytes_text(first.sent_bytes)} a device, more than the {most_mb:g} MB allowed",
        where=f"{first.title}: {first.how}",
        notes=tuple(notes),
        do=_do(advisor.advice(module, moves, plan.totals["sent_bytes"]), advisor, module, first),
    )


def _do(ways: Sequence[str], advisor: Advisor, module: Module, first: Redistribution) -> str:
    """What to do about the largest redistribution."""
    allow = f"--max-redistribution-mb {first.sent_bytes / MEGABYTE!r}"
    if ways:
        return f"{', or '.join(ways)}, or allow more: {allow}"
    if advisor.tried:
        none = f"of {advisor.tried} other annotations that were tried none makes it smaller and sends less in all"
        return f"allow more: {allow}, or shard less: {none}"
    return f"{may_avoid(module, first)}, which may avoid it (too large a model to try), or allow more: {allow}"


def _sides(move: Redistribution) -> list[str]:
    """Why it is moved: how it is sharded and is needed, each with its cause."""
    conflict = move.conflict
    if conflict is None:
        return [str(move.entries[0]["reason"])]
    return [
        f"it is sharded as {conflict.lies}" + (f": {conflict.because}" if conflict.because else ""),
        f"{conflict.node} has it as {conflict.needed}: {conflict.needed_because}",
    ]
