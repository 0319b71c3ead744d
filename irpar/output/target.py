"""Whether a partition may be written to a folder: nothing but a partition is ever replaced."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from irpar.files.atomic import is_leftover, left_aside, notes_on_aside
from irpar.files.regular_file import read_text
from irpar.sharding import IrparError, listed, option, spelled
from irpar.system_errors import remedy

from .plan_record import FORMAT

if TYPE_CHECKING:
    from irpar.ir import Module

MODEL_FILE, WEIGHTS_FILE, PLAN_FILE = "model.onnx", "weights.bin", "plan.json"
STATE_FILE = "state.safetensors"
"""Whole tensors that state begins with; each rank reads its blocks."""
EVALUATION = "evaluation"
"""The folder of a training step's evaluation program: a partition over the same ranks."""
_PART = re.compile(r"part\d+")
_SUMS = re.compile(r"part\d+\.sha256")
"""What `irpar pack` puts beside the parts."""
_MOST_OF_A_PATH = 255
"""Characters of a path in a message."""
_MOST_NAMED = 3
"""Of what else lies in a folder."""


class OutputError(IrparError):
    """The output folder cannot be written, or must not be replaced."""


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Tell what the system refuses at a target in words.

    Raises:
        OutputError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        path = os.fsdecode(error.filename or folder)
        raise OutputError(
            f"the partition cannot be written: {error.strerror or error}",
            where=path if len(path) <= _MOST_OF_A_PATH else f"{path[:_MOST_OF_A_PATH]}...",
            do=remedy(error),
        ) from error


def check_target(folder: Path, force: bool, sources: Iterable[Path] = ()) -> None:
    """Refuse a target that exists, unless `force` is given and it holds a partition and nothing else.

    Args:
        folder: the target.
        force: replace a partition.
        sources: files that are read: they must not lie in the target.

    Raises:
        OutputError: saying why.
    """
    with told(folder):
        _check_target(folder, force, sources)


def _check_target(folder: Path, force: bool, sources: Iterable[Path]) -> None:
    _refuse_current_folder(folder)
    if not folder.exists() and not folder.is_symlink():
        if not force:
            _refuse_left_aside(folder)
        return
    if not force:
        do = f"give another folder, or {option('force')} to replace a partition"
        raise OutputError(f"{folder} exists already", do=do)
    if not folder.is_dir() or folder.is_symlink():
        raise _no_partition(folder)
    if not any(folder.iterdir()):
        return
    if not _has_plan(folder):
        raise _no_partition(folder)
    _refuse_sources(folder, sources)
    others = sorted(_others(folder))
    if others:
        named = listed(others, _MOST_NAMED)
        raise OutputError(
            f"{folder} holds more than a partition, which {option('force')} would remove: {named}",
            do="move that elsewhere, or give another folder",
        )


def _refuse_left_aside(folder: Path) -> None:
    """Tell where a partition is that was being replaced when its process was killed, before it is forgotten."""
    aside = left_aside(folder)
    if aside:
        raise OutputError(
            f"{folder} is not there: a run with --force was killed while it exchanged two folders",
            notes=notes_on_aside(aside),
            do=f"take one of them back (mv {aside[0]} {folder}), or --force (in Python force=True) to replace both",
        )


def source_files(module: "Module") -> list[Path]:
    """The files that a module was read from: the model and its external data."""
    from irpar.ir import ExternalTensor

    found = dict.fromkeys([] if module.source is None else [module.source])
    for graph in module.all_graphs():
        held = [value.data for value in graph.constants] + [state.data for state in graph.states.values()]
        for data in held:
            for base in data.bases if data is not None else ():
                if isinstance(base, ExternalTensor):
                    found[base.path] = None
    return list(found)


def _no_partition(folder: Path) -> OutputError:
    return OutputError(
        f"{folder} holds no partition of irpar (no plan.json of irpar in it), so {option('force')} does not replace it",
        do="give another folder, or remove this one yourself",
    )


def _refuse_current_folder(folder: Path) -> None:
    """A partition takes the place of its folder, so the folder cannot be one that is being worked in."""
    here, target = os.path.realpath("."), os.path.realpath(folder)
    if os.path.commonpath((here, target)) == target:
        what = "the current folder" if here == target else "a folder around the current one"
        raise OutputError(
            f"a partition cannot be written over {what}",
            where=target,
            do=f"give the name of a folder to make{spelled(': -o out', '')}",
        )


def _has_plan(folder: Path) -> bool:
    try:
        text = read_text(folder / PLAN_FILE)
        # As irpar writes it; the plan of a large model has megabytes, of which nothing else counts here.
        if text.startswith(f'{{\n  "format": "{FORMAT.split("/")[0]}'):
            return True
        data = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and str(data.get("format", "")).startswith(FORMAT.split("/")[0])


def _refuse_sources(folder: Path, sources: Iterable[Path]) -> None:
    target = os.path.realpath(folder)
    for source in sources:
        if os.path.commonpath((os.path.realpath(source), target)) == target:
            raise OutputError(
                f"{source} lies in {folder}, which {option('force')} would remove",
                do="give another folder, or copy what is read from elsewhere",
            )


def _others(folder: Path) -> Iterator[str]:
    """What lies in a folder beside the pieces of a partition, as paths inside it."""
    yield from _unexpected(folder, (PLAN_FILE, STATE_FILE), "")
    for entry in os.scandir(folder):
        if _is_part(entry):
            yield from _unexpected(Path(entry.path), (MODEL_FILE, WEIGHTS_FILE), f"{entry.name}/")
        elif _is_evaluation(entry):
            yield from (f"{entry.name}/{name}" for name in _others(Path(entry.path)))


def _unexpected(folder: Path, files: Sequence[str], prefix: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        is_named = entry.name in files or (not prefix and _SUMS.fullmatch(entry.name) is not None)
        is_known = is_named and entry.is_file(follow_symlinks=False)
        is_folder = not prefix and (_is_part(entry) or _is_evaluation(entry))
        if not (is_known or is_leftover(entry.name) or is_folder):
            yield prefix + entry.name


def _is_part(entry: "os.DirEntry[str]") -> bool:
    return _PART.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _is_evaluation(entry: "os.DirEntry[str]") -> bool:
    return entry.name == EVALUATION and entry.is_dir(follow_symlinks=False)
