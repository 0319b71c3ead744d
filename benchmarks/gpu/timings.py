"""The basic engine beside PyTorch eager on one device: a GPT-2-small-size model, and what a node costs the host."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import irpar
from irpar import models
from irpar.kernels import Kernel
from irpar.onnx_io import to_module
from irpar.runtime.engines.base import Constants, EngineSettings, make_engine
from irpar.runtime.program import build_program

from .findings import Context, Findings, markdown_table, problem_text

RUNS = 15
"""Of which the medians are reported, after three that warm up."""
ALLOWED = {"float32": 1e-3, "float16": 5e-2}
"""Largest |a - b| / (1 + |b|) of irpar's and PyTorch's logits: both must compute the same."""
CHAIN = 400
"""Nodes of the chain of additions."""


@dataclass(frozen=True)
class Size:
    """Of the model; the vocabulary is small, so that logits do not outweigh the blocks."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batches: tuple[int, ...]


GPT2_SMALL = Size(layers=12, hidden=768, heads=12, seq=128, vocab=1024, batches=(1, 8))
TINY = Size(layers=1, hidden=32, heads=2, seq=8, vocab=64, batches=(1, 2))


def run(context: Context) -> Findings:
    """Time every batch and dtype."""
    size = GPT2_SMALL if context.engine == "cupy" else TINY
    found = Findings(figures={"size": vars(size) | {"batches": list(size.batches)}, "steps": [], "chain": {}})
    torch = _torch(found, context.engine)
    for dtype in ("float32", "float16"):
        for batch in size.batches:
            if context.is_late:
                found.check(f"out of time before batch {batch}, {dtype}")
                continue
            try:
                problem = _time_model(size, batch, dtype, context.engine, torch, found)
            except Exception as error:
                problem = problem_text(error)
            found.check(f"batch {batch}, {dtype}: {problem}" if problem else None)
    try:
        found.figures["chain"] = _time_chain(context.engine, torch)
        problem = None
    except Exception as error:
        problem = problem_text(error)
    found.check(f"chain of additions: {problem}" if problem else None)
    return found


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    size, chain = figures.get("size", {}), figures.get("chain", {})
    rows = [
        (
            row["batch"],
            row["dtype"],
            row["nodes"],
            *(_milliseconds(row.get(name)) for name in ("irpar", "torch", "torch_tf32")),
            _ratio(row.get("irpar"), row.get("torch")),
            _milliseconds(row["irpar_host"]),
            _microseconds(row["irpar_host"] / row["nodes"]),
            *(_milliseconds(row.get(name)) for name in ("irpar_whole", "torch_whole")),
        )
        for row in figures.get("steps", ())
    ]
    header = (
        *("batch", "dtype", "nodes", "irpar ms", "PyTorch ms", "PyTorch with TF32 ms", "irpar / PyTorch"),
        *("irpar, host alone ms", "a node us", "irpar from and to the host ms", "PyTorch the same ms"),
    )
    made = [
        f"gpt of {size.get('layers')} layers, hidden {size.get('hidden')}, {size.get('heads')} heads, "
        f"{size.get('seq')} tokens, vocabulary {size.get('vocab')}; medians of {RUNS} runs in turn, each waited for. "
        "irpar multiplies f32 in full (no TF32); PyTorch attends by scaled_dot_product_attention. "
        "No bound: figures.",
        "",
        *markdown_table(header, rows),
    ]
    for row in figures.get("steps", ())[:1]:
        made += _host_table(row)
    if chain:
        others = f", PyTorch {_microseconds(chain['torch'])} us" if "torch" in chain else ""
        made += [
            "",
            f"A chain of {CHAIN} additions of 1,024 numbers: irpar {_microseconds(chain['irpar'])} us{others} a node.",
        ]
    return made


def _torch(found: Findings, engine: str) -> Any:
    """PyTorch with a device, or None."""
    try:
        import torch
    except ImportError:
        found.notes.append("PyTorch is not installed: nothing to compare with")
        return None
    if engine != "cupy" or not torch.cuda.is_available():
        found.notes.append("PyTorch has no device here: nothing to compare with")
        return None
    return torch


