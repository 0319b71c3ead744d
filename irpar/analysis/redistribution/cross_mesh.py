"""From a sharding on one mesh to a sharding on another: which device sends which box of the tensor to which device.

Meshes are views of one list of devices; they may have other shapes, share some devices, or none. Every element that a
device lacks comes to it once, from a holder that is near and has least to send. What several devices of the target need
may come to one of them and be gathered there; partial values are reduced first, where they are.

    [@x] on x=4 (devices 0-3) -> [@y] on y=2 (devices 4, 5)      0 -> 4, 1 -> 4, 2 -> 5, 3 -> 5, a quarter each
    [_] on x=4 -> [_] on y=2                                     0 -> 4, 1 -> 4, 2 -> 5, 3 -> 5, one half each
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from irpar.analysis.cost.model import Key, add_keys, in_femtoseconds
from irpar.analysis.cost.network import BYTES, Network
from irpar.sharding import Axis, IrparError, Region, Sharding, block_range, local_region

from . import Redistribution, redistribution


@dataclass(frozen=True)
class Transfer:
    """A box of the tensor that one device sends to another.

    Attributes:
        source, target: device ids.
        box: per dim the half-open range [start, stop), in the full tensor.
        bytes: of the box.
    """

    source: int
    target: int
    box: Region
    bytes: int


@dataclass(frozen=True)
class CrossMesh:
    """How a tensor gets from one mesh to another.

    Attributes:
        before: on the source's mesh; there is something to do only where the source is partial.
        transfers: what is sent, in a fixed order; all of it at once.
        kept: what a device of both meshes holds already and needs again (source and target are equal).
        landing: where the transfers leave the tensor, on the target's mesh.
        after: from there to the target.
        key: what it costs by the network, comparable: as `CostModel.collective`, with messages for launches.
    """

    before: Redistribution
    transfers: tuple[Transfer, ...]
    kept: tuple[Transfer, ...]
    landing: Sharding
    after: Redistribution
    key: Key

    @property
    def sent_bytes(self) -> int:
        """The most that any device sends, from mesh to mesh and inside both."""
        return self.before.sent_bytes + _most(self.transfers, "source") + self.after.sent_bytes


def cross_mesh(
    source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network = BYTES
) -> CrossMesh:
    """The cheapest of the ways tried: with and without sharing the work among holders and among receivers.

    Args:
        source: where the tensor is; may be partial.
        target: where it should be, on a mesh of its own; not partial.
        shape: the full tensor's.
        itemsize_bits: bits of one element.
        network: what communication costs, and how far devices are from each other.

    Raises:
        IrparError: the target is partial.
    """
    if target.partial:
        raise IrparError(
            f"cannot send from {source} to {target} on another mesh: the target is partial",
            do="send full values, and make them partial by a redistribution on the mesh of the target",
        )
    shape = tuple(shape)
    found = [
        _way(source, departure, landing, target, shape, itemsize_bits, network, is_shared)
        for departure in _cut_further(source.closed(), source.partial, shape)
        for landing in _cut_further(target.closed(), _replicating(target), shape)
        for is_shared in (False, True)
    ]
    return min(found, key=lambda way: way.key)


def _way(
    source: Sharding,
    departure: Sharding,
    landing: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    bits: int,
    network: Network,
    is_shared: bool,
) -> CrossMesh:
    before = redistribution(source, departure, shape, bits, network)
    after = redistribution(landing, target, shape, bits, network)
    transfers, kept = _Senders(departure, landing, shape, bits, network, is_shared).run()
    key = add_keys(add_keys(before.key, _key(transfers, network)), after.key)
    return CrossMesh(before, transfers, kept, landing, after, key)


def _cut_further(sharding: Sharding, axes: Sequence[Axis], shape: Sequence[int]) -> Iterator[Sharding]:
    """The sharding without partial values, and where it divides evenly, with each dim cut over `axes` too."""
    plain = sharding.with_partial(())
    yield plain
    if sharding.mesh.group_size(axes) > 1:
        yield from plain.cut_further(axes, shape)


def _replicating(sharding: Sharding) -> tuple[Axis, ...]:
    """The whole mesh axes over which a tensor is replicated."""
    used = {axis.name for axis in sharding.all_axes}
    return tuple(Axis(name) for name, size in sharding.mesh.axes.items() if name not in used and size > 1)


class _Senders:
    """Chooses who sends what."""

    def __init__(
        self, source: Sharding, target: Sharding, shape: tuple[int, ...], bits: int, network: Network, is_shared: bool
    ) -> None:
        self.source = source
        self.target = target
        self.shape = shape
        self.bits = bits
        self.network = network
        self.is_shared = is_shared
        self.load: dict[int, float] = {}

    def run(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What is sent, and what is where it should be."""
        holders, readers = _holders(self.source, self.shape), _holders(self.target, self.shape)
        kept: list[Transfer] = []
        wanted: list[tuple[Region, list[int], int]] = []
        for box, having, needing in _overlaps(holders, readers):
            kept.extend(Transfer(device, device, box, self._bytes(box)) for device in needing if device in having)
            missing = [device for device in needing if device not in having]
            pieces = _pieces(box, len(having) // max(1, len(missing))) if self.is_shared else [box]
            wanted.extend((piece, having, device) for device in missing for piece in pieces)
        # Those that few can send come first, and of these the large ones; the others fill what is left.
        wanted.sort(key=lambda entry: (len(entry[1]), -self._bytes(entry[0]), entry[2], entry[0]))
        transfers = [self._sent(box, having, device) for box, having, device in wanted]
        return tuple(sorted(transfers, key=lambda one: (one.source, one.target, one.box))), tuple(kept)

    def _sent(self, box: Region, having: Sequence[int], target: int) -> Transfer:
        size = self._bytes(box)

        def after(device: int) -> tuple[float, int, int]:
            link = self.network.link_between(device, target)
            return self.load.get(device, 0.0) + self.network.seconds_between(device, target, size), link, device

        source = min(having, key=after)
        self.load[source] = after(source)[0]
        return Transfer(source, target, box, size)

    def _bytes(self, box: Region) -> int:
        return -(-math.prod(stop - start for start, stop in box) * self.bits // 8)


def _holders(sharding: Sharding, shape: Sequence[int]) -> dict[Region, list[int]]:
    """The devices that hold each block; empty blocks are no blocks."""
    found: dict[Region, list[int]] = {}
    for rank, coords in enumerate(sharding.mesh.all_coords()):
        region = local_region(sharding, shape, coords)
        if all(start < stop for start, stop in region):
            found.setdefault(region, []).append(sharding.mesh.device(rank))
    return found


def _overlaps(
    holders: dict[Region, list[int]], readers: dict[Region, list[int]]
) -> Iterator[tuple[Region, list[int], list[int]]]:
    """The boxes in which a held and a needed block meet, who holds them, and who needs them."""
    for (held, having), (needed, needing) in itertools.product(holders.items(), readers.items()):
        box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, needed, strict=True))
        if all(start < stop for start, stop in box):
            yield box, having, needing


