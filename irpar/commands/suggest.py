"""irpar inspect --suggest: what to cut over a mesh, and a --shardings file that says so."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.text import Text

from irpar.display import (
    ProgressReport,
    bytes_text,
    count_text,
    flops_text,
    name_with,
    output,
    print_json,
    sharding_text,
    share_text,
    table,
)
from irpar.sharding import IrparError, Mesh

if TYPE_CHECKING:
    from rich.console import Console

    from irpar.suggestion import Prediction, Suggestion
    from irpar.suggestion_report import TensorGroup


def suggest_shardings(
    model: Path,
    bind: Sequence[str] | None,
    axes: str,
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
    rows: int | None,
) -> None:
    """Choose, write the file, and tell.

    Args:
        model, bind: as for the other commands.
        axes: the mesh, as text.
        out: the file; None: beside the model.
        force: replace a --shardings file that is there.
        as_json: print one JSON object instead of tables.
        rows: how many lines a table has; None: all.

    Raises:
        IrparError: the axes make no mesh of two devices, the file may not be written, or a size is not known.
    """
    from irpar.suggestion import suggest
    from irpar.suggestion_file import check_target, text_of, write

    from .loading import load_model

    mesh = Mesh.parse(axes)
    if mesh.size == 1:
        raise IrparError(f"a mesh of one device ({mesh}) cuts nothing", do="give the devices: --suggest tp=4")
    target = default_target(model) if out is None else out
    check_target(target, model, force=force)
    with ProgressReport(is_shown=not as_json, quiet=1.0) as report:
        found = suggest(load_model(model, bind), mesh, report.passes)
    write(target, text_of(target, found.mesh, found.lines, found.comments, model.name))
    if as_json:
        print_json(_plain(found, target))
    else:
        _print(output(), found, rows, model, target, bind)


def default_target(model: Path) -> Path:
    """`gpt.shardings.yaml` for `gpt.onnx`."""
    return model.with_name(f"{model.name.removesuffix('.onnx')}.shardings.yaml")


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
    bind: Sequence[str] | None,
) -> None:
    console.print(
        Text(f"{model.name} over {found.mesh}: {count_text(found.mesh.size, 'rank')}", style="bold"), soft_wrap=True
    )
    _print_cut(console, found.cut, rows)
    _print_whole(console, found.whole, rows)
    _print_prediction(console, found.prediction)
    for note in found.notes:
        console.print(f"\n{note}")
    file = quote(str(target))
    sizes = "".join(f" --bind {quote(size)}" for size in bind or ())
    console.print(
        f"\nwritten to {file}; next: irpar partition {quote(str(model))} -o OUT --shardings {file}{sizes}",
        soft_wrap=True,
    )


def _print_cut(console: "Console", groups: "Sequence[TensorGroup]", rows: int | None) -> None:
    if not groups:
        return
    made = table("cut", "tensors", "lies as", "why", right=("tensors",))
    for group in groups[:rows]:
        made.add_row(_labelled(group), f"{len(group.names):,}", _lies(group), group.reason)
    _print_table(console, made, len(groups), rows)


def _print_whole(console: "Console", groups: "Sequence[TensorGroup]", rows: int | None) -> None:
    if not groups:
        return
    made = table("whole on every rank", "tensors", "bytes", "why", right=("tensors", "bytes"))
    for group in groups[:rows]:
        made.add_row(
            _labelled(group),
            f"{len(group.names):,}",
            bytes_text(group.bytes),
            group.reason,
        )
    _print_table(console, made, len(groups), rows)


def _labelled(group: "TensorGroup") -> Any:
    """The name, and below it the use of a tensor whose name does not tell it."""
    return name_with(group.pattern, [group.use] if group.use else [])


def _lies(group: "TensorGroup") -> str:
    return f"{group.dtype}{sharding_text(group.spec, group.shape)}"


def _print_prediction(console: "Console", found: "Prediction") -> None:
    made = table("", "one device", "per rank", "share", right=("one device", "per rank", "share"))
    for name, whole, part, text in (
        ("weights", found.weight_bytes, found.weight_bytes_per_rank, bytes_text),
        ("computation", found.flops, found.flops_per_rank, flops_text),
    ):
        made.add_row(name, text(whole), text(part), share_text(part, whole))
    console.print()
    console.print(made)
    console.print()
    if not found.by_kind:
        console.print("nothing is sent between the ranks")
        return
    sent = table("sent each step", "times", "per device", right=("times", "per device"))
    for kind, counts in _largest_first(found.by_kind):
        sent.add_row(kind, f"{counts['collectives']:,}", bytes_text(counts["sent_bytes"]))
    console.print(sent)


def _largest_first(by_kind: Mapping[str, Mapping[str, int]]) -> list[tuple[str, Mapping[str, int]]]:
    return sorted(by_kind.items(), key=lambda item: -item[1]["sent_bytes"])


def _print_table(console: "Console", made: object, count: int, rows: int | None) -> None:
    console.print()
    console.print(made)
    if rows is not None and count > rows:
        console.print(f"{count - rows} more: --all shows them")
