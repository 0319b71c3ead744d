"""--annotate: the whole model beside its partition, with ONNX's multi-device annotations."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from irpar.files.atomic import check_file
from irpar.pass_manager.default_pipeline import COMPLETION
from irpar.sharding import IrparError

if TYPE_CHECKING:
    from irpar.annotations.onnx_annotations import DecidedShardings
    from irpar.api import Partition
    from irpar.ir import Module
    from irpar.pass_manager import Pass


def check_annotate(path: Path, out: Path, sources: list[Path], passes: "tuple[Pass, ...]", force: bool) -> None:
    """Refuse a file that the annotated model must not replace, and a pipeline that decides no shardings.

    Args:
        path: the file of --annotate.
        out: the folder of the partition.
        sources: files that are read.
        passes: those of the pipeline.
        force: whether a file that is there may be replaced.

    Raises:
        IrparError: saying why.
    """
    from irpar.onnx_io import data_file

    check_file(path, "the annotated model")
    files = {path.resolve(), data_file(path).resolve()}
    problem = ""
    if files & {source.resolve() for source in sources}:
        problem = "it is one of the files that are read"
    elif path.resolve().is_relative_to(out.resolve()):
        problem = f"it lies in {out}, which holds the partition alone"
    elif path.exists() and not force:
        problem = "the file exists"
    if problem:
        do = "give another file" + (", or --force" if problem == "the file exists" else "")
        raise IrparError(f"cannot write the annotated model: {problem}", where=str(path), do=do)
    if all(pass_.name != COMPLETION for pass_ in passes):
        raise IrparError(
            f"the pipeline has no {COMPLETION}, which decides what --annotate writes",
            do=f"add {COMPLETION} to the pipeline, or leave out --annotate",
        )


def write_annotated(path: Path, module: "Module", made: "Partition", decided: "DecidedShardings") -> list[str]:
    """Write the annotated model.

    Args:
        path: the .onnx file.
        module: the model that was partitioned.
        made: its partition.
        decided: what completion decided.

    Returns:
        What to tell of it, a line each.

    Raises:
        IrparError: it cannot be written.
    """
    from irpar.annotations.onnx_annotations import decided_values, save_annotated

    shardings = decided_values(module, decided)
    left = save_annotated(module, path, shardings, made.plan.mesh_of_ranks)
    count = len(shardings) - len(left)
    lines = [f"{count} tensor{'' if count == 1 else 's'} annotated in {path}"]
    for why, number in Counter(left.values()).most_common():
        names = [name for name, reason in left.items() if reason == why][:3]
        shown = ", ".join(f"%{name}" for name in names) + (" ..." if number > len(names) else "")
        lines.append(f"without annotation, since {why}: {shown} ({number})")
    return lines
