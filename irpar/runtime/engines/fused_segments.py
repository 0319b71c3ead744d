"""Segments as a device runs them: nodes that one kernel computes are one node."""

from dataclasses import replace

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.runtime.instructions import Segment


def fused(segment: Segment) -> Segment:
    """A segment with irpar.Fused in place of nodes that one kernel computes; its graph stays as it is."""
    return replace(segment, nodes=tuple(stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over))))
