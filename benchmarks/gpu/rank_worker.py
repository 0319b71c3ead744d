"""What one rank of the part `ranks` does, in a process of its own: a partition verified, or every collective."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.runtime.groups import Call, Collective, ThreadGroup, make_group
from irpar.runtime.groups.nccl.sharing import CAPTURES
from irpar.sharding import Axis, Mesh

from .findings import problem_text

Array = np.ndarray[Any, Any]

SECONDS = 30.0
"""How long a rank waits for others at a collective."""

RUNS = 3
"""Of a partition: node by node, captured in CUDA graphs, and replayed."""

KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "CollectivePermute", "Broadcast", "Send", "Recv")

_MOVED = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, ml_dtypes.float8_e4m3fn),
)
_REDUCED = {
    **dict.fromkeys(("sum", "prod", "max", "min"), _MOVED[1:13]),
    **dict.fromkeys(("and", "or"), _MOVED[:9]),
}
"""Dtypes of collectives, and those of each reduction."""
_RTOL = {np.dtype(np.float16): 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2.0**-7, np.dtype(np.float32): 2.0**-22}
"""One or two roundings: sums of several ranks may be rounded on the way."""

_SHARED_DEVICE = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""With these, and a host id for each rank, NCCL takes several ranks on one GPU, and talks over loopback sockets."""


def share_device(rank: str) -> None:
    """Let the ranks of this machine share a device, and capture collectives; before CUDA starts."""
    os.environ.update(_SHARED_DEVICE)
    os.environ[CAPTURES] = "1"
    os.environ["NCCL_HOSTID"] = f"irpar-rank-{rank}"


def main(work: str, folder: Path, engine: str, group: str) -> int:
    """Do a rank's work; rank 0, or each rank, writes what came of it to `folder`.

    Args:
        work: "verify" (the partition in `folder`/out), or axes and sizes of a mesh, for its collectives.
        folder: for input and results.
        engine, group: of irpar.
    """
    rank = os.environ["RANK"]
    if group == "nccl":
        share_device(rank)
    try:
        made = _verify(folder, engine, group) if work == "verify" else _collectives(Mesh.parse(work), group)
    except Exception as error:
        made = {"error": problem_text(error, lines=6)}
    if made is not None:
        (folder / f"rank{rank}.json").write_text(json.dumps(made))
    return 1 if made is not None and "error" in made else 0


def _verify(folder: Path, engine: Any, group: str) -> dict[str, Any] | None:
    """Verify a partition as `irpar verify` does on ranks; None on other ranks than the driver."""
    from irpar.api import Partition

    tolerance = json.loads((folder / "tolerance.json").read_text())
    with Partition.open(folder / "out") as partition:
        executor = partition.executor(engine, group, SECONDS)
        if not executor.is_driver:
            executor.serve()
            return None
        options = {"engine": engine, "group": group, "tolerance": tolerance}
        verified = [partition.verify(**options, seed=seed) for seed in range(RUNS)]
        differences = [difference.relative for one in verified for difference in one.differences]
        return {
            "relative": max(differences, default=0.0),
            "problem": next((str(one) for one in verified if not one.is_equal), None),
            "log": executor.log.differences(partition.plan.collectives),
            "collectives": len(executor.log),
        }


def _collectives(mesh: Mesh, group: str) -> dict[str, Any]:
    """Every collective, dtype and reduction, uneven and started ones too, beside the same on numpy in one process."""
    problems, done, seen = [], 0, dict[str, int]()
    joined: Any = make_group(group, mesh, SECONDS)
    (rank,) = joined.ranks
    reference = ThreadGroup(mesh)
    try:
        for number, (collective, operands) in enumerate(collectives(mesh)):
            calls = {peer: Call(peer, mesh.coords(peer), collective, one) for peer, one in enumerate(operands)}
            wanted = reference.exchange(calls)[rank]
            mine = Call(rank, mesh.coords(rank), collective, placed(joined, operands[rank]))
            if number % 3 == 2:
                joined.start(mine)
            got = on_host(joined.exchange({rank: mine})[rank])
            problem = difference(got, wanted)
            if problem:
                problems.append(f"{collective} {collective.reduce} of {operands[rank].dtype}: {problem}")
            done += 1
            seen[collective.kind] = seen.get(collective.kind, 0) + 1
    except Exception as error:
        problems.append(f"after {done} collectives: {problem_text(error, lines=6)}")
    finally:
        joined.close()
    return {"done": done, "problems": problems, "kinds": seen}


