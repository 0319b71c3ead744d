"""irpar verify: a partition against ONNX Runtime on the original model."""

from dataclasses import asdict
from math import isinf
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.tables.display import output, print_json, shortened, table
from irpar.units import difference_text

from .exit_codes import DIFFERS
from .options import Engine, Input, Inputs, Json, Out, Tf32
from .ranks import GroupName, Timeout, on_ranks

if TYPE_CHECKING:
    from irpar.api import Partition
    from irpar.verification import Bisection, Difference, Verification


Bisect = Annotated[bool, typer.Option("--bisect", help="Find the first tensor that differs.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        min=0.0,
        help="Largest |a - b| / (1 + |b|) that counts as equal, instead of what rounding explains.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help='End with 1 also where the answer is "equal, but"; refuse what the engine cupy would compute on the host.',
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random inputs.")]
Original = Annotated[
    Path | None,
    typer.Option("--model", metavar="MODEL", help="The original, if it is not where it was.", show_default=False),
]


def verify_command(
    context: typer.Context,
    out: Out,
    inputs: Inputs = None,
    given: Input = None,
    bisect: Bisect = False,
    tolerance: Tolerance = None,
    seed: Seed = 0,
    model: Original = None,
    engine: Engine = None,
    group: GroupName = None,
    timeout: Timeout = None,
    strict: Strict = False,
    tf32: Tf32 = False,
    as_json: Json = False,
) -> None:
    """Compare a partition with ONNX Runtime on the original model. The exit code is 1 where they differ.

    The ranks run as those of irpar run; the original runs beside rank 0. Inputs that are not given are drawn at random,
    several times where that reaches more branches; where some never ran the answer is "equal, but". Results that differ
    by more than 8 units in the last place of their largest element are compared with the original in float64: "error"
    may be 4 times that of ONNX Runtime, and these units more.
    """

    def work(partition: "Partition", chosen: dict[str, Any]) -> None:
        from .input_values import given_inputs

        state = [entry["input"] for entry in partition.plan.state]
        arrays = given_inputs(partition.plan.inputs, inputs, given, state)
        options = {**chosen, "tolerance": tolerance, "seed": seed, "model": model}
        verified = partition.verify(arrays, **options)
        bisected = partition.bisect(arrays, **options) if bisect else None
        if as_json:
            print_json(_as_json(verified, bisected))
        else:
            again: dict[str, Any] = {"inputs": inputs, "model": model, "seed": seed or None, "engine": engine}
            again |= {"group": group, "timeout": timeout, "tolerance": tolerance}
            words = [f"--{name} {quote(str(value))}" for name, value in again.items() if value is not None]
            words += [f"--input {quote(text)}" for text in given or ()]
            command = ["irpar verify", quote(str(out)), *words, *["--strict"] * strict, *["--tf32"] * tf32, "--bisect"]
            _print(verified, bisected, " ".join(command))
        is_wrong = not verified.is_equal or (bisected is not None and bisected.first is not None)
        if is_wrong or (strict and verified.but):
            raise typer.Exit(DIFFERS)

    on_ranks(context, out, work, engine=engine, group=group, timeout=timeout, strict=strict, tf32=tf32)


def _as_json(verified: "Verification", bisected: "Bisection | None") -> dict[str, Any]:
    made = {
        "result": verified.result,
        "is_equal": verified.is_equal,
        "not_run": [body.as_json() for body in verified.not_run],
        "but": list(verified.but),
        "largest": verified.largest,
        "inputs": verified.inputs,
        "notes": list(verified.notes),
        "outputs": [_difference_json(difference) for difference in verified.differences],
        "bisection": None,
    }
    if bisected is not None:
        first = None if bisected.first is None else _difference_json(bisected.first)
        made["bisection"] = {"first": first, "node": bisected.node or None, "compared": bisected.compared}
    return made


def _difference_json(difference: "Difference") -> dict[str, Any]:
    return asdict(difference) | {"is_equal": difference.is_equal}


def _print(verified: "Verification", bisected: "Bisection | None", command: str) -> None:
    console = output()
    bounded = "relative" if any(found.measure == "tolerance" for found in verified.differences) else "error"
    numbers = ("difference", bounded, "allowed")
    made = table("output", *numbers, "", right=numbers)
    for found in verified.differences:
        made.add_row(
            shortened(found.name),
            "" if found.note and isinf(found.largest) else difference_text(found.largest),
            "" if found.measure == "values" else difference_text(found.error),
            difference_text(found.allowed),
            shortened(found.note) or ("equal" if found.is_equal else f"differs, most at {list(found.where)}"),
        )
    console.print(made)
    console.print(f"\nthe partition is {verified.verdict}", soft_wrap=True)
    for line in (*verified.but, *verified.notes):
        console.print(line, soft_wrap=True)
    if bisected is not None:
        _print_bisection(bisected)
    elif not verified.is_equal:
        console.print(f"find the first tensor that differs: {command}", soft_wrap=True)


def _print_bisection(bisected: "Bisection") -> None:
    output().print(str(bisected), soft_wrap=True)
