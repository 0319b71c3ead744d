"""When sums of trips leave their loops for which ranks then hold more: where they have the memory."""

from collections.abc import Callable

from irpar.analysis.memory.liveness import peak_bytes
from irpar.analysis.trips import memory_of, say_when, trips_said
from irpar.ir import Module, clone_module

from .sums_of_trips import sums_hold_more


def sums_leave(module: Module, rewrite: Callable[[Module, bool], object]) -> tuple[bool, tuple[str, ...]]:
    """Whether sums of parts leave, of which a rank then holds all before they are reduced to its share.

    What memory decides is said of the module, so that it holds for later passes.

    Args:
        module: it.
        rewrite: lets them leave, and does what follows from that.

    Returns:
        This; a line about it where memory was looked at.
    """
    said = trips_said(module).reduce
    limit = memory_of(module) if said == "auto" else None
    if limit is None or not sums_hold_more(module):
        return said != "micro-batch", ()
    once = _peak(module, rewrite, leave=True)
    if once <= limit or once <= _peak(module, rewrite, leave=False):
        return True, (say_when(module, "reduce", "step", once, limit),)
    return False, (say_when(module, "reduce", "micro-batch", once, limit),)


def _peak(module: Module, rewrite: Callable[[Module, bool], object], *, leave: bool) -> int:
    """The bytes that a rank holds at most."""
    from irpar.passes.localize import Localize

    trial = clone_module(module)
    rewrite(trial, leave)
    if not trial.is_local:
        Localize().run(trial)
        rewrite(trial, leave)
    return peak_bytes(trial)
