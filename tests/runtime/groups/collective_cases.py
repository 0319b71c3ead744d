"""Every kind of collective, on every dtype, evenly and unevenly cut: what any group must do as the threads do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.sharding import Axis, Mesh

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "str"),
)
REDUCED = tuple(dtype for dtype in DTYPES if dtype not in ("str", "complex64"))


@dataclass(frozen=True, eq=False)
class Case:
    """A collective, and what each rank of the mesh brings to it."""

    collective: Collective
    operands: tuple[np.ndarray, ...]

    def call(self, mesh: Mesh, rank: int) -> Call:
        return Call(rank, mesh.coords(rank), self.collective, self.operands[rank])


def draw(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers of a dtype; sums of floats are not exact."""
    if dtype == "str":
        texts = np.empty(shape, object)
        texts.reshape(-1)[:] = [f"text {number} é" for number in random.integers(0, 10_000, texts.size)]
        return texts
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("int", "uint")):
        return random.integers(0, 8, shape).astype(getattr(ml_dtypes, dtype, dtype))
    return random.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def axes_of(mesh: Mesh) -> list[tuple[Axis, ...]]:
    """Each axis, all of them both ways round, and the halves of those that have some."""
    names = mesh.axis_names
    lists = [[name] for name in names] + [list(names), list(reversed(names))] * (len(names) > 1)
    halves = [f"{name}:({left})2" for name in names for left in (1, 2) if mesh.axes[name] == 4]
    return [tuple(map(Axis.parse, each)) for each in [*lists, *([half] for half in halves)]]


def cases(mesh: Mesh, *, rows: int = 3, seed: int = 0) -> Iterator[Case]:
    """All kinds over all groups of a mesh; the dtypes in turn. Some blocks are empty.

    Args:
        mesh: the mesh.
        rows: about how many rows an operand has.
        seed: other numbers and dtypes with another one.
    """
    random = np.random.default_rng(seed)
    turn = seed
    number = 0
    for axes in axes_of(mesh):
        count = mesh.group_size(axes)
        for kind, settings, shapes in shapes_of(random, count, rows):
            reduces = "reduce" in settings
            dtype = (REDUCED if reduces else DTYPES)[turn % len(REDUCED if reduces else DTYPES)]
            turn += 1
            if dtype == "bool" and reduces:
                settings = {**settings, "reduce": "or" if turn % 2 else "and"}
            operands = [draw(random, shapes[mesh.position(coords, axes)], dtype) for coords in mesh.all_coords()]
            yield Case(Collective(kind, number, axes, **settings), tuple(operands))
            number += 1


def shapes_of(
    random: np.random.Generator, count: int, rows: int
) -> Iterator[tuple[str, dict[str, Any], list[tuple[int, ...]]]]:
    """Kind, attributes, and operand shapes by position in a group."""
    blocks = tuple(int(size) for size in random.integers(0, rows + 1, count))
    others = tuple(int(size) for size in random.integers(0, 4, count))
    for reduce in ("sum", "max", "min", "prod"):
        yield "AllReduce", {"reduce": reduce}, [(rows, 5)] * count
    yield "AllReduce", {"reduce": "sum"}, [()] * count
    yield "AllReduce", {"reduce": "sum"}, [(0, 2)] * count
    for dim in (0, 1):
        even = (rows * count, 2) if dim == 0 else (2, rows * count)
        yield "ReduceScatter", {"reduce": "sum", "dim": dim}, [even] * count
        uneven = (sum(blocks), 2) if dim == 0 else (2, sum(blocks))
        yield "ReduceScatter", {"reduce": "max", "dim": dim, "sizes": blocks}, [uneven] * count
        yield "AllGather", {"dim": dim}, [(rows, 3)] * count
        yield "AllGather", {"dim": dim, "sizes": blocks}, [(size, 3) if dim == 0 else (3, size) for size in blocks]
        split, concat = dim, 1 - dim
        yield "AllToAll", {"split_dim": split, "concat_dim": concat}, [(2 * count, 2 * count)] * count
        pairs = [(sum(blocks), size) if split == 0 else (size, sum(blocks)) for size in others]
        settings = {"split_dim": split, "concat_dim": concat, "split_sizes": blocks, "concat_sizes": others}
        yield "AllToAll", settings, pairs
    ring = tuple(place for member in range(count) for place in (member, (member + 1) % count))
    yield "CollectivePermute", {"pairs": ring}, [(rows, 2)] * count
    yield "CollectivePermute", {"pairs": ring[:-2]}, [(rows, 2)] * count
    yield "CollectivePermute", {"pairs": (0, 0)}, [(rows, 2)] * count
    uneven_pairs = tuple(dim for size in blocks for dim in (size, 2))
    yield "CollectivePermute", {"pairs": ring, "shapes": uneven_pairs}, [(size, 2) for size in blocks]
    for root in {0, count - 1}:
        yield "Broadcast", {"root": root}, [(rows, 4)] * count


def check(
    case: Case, mesh: Mesh, rank: int, result: np.ndarray, tolerances: Mapping[np.dtype, float] | None = None
) -> None:
    """A rank's result must have the bits that the threads group gives.

    Args:
        case, mesh, rank: where it comes from.
        result: the rank's.
        tolerances: dtype to how far a sum or product may be off, relative to the right one.
    """
    calls = {each: case.call(mesh, each) for each in range(mesh.size)}
    expected = ThreadGroup(mesh).exchange(calls)[rank]
    label = f"rank {rank}: {case.collective} {case.collective.reduce} of {expected.dtype}{list(expected.shape)}"
    assert result.dtype == expected.dtype, label
    assert result.shape == expected.shape, f"{label}: {result.shape} != {expected.shape}"
    is_reduced = case.collective.kind in ("AllReduce", "ReduceScatter")
    tolerance = (tolerances or {}).get(result.dtype) if is_reduced else None
    if tolerance is not None:
        wide = np.complex128 if result.dtype.kind == "c" else np.float64
        left, right = result.astype(wide), expected.astype(wide)
        # Parts that cancel each other leave their rounding.
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=4 * tolerance, err_msg=label)
    elif result.dtype == np.object_:
        assert result.tolist() == expected.tolist(), label
    else:
        assert result.tobytes() == expected.tobytes(), f"{label}: {result} is not {expected}"
