"""Collectives as rings of sends and receives, which count the bytes that each device sends: no formula is asked.

A device knows only what it holds, and what came to it. Blocks that are shorter than the longest of their collective
travel padded to its size, as plan.json counts them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irpar import Partition
from irpar.api import Arrays, Engine
from irpar.ir import dtype_of_text
from irpar.ops.collectives.reduced_arrays import reduce_arrays
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.sharding import Mesh, Reduction

Array = np.ndarray[Any, Any]


class Wires:
    """Devices in a row that send each other arrays.

    Attributes:
        sent: bytes that each has sent.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent = [0] * count
        self._underway: dict[tuple[int, int], list[Array]] = {}

    def send(self, source: int, target: int, array: Array, elements: int | None = None) -> None:
        """Put an array on its way; on the wire it is as long as `elements`, what stays on a device is not sent."""
        if source != target:
            size = array.size if elements is None else elements
            assert size >= array.size, "a block is longer than the longest"
            self.sent[source] += size * array.dtype.itemsize
        self._underway.setdefault((source, target), []).append(array.copy())

    def receive(self, source: int, target: int) -> Array:
        """What came first."""
        return self._underway[source, target].pop(0)

    def pass_on(self, parcels: Sequence[Array], elements: int) -> list[Array]:
        """Each sends one array to the next of the ring."""
        for device, parcel in enumerate(parcels):
            self.send(device, (device + 1) % self.count, parcel, elements)
        return [self.receive((device - 1) % self.count, device) for device in range(self.count)]

    @property
    def is_quiet(self) -> bool:
        """Whether all that was sent has been received."""
        return not any(self._underway.values())


def _cut(array: Array, dim: int, sizes: Sequence[int] | None, count: int) -> list[Array]:
    if sizes is None:
        assert array.shape[dim] % count == 0
        return np.split(array, count, dim)
    assert sum(sizes) == array.shape[dim]
    return np.split(array, np.cumsum(sizes)[:-1], dim)


def _longest(arrays: Sequence[Array]) -> int:
    return max(array.size for array in arrays)


def _scattered(wires: Wires, pieces: Sequence[Sequence[Array]], reduction: Reduction) -> list[Array]:
    """Piece i of all devices reduced at device i: n - 1 times a piece goes on to the next, which adds its own."""
    n = wires.count
    longest = _longest(pieces[0])
    parcels = [pieces[device][(device - 1) % n] for device in range(n)]
    for step in range(n - 1):
        parcels = wires.pass_on(parcels, longest)
        parcels = [
            reduce_arrays([parcel, pieces[device][(device - step - 2) % n]], reduction)
            for device, parcel in enumerate(parcels)
        ]
    return parcels


def _gathered(wires: Wires, blocks: Sequence[Array], dim: int) -> list[Array]:
    """n - 1 times the block that came last goes on to the next device."""
    n = wires.count
    longest = _longest(blocks)
    known = [{device: block} for device, block in enumerate(blocks)]
    parcels = list(blocks)
    for step in range(n - 1):
        parcels = wires.pass_on(parcels, longest)
        for device, parcel in enumerate(parcels):
            known[device][(device - step - 1) % n] = parcel
    return [np.concatenate([held[block] for block in range(n)], dim) for held in known]


