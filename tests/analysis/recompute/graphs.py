"""Training graphs for tests, and the cheapest schedule by trying all."""

import heapq
import itertools

from hypothesis import strategies as st

from irpar.analysis.recompute import TrainingGraph, TrainingNode


def chain(count: int, mem: int = 1, cost: int = 1) -> TrainingGraph:
    """f0 f1 ... loss ... b1 b0, where each b reads its f."""
    names = [*(f"f{place}" for place in range(count)), "loss", *(f"b{place}" for place in reversed(range(count)))]
    nodes = tuple(TrainingNode(name, cost, mem, bwd=name.startswith("b")) for name in names)
    edges = [(place, place + 1) for place in range(len(nodes) - 1)]
    edges += [(place, 2 * count - place) for place in range(count)]
    return TrainingGraph(nodes, tuple(edges))


@st.composite
def random_graphs(draw: st.DrawFn, most: int = 8) -> TrainingGraph:
    """Any order, with what is kept, what may run only once and what works in more than its result."""
    count = draw(st.integers(2, most))
    nodes = []
    for place in range(count):
        facts = draw(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 7), st.integers(0, 3)))
        cost, mem, kind, work = facts
        nodes.append(TrainingNode(f"n{place}", cost, mem, keep=kind == 0, norec=kind == 1, work=work * (kind == 2)))
    pairs = itertools.combinations(range(count), 2)
    edges = tuple(pair for pair in pairs if draw(st.integers(0, 9)) < 5)
    return TrainingGraph(tuple(nodes), edges, fixed_mem=draw(st.integers(0, 2)))


def least_cost(graph: TrainingGraph, budget: int) -> int | None:
    """The cost of the cheapest schedule whose peak fits, by a search over all that can be held; None: there is none.

    A state: the next new node, the next node that may run again before it, and what is held.
    """
    nodes, count = graph.nodes, len(graph.nodes)
    waiting = [(0, 0, 0, frozenset[int]())]
    known = {(0, 0, frozenset[int]()): 0}
    while waiting:
        cost, stage, place, held = heapq.heappop(waiting)
        if stage == count:
            return cost
        if known[stage, place, held] < cost:
            continue
        moves = [(cost, stage, place, held - {one}) for one in held if not nodes[one].keep]
        now = graph.fixed_mem + sum(nodes[one].mem for one in held) + nodes[place].mem + nodes[place].work
        if held.issuperset(graph.operands[place]) and now <= budget:
            if place == stage:
                moves.append((cost + nodes[place].cost, stage + 1, 0, held | {place}))
            elif place not in held and graph.may_repeat(place):
                moves.append((cost + nodes[place].cost, stage, place + 1, held | {place}))
        if place < stage:
            moves.append((cost, stage, place + 1, held))
        for move in moves:
            if move[0] < known.get(move[1:], 1 << 60):
                known[move[1:]] = move[0]
                heapq.heappush(waiting, move)
    return None