class Compiled:
    """One program of one segment on an engine, given and giving arrays where it computes.

    Args:
        model: of one output.
        engine: of irpar.
    """

    def __init__(self, model: onnx.ModelProto, engine: str) -> None:
        self.partition = irpar.partition(to_module(model), irpar.Mesh({"x": 1}))
        (part,) = self.partition.parts
        assert self.partition.module is not None
        on_device = {"keep_on_device": True} if engine == "cupy" else {}
        self._engine = make_engine(engine, EngineSettings(self.partition.module.opsets, 1, **on_device))
        (segment,) = build_program(part.graph).segments
        self.nodes = len(segment.nodes)
        self._segment = self._engine.compile(segment, Constants(part))
        self._cupy: Any = __import__("cupy") if engine == "cupy" else None

    def placed(self, array: "np.ndarray[Any, Any]") -> Any:
        """An input where the engine computes."""
        return array if self._cupy is None else self._cupy.asarray(array)

    def __call__(self, given: Any) -> Any:
        """The output; the device may still be at it."""
        (found,) = self._segment.run([given])
        return found

    def wait(self) -> None:
        """Until the device is done."""
        if self._cupy is not None:
            self._cupy.cuda.runtime.deviceSynchronize()

    def numpy(self, array: Any) -> "np.ndarray[Any, Any]":
        """A result on the host."""
        return np.asarray(array.get() if hasattr(array, "get") else array)


def _time_model(size: Size, batch: int, dtype: str, engine: Any, torch: Any, found: Findings) -> str | None:
    settings = {"layers": size.layers, "hidden": size.hidden, "heads": size.heads, "seq": size.seq}
    model = models.build("gpt", batch=batch, vocab=size.vocab, dtype=dtype, opset=20, **settings)
    compiled = Compiled(model, engine)
    ids = np.random.default_rng(0).integers(0, size.vocab, (batch, size.seq))
    placed = compiled.placed(ids)
    partition = compiled.partition

    def waited() -> None:
        compiled(placed)
        compiled.wait()

    timed: dict[str, Callable[[], object]] = {
        "irpar": waited,
        "irpar_whole": lambda: partition.run({"input_ids": ids}, engine=engine),
    }
    problem = None
    if torch is not None:
        problem = _add_torch(timed, model, size, ids, torch, compiled.numpy(compiled(placed)), ALLOWED[dtype])
    row: dict[str, Any] = {"batch": batch, "dtype": dtype, "nodes": compiled.nodes}
    row |= medians(timed)
    row["irpar_host"] = _host_seconds(lambda: compiled(placed), compiled.wait)
    row["host_by_operator"] = _by_operator(lambda: compiled(placed), compiled.wait)
    found.figures["steps"].append(row)
    partition.close()
    return problem


def _add_torch(
    timed: dict[str, Callable[[], object]],
    model: onnx.ModelProto,
    size: Size,
    ids: "np.ndarray[Any, Any]",
    torch: Any,
    logits: "np.ndarray[Any, Any]",
    allowed: float,
) -> str | None:
    """Add PyTorch's ways to run the model; says where its logits are others."""
    from .torch_gpt import TorchGpt

    gpt = TorchGpt(model, size.layers, size.heads, "cuda")
    on_device = gpt.ids(ids)

    def run(tf32: bool, given: Any = on_device) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        made = gpt(given)
        torch.cuda.synchronize()
        return made

    timed["torch"] = lambda: run(False)
    if logits.dtype == np.float32:
        timed["torch_tf32"] = lambda: run(True)
    timed["torch_whole"] = lambda: run(False, gpt.ids(ids)).cpu()
    beside = run(False).float().cpu().numpy().astype(np.float64)
    error = float(np.max(np.abs(logits.astype(np.float64) - beside) / (1 + np.abs(beside))))
    return None if error <= allowed else f"the logits of irpar and PyTorch differ by {error:.2g}, allowed {allowed:g}"


