"""Measuring this machine: what its ranks compute, and what irpar's collectives among them take.

All ranks run at once, as `irpar run` runs them, so that a rate is what one rank has while the others compute too.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from irpar.analysis.cost.network_algorithms import ALGORITHMS
from irpar.ops.collectives import KINDS, OF_KIND
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.memory import memory_limit
from irpar.sharding import Axis, IrparError, Mesh

from .computation_speed import DTYPES, SUMMED, measure_launch, measure_matmul, measure_memory, measure_sums, shortest
from .disk_speed import DiskSpeed, measure_disk

Array = np.ndarray[Any, Any]

ALGORITHM = {kind: op.calibrated for kind, op in OF_KIND.items() if op.partners is None}
"""The formula that is fitted to each kind, whatever a group really does; the file pins it."""
_OPS = {kind: name for name, kind in KINDS.items()}
_MOVING = frozenset(kind for kind in ALGORITHM if not EXECUTED[_OPS[kind]].gives_operands)
"""The kinds that move data also among ranks of one process."""
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Bytes of a rank's operand (of the gathered result for all_gather) at which collectives are measured."""
MOST_RANKS = 64
_MOST_BANDWIDTH = 1e13
"""Bytes/s; what moves no data at all gets this one."""


@dataclass(frozen=True)
class Point:
    """One collective at one size.

    Attributes:
        kind: as plan.json calls it.
        size: bytes of the operand that a rank holds.
        seconds: measured.
        fitted: what the fit says.
    """

    kind: str
    size: int
    seconds: float
    fitted: float

    @property
    def residual(self) -> float:
        """(fitted - measured) / measured."""
        return (self.fitted - self.seconds) / self.seconds


@dataclass(frozen=True)
class Fit:
    """Latency in seconds a message and bandwidth in bytes/s."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        ranks: how many ranks ran at once.
        engine: what computed.
        flops: type to FLOP/s of one rank.
        left_out: type to why it has no rate.
        memory_bandwidth: bytes/s of one rank, reading and writing.
        launch: seconds that a small node takes, on all ranks one after the other.
        collective_launch: seconds that a step is longer for a collective than what the collective itself takes.
        memory: bytes for one rank; None where the system does not tell.
        link: the fit over all kinds that move data.
        kinds: kind to a fit of its own.
        points: the collectives, and how well the fits of their kinds meet them.
        disk: what the disk does; None where it was not measured.
        seconds: how long all this took.
    """

    ranks: int
    engine: str
    flops: Mapping[str, float]
    left_out: Mapping[str, str]
    memory_bandwidth: float
    launch: float
    collective_launch: float
    memory: float | None
    link: Fit
    kinds: Mapping[str, Fit]
    points: tuple[Point, ...]
    disk: DiskSpeed | None
    seconds: float

    @property
    def name(self) -> str:
        """What the network is called."""
        return f"{self.ranks} ranks in one process on {os.cpu_count() or 1} cores, {self.engine}, measured"

    def fields(self) -> dict[str, Any]:
        """The fields of a network file (docs/network.md)."""
        device: dict[str, Any] = {
            "flops": {name: _rounded(rate) for name, rate in self.flops.items()},
            "memory_bandwidth": _rounded(self.memory_bandwidth),
            "launch": _rounded(self.launch),
        }
        if self.memory is not None:
            device["memory"] = _rounded(self.memory)
        link = {
            "name": "threads",
            **_speed(self.link),
            "algorithms": dict(ALGORITHM),
            "kinds": {kind: _speed(fit) for kind, fit in self.kinds.items()},
        }
        found = {"name": self.name, "launch": _rounded(self.collective_launch), "links": [link], "device": device}
        if self.disk is not None:
            figures = (("read", self.disk.read), ("write", self.disk.write), ("capacity", self.disk.capacity))
            found["disk"] = {name: _rounded(figure / self.ranks) for name, figure in figures}
        return found


def _speed(fit: Fit) -> dict[str, float]:
    return {"latency": _rounded(fit.latency), "bandwidth": _rounded(fit.bandwidth)}


def _rounded(number: float) -> float:
    """Four digits: there are not more in a measurement."""
    return float(f"{number:.4g}")