def _pieces(box: Region, count: int) -> list[Region]:
    """A box in up to `count` pieces along its longest dim."""
    if count < 2 or not box:
        return [box]
    dim = max(range(len(box)), key=lambda place: box[place][1] - box[place][0])
    start, stop = box[dim]
    ranges = [block_range(stop - start, count, index) for index in range(count)]
    return [(*box[:dim], (start + a, start + b), *box[dim + 1 :]) for a, b in ranges if a < b]


def _key(transfers: Sequence[Transfer], network: Network) -> Key:
    """What the busiest device does; sending and receiving go on at the same time."""
    sent = _most(transfers, "source")
    messages = max(_counts(transfers).values(), default=0)
    if not network.knows_seconds:
        return sent, messages
    seconds: dict[tuple[str, int], float] = {}
    for one in transfers:
        took = network.seconds_between(one.source, one.target, one.bytes)
        for end in (("source", one.source), ("target", one.target)):
            seconds[end] = seconds.get(end, 0.0) + took
    return in_femtoseconds(max(seconds.values(), default=0.0)), sent, messages


def _counts(transfers: Sequence[Transfer]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for one in transfers:
        counts[one.source] = counts.get(one.source, 0) + 1
    return counts


def _most(transfers: Sequence[Transfer], end: str) -> int:
    """The most bytes that any device sends (end: source) or receives (target)."""
    totals: dict[int, int] = {}
    for one in transfers:
        device = getattr(one, end)
        totals[device] = totals.get(device, 0) + one.bytes
    return max(totals.values(), default=0)
