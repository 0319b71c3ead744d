"""Packing the parts of some ranks into one tar file, with the plan and a checksum file for each part."""

import hashlib
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from irpar.files.atomic import check_file, new_file
from irpar.output.checksums import sums_file, sums_text
from irpar.output.plan_record import Plan
from irpar.output.plan_source import sha256_of
from irpar.output.target import EVALUATION, MODEL_FILE, PLAN_FILE, WEIGHTS_FILE
from irpar.sharding import IrparError, option, spelled

_DIGEST = "0" * 64
"""Stands for a sha256 that is not known yet."""
_HOLE = bytes(1 << 20)
_MOST_NAME_BYTES = 200

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


class PackError(IrparError):
    """A partition that cannot be packed, or a file that cannot be written."""


@dataclass(frozen=True)
class PackedFile:
    """A file of a pack.

    Attributes:
        name: as `part1/model.onnx`.
        path: where it lies.
        size: in bytes.
        sha256: in hexadecimal; empty until it is copied.
    """

    name: str
    path: Path
    size: int
    sha256: str = ""


@dataclass(frozen=True)
class Pack:
    """What was packed.

    Attributes:
        path: the tar file.
        size: bytes of the tar file.
        name: the folder that it unpacks to.
        ranks: the ranks that were asked for.
        parts: their parts.
        files: what is in it beside the checksum files, by name.
    """

    path: Path
    size: int
    name: str
    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    files: tuple[PackedFile, ...]


def default_target(folder: str | os.PathLike[str], ranks: Sequence[int]) -> Path:
    """`OUT-rank3.tar`, `OUT-ranks0-3+6.tar` ... in the current folder.

    Raises:
        PackError: such a name is too long.
    """
    name = f"{_folder_name(Path(folder))}-rank{'s' * (len(set(ranks)) != 1)}{'+'.join(rank_runs(ranks))}.tar"
    if len(os.fsencode(name)) > _MOST_NAME_BYTES:
        raise PackError("the name for a pack of these ranks is too long", do="name the file: -o FILE.tar")
    return Path(name)


