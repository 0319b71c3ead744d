"""Which nodes of a graph one kernel can compute, and the expression that it then computes."""

from .rewriting import fuse

__all__ = ["fuse"]