def collectives(mesh: Mesh) -> Iterator[tuple[Collective, list[Array]]]:
    """Collectives over each axis and over all, with an operand for each rank."""
    random = np.random.default_rng(0)
    number = 0
    axes_of = [[name] for name in mesh.axis_names] + ([list(mesh.axis_names)] if len(mesh.axis_names) > 1 else [])
    for names in axes_of:
        axes = tuple(map(Axis.parse, names))
        size = mesh.group_size(axes)
        for settings, shapes, dtype in _kinds(size):
            number += 1
            places = [mesh.position(mesh.coords(rank), axes) for rank in range(mesh.size)]
            operands = [_numbers(random, shapes[place], dtype) for place in places]
            yield Collective(id=number, axes=axes, **settings), operands
    for dtype in _MOVED:
        yield from _from_rank_to_rank(random, mesh.size, number + 1, dtype)
        number += 2


def _from_rank_to_rank(
    random: np.random.Generator, size: int, number: int, dtype: Any
) -> Iterator[tuple[Collective, list[Array]]]:
    """A Send to the next rank, the last one to the first, and its Recv."""
    pairs = tuple(place for one in range(size) for place in (one, (one + 1) % size))
    operands = [_numbers(random, (size * 2, 3), dtype) for _ in range(size)]
    yield Collective("Send", number, (), pairs=pairs), operands
    text = dtype_of_numpy(np.dtype(dtype)).text
    taken = Collective("Recv", number + 1, (), pairs=pairs, dtype=text, shape=operands[0].shape)
    yield taken, [taken.blank() for _ in range(size)]


def _kinds(size: int) -> Iterator[tuple[dict[str, Any], list[tuple[int, ...]], Any]]:
    """Settings of a collective of `size` members, the shapes of their operands, a dtype."""
    uneven = tuple(3 + place % 2 for place in range(size))
    same = [(size * 2, 3)] * size
    for reduce, dtypes in _REDUCED.items():
        for dtype in dtypes:
            yield {"kind": "AllReduce", "reduce": reduce}, same, dtype
            yield {"kind": "ReduceScatter", "reduce": reduce, "dim": 0}, same, dtype
    yield {"kind": "ReduceScatter", "reduce": "sum", "dim": 1, "sizes": uneven}, [(2, sum(uneven))] * size, np.float32
    around = tuple(place for one in range(size) for place in (one, (one + 1) % size))
    for dtype in _MOVED:
        yield {"kind": "AllGather", "dim": 0}, same, dtype
        yield {"kind": "AllGather", "dim": 1, "sizes": uneven}, [(2, block) for block in uneven], dtype
        yield {"kind": "AllToAll", "split_dim": 0, "concat_dim": 1}, same, dtype
        yield {"kind": "CollectivePermute", "pairs": around}, same, dtype
        yield {"kind": "CollectivePermute", "pairs": (0, size - 1)}, same, dtype
        yield {"kind": "Broadcast", "root": size - 1}, same, dtype
    yield {"kind": "AllReduce", "reduce": "sum"}, [(1 << 20,)] * size, np.float32
    yield {"kind": "AllReduce", "reduce": "sum"}, [(0, 4)] * size, np.float32


def _numbers(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Small numbers of both signs where the dtype has them, whose products fit."""
    kind = np.dtype(dtype).kind
    low = 0 if kind in "bu" else -2
    made = random.integers(low, 2 if kind == "b" else 4, shape)
    # Halves, so that what is cut to integers on the way shows.
    return (made / 2 if kind not in "biu" else made).astype(dtype)


def placed(group: Any, operand: Array) -> Any:
    """An operand where the group takes it."""
    if not group.takes_device_arrays:
        return operand
    import cupy

    try:
        return cupy.asarray(operand)
    except ValueError:  # A dtype that CuPy lacks travels as numpy has it.
        return operand


def on_host(result: Any) -> Array:
    """A result as a numpy array."""
    return result if isinstance(result, np.ndarray) else np.asarray(result.get())


def difference(got: Array, wanted: Array) -> str | None:
    """What is wrong with a result."""
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"is {got.dtype}{list(got.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.kind in "biu":
        return None if np.array_equal(got, wanted) else f"{int(np.sum(got != wanted))} of {wanted.size} elements differ"
    kind = np.complex128 if wanted.dtype.kind == "c" else np.float64
    left, right = got.astype(kind), wanted.astype(kind)
    error = float(np.max(np.abs(left - right) / (1 + np.abs(right)), initial=0.0))
    return None if error <= _RTOL.get(wanted.dtype, 0.0) else f"differs by {error:.2g}"
