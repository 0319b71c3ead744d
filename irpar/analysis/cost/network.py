"""What communication costs: links with latency and bandwidth, and the cheapest algorithm for each collective.

    network = network_of("h100-nvlink-ib")
    network.seconds("all_reduce", [Axis("tp")], 1 << 20, Mesh({"dp": 2, "tp": 8}))      inside one node

A network is a list of links, the innermost first: the first joins the devices of a node, the next the nodes. Which of
them a mesh axis runs over follows from the device ids: minor axes fill a node first. A collective over several links
is taken apart (reduce-scatter inside, all-reduce across, all-gather inside), or runs as one ring over all, which leaves
a node over all of its adapters as NCCL's rings do, whichever is cheaper.

The network `bytes` has no links: it counts what the ring model sends, launches breaking ties.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from irpar.ir import Memory
from irpar.ops.collectives import OF_KIND
from irpar.ops.collectives.record import Nested
from irpar.sharding import Axis, IrparError, Mesh, spelled

from .device import Device
from .network_algorithms import ALGORITHMS, Volume

_MOST_KNOWN = 1 << 18
"""Costs that a network keeps; then it begins anew."""


@dataclass(frozen=True)
class Speed:
    """Latency in seconds a message, and bandwidth in bytes/s that a device sends while all of them do."""

    latency: float
    bandwidth: float

    def seconds(self, volume: Volume) -> float:
        """How long an algorithm takes."""
        return volume.messages * self.latency + volume.sent / self.bandwidth


@dataclass(frozen=True)
class Disk:
    """Where a host keeps files.

    Attributes:
        read, write: bytes/s.
        capacity: bytes; None where it is not known.
    """

    read: float
    write: float
    capacity: float | None = None


@dataclass(frozen=True)
class Link:
    """What joins devices.

    Attributes:
        name: what messages and `axes` call it.
        speed: its latency and bandwidth.
        devices: how many devices it joins, those of links further in included; None: all there are.
        algorithms: kind of collective to the algorithms that may be taken; of other kinds, all.
        kinds: kind of collective to a speed of its own.
    """

    name: str
    speed: Speed
    devices: int | None = None
    algorithms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: Mapping[str, Speed] = field(default_factory=dict)

    def speed_of(self, kind: str) -> Speed:
        """The speed at which a kind of collective runs."""
        return self.kinds.get(kind, self.speed)

    def algorithms_of(self, kind: str) -> tuple[str, ...]:
        """The algorithms that a kind of collective may take."""
        return self.algorithms.get(kind) or tuple(ALGORITHMS[kind])

    def seconds(self, kind: str, n: int, size: float) -> float:
        """Seconds of a collective among n devices of this link, by the cheapest algorithm; operands of `size` bytes."""
        speed = self.speed_of(kind)
        return min(speed.seconds(ALGORITHMS[kind][name](n, size)) for name in self.algorithms_of(kind))


Level = tuple[int, int]
"""A link by its number, and how many devices of a group differ there."""


@dataclass(frozen=True, eq=False)
class Network:
    """Links and devices.

    Attributes:
        text: what makes it again: the name of a preset, or the fields of a file as JSON (`network_of`).
        name: what people call it.
        links: the innermost first; none: only bytes are counted.
        launch: seconds that starting a collective takes.
        axes: mesh axis to the name of the link that it runs over, whatever the device ids say.
        device: what computes; None where nothing is known of it.
        host: the share of cores and memory that a device has of its machine; None where nothing is known.
        host_link: between the memory of a device and that of its host, in one direction.
        disk: a device's share of what its host keeps files on.
        room: bytes that one node may hold on a device, where that is less than all that the device has.
    """

    text: str
    name: str
    links: tuple[Link, ...] = ()
    launch: float = 0.0
    axes: Mapping[str, str] = field(default_factory=dict)
    device: Device | None = None
    host: Device | None = None
    host_link: Speed | None = None
    disk: Disk | None = None
    room: int | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Network) and (self.text, self.room) == (other.text, other.room))

    def __repr__(self) -> str:
        return f"<network {self.name}>"

    @cached_property
    def _hash(self) -> int:
        return hash(self.text)

    @cached_property
    def _levels(self) -> dict[tuple[Mesh, tuple[Axis, ...]], tuple[Level, ...]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[Mesh, dict[str, tuple[int, ...]]]:
        return {}

    @cached_property
    def _seconds(self) -> dict[tuple[str, tuple[Level, ...], float], float]:
        return {}

    @cached_property
    def memory(self) -> int | None:
        """Bytes that what one node reads and gives may take on a device; None where that is not known."""
        has = None if self.device is None or self.device.memory is None else int(self.device.memory)
        return min((room for room in (has, self.room) if room is not None), default=None)

    @property
    def knows_seconds(self) -> bool:
        """Whether it has links; `bytes` has none."""
        return bool(self.links)

    def seconds(self, kind: str, axes: Sequence[Axis], local_bytes: float, mesh: Mesh) -> float:
        """Seconds that a collective takes; 0 among 1 device.

        Args:
            kind: as plan.json calls it: all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast.
            axes: the mesh axes that it runs over.
            local_bytes: the operand that one device holds; of uneven blocks the padded one.
            mesh: the mesh.

        Raises:
            IrparError: the network is `bytes`, which knows no seconds.
        """
        if not self.links:
            raise IrparError(
                "the network bytes knows no seconds",
                do=f"take another {spelled('--network', 'network')}: a preset or a file",
            )
        levels = self.levels(tuple(axes), mesh)
        if not levels:
            return 0.0
        key = kind, levels, local_bytes
        known = self._seconds.get(key)
        if known is None:
            if len(self._seconds) >= _MOST_KNOWN:
                self._seconds.clear()
            known = self._seconds[key] = self.launch + self._best(kind, levels, local_bytes)
        return known

    def link_between(self, first: int, second: int) -> int:
        """The number of the innermost link that joins two devices, by their ids; 0 where there are no links."""
        for number, link in enumerate(self.links):
            if link.devices is None or first // link.devices == second // link.devices:
                return number
        return max(0, len(self.links) - 1)

    def seconds_between(self, first: int, second: int, size: int) -> float:
        """Seconds that one device takes to send `size` bytes to another; of the network `bytes` just their number."""
        if not self.links:
            return float(size)
        speed = self.links[self.link_between(first, second)].speed_of("permute")
        return speed.latency + size / speed.bandwidth

    def copy_seconds(self, source: Memory, target: Memory, size: int) -> float | None:
        """Seconds that a copy between two memories of a rank takes; None where that is not known.

        Between a device and a disk all passes the host's memory, one after the other.
        """
        seconds = 0.0
        if "device" in (source, target):
            if self.host_link is None:
                return None
            seconds += self.host_link.latency + size / self.host_link.bandwidth
        if "disk" in (source, target):
            if self.disk is None:
                return None
            seconds += size / (self.disk.read if source == "disk" else self.disk.write)
        return seconds

    def seconds_of_pairs(self, pairs: Sequence[int], size: int, mesh: Mesh) -> float:
        """Seconds until all of some pairs of ranks (sources and targets in turn) have sent and got `size` bytes.

        A source sends to one target after the other; sources send at once.
        """
        devices = mesh.devices or range(mesh.size)
        of_source: dict[int, float] = {}
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            seconds = self.seconds_between(devices[source], devices[target], size)
            of_source[source] = of_source.get(source, self.launch) + seconds
        return max(of_source.values(), default=0.0)

    # -- which links -----------------------------------------------------------------------------------------------

    def levels(self, axes: tuple[Axis, ...], mesh: Mesh) -> tuple[Level, ...]:
        """How many devices of a group over `axes` differ on each link, the innermost first; empty for 1 device."""
        known = self._levels.get((mesh, axes))
        if known is None:
            counts = [1] * len(self.links)
            for axis in axes:
                for link, count in self._levels_of_axis(axis, mesh):
                    counts[link] *= count
            known = self._levels[mesh, axes] = tuple((link, n) for link, n in enumerate(counts) if n > 1)
        return known

    def _levels_of_axis(self, axis: Axis, mesh: Mesh) -> Iterator[Level]:
        """dp of 4 over nodes of 2 devices (cuts (2, 1)): dp is 2 on link 0 and 2 on link 1, dp:(1)2 is 2 on link 1."""
        start, stop = axis.pre, axis.pre * mesh.axis_size(axis)
        cuts = self._cuts_of(mesh)[axis.name]
        pieces = []
        outer = mesh.axes[axis.name]
        for link, cut in enumerate(cuts):
            low, high = max(cut, start), min(outer, stop)
            if low < high:
                pieces.append((link, low, high))
            outer = cut
        crossed = [link + 1 for link, cut in enumerate(cuts) if not _nests(cut, start, stop)]
        if crossed:
            # The bounds of a sub-axis and of a node do not divide each other: all of it counts as the slower.
            yield max(*crossed, *(link for link, _, _ in pieces)), stop // start
        else:
            yield from ((link, high // low) for link, low, high in pieces)

    def _cuts_of(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        """For each mesh axis how many blocks of it each link cannot join; the (minor) devices inside a block it can."""
        known = self._cuts.get(mesh)
        if known is None:
            devices = np.arange(mesh.size) if mesh.devices is None else np.array(mesh.devices)
            ids = devices.reshape(tuple(mesh.axes.values()))
            names = [link.name for link in self.links]
            known = self._cuts[mesh] = {}
            for dim, (name, size) in enumerate(mesh.axes.items()):
                if name in self.axes:
                    pinned = names.index(self.axes[name])
                    known[name] = tuple(size if link < pinned else 1 for link in range(len(names)))
                else:
                    known[name] = self._cuts_by_ids(np.moveaxis(ids, dim, -1).reshape(-1, size))
        return known

    def _cuts_by_ids(self, ids: "np.ndarray[Any, Any]") -> tuple[int, ...]:
        """The cuts of one axis; `ids` are the device ids [.., along the axis]."""
        size = ids.shape[-1]
        inner, cuts = size, []
        for link in reversed(self.links):
            if link.devices is not None:
                nodes = ids // link.devices
                inner = next(count for count in _divisors(inner) if _is_constant(nodes.reshape(-1, count)))
            cuts.append(size // inner)
        return tuple(reversed(cuts))

    # -- how long --------------------------------------------------------------------------------------------------

    def _best(self, kind: str, levels: tuple[Level, ...], size: float) -> float:
        apart = self._apart(kind, levels, size)
        return apart if len(levels) == 1 else min((apart, *self._at_once(kind, levels, size)))

    def _apart(self, kind: str, levels: tuple[Level, ...], size: float) -> float:
        """Link after link: what crosses the outer links is as small as can be."""
        (number, n), rest = levels[0], levels[1:]
        link = self.links[number]
        if not rest:
            return link.seconds(kind, n, size)
        across = math.prod(count for _, count in rest)
        links = Nested(
            lambda each, held: link.seconds(each, n, held), lambda held: self._apart(kind, rest, held), n, across
        )
        nested = OF_KIND[kind].nested
        if nested is None:
            return links.inside(kind, size) + links.outside(size)
        return nested(links, size)

    def _at_once(self, kind: str, levels: tuple[Level, ...], size: float) -> Iterator[float]:
        """One ring through all devices, or an exchange of each with each."""
        links = [self.links[number] for number, _ in levels]
        n = math.prod(count for _, count in levels)
        if all("ring" in link.algorithms_of(kind) for link in links):
            # The ring leaves a block of inner devices once, with what these can send together.
            latency, bandwidth, inside = 0.0, math.inf, 1
            for link, (_, count) in zip(links, levels, strict=True):
                speed = link.speed_of(kind)
                latency = max(latency, speed.latency)
                bandwidth = min(bandwidth, speed.bandwidth * inside)
                inside *= count
            yield Speed(latency, bandwidth).seconds(ALGORITHMS[kind]["ring"](n, size))
        if kind == "all_to_all" and all("direct" in link.algorithms_of(kind) for link in links):
            seconds, inside = 0.0, 1
            for link, (_, count) in zip(links, levels, strict=True):
                others = inside * (count - 1)
                seconds += link.speed_of(kind).seconds(Volume(others, others * size / n))
                inside *= count
            yield seconds


def _divisors(number: int) -> list[int]:
    """The largest first."""
    return [count for count in range(number, 0, -1) if number % count == 0]


def _nests(cut: int, start: int, stop: int) -> bool:
    """Whether blocks of an axis cut in `cut` and the groups of its part from `start` to `stop` lie in each other."""
    return start % cut == 0 or (cut % start == 0 and (stop % cut == 0 or cut % stop == 0))


def _is_constant(rows: "np.ndarray[Any, Any]") -> bool:
    return bool((rows == rows[:, :1]).all())


# -- networks by name or fields ------------------------------------------------------------------------------------


class FieldError(IrparError):
    """A field of a network that cannot be.

    Attributes:
        path: the keys and indices that lead to it.
    """

    def __init__(self, path: Sequence[str | int], what: str, *, do: str, notes: tuple[str, ...] = ()) -> None:
        self.path = tuple(path)
        place = ".".join(map(str, path))
        super().__init__(what, where=f"network: {place}" if place else "network", notes=notes, do=do)

    def __reduce__(self) -> tuple[object, ...]:
        return _field_error, (self.path, self.what, self.do, self.notes)


def _field_error(path: Sequence[str | int], what: str, do: str, notes: tuple[str, ...]) -> FieldError:
    return FieldError(path, what, do=do, notes=notes)


BYTES = Network("bytes", "bytes")
"""Counts what is sent, launches breaking ties."""
