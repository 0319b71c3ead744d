"""Segments as a device runs them: nodes that one kernel computes are one node."""

from dataclasses import replace

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.runtime.instructions import Segment


def fused(segment: Segment) -> Segment:
    """A segment with irpar.Fused in place of nodes that one kernel computes; its graph stays as it is."""
    nodes = tuple(stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over)))
    writers = {value: node for node in nodes for value in node.results}
    over = {writers[node.result]: state for node, state in segment.over.items()}
    return replace(segment, nodes=nodes, over=over)
