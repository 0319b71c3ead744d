"""The default pipeline of a module that says of itself what is sharded, computed again, or lies where."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from irpar.analysis.optimizer_parallel import optimizer_parallel_said
from irpar.analysis.place_said import place_said
from irpar.analysis.recompute_said import recompute_said
from irpar.analysis.store_said import store_said
from irpar.ir import Module
from irpar.pass_manager.default_pipeline import composed

if TYPE_CHECKING:
    from irpar.pass_manager import Pass
    from irpar.passes.place import Place
    from irpar.passes.recompute import Recompute
    from irpar.passes.store import Store
    from irpar.passes.zero import Zero


def default_pipeline(
    module: Module,
    *,
    zero: "Zero | None" = None,
    recompute: "Recompute | None" = None,
    place: "Place | Literal[False] | None" = None,
    store: "Store | None" = None,
) -> str:
    """The default pipeline of a module with a mesh: with the pass `zero` where it says how optimizer state is sharded,
    with `recompute` for each thing that it says is computed again, with `place` where it says what is on the host, and
    with `store` where it says what lies where.

    Args:
        module: it.
        zero: the pass where it is asked for: instead of what the module says.
        recompute: the pass where it is asked for: after what the module says.
        place: the pass where it is asked for, or False where there is to be none: instead of what the module says.
        store: the pass where it is asked for: instead of what the module says.

    Raises:
        IrparError: what it says does not fit the mesh.
    """
    zero = zero or zero_said(module)
    store = store or _store_said(module)
    placed = _place_said(module) if place is None else place or None
    asked: tuple[Pass | None, ...] = (*_recompute_said(module), recompute, placed, store)
    return composed(zero, [each for each in asked if each is not None])


def zero_said(module: Module) -> "Zero | None":
    """The pass `zero` as a module with a mesh says it; None where it says nothing of it, or groups are of one rank.

    Raises:
        IrparError: what it says does not fit the mesh.
    """
    said = optimizer_parallel_said(module)
    axes = said.axes_on(module.mesh) if said.stage else ()
    if not axes:
        return None
    from irpar.passes.zero import Zero

    return Zero(said.stage, axes, said.threshold_kb, said.regather)


def _recompute_said(module: Module) -> "list[Recompute]":
    said = recompute_said(module)
    if not said:
        return []
    from irpar.passes.recompute import Recompute

    return [
        Recompute(
            (each.match,),
            mp_comm_recompute=each.mp_comm_recompute,
            parallel_optimizer_comm_recompute=each.parallel_optimizer_comm_recompute,
        )
        for each in said
    ]


def _place_said(module: Module) -> "Place | None":
    said = place_said(module)
    if said is None:
        return None
    from irpar.passes.place import Place

    return Place(said.host, said.device, "device")


def _store_said(module: Module) -> "Store | None":
    said = store_said(module)
    if said is None:
        return None
    from irpar.passes.store import Store

    return Store(**asdict(said))
