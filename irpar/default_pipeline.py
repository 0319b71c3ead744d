"""The default pipeline, of which commands, suggestions and annotations each run a part."""

from irpar.ir import Module

NORMALISE = "inline-functions,infer-types,fold-constants,cse,simplify-layout,dce"
"""The passes that make an export static and small."""
NORMALISING = frozenset({"bind-dims", *NORMALISE.split(",")})
"""Passes that leave the model what it is; what follows them meets it as one device would run it."""
COMPLETION = "complete-sharding"
"""The pass that decides how all values lie."""
COMPLETE = f"split-weights,{COMPLETION}"
"""This pass, and what makes more cuts possible before it."""
MOVES = "insert-redistribution,simplify-collectives"
"""The passes that put collectives where values lie otherwise than they are needed."""
PROGRAM = "localize,simplify-collectives,join-weights,fuse-communication"
"""The passes that make programs of a graph in which all communication stands."""
SHARD = f"{COMPLETE},{MOVES},{PROGRAM}"
"""The passes that make it a partition."""
DEFAULT_PIPELINE = f"{NORMALISE},{SHARD}"


def know_ranks(module: Module) -> None:
    """Infer the types that the model does not declare, so that annotations of intermediate values can be checked."""
    from irpar.passes.infer_types import InferTypes

    InferTypes().run(module)
