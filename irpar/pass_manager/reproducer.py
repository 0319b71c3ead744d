"""Crash reproducers: IR text whose first lines name the pipeline that fails on it."""

import io
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from irpar.files.regular_file import open_file
from irpar.ir import Module
from irpar.sharding import IrparError

from .instrumentation import EXTENSION
from .pipeline import Pass, format_pipeline

HEADER = "// irpar reproducer"
_PIPELINE = "// pipeline: "


def write_reproducer(folder: Path | None, module: Module, passes: Sequence[Pass], error: BaseException) -> Path:
    """Write what makes `passes` fail: their names and the module before the first of them.

    Numbers that the module holds in memory go to a file beside the text, its reasons to the end of the text.

    Args:
        folder: where to; None: the system's folder for temporary files.
        module: the module before the passes.
        passes: the rest of the pipeline; the first of them failed.
        error: what was raised, for the reader.

    Returns:
        The path of the text.
    """
    from irpar.ir.text.files import write_text
    from irpar.ir.text.logs import logs_text

    if folder is None:
        path = Path(tempfile.gettempdir()) / f"irpar-{passes[0].name}-{uuid.uuid4().hex[:8]}{EXTENSION}"
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path = _free_path(folder, passes[0].name)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    comment = f"{HEADER}\n{_PIPELINE}{format_pipeline(passes)}\n// error: {reason}\n"
    write_text(module, path, comment, logs_text(module))
    return path


def _free_path(folder: Path, name: str) -> Path:
    """A file name that is not taken, so that an earlier reproducer stays."""
    path, number = folder / f"{name}{EXTENSION}", 2
    while path.exists():
        path, number = folder / f"{name}-{number}{EXTENSION}", number + 1
    return path


def reproducer_pipeline(path: Path) -> str | None:
    """The pipeline that a reproducer names in its header; None where the file is no reproducer."""
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
        if file.readline().rstrip("\n") != HEADER:
            return None
        line = file.readline().rstrip("\n")
    return line.removeprefix(_PIPELINE) if line.startswith(_PIPELINE) else None


def read_reproducer(path: Path) -> tuple[Module, str]:
    """The module of a reproducer and the pipeline that fails on it.

    Raises:
        IrparError: the file is no reproducer, or its text cannot be read.
    """
    from irpar.ir.text.files import read_text

    pipeline = reproducer_pipeline(path)
    if pipeline is None:
        raise IrparError(
            f'{path} is no reproducer: its first lines are not "{HEADER}" and "{_PIPELINE}..."',
            do="give the pipeline with --pipeline, or the file that a failed pass wrote",
        )
    return read_text(path), pipeline
