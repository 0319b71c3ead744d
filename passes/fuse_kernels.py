"""fuse-kernels: what one kernel can compute becomes one node, irpar.Fused."""

from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.kernel_fusion import fuse
from irpar.ir import Module
from irpar.pass_manager import Pass, PassResult


@dataclass(frozen=True)
class FuseKernels(Pass):
    """Let elementwise nodes, and the reductions of rows between them, be computed by one kernel each.

    Before: any view; shapes are static where something is to be fused. After: nodes irpar.Fused, whose attribute
    `expression` says what they compute, take the place of chains of elementwise nodes of one shape, and of softmax,
    normalisations and reductions over the last dims together with what is elementwise around them.

    Nothing is computed twice but a few elementwise steps of what a kernel reads anyway, and nothing moves over
    communication, or to another phase. Small floats are rounded once, at the end of a kernel. The engine `cupy` does
    this by itself with what it runs; models that are written have the operators again that a kernel was made of.
    """

    name: ClassVar[str] = "fuse-kernels"

    def run(self, module: Module) -> PassResult:
        """Fuse in all graphs and their bodies."""
        bodies = [body for graph in module.graphs for body in graph.graphs()]
        count = sum(map(fuse, bodies))
        return PassResult(count > 0, statistics={"fused nodes": count} if count else {})
