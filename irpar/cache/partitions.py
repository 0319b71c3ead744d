"""Partitions that are made once: kept when they have been written, and written again where nothing has changed."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpar.output.fresh import Progress, WriteReport, check_room, fresh_partition, write_data_files
from irpar.output.plan_record import Plan
from irpar.output.target import MODEL_FILE, PLAN_FILE, STATE_FILE, WEIGHTS_FILE

from .entry import Entry, NotKeptError, file_state
from .folder import CacheFolder
from .key import key_of

if TYPE_CHECKING:
    from irpar.api import Partition
    from irpar.ir import Tensor
    from irpar.ir.data_file import DataFile

_SETTLED_NS = 100_000_000
"""A file that changed later than this before the command began may change again within one tick of its clock."""


@dataclass(frozen=True)
class Written:
    """A partition that was written, or is to be kept.

    Attributes:
        folder: where it lies in OUT; empty: it is OUT itself.
        partition: it.
        has_weights: whether its weights were written.
    """

    folder: str
    partition: "Partition"
    has_weights: bool


@dataclass(frozen=True)
class Restored:
    """A partition that was written again.

    Attributes:
        plan: its plan.
        report: what was said of it when it was made.
    """

    plan: Plan
    report: Mapping[str, Any]


class PartitionCache:
    """The place of one partition in the cache.

    Args:
        folder: the cache.
        make_key: gives the key of the partition as things are now; None where there is none.
        model: the model file.
    """

    def __init__(self, folder: CacheFolder, make_key: Callable[[], str | None], model: Path) -> None:
        self._folder = folder
        self._make_key = make_key
        self._model = model
        self._start = time.time_ns()
        self._key = make_key()

    @classmethod
    def of(
        cls, command: str, options: Mapping[str, Any], model: Path, others: Iterable[Path]
    ) -> "PartitionCache | None":
        """The place of what a command makes; None where there is no cache.

        Args:
            command: the name of the command.
            options: those that the result depends on.
            model: the model file.
            others: what else is read, but external data.

        Raises:
            IrparError: the limit of the cache cannot be read.
        """
        folder = CacheFolder.of_environment()
        if folder is None:
            return None
        files = [model, *others]
        return cls(folder, lambda: key_of(command, options, files), model)

    def restore(
        self, out: Path, *, force: bool, sources: Sequence[Path], progress: Progress | None = None
    ) -> Restored | None:
        """Write the partition to a folder; None where it is not in the cache, or its weights have changed.

        Raises:
            OutputError: the target exists (and is not to be replaced), there is not enough room, or the system refuses.
            TensorError: the weights cannot be read.
        """
        data = None if self._key is None else self._folder.load(self._key)
        if self._key is None or data is None:
            return None
        try:
            entry = Entry.decode(data)
            if not entry.is_current:
                return None
            plan = Plan(**json.loads(entry.files[PLAN_FILE]))
            data_files, safetensors = _with_tensors(entry)
        except (ValueError, KeyError, TypeError, IndexError, AssertionError):
            self._folder.drop(self._key)
            return None
        _write(entry, out, data_files, safetensors, force=force, sources=sources, progress=progress)
        return Restored(plan, entry.report)

    def store(self, out: Path, written: Sequence[Written], report: Mapping[str, Any], read: Iterable[Path]) -> None:
        """Keep what was written to a folder, unless something changed meanwhile; nobody is told where that cannot be.

        Args:
            out: the folder.
            written: what it holds.
            report: what is to be said of it, as plain data.
            read: the files of the model's external data, the model itself among them or not.
        """
        try:
            entry = self._entry(out, written, report, read)
        except (OSError, ValueError, NotKeptError):
            return
        # What was read for the key may have been exchanged before it was read for the partition.
        if self._key is not None and self._make_key() == self._key:
            self._folder.store(self._key, entry.encode())

    def _entry(self, out: Path, written: Sequence[Written], report: Mapping[str, Any], read: Iterable[Path]) -> Entry:
        from irpar.output.writer import first_tensors, weights_file

        from .weights import WeightsWriter

        entry, weights = Entry(report), WeightsWriter(self._model)
        entry.external = [file_state(path) for path in read if path != self._model]
        if any(max(state[2:4]) > self._start - _SETTLED_NS for state in entry.external):
            raise NotKeptError
        room = self._folder.limit
        for part_of in written:
            module, prefix = part_of.partition.module, f"{part_of.folder}/" if part_of.folder else ""
            assert module is not None
            for path, content in _contents(out / part_of.folder, part_of.partition.plan):
                entry.files[prefix + path] = content
                room -= len(content)
                if room < 0:
                    raise NotKeptError
            if not part_of.has_weights:
                continue
            for part in part_of.partition.parts:
                file = weights_file(part)
                placed = [(offset, weights.plain(tensor)) for offset, tensor in file.placed]
                entry.data_files[f"{prefix}part{part.index}/{WEIGHTS_FILE}"] = file.size, placed
            state = first_tensors(module.graph)
            if state:
                entry.safetensors[prefix + STATE_FILE] = {name: weights.plain(state[name]) for name in state}
        entry.sources, entry.numbers = weights.files, bytes(weights.data)
        return entry


def _contents(folder: Path, plan: Plan) -> Iterable[tuple[str, bytes]]:
    """The plan and the programs of a folder, as they were written."""
    from irpar.output.fingerprint import bytes_digest

    text = plan.to_json().encode()
    if (folder / PLAN_FILE).read_bytes() != text:
        raise NotKeptError
    yield PLAN_FILE, text
    for index, entry in enumerate(plan.parts):
        path = f"part{index}/{MODEL_FILE}"
        content = (folder / path).read_bytes()
        if bytes_digest(content) != entry["program"]["digest"]:
            raise NotKeptError
        yield path, content


def _with_tensors(entry: Entry) -> "tuple[dict[str, DataFile], dict[str, dict[str, Tensor]]]":
    """The data files and the safetensors files of an entry. Without weights nothing is imported that knows tensors."""
    if not entry.data_files and not entry.safetensors:
        return {}, {}
    from irpar.ir.data_file import DataFile

    from .weights import WeightsReader

    reader = WeightsReader(entry.sources, entry.numbers)
    data_files = {
        path: DataFile.of(size, [(offset, reader.tensor(plain)) for offset, plain in placed])
        for path, (size, placed) in entry.data_files.items()
    }
    return data_files, {
        path: {name: reader.tensor(plain) for name, plain in tensors.items()}
        for path, tensors in entry.safetensors.items()
    }


def _write(
    entry: Entry,
    out: Path,
    data_files: "Mapping[str, DataFile]",
    safetensors: "Mapping[str, Mapping[str, Tensor]]",
    *,
    force: bool,
    sources: Sequence[Path],
    progress: Progress | None,
) -> None:
    """Write the files of an entry to a folder, as `write_partition` does."""
    from_safetensors = [tensor for tensors in safetensors.values() for tensor in tensors.values()]
    total = sum(file.size for file in data_files.values()) + sum(tensor.nbytes for tensor in from_safetensors)
    with fresh_partition(out, force, sources) as fresh:
        check_room(fresh, total)
        report = WriteReport(progress, total)
        for path, content in entry.files.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_bytes(content)
        write_data_files(((fresh / path, file) for path, file in data_files.items()), report)
        for path, tensors in safetensors.items():
            from irpar.output.safetensors import write_safetensors

            write_safetensors(fresh / path, tensors, progress=report)
