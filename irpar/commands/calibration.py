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

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from irpar.analysis.cost.network_algorithms import ALGORITHMS
from irpar.ops.collectives import KINDS, OF_KIND
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.memory import memory_limit
from irpar.sharding import Axis, IrparError, Mesh

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
_SECONDS_EACH = 0.15
"""How long one thing is measured, at the least once."""
_LONG_STEP = 0.02
"""Seconds; two matmuls this long are large enough to tell the rate."""
_MATRIX_SIZES = (128, 256, 512, 1024)
_SUMMED = 16
"""Elements of the small all-reduces."""

DTYPES: Mapping[str, tuple[str, "np.dtype[Any]", int]] = {
    "f64": ("MatMul", np.dtype(np.float64), TensorProto.DOUBLE),
    "f32": ("MatMul", np.dtype(np.float32), TensorProto.FLOAT),
    "f16": ("MatMul", np.dtype(np.float16), TensorProto.FLOAT16),
    "bf16": ("MatMul", np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
    "i8": ("MatMulInteger", np.dtype(np.int8), TensorProto.INT8),
}
"""Type to the operator that multiplies it, and its dtypes in numpy and ONNX."""


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
    flops: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for dtype in DTYPES:
        progress(f"matmul of {dtype}")
        try:
            flops[dtype] = _measure_matmul(dtype, mesh, engine)
        except IrparError as error:
            if dtype == "f32":
                raise
            left_out[dtype] = error.what
    progress("memory")
    bandwidth = _measure_memory(mesh, engine)
    progress("small nodes")
    launch = _measure_launch(mesh, engine)
    steps = _difference(partial(_sums, ranks), mesh, engine, 2, 22) / 20
    collective_launch = max(steps - 2 * launch - fitted("all_reduce", _SUMMED * 4, ranks, kinds["all_reduce"]), 0.0)
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
            found.append((kind, operands[0].nbytes, _shortest(partial(group.exchange, calls))))
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


# -- computation ---------------------------------------------------------------------------------------------------


def _measure_matmul(dtype: str, mesh: Mesh, engine: str) -> float:
    """FLOP/s of one rank: square matrices, larger ones until a step takes long enough."""
    for size in _MATRIX_SIZES:
        seconds = _difference(partial(_matmuls, dtype, mesh.size, size), mesh, engine, 1, 3)
        if seconds > _LONG_STEP:
            break
    return 2 * 2 * size**3 / seconds


def _measure_memory(mesh: Mesh, engine: str) -> float:
    """Bytes/s of one rank: additions of two tensors that no cache holds."""
    elements = (32 << 20) // 4 // mesh.size
    seconds = _difference(partial(_additions, mesh.size, elements), mesh, engine, 1, 5)
    return 4 * 3 * 4 * elements / seconds


def _measure_launch(mesh: Mesh, engine: str) -> float:
    """Seconds that a node takes which has hardly anything to compute."""
    return _difference(partial(_additions, mesh.size, 16), mesh, engine, 20, 220) / 200


def _difference(build: Callable[[int], onnx.ModelProto], mesh: Mesh, engine: str, few: int, many: int) -> float:
    """Seconds by which a step with many nodes is longer than one with few: what both have does not count."""
    seconds = [_step_seconds(build(count), mesh, engine) for count in (few, many)]
    return max(seconds[1] - seconds[0], 1e-9)


def _step_seconds(model: onnx.ModelProto, mesh: Mesh, engine: str) -> float:
    """Seconds of a step of a model whose input is sharded over all ranks."""
    from irpar.api import partition
    from irpar.onnx_io import to_module

    module = to_module(model)
    module.shard("x", ["x", None])
    given = model.graph.input[0].type.tensor_type
    shape = [dim.dim_value for dim in given.shape.dim]
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(helper.tensor_dtype_to_np_dtype(given.elem_type))
    made = partition(module, mesh)
    executor = made.executor(engine)  # type: ignore[arg-type]
    try:
        return _shortest(lambda: executor.run({"x": x}))
    finally:
        executor.close()


def _matmuls(dtype: str, ranks: int, size: int, count: int) -> onnx.ModelProto:
    """y = x w1 + x w2 + ...; each rank has `size` rows of x."""
    op, array_type, onnx_type = DTYPES[dtype]
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.integers(-3, 4, (size, size)).astype(array_type), f"w{i}") for i in range(count)
    ]
    nodes = [helper.make_node(op, ["x", f"w{i}"], [f"p{i}"]) for i in range(count)]
    total = "p0"
    for i in range(1, count):
        nodes.append(helper.make_node("Add", [total, f"p{i}"], [f"s{i}"]))
        total = f"s{i}"
    result = TensorProto.INT32 if op == "MatMulInteger" else onnx_type
    return _model(nodes, weights, (onnx_type, [ranks * size, size]), (total, result))


def _additions(ranks: int, elements: int, count: int) -> onnx.ModelProto:
    """y = x + x + x ...; each rank has `elements` of x."""
    names = ["x", *(f"s{i}" for i in range(count))]
    nodes = [helper.make_node("Add", [names[i], "x"], [names[i + 1]]) for i in range(count)]
    return _model(nodes, [], (TensorProto.FLOAT, [ranks, elements]), (names[-1], TensorProto.FLOAT))


def _sums(ranks: int, count: int) -> onnx.ModelProto:
    """Sums over the rows of x, which are on all ranks: each needs an all-reduce, and the next one its result."""
    names = ["x", *(f"a{i}" for i in range(count))]
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("ReduceSum", [names[i], "axes"], [f"s{i}"]))
        nodes.append(helper.make_node("Add", [names[i], f"s{i}"], [names[i + 1]]))
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    return _model(nodes, [axes], (TensorProto.FLOAT, [ranks, _SUMMED]), (names[-1], TensorProto.FLOAT))


def _model(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], given: tuple[int, list[int]], result: tuple[str, int]
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", *given)
    y = helper.make_tensor_value_info(result[0], result[1], given[1])
    graph = helper.make_graph(nodes, "measured", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _shortest(run: Callable[[], object]) -> float:
    """The least of several runs: what else the machine does makes a run longer only."""
    run()
    end = time.perf_counter() + _SECONDS_EACH
    least = float("inf")
    for _ in range(1000):
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        least = min(least, now - start)
        if now > end:
            break
    return max(least, 1e-9)


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
