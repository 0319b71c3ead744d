"""What a partition depends on, as one digest: the options, the files, irpar itself and what is installed beside it.

Weights beside the model are no part of it: nobody reads terabytes for that. An entry says of their files what the
system says (size, times, inode), which is compared when the entry is found.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from irpar.files.regular_file import open_file

_OWN = ("irpar", "irpar.passes", "irpar.kernels")
"""Packages whose sources make a partition what it is."""
_ENTRY_POINTS = "[irpar."
"""How a group of entry points begins in which other packages name passes and operators."""
_MOST_FOREIGN_FILES = 5000


def key_of(command: str, options: Mapping[str, Any], files: Iterable[Path]) -> str | None:
    """A digest of all that a partition depends on but external data; None where that cannot be said.

    Args:
        command: the name of the command.
        options: those that its result depends on.
        files: all that is read but external data.
    """
    try:
        read = [(os.path.abspath(path), _file_digest(path)) for path in files]
        made = (command, sorted((name, repr(given)) for name, given in options.items()), read, _surroundings())
    except OSError:
        return None
    if made[-1] is None:
        return None
    return hashlib.blake2b(json.dumps(made).encode(errors="surrogatepass"), digest_size=20).hexdigest()


def _file_digest(path: Path) -> str:
    """Of the content of a file; it is an ordinary one, since a pipe can be read only once."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _surroundings() -> list[Any] | None:
    """Python, irpar's sources, and packages by name and version; None where another package's passes are not known."""
    packages, entry_points = _installed()
    homes = [find_spec(name) for name in _OWN]
    own = sorted({path for spec in homes if spec is not None for path in _sources(spec.submodule_search_locations)})
    foreign = [path for name in _packages_of(entry_points) for path in _foreign_sources(name)]
    if len(foreign) > _MOST_FOREIGN_FILES:
        return None
    python = (sys.implementation.name, tuple(sys.version_info), platform.machine())
    return [python, packages, entry_points, _digest_of(own), _digest_of(foreign)]


def _installed() -> tuple[list[str], list[str]]:
    """The names of what is installed, with versions; and the entry points that mean irpar, as texts.

    irpar itself is known by its sources: a build leaves a name for it in the current folder, from where some start it.
    """
    names, texts = set(), []
    for folder in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            if not entry.endswith((".dist-info", ".egg-info")) or re.split(r"[-.]", entry)[0] == "irpar":
                continue
            names.add(entry)
            try:
                text = Path(folder, entry, "entry_points.txt").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if _ENTRY_POINTS in text:
                texts.append(text)
    return sorted(names), texts


def _packages_of(entry_points: Iterable[str]) -> list[str]:
    """The outermost packages that entry points of irpar's groups lie in."""
    found, is_ours = set(), False
    for line in (line.strip() for text in entry_points for line in text.splitlines()):
        if line.startswith("["):
            is_ours = line.startswith(_ENTRY_POINTS)
        elif is_ours and "=" in line:
            found.add(line.partition("=")[2].partition(":")[0].strip().partition(".")[0])
    return sorted(found - {"irpar"})


def _foreign_sources(name: str) -> list[str]:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [spec.origin] if spec.origin is not None else []
    return sorted(_sources(spec.submodule_search_locations))


def _sources(folders: Iterable[str] | None) -> Iterator[str]:
    """The Python files of packages."""
    for folder in folders or ():
        for path, _, names in os.walk(folder):
            yield from (os.path.join(path, name) for name in names if name.endswith(".py"))


def _digest_of(paths: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(b"%d %s %d\n" % (len(path), os.fsencode(path), len(content)))
        digest.update(content)
    return digest.hexdigest()
