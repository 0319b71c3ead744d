"""Random tensors that go from rank to rank: what each rank sends and takes, and what it must get."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.runtime.groups import Call, Collective
from irpar.sharding import Mesh

from .collective_cases import DTYPES, draw


@dataclass(frozen=True, eq=False)
class PairCase:
    """One Send and its Recv, as each rank comes to them.

    Attributes:
        sends, takes: by rank.
        expected: what a rank gets of the Recv.
    """

    sends: list[Call]
    takes: list[Call]
    expected: list[np.ndarray]


def pair_cases(mesh: Mesh, count: int, seed: int, rows: int = 3, channels: int = 2) -> Iterator[PairCase]:
    """So many, of all dtypes, over few channels; shapes differ from rank to rank."""
    random = np.random.default_rng(seed)
    for number in range(count):
        pairs = draw_pairs(random, mesh.size)
        dtype = DTYPES[int(random.integers(len(DTYPES)))]
        shapes = [tuple(int(size) for size in random.integers(0, rows + 1, 2)) for _ in range(mesh.size)]
        operands = [draw(random, shape, dtype) for shape in shapes]
        sources = {target: source for source, target in pairs}
        settings: dict[str, Any] = {
            "pairs": tuple(rank for pair in pairs for rank in pair),
            "channel": int(random.integers(channels)),
        }
        sends, takes, expected = [], [], []
        for rank in range(mesh.size):
            source = sources.get(rank)
            shape = shapes[rank if source is None else source]
            send = Collective("Send", 2 * number, (), **settings)
            text = dtype_of_numpy(operands[0].dtype).text
            take = Collective("Recv", 2 * number + 1, (), dtype=text, shape=shape, **settings)
            sends.append(Call(rank, mesh.coords(rank), send, operands[rank]))
            takes.append(Call(rank, mesh.coords(rank), take, take.blank()))
            expected.append(take.blank() if source is None else operands[source])
        yield PairCase(sends, takes, expected)


def draw_pairs(random: np.random.Generator, size: int) -> list[tuple[int, int]]:
    """Pairs of different ranks, of which no two send to one: one at least, circles among them."""
    targets = random.permutation(size)[: int(random.integers(1, size + 1))]
    return [(int((target + random.integers(1, size)) % size), int(target)) for target in targets]


def check_taken(result: np.ndarray, expected: np.ndarray) -> None:
    """What a rank got, to the last bit."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    if expected.dtype == np.object_:
        assert result.tolist() == expected.tolist()
    else:
        assert result.tobytes() == expected.tobytes()


def exchange_pairs(group: Any, rank: int, mesh: Mesh, count: int, seed: int, rows: int = 3) -> int:
    """One rank's part of so many cases, three sent before the first of them is taken; how many were right."""
    listed = list(pair_cases(mesh, count, seed, rows))
    group.begin_run()
    for start in range(0, count, 3):
        some = listed[start : start + 3]
        for case in some:
            group.exchange({rank: case.sends[rank]})
        for case in some:
            check_taken(group.exchange({rank: case.takes[rank]})[rank], case.expected[rank])
    return count