def rank_runs(ranks: Sequence[int]) -> list[str]:
    """Ranks in few words: `["0-3", "6"]`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ["-".join(map(str, run)) for run in runs]


def write_pack(
    folder: str | os.PathLike[str],
    ranks: Sequence[int],
    target: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Pack:
    """Write a tar file with all that some ranks need: plan.json, their parts, a checksum file for each.

    It unpacks to a folder of the partition's name. Packs of one partition can be unpacked into one folder. The bytes
    depend on the names and bytes of these files alone. Weights are copied block by block; what is zero in them is a
    hole in the tar file, where the file system has holes. The tar file takes its place when it is complete.

    Args:
        folder: what `irpar partition` wrote.
        ranks: at least one.
        target: the tar file; None: see `default_target`.
        force: replace a tar file.
        progress: told about written bytes.

    Raises:
        IrparError: no such rank, a damaged partition, one without weights, a target that is not to be replaced, or no
            room.
    """
    from .pieces import open_parts

    folder = Path(folder)
    if not ranks:
        raise PackError(
            "there are no ranks to pack", do=spelled("name them: --rank 3, or --rank 0-3", "name them: ranks=[3]")
        )
    plan_at_first = _plan_sum(folder)
    opened = open_parts(folder, ranks)
    path = Path(target) if target is not None else default_target(folder, ranks)
    _check_target(path, folder, force)
    parts = tuple(part.index for part in opened.parts)
    members = [_member(folder, name) for name in (*_names(opened.plan, parts), *_names_beside(folder, ranks))]
    with new_file(path, "the pack", PackError) as fresh:
        _check_room(fresh, members)
        with open(fresh, "r+b") as file:
            files = _Writer(file, _folder_name(folder), progress, members).write(parts)
        size = fresh.stat().st_size
        if next(file.sha256 for file in files if file.name == PLAN_FILE) != plan_at_first:
            raise PackError("the partition was replaced while it was packed", where=str(folder), do="pack it again")
        _check_target(path, folder, force)
    return Pack(path, size, _folder_name(folder), tuple(sorted(set(ranks))), parts, files)


def _plan_sum(folder: Path) -> str | None:
    """None where there is no plan, which whoever opens the partition tells."""
    path = folder / PLAN_FILE
    return sha256_of(path) if path.is_file() else None


def _folder_name(folder: Path) -> str:
    return Path(os.path.realpath(folder)).name or "partition"


def _names(plan: Plan, parts: Sequence[int]) -> list[str]:
    names = [PLAN_FILE, *{entry["file"] for entry in plan.state if entry["file"] is not None}]
    for index in parts:
        entry = plan.parts[index]
        if entry["model"] != f"part{index}/{MODEL_FILE}":
            raise PackError(
                f"plan.json has {entry['model']} as the model of part {index}, not part{index}/{MODEL_FILE}",
                do="partition the model again; plan.json is not meant to be edited",
            )
        names.append(entry["model"])
        if entry["weights"] is not None:
            names.append(f"part{index}/{WEIGHTS_FILE}")
    return names


def _names_beside(folder: Path, ranks: Sequence[int]) -> list[str]:
    """The files of the evaluation program of a training step that these ranks need."""
    from .pieces import open_parts

    if not (folder / EVALUATION / PLAN_FILE).is_file():
        return []
    opened = open_parts(folder / EVALUATION, ranks)
    return [f"{EVALUATION}/{name}" for name in _names(opened.plan, [part.index for part in opened.parts])]


def _member(folder: Path, name: str) -> PackedFile:
    path = folder / name
    # A link may lead to any file of the machine.
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), *PurePosixPath(name).parts):
        raise PackError(f"{name} is a link, or lies behind one", where=str(folder), do="put the file itself there")
    known = path.stat()
    if not stat.S_ISREG(known.st_mode):
        raise PackError(f"{name} is not a file", where=str(folder), do="partition the model again")
    return PackedFile(name, path, known.st_size)


def _check_target(path: Path, folder: Path, force: bool) -> None:
    """Refuse a target inside the partition, one that is there, and with `force` one that is no tar file."""
    check_file(path, "the pack", PackError)
    inside = os.path.realpath(folder)
    if os.path.commonpath((os.path.realpath(path), inside)) == inside:
        raise PackError(
            "a pack cannot be written into the partition that it is made of",
            where=str(path),
            do="give a file elsewhere: -o FILE.tar",
        )
    if not os.path.lexists(path):
        return
    if not force:
        do = f"give another file, or {option('force')} to replace a tar file"
        raise PackError(f"{path} exists already", do=do)
    if path.exists() and path.stat().st_size and not tarfile.is_tarfile(path):
        raise PackError(
            f"{path} is no tar file, so {option('force')} does not replace it",
            do="give another file, or remove this one yourself",
        )


def _check_room(fresh: Path, members: Sequence[PackedFile]) -> None:
    # Holes take no room, neither here nor there.
    needed = sum(min(member.size, member.path.stat().st_blocks * 512) for member in members)
    free = shutil.disk_usage(fresh.parent).free
    if needed > free:
        raise PackError(
            f"the pack needs {needed:,} bytes, the disk has {free:,} free",
            where=str(fresh.parent),
            do="free some room, or give a file on another disk: -o FILE.tar",
        )


class _Writer:
    """Writes members in the order of their names; the checksums, which come first, when they are known."""

    def __init__(self, file: BinaryIO, name: str, progress: Progress | None, members: Sequence[PackedFile]) -> None:
        self._file = file
        self._name = name
        self._progress = progress
        self._members = members
        self._done = 0
        self._total = sum(member.size for member in members)

    def write(self, parts: Sequence[int]) -> tuple[PackedFile, ...]:
        """Write everything; returns the members with their checksums, by name."""
        of_part = {index: self._names_of(index) for index in parts}
        places: dict[int, int] = {}
        sums: dict[str, str] = {}
        pieces: dict[str, int | PackedFile] = {sums_file(index): index for index in parts}
        pieces |= {member.name: member for member in self._members}
        for name, piece in sorted(pieces.items()):
            if isinstance(piece, PackedFile):
                sums[name] = self._copy(piece)
            else:
                text = sums_text(dict.fromkeys(of_part[piece], _DIGEST)).encode()
                self._header(name, len(text))
                places[piece] = self._file.tell()
                self._file.write(text)
                self._pad(len(text))
        end = -(-(self._file.tell() + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
        self._file.truncate(end)
        for index, place in places.items():
            self._file.seek(place)
            self._file.write(sums_text({name: sums[name] for name in of_part[index]}).encode())
        return tuple(
            replace(member, sha256=sums[member.name])
            for member in sorted(self._members, key=lambda member: member.name)
        )

    def _names_of(self, index: int) -> list[str]:
        names = (member.name for member in self._members)
        return [name for name in names if name == PLAN_FILE or name.startswith(f"part{index}/")]

    def _header(self, name: str, size: int) -> None:
        """Neither time nor owner of a file is part of a pack."""
        info = tarfile.TarInfo(f"{self._name}/{name}")
        info.size, info.mode = size, 0o644
        # GNU's form holds more than 8 GB in one header, and is read by the tar of every system.
        self._file.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def _pad(self, size: int) -> None:
        self._file.seek(-size % tarfile.BLOCKSIZE, io.SEEK_CUR)

    def _copy(self, member: PackedFile) -> str:
        self._header(member.name, member.size)
        digest, count = hashlib.sha256(), 0
        for block in _blocks(member):
            digest.update(block)
            count += len(block)
            if block == _HOLE:
                self._file.seek(len(block), io.SEEK_CUR)
            else:
                self._file.write(block)
            if self._progress is not None:
                self._progress(self._done + count, self._total)
        self._done += count
        self._pad(count)
        return digest.hexdigest()


def _blocks(member: PackedFile) -> Iterator[bytes]:
    """The bytes of a file.

    Raises:
        PackError: it cannot be read, or is changed meanwhile.
    """
    try:
        handle = os.open(member.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            before, count = os.fstat(handle), 0
            # A file that grows is not read for ever.
            while count <= member.size and (block := os.read(handle, len(_HOLE))):
                count += len(block)
                if count <= member.size:
                    yield block
            after = os.fstat(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise PackError(
            f"cannot read {member.name}: {error.strerror}", where=str(member.path), do="check the file and the disk"
        ) from error
    if count != member.size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise PackError(
            f"{member.name} was changed while it was packed",
            where=str(member.path),
            do="pack again when nothing writes there",
        )
