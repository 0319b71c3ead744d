"""irpar verify: a partition against ONNX Runtime on the original model."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.display import count_text, difference_text, output, print_json, table

from .options import Engine, Inputs, Json, Out, Strict
from .ranks import GroupName, Timeout, on_ranks

if TYPE_CHECKING:
    from irpar.api import Partition
    from irpar.comparison import Difference
    from irpar.verification import Bisection, Verification

DIFFERS = 1
"""Exit code where the partition differs from the original."""

Bisect = Annotated[bool, typer.Option("--bisect", help="Find the first tensor that differs.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        min=0.0,
        help="Largest |a - b| / (1 + |b|) that counts as equal; by dtype if not given (float32 1e-4).",
        show_default=False,
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
    bisect: Bisect = False,
    tolerance: Tolerance = None,
    seed: Seed = 0,
    model: Original = None,
    engine: Engine = None,
    group: GroupName = None,
    timeout: Timeout = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Compare a partition with ONNX Runtime on the original model. The exit code is 1 where they differ.

    The ranks run as those of irpar run; the original runs beside rank 0. Of the numbers a of the partition and b of the
    original, "difference" is the largest |a - b|, and "relative" the largest |a - b| / (1 + |b|), which has a bound.
    """

    def work(partition: "Partition", chosen: dict[str, Any]) -> None:
        from irpar.npz_file import read_npz

        arrays = None if inputs is None else read_npz(inputs, partition.plan.inputs)
        options = {**chosen, "tolerance": tolerance, "seed": seed, "model": model}
        verified = partition.verify(arrays, **options)
        bisected = partition.bisect(arrays, **options) if bisect else None
        if as_json:
            print_json(_as_json(verified, bisected))
        else:
            again: dict[str, Any] = {"inputs": inputs, "model": model, "seed": seed or None, "engine": engine}
            again |= {"group": group, "timeout": timeout, "tolerance": tolerance}
            given = [f"--{name} {quote(str(value))}" for name, value in again.items() if value is not None]
            command = ["irpar verify", quote(str(out)), *given, *["--strict"] * strict, "--bisect"]
            _print(verified, bisected, " ".join(command))
        if not verified.is_equal or (bisected is not None and bisected.first is not None):
            raise typer.Exit(DIFFERS)

    on_ranks(context, out, work, engine=engine, group=group, timeout=timeout, strict=strict)


def _as_json(verified: "Verification", bisected: "Bisection | None") -> dict[str, Any]:
    made = {
        "is_equal": verified.is_equal,
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
    numbers = ("difference", "relative", "relative allowed")
    made = table("output", *numbers, "", right=numbers)
    for found in verified.differences:
        made.add_row(
            found.name,
            difference_text(found.largest),
            difference_text(found.relative),
            difference_text(found.tolerance),
            found.note or ("equal" if found.is_equal else f"differs, most at {list(found.where)}"),
        )
    console.print(made)
    verdict = "equal to" if verified.is_equal else "different from"
    console.print(f"\nthe partition is {verdict} ONNX Runtime on the original (inputs: {verified.inputs})")
    for note in verified.notes:
        console.print(note)
    if bisected is not None:
        _print_bisection(bisected)
    elif not verified.is_equal:
        console.print(f"find the first tensor that differs: {command}", soft_wrap=True)


def _print_bisection(bisected: "Bisection") -> None:
    from irpar.verification import describe

    agree = f"{count_text(bisected.compared, 'tensor')} inside the model"
    if bisected.first is None:
        output().print(f"no tensor differs: {agree} compared")
        return
    output().print(f"the first tensor that differs, after {agree} that agree:\n  {describe(bisected.first)}")
    output().print(f"  made by {bisected.node}")
