"""What redistributions send: irpar beside what information theory asks for, MindSpore's greedy, and XLA; and how fast
they are planned.

    python benchmarks/redistribution.py [--anchors FOLDER] [--sample N]

Bytes are those that one device sends, by the ring model. For every pair of shardings on some meshes they are printed
beside (a) the lower bound: the most bytes that any device needs and does not hold; and (b), where every dim is cut by
one axis at most, MindSpore's greedy as published: SplitByAxis where it is free, PermuteByAxis (an all-to-all, or
without it a gather and a split), ConcatByAxis for what the target does not use, and when nothing of these leads on, a
gather of the first dim that is left. Then (c), pure moves through XLA's two partitioners: the cases reshard_* of
--anchors, of IRPAR_ANCHORS, or of ../shared/anchors beside this project. Last, how many problems are planned in a
second whose answer is known, under other names of axes and dims, and how long a new one takes. The exit code is 1 if
irpar sends more than (b) or (c), or if half of the problems take longer than 0.1 ms and 1 ms.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from irpar.analysis.redistribution import planned, redistribution
from irpar.analysis.redistribution.solution import forget
from irpar.sharding import Axis, Mesh, Sharding, local_region

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "anchors"
MESHES = [({"x": 4}, 2), ({"x": 2, "y": 2}, 3), ({"x": 2, "y": 4}, 3), ({"x": 2, "y": 2, "z": 2}, 3)]
MESHES += [({"x": 4, "y": 2, "z": 2}, 2), ({"x": 2, "y": 8, "z": 4}, 3)]
SIZE = 64
"""Of every dim; all cuts divide it."""
ITEM = 4
"""Bytes of an element."""


# -- shardings -----------------------------------------------------------------------------------------------------


def shardings(mesh: Mesh, rank: int, most_axes: int) -> Iterator[Sharding]:
    """Every way to cut `rank` dims over whole axes, up to `most_axes` on each."""
    for places in itertools.product(range(-1, rank), repeat=len(mesh.axes)):
        dims = [
            [Axis(axis) for axis, place in zip(mesh.axes, places, strict=True) if place == dim] for dim in range(rank)
        ]
        if all(len(axes) <= most_axes for axes in dims):
            for orders in itertools.product(*map(itertools.permutations, dims)):
                yield Sharding.of_axes(mesh, orders)


def regions(sharding: Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """The block of every rank: [ranks, dims, 2]."""
    return np.array([local_region(sharding, shape, coords) for coords in sharding.mesh.all_coords()])


def lower_bound(held: np.ndarray, needed: np.ndarray) -> int:
    """The most bytes that any device needs and does not hold."""
    overlap = np.minimum(held[..., 1], needed[..., 1]) - np.maximum(held[..., 0], needed[..., 0])
    wanted = (needed[..., 1] - needed[..., 0]).prod(axis=1)
    return int((wanted - overlap.clip(min=0).prod(axis=1)).max()) * ITEM


# -- MindSpore's greedy ----------------------------------------------------------------------------------------------


class Greedy:
    """SplitByAxis, PermuteByAxis and ConcatByAxis in turn, until every dim is sharded as it should be.

    Args:
        source, target: every dim cut by one axis at most.
        has_all_to_all: a permutation is one all-to-all; else a gather, and a split that is free.
    """

    def __init__(self, source: Sharding, target: Sharding, has_all_to_all: bool) -> None:
        self.mesh = source.mesh
        self.has_all_to_all = has_all_to_all
        self.goal = [axes[0] if axes else None for axes in target.axes]
        self.now = [axes[0] if axes else None for axes in source.axes]
        self.left = dict.fromkeys(range(len(self.now)))
        self.block = SIZE ** len(self.now) * ITEM // self.mesh.group_size([axis for axis in self.now if axis])
        self.sent = 0

    def run(self) -> int:
        """Bytes that a device sends."""
        while self.left:
            while self._split() + self._permute():
                pass
            if not self._concat() and self.left:
                self._gather(next(iter(self.left)))
        return self.sent

    def _done(self) -> None:
        for dim in [dim for dim in self.left if self.now[dim] == self.goal[dim]]:
            del self.left[dim]

    def _split(self) -> int:
        """Dims that nothing shards take an axis that nothing holds."""
        self._done()
        found = [dim for dim in self.left if self.now[dim] is None and self.goal[dim] not in self.now]
        for dim in found:
            self._cut(dim)
        self._done()
        return len(found)

    def _permute(self) -> int:
        """Dims that nothing shards take their axis from the dim that has it."""
        count = 0
        for dim in list(self.left):
            axis = self.goal[dim]
            if self.now[dim] is None and axis is not None and axis in self.now:
                other, n = self.now.index(axis), self.mesh.group_size([axis])
                self.sent += (n - 1) * self.block // n if self.has_all_to_all else (n - 1) * self.block
                self.now[dim], self.now[other] = axis, None
                self.left[other] = None
                del self.left[dim]
                count += 1
        self._done()
        return count

    def _concat(self) -> int:
        """Dims give up axes that the target does not use."""
        found = [dim for dim in self.left if self.now[dim] is not None and self.now[dim] not in self.goal]
        for dim in found:
            self._gather(dim)
        self._done()
        return len(found)

    def _cut(self, dim: int) -> None:
        self.now[dim] = self.goal[dim]
        self.block //= self.mesh.group_size([self.goal[dim]])

    def _gather(self, dim: int) -> None:
        n = self.mesh.group_size([self.now[dim]])
        self.sent += (n - 1) * self.block
        self.block *= n
        self.now[dim] = None


# -- every pair ----------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Sums over pairs of shardings.

    Attributes:
        pairs: how many that are not equal.
        ours, other: bytes that a device sends.
        worst: the largest ratio of what irpar sends to the other, or the other to irpar.
        above: of how many pairs irpar sends more.
    """

    pairs: int = 0
    ours: int = 0
    other: int = 0
    worst: float = 1.0
    above: int = 0

    def add(self, ours: int, other: int, largest: int, smallest: int) -> None:
        """One pair."""
        self.pairs += 1
        self.ours += ours
        self.other += other
        self.above += ours > other
        if smallest:
            self.worst = max(self.worst, largest / smallest)


