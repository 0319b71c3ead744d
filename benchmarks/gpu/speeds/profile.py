"""Where the device's time goes, by kernel: PyTorch's profiler sees what anything in its process launches."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import markdown_table

from .cases import Case
from .device_program import DeviceProgram

RUNS = 5
WARM = 4
MOST = 25
"""Kernels that are listed."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a trace that are the device's."""


def profile_case(case: Case, engine: str) -> list[str]:
    """The lines of a table of irpar's side of a case in both ways, and of PyTorch in eager."""
    from .torch_side import TorchSide

    # CUDA graphs that were there before the profiler was are not always told apart into kernels.
    with _profiler():
        pass
    lines: list[str] = []
    for way, captures in (("captured", True), ("node by node", False)):
        program = DeviceProgram(case.module(), engine, captures=captures, tf32=case.is_tf32)
        program.give(case.inputs)
        lines += [*_profiled(f"{case.name}: irpar, {way}", program, program.wait), ""]
        lines += [f"- {told}" for told in (*program.capture_facts(), *program.notes)]
    side = TorchSide(case, "cuda" if engine == "cupy" else "cpu")
    return [*lines, "", *_profiled(f"{case.name}: PyTorch eager", side.subject.start, side.wait)]


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def _profiled(title: str, start: Callable[[], object], wait: Callable[[], None]) -> list[str]:
    for _ in range(WARM):
        start()
    wait()
    with _profiler() as traced:
        begin = time.perf_counter()
        for _ in range(RUNS):
            start()
        wait()
        seconds = (time.perf_counter() - begin) / RUNS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernel_table(title, events, seconds)


def kernel_table(title: str, events: list[Mapping[str, Any]], seconds: float) -> list[str]:
    """What a trace of `RUNS` runs tells.

    Args:
        title: of the table.
        events: as a Chrome trace has them, durations in microseconds.
        seconds: that a run took, profiled.
    """
    spent: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            row = spent.setdefault(event["name"], [0, 0.0])
            row[0] += 1 / RUNS
            row[1] += event["dur"] / RUNS
    whole = sum(microseconds for _, microseconds in spent.values())
    listed = sorted(spent.items(), key=lambda item: -item[1][1])
    rows = [
        (name[:110], f"{count:g}", f"{microseconds:.1f}", f"{microseconds / whole:.1%}")
        for name, (count, microseconds) in listed[:MOST]
    ]
    launches = sum(count for count, _ in spent.values())
    told = (
        f"{title}: {seconds * 1e6:.0f} us a run (profiled), the device busy {whole:.0f} us in {launches:g} kernels "
        f"and copies of {len(spent)} names"
    )
    return [told, "", *markdown_table(("kernel", "a run", "us", "share"), rows)]
