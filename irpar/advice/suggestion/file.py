"""The text of a --shardings file with what was suggested: globs where they say exactly what is meant, else names."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from irpar.annotations.shardings_file import read_shardings
from irpar.files.atomic import WriteError, check_file, new_file
from irpar.ir.annotate import matching
from irpar.ir.annotation import spec_json
from irpar.sharding import IrparError, Mesh, option, spelled
from irpar.tables.display import shortened

Spec = tuple[tuple[str, ...] | None, ...]
"""Per dim the axes that shard it, major first, or None."""

_NUMBERS = re.compile(r"(\d+)")
_SPECIAL = re.compile(r"[*?\[]")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def pattern_of(names: Sequence[str]) -> str:
    """Names that differ only in numbers as one glob with `*` for these: `h.0.fc`, `h.1.fc` are `h.*.fc`.

    A single name is itself; names that differ otherwise give their first.
    """
    pieces = [_NUMBERS.split(name) for name in names]
    first = pieces[0]
    texts = [piece[::2] for piece in pieces]
    if any(text != texts[0] for text in texts):
        return names[0]
    return "".join(
        "*" if place % 2 and len({piece[place] for piece in pieces}) > 1 else part for place, part in enumerate(first)
    )


def lines_of(tensors: Mapping[str, Spec], groups: Iterable[Sequence[str]], known: Iterable[str]) -> dict[str, Spec]:
    """The entries of the section `tensors`: one for each group where a glob can say it, else one for each name.

    Args:
        tensors: name to sharding, exactly what is meant.
        groups: names that belong together.
        known: all names that a glob could match.
    """
    index = {name: (name,) for name in known}
    lines: dict[str, Spec] = {}
    for group in groups:
        names = [name for name in group if name in tensors]
        if not names:
            continue
        pattern = pattern_of(names)
        said = pattern != names[0] and not any(map(_SPECIAL.search, names))
        if said and pattern not in index and _says(pattern, names, tensors, index):
            lines[pattern] = tensors[names[0]]
        else:
            lines.update((name, tensors[name]) for name in names)
    return lines


def _says(pattern: str, names: Sequence[str], tensors: Mapping[str, Spec], index: Mapping[str, tuple[str]]) -> bool:
    """Whether a glob means these names and no other."""
    return set(matching(pattern, index)) == set(names) and len({tensors[name] for name in names}) == 1


def as_yaml(mesh: Mesh, lines: Mapping[str, Spec], comments: Mapping[str, str], model: str) -> str:
    """The file as YAML, with the reason behind each entry."""
    axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.axes.items())
    head = [
        f"# Suggested by `irpar inspect {_comment(model)} --suggest {mesh}`: a start, to be changed as you like.",
        "# Per dim the axes that shard it, null: not sharded. What is not named follows.",
        f"mesh: {{{axes}}}",
        "tensors:" if lines else "tensors: {}",
    ]
    entries = [(f"  {_key(name)}: {_dims(spec)}", comments.get(name, "")) for name, spec in lines.items()]
    width = min(max((len(entry) for entry, _ in entries), default=0), 60)
    body = [f"{entry:<{width}}  # {shortened(_comment(comment))}" if comment else entry for entry, comment in entries]
    return "\n".join((*head, *body, ""))


def as_json(mesh: Mesh, lines: Mapping[str, Spec]) -> str:
    """The file as JSON."""
    entries = ",\n".join(f"    {json.dumps(name)}: {spec_json(spec)}" for name, spec in lines.items())
    tensors = f"{{\n{entries}\n  }}" if entries else "{}"
    return f'{{\n  "mesh": {json.dumps(dict(mesh.axes))},\n  "tensors": {tensors}\n}}\n'


def _comment(text: str) -> str:
    """A text on one line, without characters that YAML has no comments with."""
    return "".join(character if character.isprintable() else " " for character in text)


def _key(name: str) -> str:
    """A name as a key of YAML: in quotes where it could be read as something else."""
    is_plain = _PLAIN.fullmatch(name.replace("*", "x")) and name[0] != "*" and name.lower() not in _WORDS
    return name if is_plain else json.dumps(name)


def _dims(spec: Spec) -> str:
    texts = ("null" if axes is None else f"[{', '.join(map(_axis, axes))}]" for axes in spec)
    return f"[{', '.join(texts)}]"


def _axis(axis: str) -> str:
    return axis if _PLAIN.fullmatch(axis) and axis.lower() not in _WORDS else json.dumps(axis)


def text_of(path: Path, mesh: Mesh, lines: Mapping[str, Spec], comments: Mapping[str, str], model: str) -> str:
    """The file, in the format that its name asks for."""
    if path.suffix.lower() == ".json":
        return as_json(mesh, lines)
    return as_yaml(mesh, lines, comments, model)


def check_target(path: Path, model: Path | None, *, force: bool) -> None:
    """Refuse a place that holds something else.

    Args:
        path: where the file goes.
        model: the file that is read, if there is one.
        force: whether a --shardings file may be replaced.

    Raises:
        WriteError: its folder is missing; or a file is there, and may not be replaced or is no --shardings file.
    """
    check_file(path, "the suggestion")
    if not path.parent.is_dir():
        raise WriteError(
            "there is no such folder",
            where=str(path.parent),
            do=f"give a file in a folder that exists{spelled(': -o FILE', '')}",
        )
    if not path.exists():
        return
    elsewhere = f"write elsewhere{spelled(': -o FILE', '')}"
    if model is not None and path.samefile(model):
        raise WriteError("the suggestion would replace the model", where=str(path), do=elsewhere)
    if not force:
        raise WriteError(
            "the file of the suggestion exists", where=str(path), do=f"{elsewhere}, or replace it: {option('force')}"
        )
    try:
        read_shardings(path)
    except IrparError as error:
        raise WriteError("the file is no --shardings file, so it stays", where=str(path), do=elsewhere) from error


def write(path: Path, text: str) -> None:
    """Write the file; it takes its place when it is complete.

    Raises:
        WriteError: the system refuses.
    """
    with new_file(path, "the suggestion") as fresh:
        fresh.write_text(text, encoding="utf-8")
