"""Each hot operator alone: what it reaches of the device's rates."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import irpar
from benchmarks.gpu.findings import problem_text

from .device_clock import DeviceClock
from .device_program import DeviceProgram
from .single_operators import Operator, operators
from .work import least_work

COUNT_OF_SMALL = 3
"""Operators that are tried without a GPU."""


def run_kernels(engine: str, deadline: float, keep: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Time every operator.

    Args:
        engine: of irpar.
        deadline: by `time.monotonic`, after which no further one begins.
        keep: is given all that is known after each.

    Returns:
        What the report is made of, as JSON has it.
    """
    made: dict[str, Any] = {"rows": [], "problems": []}
    clock = DeviceClock(engine)
    listed = list(operators())
    for operator in listed if engine == "cupy" else [one.small() for one in listed[:COUNT_OF_SMALL]]:
        if time.monotonic() > deadline:
            made["problems"].append(f"out of time before {operator.label}")
            break
        try:
            made["rows"].append(time_operator(operator, engine, clock))
        except Exception as error:
            made["problems"].append(f"{operator.label}: {problem_text(error)}")
        keep(made)
    return made


def time_operator(operator: Operator, engine: str, clock: DeviceClock) -> dict[str, Any]:
    """What the device takes for an operator, and what it does in that time."""
    program = DeviceProgram(irpar.load(operator.model()), engine, captures=False)
    program.give(operator.arrays())
    seconds = clock.seconds(program)
    runs = program.operators
    as_others = [] if runs in ([operator.name], ["Fused"]) else [f"runs as {', '.join(runs)}"]
    late = ["the time is the host's, which asks for it more slowly"] * clock.is_behind
    work = least_work(program.graph, operator.masked_flops)
    return {
        "name": operator.name,
        "label": operator.label,
        "dtype": operator.dtype,
        "seconds": seconds,
        "notes": [*program.notes, *as_others, *late],
        **work.as_json(),
    }
