"""What the device can do: products of large matrices in each dtype, and copies."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import irpar
from benchmarks.gpu.findings import problem_text

from .cases import SHORT, TF32
from .device_clock import DeviceClock
from .device_program import DeviceProgram
from .single_operators import product
from .turns import Turns

SIDE, SMALL_SIDE = 8192, 64
COPIED, SMALL_COPIED = 1 << 30, 1 << 16
"""Bytes."""
COPY = "copy"
"""What is measured beside products."""
Start = Callable[[], object]


@dataclass(frozen=True)
class _Rate:
    """Something to measure.

    Attributes:
        what: a dtype, `TF32` or `COPY`.
        who: does it.
        amount: FLOPs, or bytes read and written.
        prepare: gives what begins a run.
    """

    what: str
    who: str
    amount: int
    prepare: Callable[[], Start]


def run_rates(engine: str, turns: Turns) -> dict[str, Any]:
    """Measure all rates.

    Args:
        engine: of irpar.
        turns: who may use the device.

    Returns:
        "products": dtype to FLOP/s by who multiplied; "copy": bytes read and written in a second, likewise.
    """
    turns.together()
    made: dict[str, Any] = {"products": {}, COPY: {}, "problems": []}
    ready: list[tuple[_Rate, Start]] = []
    for rate in _rates(engine):
        try:
            ready.append((rate, rate.prepare()))
        except Exception as error:
            made["problems"].append(f"{rate.what} by {rate.who}: {problem_text(error)}")
    with turns.alone():
        clock = DeviceClock(engine)
        for rate, start in ready:
            table = made[COPY] if rate.what == COPY else made["products"].setdefault(rate.what, {})
            try:
                table[rate.who] = rate.amount / clock.seconds(start)
            except Exception as error:
                made["problems"].append(f"{rate.what} by {rate.who}: {problem_text(error)}")
    return made


def best(table: Mapping[str, float]) -> float:
    """The highest of some rates; 0 of none."""
    return max(table.values(), default=0.0)


def _rates(engine: str) -> Iterator[_Rate]:
    has_device = engine == "cupy"
    side, copied = (SIDE, COPIED) if has_device else (SMALL_SIDE, SMALL_COPIED)
    flops, device = 2 * side**3, "cuda" if has_device else "cpu"
    if find_spec("torch") is not None:
        for dtype in SHORT:
            yield _Rate(dtype, "PyTorch", flops, lambda dtype=dtype: _torch_product(side, dtype, device))  # type: ignore[misc]
        yield _Rate(TF32, "PyTorch", flops, lambda: _torch_product(side, "float32", device, tf32=True))
        yield _Rate(COPY, "PyTorch", 2 * copied, lambda: _torch_copy(copied, device))
    for dtype in SHORT:
        yield _Rate(dtype, "irpar", flops, lambda dtype=dtype: _irpar_product(side, dtype, engine))  # type: ignore[misc]
    yield _Rate(TF32, "irpar", flops, lambda: _irpar_product(side, "float32", engine, tf32=True))
    if has_device:
        yield _Rate(COPY, "CuPy", 2 * copied, lambda: _cupy_copy(copied))


def _irpar_product(side: int, dtype: str, engine: str, tf32: bool = False) -> Start:
    operator = product(dtype, side, side, side)
    program = DeviceProgram(irpar.load(operator.model()), engine, captures=False, tf32=tf32)
    program.give(operator.arrays())
    return program


def _torch_product(side: int, dtype: str, device: str, tf32: bool = False) -> Start:
    import torch

    from .torch_side import tf32_allowed

    kind = getattr(torch, dtype)
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)

    def start() -> None:
        with tf32_allowed(tf32):
            torch.matmul(a, b, out=out)

    return start


def _torch_copy(size: int, device: str) -> Start:
    import torch

    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _cupy_copy(size: int) -> Start:
    import cupy

    source, target = (cupy.zeros(size, cupy.uint8) for _ in range(2))
    return lambda: cupy.copyto(target, source)
