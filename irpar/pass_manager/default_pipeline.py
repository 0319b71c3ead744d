"""The default pipeline, of which commands, suggestions and annotations each run a part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irpar.pass_manager import Pass
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
    return composed(zero)


def with_recompute(recompute: "Recompute | str", zero: "Zero | str | None" = None) -> str:
    """The default pipeline with the pass `recompute`, or several of it, and with `zero` where that is given."""
    return composed(zero, [recompute])


def composed(zero: "Zero | str | None" = None, programs: "Sequence[Pass | str]" = ()) -> str:
    """The default pipeline with the pass `zero` where that is given, and with passes that make programs hold less."""
    passes = (NORMALISE, *([] if zero is None else [zero]), COMPLETE, MOVES, LOCAL, *programs, ORDER)
    return ",".join(map(str, passes))