def compare(mesh: Mesh, rank: int, sample: int) -> tuple[Comparison, Comparison, Comparison]:
    """irpar beside the lower bound, for all shardings, and the greedy, for simple ones, with and without all-to-all."""
    shape = (SIZE,) * rank
    bound, greedy, plain = Comparison(), Comparison(), Comparison()
    every = list(shardings(mesh, rank, len(mesh.axes)))
    simple = [sharding for sharding in every if all(len(axes) <= 1 for axes in sharding.axes)]
    blocks = {sharding: regions(sharding, shape) for sharding in every}
    pairs = [(old, new) for old, new in itertools.product(every, every) if old != new]
    if len(pairs) > sample:
        pairs = random.Random(0).sample(pairs, sample)
    for old, new in pairs:
        ours = redistribution(old, new, shape, 8 * ITEM, chunk_bytes=0).sent_bytes
        least = lower_bound(blocks[old], blocks[new])
        bound.add(ours, least, ours, least)
    for old, new in itertools.product(simple, simple):
        if old != new:
            ours = redistribution(old, new, shape, 8 * ITEM, chunk_bytes=0).sent_bytes
            for column, has_all_to_all in ((greedy, True), (plain, False)):
                sent = Greedy(old, new, has_all_to_all).run()
                column.add(ours, sent, sent, ours)
    return bound, greedy, plain


def print_pairs(sample: int) -> int:
    """The tables of (a) and (b); returns of how many pairs irpar sends more than the greedy."""
    print("every pair of shardings, MB that a device sends, and the largest ratio of one pair")
    print(f"  {'mesh':16}{'rank':>5}{'pairs':>7}{'irpar':>10}{'bound':>10}{'worst':>7}", end="")
    print(f"   |{'pairs':>6}{'irpar':>10}{'greedy':>10}{'worst':>7}{'no a2a':>10}{'worst':>7}{'above':>7}")
    above = 0
    for sizes, rank in MESHES:
        mesh = Mesh(sizes)
        bound, greedy, plain = compare(mesh, rank, sample)
        above += greedy.above + plain.above
        print(f"  {mesh!s:16}{rank:>5}{bound.pairs:>7}{bound.ours / 1e6:>10.2f}{bound.other / 1e6:>10.2f}", end="")
        print(f"{bound.worst:>7.2f}   |{greedy.pairs:>6}{greedy.ours / 1e6:>10.2f}{greedy.other / 1e6:>10.2f}", end="")
        print(f"{greedy.worst:>7.2f}{plain.other / 1e6:>10.2f}{plain.worst:>7.2f}{greedy.above + plain.above:>7}")
    return above


