"""Writing a partition: out/plan.json, and for each part its model and its slices of the weights."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal

import onnx

from irpar.analysis.parts import Part
from irpar.analysis.plan import FORMAT, Plan
from irpar.ir import DType, Module, Value
from irpar.sharding import IrparError

from .data_file import DataFile
from .proto import replace_metadata, to_proto
from .save import EXTERNAL_BYTES, external_tensor, serialized
from .tensors import write_tensor

Weights = Literal["copy", "none"]
WEIGHTS_FILE = "weights.bin"
PARTS_AT_ONCE = min(2, os.cpu_count() or 1)

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


class OutputError(IrparError):
    """The output folder cannot be written, or must not be replaced."""


def write_partition(
    folder: Path,
    module: Module,
    parts: Sequence[Part],
    plan: Plan,
    *,
    weights: Weights = "copy",
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write plan, programs and weights of a local module.

    Everything is written into a folder beside the target, which then takes its name; when anything fails before that,
    nothing is left and the target is as it was.

    Args:
        folder: the target.
        module: after localize.
        parts: its parts.
        plan: its plan.
        weights: "copy" writes each part's slices, "none" writes plan and programs only.
        force: replace a target that holds an irpar plan.
        progress: told about written bytes.

    Raises:
        OutputError: the target exists (and is not to be replaced), or there is not enough room.
        OSError: the disk refuses.
    """
    check_target(folder, force)
    with _fresh_folder(folder) as fresh:
        layouts = [_Layout(part) for part in parts]
        total = sum(layout.file.size for layout in layouts) if weights == "copy" else 0
        _check_room(fresh, total)
        report = _Report(progress, total)
        for part, layout in zip(parts, layouts, strict=True):
            target = fresh / f"part{part.index}"
            target.mkdir()
            _write_model(target / "model.onnx", module, part, layout)
        if weights == "copy":
            _write_weights(layouts, fresh, report)
        (fresh / "plan.json").write_text(plan.to_json(), encoding="utf-8")


def check_target(folder: Path, force: bool) -> None:
    """Refuse a target that exists, unless `force` is given and it holds irpar's plan.json.

    Raises:
        OutputError: saying which of the two.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise OutputError(f"{folder} exists already", do="give another folder, or --force to replace a partition")
    if folder.is_dir() and not folder.is_symlink():
        if not any(folder.iterdir()):
            return
        try:
            data = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
            if isinstance(data, dict) and str(data.get("format", "")).startswith(FORMAT.split("/")[0]):
                return
        except (OSError, ValueError):
            pass
    raise OutputError(
        f"{folder} holds no partition of irpar (no plan.json of irpar in it), so --force does not replace it",
        do="give another folder, or remove this one yourself",
    )


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name on success and goes on failure."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    fresh = folder.parent / f".{folder.name}.{mark}.new"
    fresh.mkdir()
    try:
        yield fresh
        old = folder.parent / f".{folder.name}.{mark}.old"
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(fresh, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"the weights need {needed:,} bytes, the disk has {free:,} free",
            where=str(folder.parent),
            do="free some room, give another folder, or write --weights none",
        )


class _Report:
    """Adds up written bytes for the progress display; called from the threads that write."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0
        self.lock = Lock()

    def __call__(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.progress is not None:
                self.progress(self.done, self.total)


def _write_weights(layouts: "Sequence[_Layout]", folder: Path, report: _Report) -> None:
    """Write the weights of some parts at a time, each through buffers of its own; the kernel does the copying."""
    pool = ThreadPoolExecutor(PARTS_AT_ONCE, "irpar-write")
    try:
        jobs = [
            pool.submit(layout.file.write, folder / f"part{layout.part.index}" / WEIGHTS_FILE, report)
            for layout in layouts
        ]
        for job in jobs:
            job.result()
    finally:
        # After a failure, what has not begun is not worth beginning.
        pool.shutdown(cancel_futures=True)


class _Layout:
    """Which constants of a part go to weights.bin, and where."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.file = DataFile()
        self.places: dict[Value, int] = {}
        for value in part.graph.constants:
            tensor = part.tensor(value)
            if tensor.dtype is not DType.STR and tensor.nbytes > EXTERNAL_BYTES:
                self.places[value] = self.file.place(tensor)

    def proto(self, value: Value) -> onnx.TensorProto:
        """How model.onnx refers to a constant."""
        made = onnx.TensorProto(name=value.name)
        if value in self.places:
            external_tensor(made, self.part.tensor(value), WEIGHTS_FILE, self.places[value])
        else:
            tensor = self.part.tensor(value) if value.graph is self.part.graph else value.data
            assert tensor is not None
            write_tensor(tensor, made)
        return made


def _write_model(path: Path, module: Module, part: Part, layout: _Layout) -> None:
    model = to_proto(module, part.graph, constant=layout.proto)
    facts = {"irpar.part": str(part.index), "irpar.ranks": json.dumps(list(part.ranks))}
    replace_metadata(model, facts)
    path.write_bytes(serialized(model))
