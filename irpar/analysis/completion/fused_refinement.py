"""How nodes run, chosen for the program that fuse-communication leaves."""

from collections.abc import Collection, Mapping

from irpar.analysis.cost.model import Cost
from irpar.analysis.cost.network import Network
from irpar.ir import Node

from .flow import Flow
from .fused_moves import saved_together
from .moves import cost_of_placements, wanted_shardings
from .placement import Placement
from .refinement import Refinement


def refine_for_program(
    flow: Flow, placements: Mapping[Node, Placement], network: Network, annotated: Collection[str]
) -> dict[Node, Placement]:
    """The placements of nodes, changed where the program is faster then, or sends less where nothing has seconds.

    Each node by itself leads to one choice. Others are tried from there, which only whole choices show to be right:

    * what waits for nothing, inputs and weights, is sent without a launch of its own: right where there are several;
    * a device cuts blocks out of what it holds for nothing: right where that leads to one block for many readers.

    The best of them is taken, by what plan.json then predicts.

    Args:
        flow: every tensor has a sharding, nothing is redistributed yet.
        placements: how each node runs.
        network: what communication costs.
        annotated: names of values that are brought to how they were annotated, whoever reads them.
    """
    refinement = Refinement(flow, placements, network, annotated)
    apart = refinement.run()
    if not network.knows_seconds:
        return apart
    choices = [apart]
    for choice in (refinement.run_together(), refinement.run_with_free_slices()):
        choices += [choice] * (choice != choices[-1])
    if len(choices) == 1:
        return apart
    changed = {node for node, placement in apart.items() if any(choice[node] != placement for choice in choices[1:])}
    return min(choices, key=lambda choice: cost_of_program(flow, choice, network, annotated, changed))


def cost_of_program(
    flow: Flow,
    placements: Mapping[Node, Placement],
    network: Network,
    annotated: Collection[str],
    among: Collection[Node] | None = None,
) -> Cost:
    """What all nodes and moves cost one device in each step once fuse-communication has run: see `cost_of_placements`.

    With `among`, what is neither one of these nodes nor a move of their values is left out, whatever it costs.
    """
    wanted = wanted_shardings(flow, placements)
    amount, launches = cost_of_placements(
        flow, placements, network, lambda value: value.name in annotated, annotated, among, wanted
    )
    saved, fewer = saved_together(flow, placements, network, annotated, wanted)
    return amount - saved, launches - fewer