# -- XLA -----------------------------------------------------------------------------------------------------------


def print_xla(folder: Path) -> int:
    """The table of (c); returns in how many cases irpar sends more."""
    files = sorted((folder / "cases").glob("reshard_*.json"))
    if not files:
        print(f"\nno cases reshard_* in {folder / 'cases'}: give --anchors FOLDER", file=sys.stderr)
        return 0
    print("\npure moves, bytes that a device sends")
    print(f"  {'':30}{'irpar':>9}{'bound':>9}{'GSPMD':>9}{'Shardy':>9}{'DTensor':>9}{'best known':>12}")
    above = 0
    for file in files:
        case = json.loads(file.read_text(encoding="utf-8"))
        mesh = Mesh(dict(zip(case["mesh"]["axes"], case["mesh"]["sizes"], strict=True)))
        (source,), (target,) = case["annotations"].values(), case["required_outputs"].values()
        shape = tuple(next(iter(case["inputs"].values()))["shape"])
        old, new = Sharding.of_spec(mesh, source), Sharding.of_spec(mesh, target)
        ours, sent = redistribution(old, new, shape, 32).sent_bytes, case["sent_bytes"]
        xla = min(value for value in (sent["xla_gspmd"], sent["xla_shardy"]) if value is not None)
        columns = [sent[name] for name in ("xla_gspmd", "xla_shardy", "dtensor")]
        texts = "".join(f"{'-' if value is None else format(int(value), ','):>9}" for value in columns)
        verdict = "worse" if ours > xla else "below XLA" if ours < xla else "ok"
        least = lower_bound(regions(old, shape), regions(new, shape))
        print(f"  {case['name']:30}{ours:>9,}{least:>9,}{texts}{int(sent['best_known']):>12,}  {verdict}")
        above += ours > xla
    return above


# -- speed ---------------------------------------------------------------------------------------------------------


def print_speed() -> bool:
    """Problems a second where the answer is known, and the median of those where it is not; whether that is enough."""
    mesh = Mesh({"x": 2, "y": 2, "z": 2})
    draw = random.Random(0)
    print("\nplanning on x=2,y=2,z=2, medians of 1,000 problems")
    is_met = True
    for rank in (2, 3):
        every = list(shardings(mesh, rank, 3))
        shape = (SIZE,) * rank
        pairs = [(draw.choice(every), draw.choice(every)) for _ in range(1000)]

        def plan(source: Sharding, target: Sharding, shape: tuple[int, ...] = shape) -> None:
            redistribution(source, target, shape, 32)

        fresh = statistics.median(seconds(plan, pairs, _forget_all))
        seconds(plan, pairs)
        known = statistics.median(seconds(plan, pairs))
        renamed = statistics.median(seconds(plan, pairs, planned.cache_clear))
        is_met = is_met and renamed <= 1e-4 and fresh <= 1e-3
        print(f"  rank {rank}: {1 / known:,.0f} a second asked before, {1 / renamed:,.0f} by other names; ", end="")
        print(f"new: {fresh * 1e3:.2f} ms")
    return is_met


def seconds(
    plan: Callable[[Sharding, Sharding], None],
    pairs: Sequence[tuple[Sharding, Sharding]],
    before: Callable[[], None] | None = None,
) -> list[float]:
    """How long each plan takes; `before` is called before each, untimed."""
    found = []
    for source, target in pairs:
        if before is not None:
            before()
        start = time.perf_counter()
        plan(source, target)
        found.append(time.perf_counter() - start)
    return found


def _forget_all() -> None:
    forget()
    planned.cache_clear()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=5000, metavar="N", help="pairs of a mesh at most (default 5000)")
    options = parser.parse_args(arguments)
    folder = options.anchors or Path(os.environ.get("IRPAR_ANCHORS", DEFAULT_FOLDER))
    above = print_pairs(options.sample) + print_xla(folder)
    is_fast = print_speed()
    print(f"\nirpar sends more than MindSpore's greedy or XLA in {above} cases")
    return 0 if is_fast and not above else 1


if __name__ == "__main__":
    sys.exit(main())
