"""How long a step of a partition takes, by its network: what plan.json calls `predicted`."""

from collections.abc import Mapping, Sequence
from typing import Any

from irpar.analysis.cost.model import CostModel
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_algorithms import operand_of_ring_bytes
from irpar.analysis.cost.timeline import copy_seconds
from irpar.ir import Graph
from irpar.ops.facts import int_attribute
from irpar.ops.memory_copies import copies_of
from irpar.sharding import Axis, Mesh

from .entries import known_times


def predict(
    network: Network, graphs: Sequence[Graph], collectives: Sequence[Mapping[str, Any]], mesh: Mesh
) -> dict[str, float | None] | None:
    """The prediction for local graphs and their collectives.

    Args:
        network: what communication and computation cost.
        graphs: the programs; the slowest counts.
        collectives: as plan.json has them.
        mesh: the mesh.

    Returns:
        `step_seconds`, `compute_seconds`, `communication_seconds` and `exposed_communication_seconds`, which is all of
        the communication while nothing overlaps; where something is copied between memories `copy_seconds`, and
        `exposed_copy_seconds` that a rank waits for copies. None where the network knows no seconds; where it knows no
        device, `compute_seconds` and `step_seconds` are None.
    """
    if not network.knows_seconds:
        return None
    communication = sum(known_times(entry) * collective_seconds(network, entry, mesh) for entry in collectives)
    seconds = [CostModel(network).graph_seconds(graph) for graph in graphs]
    compute = max((each for each in seconds if each is not None), default=None)
    copies = _copies(network, graphs, {entry["id"]: collective_seconds(network, entry, mesh) for entry in collectives})
    known = None not in (compute, *copies.values())
    return {
        "step_seconds": (compute or 0.0) + communication + copies.get("exposed_copy_seconds", 0.0) if known else None,
        "compute_seconds": compute,
        "communication_seconds": communication,
        "exposed_communication_seconds": communication,
        **copies,
    }


def _copies(network: Network, graphs: Sequence[Graph], of_id: Mapping[int, float]) -> dict[str, Any]:
    """Seconds of the copies of the program that waits longest for its own; none where nothing is copied."""
    if not any(True for graph in graphs for _ in copies_of(graph)):
        return {}
    found = [copy_seconds(network, graph, lambda node: of_id.get(int_attribute(node, "id"), 0.0)) for graph in graphs]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return {"copy_seconds": None, "exposed_copy_seconds": None}
    worst = max(known, key=lambda each: (each.exposed, each.total))
    return {"copy_seconds": worst.total, "exposed_copy_seconds": worst.exposed}


def collective_seconds(network: Network, entry: Mapping[str, Any], mesh: Mesh) -> float:
    """Seconds of one run of a collective of plan.json; of what goes from rank to rank, those of the busiest source."""
    if "pairs" in entry:
        return network.seconds_of_pairs(entry["pairs"], entry["bytes"], mesh) if entry["sent_bytes"] else 0.0
    operand = operand_of_ring_bytes(entry["kind"], entry["group_size"], entry["sent_bytes"])
    return network.seconds(entry["kind"], [Axis.parse(axis) for axis in entry["axes"]], operand, mesh)