def _time_chain(engine: Any, torch: Any) -> dict[str, float]:
    """Seconds that a small addition takes, in a long chain of them."""
    names = ["x", *(f"y{place}" for place in range(CHAIN))]
    # Each adds its operand to itself, and halves come between: the numbers stay as they are.
    nodes = [
        helper.make_node("Add" if place % 2 == 0 else "Sub", [names[place], "one"], [names[place + 1]])
        for place in range(CHAIN)
    ]
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        "chain",
        [info("x", TensorProto.FLOAT, [1024])],
        [info(names[-1], TensorProto.FLOAT, [1024])],
        [helper.make_tensor("one", TensorProto.FLOAT, [1024], np.ones(1024, np.float32))],
    )
    model = helper.make_model(body, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    compiled = Compiled(model, engine)
    x = compiled.placed(np.linspace(0, 1, 1024, dtype=np.float32))

    def waited() -> None:
        compiled(x)
        compiled.wait()

    timed: dict[str, Callable[[], object]] = {"irpar": waited}
    if torch is not None:
        given, one = torch.linspace(0, 1, 1024, device="cuda"), torch.ones(1024, device="cuda")

        def with_torch() -> None:
            value = given
            for place in range(CHAIN):
                value = value + one if place % 2 == 0 else value - one
            torch.cuda.synchronize()

        timed["torch"] = with_torch
    return {name: seconds / CHAIN for name, seconds in medians(timed).items()}


def medians(timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of functions that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(RUNS + 3):
        for name, function in timed.items():
            start = time.perf_counter()
            function()
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(listed) for name, listed in seconds.items()}


def _host_seconds(function: Callable[[], object], wait: Callable[[], None]) -> float:
    """Median seconds until a function comes back, with the device idle before."""
    listed = []
    for _ in range(RUNS):
        wait()
        start = time.perf_counter()
        function()
        listed.append(time.perf_counter() - start)
    wait()
    return statistics.median(listed)


def _by_operator(function: Callable[[], object], wait: Callable[[], None]) -> dict[str, list[float]]:
    """Operator to how many of its nodes a call runs, and the seconds that the host spends in their kernels.

    What is outside of kernels is listed under "".
    """
    spent: dict[str, list[float]] = {}
    whole = 0.0
    plain = Kernel.__call__

    def timed(kernel: Kernel, *given: Any) -> Any:
        start = time.perf_counter()
        results = plain(kernel, *given)
        row = spent.setdefault(kernel.op_type, [0, 0.0])
        row[0] += 1 / RUNS
        row[1] += (time.perf_counter() - start) / RUNS
        return results

    Kernel.__call__ = timed  # type: ignore[method-assign, assignment]
    try:
        for _ in range(RUNS):
            wait()
            start = time.perf_counter()
            function()
            whole += (time.perf_counter() - start) / RUNS
    finally:
        Kernel.__call__ = plain  # type: ignore[method-assign]
    wait()
    spent[""] = [sum(count for count, _ in spent.values()), whole - sum(seconds for _, seconds in spent.values())]
    return {name: [round(count), seconds] for name, (count, seconds) in spent.items()}


def _host_table(row: Mapping[str, Any]) -> list[str]:
    """Where the host's time of a step goes."""
    by_operator = row["host_by_operator"]
    whole = sum(seconds for _, seconds in by_operator.values())
    rows = [
        (name or "outside of kernels", count, _microseconds(seconds / max(count, 1)), f"{seconds / whole:.0%}")
        for name, (count, seconds) in sorted(by_operator.items(), key=lambda item: -item[1][1])
    ]
    title = f"Where the host spends its time, batch {row['batch']}, {row['dtype']}:"
    return ["", title, "", *markdown_table(("kernels of", "nodes", "a node us", "of the step"), rows)]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _ratio(one: float | None, other: float | None) -> str:
    return "" if one is None or other is None else f"{one / other:.2f}"