def _all_reduce(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    shares = [np.array_split(array.reshape(-1), wires.count) for array in held]
    reduced = _scattered(wires, shares, collective.reduce)
    return [whole.reshape(held[0].shape) for whole in _gathered(wires, reduced, 0)]


def _all_gather(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    return _gathered(wires, held, collective.dim)


def _reduce_scatter(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    pieces = [_cut(array, collective.dim, collective.sizes, wires.count) for array in held]
    return _scattered(wires, pieces, collective.reduce)


def _all_to_all(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    n = wires.count
    pieces = [_cut(array, collective.split_dim, collective.split_sizes, n) for array in held]
    longest = max(map(_longest, pieces))
    for device in range(n):
        for target in range(n):
            wires.send(device, target, pieces[device][target], longest)
    return [
        np.concatenate([wires.receive(source, device) for source in range(n)], collective.concat_dim)
        for device in range(n)
    ]


def _permute(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    pairs = list(zip(collective.pairs[::2], collective.pairs[1::2], strict=True))
    for source, target in pairs:
        wires.send(source, target, held[source], _longest(held))
    came = {target: wires.receive(source, target) for source, target in pairs}
    return [came.get(device, np.zeros_like(held[device])) for device in range(wires.count)]


def _broadcast(wires: Wires, collective: Collective, held: Sequence[Array]) -> list[Array]:
    """From device to device, the one before the root gets it last."""
    n = wires.count
    came = {collective.root: held[collective.root]}
    for step in range(n - 1):
        source, target = (collective.root + step) % n, (collective.root + step + 1) % n
        wires.send(source, target, came[source])
        came[target] = wires.receive(source, target)
    return [came[device] for device in range(n)]


RINGS: dict[str, Callable[[Wires, Collective, Sequence[Array]], list[Array]]] = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AllToAll": _all_to_all,
    "CollectivePermute": _permute,
    "Broadcast": _broadcast,
}
"""Per kind: the operands of a group, in order of position, to its results."""


class RingGroup(ThreadGroup):
    """All ranks in this process; what a collective gives comes by rings.

    Attributes:
        sent: per id of a collective, for each time that it ran, the most bytes that a device has sent.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.sent: dict[int, list[int]] = {}
        self._groups_done: dict[tuple[int, int], int] = {}

    def execute(self, calls: Sequence[Call]) -> list[Array]:
        """One collective of one group."""
        collective = calls[0].collective
        wires = Wires(len(calls))
        results = RINGS[collective.kind](wires, collective, [call.operand for call in calls])
        assert wires.is_quiet
        self._note(collective.id, calls[0].rank, max(wires.sent))
        return results

    def _note(self, number: int, first: int, sent: int) -> None:
        time = self._groups_done.get((number, first), 0)
        self._groups_done[number, first] = time + 1
        counted = self.sent.setdefault(number, [])
        counted.extend([0] * (time + 1 - len(counted)))
        counted[time] = max(counted[time], sent)


def check_rings(partition: Partition, inputs: Arrays, engine: Engine) -> dict[str, Array]:
    """Run a partition over rings: the results of its own group, and in each collective the bytes of plan.json.

    Gives the results back. The log of collectives must be that of the plan, call by call.

    An all-reduce of a size that n does not divide is in shares of whole elements, of which the longest travels: less
    than 2(n-1) elements more than the formula says.
    """
    module, plan = partition.module, partition.plan
    assert module is not None
    expected = partition.run(inputs, engine=engine)
    assert partition.executor(engine).log.differences(plan.collectives) == []
    group = RingGroup(module.mesh)
    with Executor(module, module.mesh, engine=engine, group=group, parts=partition.parts) as executor:
        found = executor.run(inputs)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-3, atol=2e-3, err_msg=name)
    planned = {entry["id"]: entry for entry in plan.collectives}
    assert {number for number, entry in planned.items() if entry["times"]} <= group.sent.keys() <= planned.keys()
    for number, times in group.sent.items():
        entry = planned[number]
        assert entry["times"] in (None, len(times))
        dtype, members = dtype_of_text(entry["dtype"]), entry["group_size"]
        assert dtype is not None
        bits = dtype.bits
        rest = 2 * (members - 1) * bits // 8 if entry["kind"] == "all_reduce" else 0
        told = f"{entry['kind']} id={number} of {entry['bytes']} bytes over {members}"
        for sent in times:
            is_whole = entry["bytes"] * 8 % (bits * members) == 0
            assert entry["sent_bytes"] <= sent <= entry["sent_bytes"] + (0 if is_whole else rest), told
    return expected
