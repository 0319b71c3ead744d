"""Checksum files: the sha256 of every file of a part, beside the part, as `sha256sum --check` reads them."""

import re
from collections.abc import Mapping
from pathlib import Path

from irpar.sharding import IrparError

_MOST_BYTES = 64 << 10
"""A checksum file has three lines."""
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\0]+)")


class ChecksumError(IrparError):
    """A checksum file that cannot be read."""


def sums_file(part: int) -> str:
    """The name of a part's checksum file, in the folder of the partition."""
    return f"part{part}.sha256"


def sums_text(sums: Mapping[str, str]) -> str:
    """The text of a checksum file: a line for each file, names relative to the folder.

    Args:
        sums: name to sha256 in hexadecimal.
    """
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_sums(path: Path) -> dict[str, str] | None:
    """Name to sha256 in hexadecimal, as a checksum file has them; None where there is no such file.

    Raises:
        ChecksumError: it cannot be read, or is no checksum file.
    """
    again = f"unpack the pack again; without {path.name} nothing is compared with it"
    if not path.exists() and not path.is_symlink():
        return None
    try:
        if not path.is_file():
            raise ChecksumError(f"{path.name} is not a file", where=str(path.parent), do=again)
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ChecksumError(f"cannot read {path.name}: {error.strerror}", where=str(path.parent), do=again) from error
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise ChecksumError(
                f"{path.name} is no checksum file, or a damaged one: line {number} has not a sha256, two spaces and "
                "the name of another file",
                where=str(path.parent),
                do=again,
            )
        sums[match[2]] = match[1]
    return sums
