"""Checkpoints: the state of a run in safetensors files, one for each rank that holds blocks, and an index.

steps/step-00000020/model.safetensors.index.json   {"metadata": {...}, "weight_map": {name: file}, "tensors": {...}}
steps/step-00000020/rank0.safetensors              the blocks that rank 0 holds first

A tensor that a rank holds in full stands under its name, as in checkpoints of Hugging Face; a block of one that is
sharded stands under its name and region, `w[0:64,128:256]`.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from irpar.errors import IrparError
from irpar.ir import ArrayTensor, LazyTensor, Tensor, TensorType, dtype_of_text

from .safetensors import SafetensorsError, read_safetensors, write_safetensors

Array = np.ndarray[Any, Any]
Region = Sequence[tuple[int, int]]

INDEX = "model.safetensors.index.json"
FORMAT = "irpar-checkpoint/1"
_STEP = re.compile(r"step-(\d{8,})")
_BLOCK = re.compile(r"(?P<name>.*)\[(?P<region>\d+:\d+(,\d+:\d+)*)\]")


class CheckpointError(IrparError):
    """A checkpoint that cannot be read, or is not of this program."""


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and (path / INDEX).is_file()
    ]
    return [path for _, path in sorted(found)]


def instead_of(path: Path) -> str:
    """What to do where a checkpoint cannot be read."""
    before = [each.name for each in checkpoints(path.parent) if each.name < path.name]
    return f"remove it: {before[-1]} is the newest then" if before else "begin anew: no other checkpoint is before it"


def remove_older(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest, and what is left of those whose removal was not finished.

    Args:
        folder: where they are.
        keep: how many stay, at least 1.
    """
    kept = {path.name for path in checkpoints(folder)[-keep:]}
    for path in list(folder.iterdir()):
        match = _STEP.fullmatch(path.name)
        if match is not None and int(match[1]) < min(int(name.removeprefix("step-")) for name in kept):
            with suppress(OSError):
                (path / INDEX).unlink(missing_ok=True)  # First: what is half removed is no checkpoint.
            shutil.rmtree(path, ignore_errors=True)


def block_name(name: str, region: Region, shape: Sequence[int]) -> str:
    """What a block is called."""
    if all((start, stop) == (0, size) for (start, stop), size in zip(region, shape, strict=True)):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in region)}]"