def calibrate(
    ranks: int = 4,
    engine: str = "ort",
    *,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure this machine; takes 5 to 15 seconds.

    Args:
        ranks: how many ranks run at once, 2 or more.
        engine: what computes: "ort" or "numpy".
        folder: on the disk that is measured; None: no disk is.
        progress: is told what is measured next.

    Raises:
        IrparError: `ranks` cannot be, there is no such engine, or it cannot multiply f32.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise IrparError(f"{ranks} ranks cannot be measured", do=f"give 2 to {MOST_RANKS}: --ranks 4")
    start = time.perf_counter()
    mesh = Mesh({"x": ranks})
    progress("collectives")
    points = _measure_collectives(mesh)
    kinds = {kind: fit([(kind, size, t) for k, size, t in points if k == kind], ranks) for kind in ALGORITHM}
    moving = [point for point in points if point[0] in _MOVING]
    flops, left_out = _matmul_rates(mesh, engine, progress)
    progress("memory")
    bandwidth = measure_memory(mesh, engine)
    progress("small nodes")
    launch = measure_launch(mesh, engine)
    steps = measure_sums(mesh, engine)
    collective_launch = max(steps - 2 * launch - fitted("all_reduce", SUMMED * 4, ranks, kinds["all_reduce"]), 0.0)
    disk = None
    if folder is not None:
        progress("disk")
        disk = measure_disk(folder)
    limit = memory_limit()
    return Calibration(
        ranks=ranks,
        engine=engine,
        flops=flops,
        left_out=left_out,
        memory_bandwidth=bandwidth,
        launch=launch,
        collective_launch=collective_launch,
        memory=None if limit is None else limit / ranks,
        link=fit(moving, ranks),
        kinds=kinds,
        points=tuple(Point(kind, size, t, fitted(kind, size, ranks, kinds[kind])) for kind, size, t in points),
        disk=disk,
        seconds=time.perf_counter() - start,
    )


def _matmul_rates(mesh: Mesh, engine: str, progress: Callable[[str], None]) -> tuple[dict[str, float], dict[str, str]]:
    """FLOP/s of one rank by type, and why another type has none; f32 must have one."""
    rates: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for dtype in DTYPES:
        progress(f"matmul of {dtype}")
        try:
            rates[dtype] = measure_matmul(dtype, mesh, engine)
        except IrparError as error:
            if dtype == "f32":
                raise
            left_out[dtype] = error.what
    return rates, left_out


# -- collectives ---------------------------------------------------------------------------------------------------


def _measure_collectives(mesh: Mesh) -> list[tuple[str, int, float]]:
    """(kind, bytes of a rank's operand, seconds) of the group `threads`."""
    group = make_group("threads", mesh)
    found = []
    for kind in ALGORITHM:
        for size in SIZES:
            rows = mesh.size
            share = size // rows if kind == "all_gather" else size
            operands = [np.ones((rows, max(share // (4 * rows), 1)), np.float32) for _ in range(rows)]
            collective = Collective(
                _OPS[kind],
                0,
                (Axis("x"),),
                split_dim=0,
                concat_dim=1,
                pairs=tuple(place for i in range(rows) for place in (i, (i + 1) % rows)),
            )
            calls = {rank: Call(rank, (rank,), collective, operand) for rank, operand in enumerate(operands)}
            found.append((kind, operands[0].nbytes, shortest(partial(group.exchange, calls))))
    return found


def fitted(kind: str, size: float, ranks: int, of: Fit) -> float:
    """Seconds of a collective by a fit."""
    volume = ALGORITHMS[kind][ALGORITHM[kind]](ranks, size)
    return volume.messages * of.latency + volume.sent / of.bandwidth


def fit(points: Sequence[tuple[str, int, float]], ranks: int) -> Fit:
    """Latency and bandwidth by least squares of the relative residuals, neither below zero.

    Args:
        points: (kind, bytes of the operand, seconds).
        ranks: how many took part.
    """
    rows = []
    for kind, size, seconds in points:
        volume = ALGORITHMS[kind][ALGORITHM[kind]](ranks, size)
        rows.append((volume.messages / seconds, volume.sent / seconds))
    matrix, ones = np.array(rows), np.ones(len(rows))
    scale = np.linalg.norm(matrix, axis=0)
    latency, slope = np.linalg.lstsq(matrix / scale, ones)[0] / scale
    if slope <= 0:
        latency, slope = _alone(matrix[:, 0]), 0.0
    elif latency < 0:
        latency, slope = 0.0, _alone(matrix[:, 1])
    return Fit(float(latency), min(_MOST_BANDWIDTH, 1 / slope) if slope else _MOST_BANDWIDTH)


def _alone(column: Array) -> float:
    """The factor that brings a column nearest to ones."""
    return float(column.sum() / (column @ column))


# -- the file ------------------------------------------------------------------------------------------------------


def as_yaml(calibration: Calibration) -> str:
    """The network file, with what was measured as comments."""
    import json

    fields = calibration.fields()
    (link,) = fields["links"]
    worst = max(abs(point.residual) for point in calibration.points)
    lines = [
        f"# Measured by `irpar calibrate --ranks {calibration.ranks} --engine {calibration.engine}`: rates of one rank",
        "# while all of them run. Seconds, bytes, bytes a second, FLOP a second; the form is in docs/network.md.",
        f"name: {json.dumps(fields['name'])}",
        f"launch: {fields['launch']:g}",
        "links:",
        f"  - name: {link['name']}",
        f"    latency: {link['latency']:g}",
        f"    bandwidth: {link['bandwidth']:g}",
        f"    algorithms: {json.dumps(link['algorithms'])}",
        f"    kinds:  # the fit is off by at most {worst:.0%} of what was measured",
        *(
            f"      {kind}: {{latency: {speed['latency']:g}, bandwidth: {speed['bandwidth']:g}}}"
            for kind, speed in link["kinds"].items()
        ),
        "device:",
        "  flops:",
        *(f"    {name}: {rate:g}" for name, rate in fields["device"]["flops"].items()),
        *(f"    # {name}: {reason.splitlines()[0]}" for name, reason in calibration.left_out.items()),
        *(f"  {name}: {value:g}" for name, value in fields["device"].items() if name != "flops"),
    ]
    if "disk" in fields:
        lines.append(f"disk: {{{', '.join(f'{name}: {value:g}' for name, value in fields['disk'].items())}}}")
    return "\n".join((*lines, ""))
