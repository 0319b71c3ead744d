"""irpar inspect --suggest: what to shard over a mesh, and a --shardings file that says so."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from irpar.advice.suggestion.tables import print_suggestion
from irpar.sharding import IrparError, Mesh
from irpar.tables.display import output, print_json

from .progress_report import ProgressReport

if TYPE_CHECKING:
    from rich.console import Console

    from irpar.advice.suggestion.result import Suggestion


def suggest_shardings(
    model: Path,
    bind: Sequence[str] | None,
    set_: Sequence[str] | None,
    axes: str,
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
    rows: int | None,
) -> None:
    """Choose, write the file, and tell.

    Args:
        model, bind, set_: as for the other commands.
        axes: the mesh, as text.
        out: the file; None: beside the model.
        force: replace a --shardings file that is there.
        as_json: print one JSON object instead of tables.
        rows: how many lines a table has; None: all.

    Raises:
        IrparError: the axes make no mesh of two devices, the file may not be written, or a size is not known.
    """
    from irpar.advice.suggestion.file import check_target, text_of, write
    from irpar.advice.suggestion.suggest import suggest

    from .loading import load_model

    mesh = Mesh.parse(axes)
    if mesh.size == 1:
        raise IrparError(f"a mesh of one device ({mesh}) shards nothing", do="give the devices: --suggest tp=4")
    target = default_target(model) if out is None else out
    check_target(target, model, force=force)
    with ProgressReport(is_shown=not as_json) as report:
        found = suggest(load_model(model, bind, set_=set_), mesh, report.passes)
    write(target, text_of(target, found.mesh, found.lines, found.comments, model.name))
    if as_json:
        print_json(_plain(found, target))
    else:
        _print(output(), found, rows, model, target, _given(bind, set_))


def default_target(model: Path) -> Path:
    """`gpt.shardings.yaml` for `gpt.onnx`."""
    return model.with_name(f"{model.name.removesuffix('.onnx')}.shardings.yaml")


def _given(bind: Sequence[str] | None, set_: Sequence[str] | None) -> str:
    """What --bind and --set said, to be said again."""
    options = [("--bind", size) for size in bind or ()] + [("--set", value) for value in set_ or ()]
    return "".join(f" {name} {quote(text)}" for name, text in options)


def _plain(found: "Suggestion", target: Path) -> dict[str, Any]:
    """The suggestion as plain data."""
    prediction = found.prediction
    tensors = {name: [None if axes is None else list(axes) for axes in spec] for name, spec in found.lines.items()}
    return {
        "file": str(target),
        "mesh": dict(found.mesh.axes),
        "tensors": tensors,
        "cut": [asdict(group) for group in found.cut],
        "whole": [asdict(group) for group in found.whole],
        "notes": list(found.notes),
        "prediction": asdict(prediction) | {"collectives": prediction.collectives, "sent_bytes": prediction.sent_bytes},
    }


def _print(
    console: "Console",
    found: "Suggestion",
    rows: int | None,
    model: Path,
    target: Path,
    given: str,
) -> None:
    print_suggestion(console, found, rows, model.name)
    file = quote(str(target))
    console.print(
        f"\nwritten to {file}; next: irpar partition {quote(str(model))} -o OUT --shardings {file}{given}",
        soft_wrap=True,
    )
