"""irpar calibrate: what this machine computes and communicates, measured, as a file for --network."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irpar.tables.display import messages, output, print_json, table
from irpar.units import scaled, seconds_text

from .options import Engine, Json

if TYPE_CHECKING:
    from rich.console import Console

    from .calibration import Calibration

Target = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FILE", help="Write the network file, YAML.", show_default=False),
]
Ranks = Annotated[int, typer.Option("--ranks", metavar="N", help="How many ranks run at once.")]


def calibrate_command(out: Target = None, ranks: Ranks = 4, engine: Engine = "ort", as_json: Json = False) -> None:
    """Measure matmuls, memory, disk and collectives on this machine, for --network FILE. Takes about 10 seconds.

    The disk is the one that FILE, or the current folder, is on.
    """
    from irpar.files.atomic import new_file

    from .calibration import as_yaml, calibrate

    if out is not None:
        _check_target(out)
    console = messages()
    measured = calibrate(
        ranks,
        engine or "ort",
        folder=Path.cwd() if out is None else out.absolute().parent,
        progress=lambda what: None if as_json else console.print(f"measuring {what}"),
    )
    if out is not None:
        with new_file(out, "the network") as fresh:
            fresh.write_text(as_yaml(measured), encoding="utf-8")
    if as_json:
        points = [
            {
                "kind": point.kind,
                "bytes": point.size,
                "seconds": point.seconds,
                "fitted_seconds": point.fitted,
                "residual": point.residual,
            }
            for point in measured.points
        ]
        fields = {"network": measured.fields(), "collectives": points, "left_out": dict(measured.left_out)}
        print_json({"file": out and str(out), "seconds": measured.seconds, **fields})
        return
    _print(output(), measured, out)


def _check_target(path: Path) -> None:
    """Refuse to write over what is no network file, before anything is measured.

    Raises:
        IrparError: saying what is there.
    """
    from irpar.analysis.cost.network_file import NetworkError, read_network
    from irpar.files.atomic import WriteError, check_file

    check_file(path, "the network")
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        read_network(path)
    except NetworkError as error:
        raise WriteError(
            "cannot write the network over a file that holds something else",
            where=str(path),
            notes=(error.what,),
            do="give another file, or remove this one yourself",
        ) from None


def _print(console: "Console", measured: "Calibration", out: Path | None) -> None:
    made = table("one rank", "rate", right=("rate",))
    for dtype, rate in measured.flops.items():
        made.add_row(f"matmul of {dtype}", scaled(rate, "FLOP/s"))
    made.add_row("memory", scaled(measured.memory_bandwidth, "B/s"))
    if measured.disk is not None:
        made.add_row("disk, reading (all ranks)", scaled(measured.disk.read, "B/s"))
        made.add_row("disk, writing (all ranks)", scaled(measured.disk.write, "B/s"))
    made.add_row("a small node", seconds_text(measured.launch))
    made.add_row("a collective, beside itself", seconds_text(measured.collective_launch))
    console.print(made)
    for dtype, reason in measured.left_out.items():
        console.print(f"no rate for {dtype}: {reason}")
    console.print()
    numbers = ("bytes", "measured", "fitted", "off by", "a message", "bandwidth")
    made = table("collective", *numbers, right=numbers)
    last = ""
    for point in measured.points:
        first, last = point.kind != last, point.kind
        fit = measured.kinds[point.kind]
        made.add_row(
            point.kind if first else "",
            f"{point.size:,}",
            seconds_text(point.seconds),
            seconds_text(point.fitted),
            f"{point.residual:+.0%}",
            seconds_text(fit.latency) if first else "",
            scaled(fit.bandwidth, "B/s") if first else "",
        )
    console.print(made)
    console.print(f"\n{measured.name}, in {measured.seconds:.1f} s")
    if out is None:
        console.print("-o FILE writes it, for irpar partition --network FILE", soft_wrap=True)
    else:
        console.print(f"written to {out}; next: irpar partition ... --network {shlex.quote(str(out))}", soft_wrap=True)
