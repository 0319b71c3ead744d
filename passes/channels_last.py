"""channels-last: convolutions and what lies between them compute with the channels of images as the last dim."""

from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.channels_last import put_channels_last
from irpar.ir import Module
from irpar.pass_manager import Pass, PassResult


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Let convolutions, and pools and elementwise operators between them, compute with channels last.

    Before: any view; shapes are static where something is to be changed, and there are no gradients. After: nodes
    irpar.ConvChannelsLast and irpar.PoolChannelsLast, and others of ONNX's along dims in another order. A convolution
    has its normalisation in its weights, where both are constants, and adds a residual and computes an activation
    itself. Transposes stand where such a region begins and ends, which is where fewest bytes are moved altogether, and
    before weights; a region that would not save what its Transposes cost stays as it is.

    Sums are rounded once, behind the activation; weights that are normalised are so in float32, and rounded. Nothing
    moves over communication. The engine `cupy` does this by itself with what it runs; models that are written have the
    operators again.
    """

    name: ClassVar[str] = "channels-last"

    def run(self, module: Module) -> PassResult:
        """Change all graphs and their bodies."""
        bodies = [body for graph in module.graphs for body in graph.graphs()]
        count = sum(map(put_channels_last, bodies))
        return PassResult(count > 0, statistics={"nodes with channels last": count} if count else {})
