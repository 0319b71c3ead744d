"""irpar demo: the whole way, from a model to a verified partition."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from irpar.sharding import IrparError
from irpar.tables.display import output, print_json, table
from irpar.units import difference_text, scaled, sharding_text

from .exit_codes import DIFFERS
from .options import Json, MeshText, mesh_of

if TYPE_CHECKING:
    from rich.console import Console

    from .demo_run import Demo

Folder = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where everything is written.")]


def demo_command(out: Folder = Path("demo-out"), mesh: MeshText = "dp=2,tp=2", as_json: Json = False) -> None:
    """Partition a GPT-like model over 4 ranks, run it, and verify it. The exit code is 1 where it differs."""
    from .demo_run import run_demo

    devices = mesh_of(mesh)
    if devices is None:
        raise IrparError("the demo needs a mesh", do="give --mesh dp=2,tp=2")
    console = output()
    start = time.perf_counter()
    demo = run_demo(
        out, devices, lambda line: None if as_json else console.print(Text(f"$ {line}", style="dim"), soft_wrap=True)
    )
    seconds = time.perf_counter() - start
    if as_json:
        print_json(_as_json(demo, seconds))
    else:
        _print(console, demo, seconds)
    if not demo.verification.is_equal or not demo.is_log_as_planned:
        raise typer.Exit(DIFFERS)


def _as_json(demo: "Demo", seconds: float) -> dict[str, Any]:
    plan = demo.plan
    return {
        "model": str(demo.model),
        "shardings": str(demo.shardings),
        "out": str(demo.out),
        "parameters": demo.parameters,
        "annotations": demo.annotations,
        "mesh": plan.mesh,
        "ranks": plan.ranks,
        "parts": plan.parts,
        "original": plan.original,
        "totals": plan.totals,
        "collectives": plan.collectives,
        "replicated": plan.replicated,
        "largest_difference": demo.verification.largest,
        "is_equal": demo.verification.is_equal,
        "is_log_as_planned": demo.is_log_as_planned,
        "seconds": seconds,
    }


def _print(console: "Console", demo: "Demo", seconds: float) -> None:
    from irpar.output.tables import print_summary

    console.print(f"\na GPT of {scaled(demo.parameters, '')} parameters; the annotations, on inputs and weights only:")
    made = table("tensor", "sharding")
    for name, spec in demo.annotations.items():
        made.add_row(name, sharding_text(spec))
    console.print(made)
    console.print()
    folder = shlex.quote(str(demo.out))
    print_summary(console, demo.plan, f"irpar explain {folder}")
    verified = demo.verification
    verdict = "equal" if verified.is_equal else "NOT EQUAL"
    log = "are those of the plan" if demo.is_log_as_planned else "are NOT those of the plan"
    console.print(
        f"\n{verdict} to ONNX Runtime on the original: largest difference {difference_text(verified.largest)} "
        f"({verified.inputs}); the executed collectives {log}"
    )
    console.print(
        f"{seconds:.1f} s. Next: irpar explain {folder}, irpar inspect {shlex.quote(str(demo.model))}", soft_wrap=True
    )
