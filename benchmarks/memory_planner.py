"""How close arenas come to the most that is held at once: training steps, and programs that are hard to place.

    python benchmarks/memory_planner.py [--seconds 30] [--hard N] [--write]

Training steps: of every family of models, over dp=2, with AdamW; what plan.json calls `arena_bytes` against the most
that is held at once, sizes rounded up to 64 bytes.

Hard programs: 11 of 150 to 450 buffers with fixed seeds, made as those that allocators are compared on: a square of
1,024 steps by 1,024 units is cut into rectangles, again and again, in two steps of time or up to five slices of memory;
so a perfect packing is known to exist. Then rectangles of about a twentieth of its area are taken out, as noise.
Heuristics alone, and `irpar plan-memory --exact` for some seconds; the ratio is to the most that is held at once, which
no block is below, so that 1 is proven to be the best. Of greedy orders (by size, area, start, steps; lowest place, or
lowest buffer first) the best is shown beside: it tells how hard a program is.

--write puts the tables into benchmarks/results/memory_planner.md.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import irpar
from irpar import models
from irpar.analysis.memory.arena import arena_bytes, arena_lifetimes
from irpar.analysis.memory.offsets.exact import SECONDS, smallest
from irpar.analysis.memory.offsets.greedy import greedy_offsets
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import ALIGNMENT, Lifetime, Rectangles, aligned, most_held

RESULT = Path(__file__).parent / "results" / "memory_planner.md"
STEP_TARGET, HARD_TARGET = 1.02, 1.05
"""Of what is held at most, for steps and for hard programs."""
SIDE = 1024
COUNTS = tuple(range(150, 451, 30))
IN_TIME, MOST_SLICES = 0.45, 5
"""How often a rectangle is cut in two steps of time; else into slices of memory, so many at most."""
TAKEN, MOST_TAKEN = 0.05, 0.03
"""How much of the square is taken out, and of which rectangles."""

Rectangle = tuple[int, int, int, int]
"""From step, to step, from unit, to unit."""


def hard_program(seed: int, count: int) -> list[Lifetime[int]]:
    """About so many buffers, for which a block of `SIDE` units is enough."""
    drawn = random.Random(seed)
    pieces: list[Rectangle] = [(0, SIDE, 0, SIDE)]
    while len(pieces) < round(count * (1 + TAKEN)):
        piece = max(drawn.sample(pieces, min(4, len(pieces))), key=_area)
        if made := _cut(piece, drawn):
            pieces.remove(piece)
            pieces += made
    taken = 0
    while taken < TAKEN * SIDE**2:
        piece = drawn.choice(pieces)
        if _area(piece) < MOST_TAKEN * SIDE**2:
            pieces.remove(piece)
            taken += _area(piece)
    return [Lifetime(key, high - low, begin, end - 1) for key, (begin, end, low, high) in enumerate(pieces)]


def _area(piece: Rectangle) -> int:
    begin, end, low, high = piece
    return (end - begin) * (high - low)


def _cut(piece: Rectangle, drawn: random.Random) -> list[Rectangle]:
    """A rectangle in pieces; none where it is too small for that."""
    begin, end, low, high = piece
    if drawn.random() < IN_TIME:
        if end - begin < 2:
            return []
        middle = drawn.randrange(begin + 1, end)
        return [(begin, middle, low, high), (middle, end, low, high)]
    if high - low < MOST_SLICES:
        return []
    inner = sorted(drawn.sample(range(low + 1, high), drawn.randrange(1, MOST_SLICES)))
    return [(begin, end, *slice_) for slice_ in zip((low, *inner), (*inner, high), strict=True)]


def best_greedy(held: Sequence[Lifetime[int]]) -> int:
    """The lowest end of all greedy orders."""
    found = Rectangles.of(held, 1)
    return min(map(found.top, greedy_offsets(found)))


def step_rows(ratios: list[float]) -> Iterator[str]:
    """A row for the training step of each family; its ratio is added to a list."""
    yield "| training step | buffers | held at most | arena | ratio | planned in |"
    yield "|---|---|---|---|---|---|"
    for family in models.FAMILIES:
        graph = irpar.partition(irpar.train_step(models.build(family), optimizer="adamw"), "dp=2").module.graph
        held = list(arena_lifetimes(graph))
        most = most_held(held)
        began = time.perf_counter()
        arena = aligned(arena_bytes(graph), ALIGNMENT)
        seconds = time.perf_counter() - began
        ratios.append(arena / most)
        yield f"| {family} | {len(held):,} | {most:,} | {arena:,} | {ratios[-1]:.4f} | {seconds:.2f} s |"


def hard_rows(seconds: float, number: int, ratios: list[float]) -> Iterator[str]:
    """A row for each hard program, and what holds of all; ratios are added to a list."""
    yield f"| hard program | buffers | best greedy order | heuristics | in | --exact, {seconds:g} s | after | proven |"
    yield "|---|---|---|---|---|---|---|---|"
    proven = 0
    for seed, count in list(enumerate(COUNTS))[:number]:
        held = hard_program(seed, count)
        most = most_held(held, 1)
        began = time.perf_counter()
        quick = place(held, 1).nbytes / most
        middle = time.perf_counter()
        found = smallest(held, seconds, 1)
        end = time.perf_counter()
        ratios.append(found.nbytes / most)
        proven += found.is_optimal
        yield (
            f"| {seed} | {len(held)} | {best_greedy(held) / most:.3f} | {quick:.3f} | {middle - began:.1f} s "
            f"| {ratios[-1]:.4f} | {end - middle:.1f} s | {'yes' if found.is_optimal else f'to {found.gap:.1%}'} |"
        )
    near = sum(ratio <= HARD_TARGET for ratio in ratios)
    most_of_all = max(ratios, default=1)
    counts = f"{near} of {len(ratios)} are within {HARD_TARGET}, {proven} proven to be the smallest"
    yield f"\n{counts}; the largest ratio is {most_of_all:.4f}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; 1 where a step or a hard program is above its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each hard program (default 30)")
    parser.add_argument("--hard", type=int, default=len(COUNTS), help="how many hard programs (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {RESULT.name}")
    options = parser.parse_args(arguments)
    lines: list[str] = []
    steps: list[float] = []
    hard: list[float] = []
    for line in chain(step_rows(steps), ("",), hard_rows(options.seconds, options.hard, hard)):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        RESULT.write_text(
            "# Arenas\n\n`python benchmarks/memory_planner.py`, on 2 cores that others shared.\n\n"
            + "\n".join(lines)
            + "\n"
        )
    is_met = max(steps) <= STEP_TARGET and all(ratio <= HARD_TARGET for ratio in hard)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