def write_blocks(folder: Path, rank: int, blocks: Mapping[str, Array]) -> None:
    """Write the blocks of a rank, by their names.

    Raises:
        CheckpointError: the system refuses.
    """
    tensors = {name: ArrayTensor(np.asarray(block, order="C")) for name, block in blocks.items()}
    path = folder / f"rank{rank}.safetensors"
    try:
        write_safetensors(path, tensors)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """What is said where the system refuses to write a checkpoint."""
    return CheckpointError(
        f"cannot write the checkpoint: {error.strerror or error}",
        where=str(path),
        notes=("the checkpoints before this one are whole",),
        do="make room there, or give another folder, and go on with --resume",
    )


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        dtype: as text.
        shape: of the full tensor.
        kind: of state.
        parameter: what a moment belongs to.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str
    parameter: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, of which only the index is read.

    Attributes:
        path: its folder.
        metadata: the step, the seed, the place in the data, the schedule.
        tensors: by name.
        files: name of a block to its file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    files: Mapping[str, str]

    @property
    def step(self) -> int:
        """How many steps had been made."""
        return int(self.metadata["step"])

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read an index; of a folder with several checkpoints that of the newest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if not (path / INDEX).is_file():
            several = checkpoints(path)
            if not several:
                raise CheckpointError(
                    "there is no checkpoint", where=str(path), do="give the folder of --checkpoint, or one in it"
                )
            path = several[-1]
        where = path / INDEX
        try:
            data = json.loads(where.read_text(encoding="utf-8"))
            if data["metadata"]["format"] != FORMAT:
                raise ValueError(f"its format is {data['metadata']['format']!r}, this irpar reads {FORMAT!r}")
            tensors = {name: _entry(name, each) for name, each in data["tensors"].items()}
            made = cls(path, data["metadata"], tensors, dict(data["weight_map"]))
            int(made.metadata["step"])
            for block, file in made.files.items():
                made._check_block(block, file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint: {_what(error)}", where=str(where), do=instead_of(path)
            ) from None
        return made

    def write_index(self) -> None:
        """Write the index, last of all: what has none is no checkpoint."""
        data = {
            "metadata": {"format": FORMAT, "total_size": self.total_bytes, **self.metadata},
            "weight_map": dict(self.files),
            "tensors": {name: asdict(each) for name, each in self.tensors.items()},
        }
        (self.path / INDEX).write_text(json.dumps(data, indent=1), encoding="utf-8")

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(_bytes(each) for each in self.tensors.values())

    def full(self, name: str) -> Tensor:
        """A tensor, read when its numbers are needed."""
        entry = self.tensors[name]
        dtype = dtype_of_text(entry.dtype)
        assert dtype is not None
        return LazyTensor(dtype, entry.shape, lambda: self.read([name], {})[name])

    def read(self, names: Sequence[str], regions: Mapping[str, Region]) -> dict[str, Array]:
        """Blocks of tensors, put together of what the files have; nothing else is read.

        Args:
            names: of tensors.
            regions: name to the block of it; without, the full tensor.

        Raises:
            CheckpointError: a file is missing or damaged, or blocks are missing.
        """
        opened: dict[str, Mapping[str, Tensor]] = {}
        parts: dict[str, list[tuple[Region, str, str]]] = {name: [] for name in names}
        for block, file in self.files.items():
            name, region = self._place(block)
            if name in parts:
                parts[name].append((region, block, file))
        found = {}
        for name in names:
            region = regions.get(name) or [(0, size) for size in self.tensors[name].shape]
            found[name] = self._assembled(name, region, parts[name], opened)
        return found

    def _check_block(self, block: str, file: Any) -> None:
        """Refuse what is no block of a tensor.

        Raises:
            ValueError: saying why.
        """
        name, region = self._place(block)
        shape = self.tensors[name].shape if name in self.tensors else ()
        is_within = len(region) == len(shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(region, shape, strict=True)
        )
        if name not in self.tensors or not is_within:
            raise ValueError(f"{block} is a block of no tensor")
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"the file of {block} is {file!r}, and no name of a file beside the index")

    def _place(self, block: str) -> tuple[str, Region]:
        """The tensor that a block is of, and which block it is."""
        match = None if block in self.tensors else _BLOCK.fullmatch(block)
        if match is None:
            return block, [(0, size) for size in self.tensors[block].shape] if block in self.tensors else ()
        pairs = (pair.split(":") for pair in match["region"].split(","))
        return match["name"], [(int(start), int(stop)) for start, stop in pairs]

    def _assembled(
        self,
        name: str,
        region: Region,
        parts: Sequence[tuple[Region, str, str]],
        opened: dict[str, Mapping[str, Tensor]],
    ) -> Array:
        entry = self.tensors[name]
        dtype = dtype_of_text(entry.dtype)
        assert dtype is not None
        made = np.empty([stop - start for start, stop in region], dtype.numpy)
        filled = 0
        for held, block, file in parts:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, held, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            if file not in opened:
                opened[file] = self._opened(file)
            if block not in opened[file]:
                raise self._damaged(f"{file} has no {block}")
            wanted = TensorType(dtype, tuple(stop - start for start, stop in held))
            if opened[file][block].type != wanted:
                raise self._damaged(f"{block} is {opened[file][block].type} in {file}, expected {wanted}")
            source = opened[file][block].slice(
                [(start - begin, stop - begin) for (start, stop), (begin, _) in zip(common, held, strict=True)]
            )
            target = tuple(
                slice(start - begin, stop - begin) for (start, stop), (begin, _) in zip(common, region, strict=True)
            )
            made[target] = source.numpy()
            filled += math.prod(stop - start for start, stop in common)
        if filled != made.size:
            raise self._damaged(f"blocks of {name} are missing")
        return made

    def _opened(self, file: str) -> Mapping[str, Tensor]:
        try:
            return read_safetensors(self.path / file)
        except SafetensorsError as error:
            raise self._damaged(f"{file}: {error.what}") from None

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint is damaged: {what}", where=str(self.path), do=instead_of(self.path))


def _what(error: Exception) -> str:
    """What is wrong with an index."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return "it has another form" if isinstance(error, TypeError | AttributeError) else str(error)


def _entry(name: str, facts: Mapping[str, Any]) -> Entry:
    """What an index says of a tensor.

    Raises:
        ValueError: no tensor is so; other errors of Python where something lacks.
    """
    shape = tuple(facts["shape"])
    if dtype_of_text(facts["dtype"]) is None or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name} is {facts['dtype']}{list(shape)}, and no tensor is")
    return Entry(facts["dtype"], shape, facts["kind"], facts["parameter"])


def _bytes(entry: Entry) -> int:
    dtype = dtype_of_text(entry.dtype)
    return 0 if dtype is None else dtype.nbytes(math.prod(entry.shape))
