"""From a problem to its path: on coarse atoms, and on finer ones where these may do better."""

from dataclasses import dataclass
from typing import Literal

from ..network import Network
from .bound import Bound, bound_of_bytes, distances
from .prices import BytePrices, NetworkPrices, Prices
from .problem import Names, Problem, refined
from .search import Path, Search
from .space import Move, space_of

Planner = Literal["optimal", "fast"]

MOST_ATOMS = 6
"""Finer atoms are not looked at where there would be more."""
WEIGHTS = {"optimal": 1.0, "fast": 1.1}
"""How far above the least cost a planner may end."""
_MOST_KNOWN = 1 << 16
_known: dict[tuple[Problem, Network, Planner, int], "Solution"] = {}


@dataclass(frozen=True)
class Solution:
    """The answer to a problem, in its own atoms and dims.

    Attributes:
        moves: from the start to the goal.
        granularity: the atoms that the moves speak of: as they were, all in prime parts, or these with unused axes.
        peak_bytes: the largest block on the way.
        ends_bytes: the larger block of the two ends.
    """

    moves: tuple[Move, ...]
    granularity: Literal["given", "prime", "all"]
    peak_bytes: int
    ends_bytes: int


def solve(problem: Problem, names: Names, network: Network, planner: Planner, chunk_bytes: int) -> Solution:
    """The cheapest moves over blocks not larger than those of the ends and a chunk; each problem is solved once.

    Args:
        problem: from `problem_of`.
        names: the mesh and the axes behind the atoms; equal problems run over equal links.
        network: what communication costs.
        planner: optimal, or fast: content with 1.1 times the least cost.
        chunk_bytes: how far above the larger end a block may be.
    """
    key = problem, network, planner, chunk_bytes
    solution = _known.get(key)
    if solution is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        solution = _known[key] = _solved(problem, names, network, planner, chunk_bytes)
    return solution


def forget() -> None:
    """Forget all solutions."""
    _known.clear()


def names_at(problem: Problem, names: Names, granularity: str) -> Names:
    """What the atoms are called that moves of a granularity speak of."""
    return names if granularity == "given" else refined(problem, names, granularity == "all")[1]


def _solved(problem: Problem, names: Names, network: Network, planner: Planner, chunk_bytes: int) -> Solution:
    weight = WEIGHTS[planner]
    coarse = _used_only(problem)
    search = _search(coarse, names, network)
    path = _within(search, chunk_bytes, weight)
    finer = _finer(problem, names)
    most = search.ends_bytes + chunk_bytes
    if finer is None:
        return Solution(path.moves, "given", path.peak_bytes, search.ends_bytes)
    granularity, fine_problem, fine_names = finer
    fine = _search(fine_problem, fine_names, network)
    least = fine.bound(fine.space.counts(fine_problem.start))
    if path.peak_bytes <= most and least is not None and path.cost <= least * int(weight * 20) // 20:
        return Solution(path.moves, "given", path.peak_bytes, search.ends_bytes)
    better = _within(fine, chunk_bytes, weight)
    if (max(better.peak_bytes, most), better.cost) < (max(path.peak_bytes, most), path.cost):
        return Solution(better.moves, granularity, better.peak_bytes, search.ends_bytes)
    return Solution(path.moves, "given", path.peak_bytes, search.ends_bytes)


def _within(search: Search, chunk_bytes: int, weight: float) -> Path:
    """The cheapest path within the bound of memory, or where there is none, the cheapest of the least peak."""
    path = search.shortest(search.ends_bytes + chunk_bytes, weight)
    path = path or search.shortest(search.least_peak(), weight)
    assert path is not None, "reducing, gathering everything and slicing always works"
    return path


def _used_only(problem: Problem) -> Problem:
    return Problem(
        problem.sizes[: problem.used],
        problem.used,
        problem.shape,
        problem.bits,
        problem.start,
        problem.goal,
        problem.levels[: problem.used],
    )


def _finer(problem: Problem, names: Names) -> tuple[Literal["prime", "all"], Problem, Names] | None:
    """The problem on atoms of prime size, those of unused axes included unless there are too many."""
    every, every_names = refined(problem, names, with_unused=True)
    if len(every.sizes) <= MOST_ATOMS:
        return None if len(every.sizes) == problem.used else ("all", every, every_names)
    used, used_names = refined(problem, names, with_unused=False)
    return ("prime", used, used_names) if problem.used < len(used.sizes) <= MOST_ATOMS else None


def _search(problem: Problem, names: Names, network: Network) -> Search:
    space = space_of(problem.sizes, len(problem.shape))
    start, goal = space.counts(problem.start), space.counts(problem.goal)
    product = space.size(tuple(range(len(problem.sizes))))
    whole_bytes = problem.bits
    for size in problem.shape:
        whole_bytes *= size
    whole_bytes //= 8
    if not network.knows_seconds:
        bound: Bound = bound_of_bytes(product, start, goal, whole_bytes)
        return Search(problem, space, BytePrices(), bound, orders=False)
    prices: Prices = NetworkPrices(network, names.mesh, names.axes[: len(problem.sizes)], problem.sizes)
    return Search(problem, space, prices, distances(product, start[-1], goal, whole_bytes, prices).get, orders=True)
