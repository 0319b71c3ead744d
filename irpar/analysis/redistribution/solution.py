"""From a problem to its path: on coarse atoms, and on finer ones where these may do better."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from irpar.analysis.cost.network import Network

from .bound import bound_of_bytes, distances
from .prices import BytePrices, NetworkPrices, Prices
from .problem import Names, Problem, refined
from .search import Effort, Path, Search, weighed
from .space import CollectiveStep, space_of

Planner = Literal["optimal", "fast"]
Granularity = Literal["given", "prime", "all"]
"""Atoms as they were, all in prime parts, or these with the prime parts of unused axes."""

MOST_ATOMS = 6
"""Finer atoms are not looked at where there would be more."""
EFFORTS: dict[Planner, Effort] = {"optimal": Effort(1.0, 8_000), "fast": Effort(1.1, 3_000)}
"""All states of three dims on meshes of up to five prime factors are fewer than the 8,000."""
_MOST_KNOWN = 1 << 16
_known: dict[tuple[Problem, Network, Planner, int], "Solution"] = {}


@dataclass(frozen=True)
class Solution:
    """The answer to a problem, in its own atoms and dims.

    Attributes:
        moves: from the start to the goal.
        granularity: the atoms that the moves speak of.
        peak_bytes: the largest block on the way.
        ends_bytes: the larger block of the two ends.
    """

    moves: tuple[CollectiveStep, ...]
    granularity: Granularity
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
    """On ever finer atoms, until the least that any of them could cost is reached."""
    effort = EFFORTS[planner]
    searches = [(kind, _search(of, of_names, network)) for kind, of, of_names in _granularities(problem, names)]
    ends_bytes = searches[0][1].ends_bytes
    most_bytes = ends_bytes + chunk_bytes
    least = min(search.least for _, search in searches)
    found: tuple[Granularity, Path] | None = None
    for kind, search in searches:
        below = found[1].cost if found is not None and found[1].peak_bytes <= most_bytes else None
        path = search.shortest(most_bytes, effort, below)
        if path is None and below is None:
            path = search.shortest(search.least_peak(), effort)
        if path is not None and (found is None or _rank(path, most_bytes) < _rank(found[1], most_bytes)):
            found = kind, path
        assert found is not None, "reducing, gathering everything and slicing always works"
        if found[1].peak_bytes <= most_bytes and found[1].cost <= weighed(least, effort.weight):
            break
    assert found is not None
    return Solution(found[1].moves, found[0], found[1].peak_bytes, ends_bytes)


def _rank(path: Path, most_bytes: int) -> tuple[int, int]:
    """The peak counts where it is above the bound, and then the cost."""
    return max(path.peak_bytes, most_bytes), path.cost


def _granularities(problem: Problem, names: Names) -> Iterator[tuple[Granularity, Problem, Names]]:
    """The atoms of the two shardings; with those of unused axes; in prime parts; and in these with unused axes."""
    used = replace(
        problem, sizes=problem.sizes[: problem.used], levels=problem.levels[: problem.used] if problem.levels else ()
    )
    yield "given", used, names
    seen = {used.sizes}
    candidates: list[tuple[Granularity, Problem, Names]] = [
        ("given", problem, names),
        ("prime", *refined(problem, names, with_unused=False)),
        ("all", *refined(problem, names, with_unused=True)),
    ]
    for kind, of, of_names in candidates:
        if of.sizes not in seen and len(of.sizes) <= MOST_ATOMS:
            seen.add(of.sizes)
            yield kind, of, of_names


def _search(problem: Problem, names: Names, network: Network) -> Search:
    space = space_of(problem.sizes, len(problem.shape))
    start, goal = space.counts(problem.start), space.counts(problem.goal)
    product = space.size(tuple(range(len(problem.sizes))))
    whole_bytes = problem.bits
    for size in problem.shape:
        whole_bytes *= size
    whole_bytes //= 8
    if not network.knows_seconds:
        bound = bound_of_bytes(product, start, goal, whole_bytes)
        return Search(problem, space, BytePrices(), bound, orders=False)
    prices: Prices = NetworkPrices(network, names.mesh, names.axes[: len(problem.sizes)], problem.sizes)
    bound = distances(product, start[-1], goal, whole_bytes, prices)
    return Search(problem, space, prices, bound, orders=True)
