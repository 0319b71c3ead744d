"""irpar checkpoint: what is in one, onto another mesh, back into the ONNX model."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.errors import IrparError
from irpar.tables.display import ROWS, output, print_json, table
from irpar.units import bytes_text, count_text

from .model_target import check_model_target
from .options import Json, choice

if TYPE_CHECKING:
    from irpar.output.checkpoint import Checkpoint

ACTIONS = ("show", "reshard", "export")
Action = Annotated[
    str, typer.Argument(metavar="show|reshard|export", help="What to do with a checkpoint.", show_default=False)
]
CheckpointPath = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of several: the newest.", show_default=False),
]
Model = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="export: the ONNX model whose weights were trained.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="OUT",
        help="reshard: the folder of checkpoints to write to; export: the .onnx file.",
        show_default=False,
    ),
]
To = Annotated[
    Path | None,
    typer.Option(
        "--to", metavar="PARTITION", help="reshard: the partition whose ranks are to read it.", show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", help="export: replace the file.")]


def checkpoint_command(
    action: Action,
    path: CheckpointPath,
    model: Model = None,
    out: Output = None,
    to: To = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show a checkpoint, bring it onto another mesh, or write its weights back into the ONNX model.

    irpar run --resume reads checkpoints of any mesh by itself; reshard writes what each rank of another one reads to a
    file of its own.
    """
    from irpar.output.checkpoint import Checkpoint

    choice("action", action, ACTIONS)
    found = Checkpoint.open(path)
    if action == "show":
        _show(found, as_json)
    elif action == "reshard":
        if to is None or out is None:
            raise IrparError("reshard needs a partition and a folder", do="give --to PARTITION and -o DIR")
        written = _reshard(found, to, out)
        _tell(as_json, checkpoint=written)
    else:
        if model is None or out is None:
            raise IrparError("export needs the model and a file", do="give MODEL, and -o TRAINED.onnx")
        count = _export(found, model, out, force)
        _tell(as_json, model=out, tensors=count)


def _tell(as_json: bool, **facts: Any) -> None:
    if as_json:
        print_json({name: str(value) if isinstance(value, Path) else value for name, value in facts.items()})
        return
    count = f": {count_text(facts['tensors'], 'tensor')} of the checkpoint" if "tensors" in facts else ""
    written = facts.get("checkpoint") or facts["model"]
    output().print(f"written: {written}{count}", soft_wrap=True)


def _show(found: "Checkpoint", as_json: bool) -> None:
    if as_json:
        tensors = {name: asdict(each) for name, each in found.tensors.items()}
        print_json({"path": str(found.path), **found.metadata, "tensors": tensors})
        return
    console = output()
    console.print(f"{found.path}: step {found.step:,}, {bytes_text(found.total_bytes)}", soft_wrap=True)
    for name, value in found.metadata.items():
        if name not in ("format", "total_size", "step"):
            console.print(f"  {name}: {_text(value)}", highlight=False, soft_wrap=True)
    made = table("tensor", "kind", "type")
    for name, each in list(found.tensors.items())[:ROWS]:
        made.add_row(name, each.kind, f"{each.dtype}[{', '.join(map(str, each.shape))}]")
    if len(found.tensors) > ROWS:
        made.add_row(f"... {len(found.tensors) - ROWS} more (--json has all)", "", "")
    console.print(made)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return str(value)


def _reshard(found: "Checkpoint", partition: Path, out: Path) -> Path:
    """Write a checkpoint again as the ranks of a partition would.

    Raises:
        IrparError: it is not of that partition's program, or the system refuses.
    """
    from irpar.api import Partition
    from irpar.training.loop import saved_schedule

    with Partition.open(partition) as opened, opened.trainer(engine="numpy") as trainer:
        read = trainer.load_checkpoint(found.path)
        kept = ("format", "total_size", "step", "mesh", "optimizer", "schedule")
        facts = {name: value for name, value in read.metadata.items() if name not in kept}
        trainer.schedule = saved_schedule(read)
        return trainer.save_checkpoint(out, facts=facts)


def _export(found: "Checkpoint", model: Path, out: Path, force: bool) -> int:
    """Write a model with the weights of a checkpoint; how many were taken.

    Raises:
        IrparError: the model lacks one, or a target exists.
    """
    from irpar.onnx_io import load, save
    from irpar.training.export import put_weights

    check_model_target(out, model, "the trained model", force)
    module = load(model)
    count = put_weights(module, found)
    save(module, out)
    return count
