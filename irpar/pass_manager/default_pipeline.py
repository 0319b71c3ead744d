"""The default pipeline, of which commands, suggestions and annotations each run a part."""

from typing import TYPE_CHECKING

from irpar.analysis.optimizer_parallel import optimizer_parallel_said
from irpar.analysis.recompute_said import recompute_said
from irpar.ir import Module

if TYPE_CHECKING:
    from irpar.passes.recompute import Recompute
    from irpar.passes.zero import Zero

NORMALISE = "inline-functions,infer-types,fold-constants,cse,simplify-layout,dce"
"""The passes that make an export static and small."""
NORMALISING = frozenset({"bind-dims", *NORMALISE.split(",")})
"""Passes that leave the model what it is; what follows them meets it as one device would run it."""
COMPLETION = "complete-sharding"
"""The pass that decides how all values are sharded."""
COMPLETE = f"split-weights,split-bias,{COMPLETION}"
"""This pass, and what makes more cuts possible before it."""
MOVES = "insert-redistribution,simplify-collectives"
"""The passes that put collectives where values are sharded otherwise than they are needed."""
LOCAL = "localize,simplify-collectives,join-weights"
"""The passes that make programs of a graph in which all communication stands."""
ORDER = "fuse-communication,group-segments"
"""The passes that decide how these communicate and in which order they run."""
PROGRAM = f"{LOCAL},{ORDER}"
SHARD = f"{COMPLETE},{MOVES},{PROGRAM}"
"""The passes that make it a partition."""
DEFAULT_PIPELINE = f"{NORMALISE},{SHARD}"


def with_zero(zero: "Zero | str") -> str:
    """The default pipeline with the pass `zero`, given as the pass or as a pipeline writes it: `zero{stage=2}`."""
    return f"{NORMALISE},{zero},{SHARD}"


def default_pipeline(module: Module, *, zero: "Zero | None" = None, recompute: "Recompute | None" = None) -> str:
    """The default pipeline of a module with a mesh: with the pass `zero` where it says how optimizer state is sharded,
    and with `recompute` for each thing that it says is computed again.

    Args:
        module: it.
        zero: the pass where it is asked for: instead of what the module says.
        recompute: the pass where it is asked for: after what the module says.

    Raises:
        IrparError: what it says does not fit the mesh.
    """
    zero = zero or _zero_said(module)
    again = [*_recompute_said(module), *([] if recompute is None else [recompute])]
    if again:
        return with_recompute(",".join(map(str, again)), zero)
    return DEFAULT_PIPELINE if zero is None else with_zero(zero)


def _zero_said(module: Module) -> "Zero | None":
    from irpar.passes.zero import Zero

    said = optimizer_parallel_said(module)
    axes = said.axes_on(module.mesh) if said.stage else ()
    return Zero(said.stage, axes, said.threshold_kb, said.regather) if axes else None


def _recompute_said(module: Module) -> "list[Recompute]":
    from irpar.passes.recompute import Recompute

    return [
        Recompute(
            (each.match,),
            mp_comm_recompute=each.mp_comm_recompute,
            parallel_optimizer_comm_recompute=each.parallel_optimizer_comm_recompute,
        )
        for each in recompute_said(module)
    ]


def with_recompute(recompute: "Recompute | str", zero: "Zero | str | None" = None) -> str:
    """The default pipeline with the pass `recompute`, or several of it, and with `zero` where that is given."""
    before = NORMALISE if zero is None else f"{NORMALISE},{zero}"
    return f"{before},{COMPLETE},{MOVES},{LOCAL},{recompute},{ORDER}"
