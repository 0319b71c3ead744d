"""Whether samples of a batch are independent: what a model makes of one depends on no other.

Each sample is given to a device of its own. A node that would have to send something is one in which samples meet.
"""

from collections.abc import Collection

from irpar.analysis.completion.flow import completed_flow
from irpar.analysis.completion.moves import captured_whole, placements_of
from irpar.analysis.completion.placement import Placement
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution.trees import standing_in
from irpar.ir import Module, Node, Value, captured_or_read
from irpar.ops import Kind
from irpar.pass_manager import PassManager
from irpar.sharding import Mesh

_DEVICES = "samples"
"""The axis of the mesh that has a device for each sample."""


def where_samples_meet(module: Module, samples: Collection[str], result: Value, dim: int) -> Node | None:
    """The first node of a model in which samples meet on their way to an output; None where they do in none.

    Args:
        module: static, in global view, without a mesh, as it is trained; it gets shardings.
        samples: the inputs whose first dim counts them.
        result: the output.
        dim: the dim of the output that counts them.
    """
    graph = module.graph
    if result.shape[dim] == 1:
        return None
    module.set_mesh(Mesh({_DEVICES: result.shape[dim]}))
    for value in graph.inputs:
        if value.source_name in samples:
            module.shard(value.source_name, [_DEVICES, *[None] * (len(value.shape) - 1)])
    PassManager.parse("complete-sharding{strategy=propagate}").run(module)
    flow = completed_flow(module, "independence")
    placements = placements_of(flow, network_of(module.network))
    before = _makers(result)
    for node, placement in placements.items():
        inside = [value for value, _ in captured_whole(flow, node)]
        if standing_in(graph, node) in before and (_meet(node, placement) or any(map(_is_cut, inside))):
            return node
    assert result.sharding is not None
    return None if result.sharding.dim_parts(dim) > 1 else result.node


def _makers(value: Value) -> set[Node]:
    """The nodes that a value is made by."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop().node
        if node is not None and node not in found:
            found.add(node)
            waiting += captured_or_read(node)
    return found


def _meet(node: Node, placement: Placement) -> bool:
    """Whether a node needs more than one sample for what it gives of one."""
    if placement.rule is not None:
        kinds = zip(placement.factors, placement.rule.kinds, strict=True)
        if any(axes and kind is not Kind.PASS for axes, kind in kinds):
            return True
    needs = zip(node.operands, placement.operands, strict=True)
    return any(
        value is not None and needed is not None and _is_cut(value) and value.sharding != needed
        for value, needed in needs
    )


def _is_cut(value: Value) -> bool:
    lies = value.sharding
    return lies is not None and any(lies.dim_parts(dim) > 1 for dim in range(lies.rank))
