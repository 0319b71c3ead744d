"""What is looked up in tables that are sharded by rows: each device keeps its share, and what follows works on shares.

t : [1000@tp, 16], ids : [64]    e = Gather(t, ids) is partial over tp; all-reduced, each device has all 64 rows of it,
                                 and computes all that follows
e : [64@tp, 16]                  a reduce-scatter sends half, and what follows is computed by rows
"""

from collections.abc import Collection

from irpar.analysis.completion.flow import Flow
from irpar.analysis.cost.network import Network
from irpar.ir import Value
from irpar.sharding import Sharding


def shares_of_lookups(flow: Flow, pinned: Collection[Value], network: Network) -> dict[Value, Sharding]:
    """How the values would be shared that are given in parts, but sum no products, and that all devices have in full.

    Args:
        flow: every tensor has a sharding.
        pinned: values that stay as they are.
        network: what communication costs.
    """
    found: dict[Value, Sharding] = {}
    for node in flow.nodes:
        view = flow.rule(node)
        if view is None or view.sums_products:
            continue
        placement = flow.place(node, pinned.__contains__, network)
        for value, given in zip(node.results, placement.results, strict=True):
            is_sum = given is not None and given.partial and value.sharding == given.with_partial(())
            if is_sum and value not in pinned and value.is_static:
                assert given is not None
                assert value.sharding is not None
                share = next(value.sharding.cut_further(given.partial, value.shape), None)
                if share is not None:
                    found[value] = share
    return found
