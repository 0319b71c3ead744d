"""Plain data, as JSON and YAML give it, read into typed records; what does not fit is reported with its place."""

import json
import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")
Path = tuple[str | int, ...]

_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")
_LACKS = re.compile(r"missing required field `(.*)`")
_ODD = re.compile(r"unknown field `(.*)`")


@dataclass(frozen=True)
class Misfit:
    """The first thing in plain data that is not of its type.

    Attributes:
        path: the keys and indices that lead to it; to the table, where a field is missing there or unknown.
        what: a field is missing, there is one too many, or a value cannot be.
        field: that field's name.
        text: what is expected, and what was found, in msgspec's words.
    """

    path: Path
    what: Literal["missing", "unknown", "wrong"]
    field: str
    text: str


class MisfitError(ValueError):
    """Plain data that is not of its type.

    Attributes:
        misfit: what is wrong.
    """

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit.text)
        self.misfit = misfit


def read_record(data: Any, kind: type[T]) -> T:
    """Plain data as a record: a struct of msgspec, or a table that a TypedDict describes.

    Halves of surrogate pairs, which JSON can write and no text has, are read as question marks.

    Raises:
        MisfitError: the data are not of that type.
    """
    try:
        return msgspec.convert(data, kind)
    except UnicodeEncodeError:
        text = json.dumps(data, ensure_ascii=False, default=str).encode(errors="replace")
        return read_record(json.loads(text), kind)
    except msgspec.ValidationError as error:
        raise MisfitError(_misfit(str(error), data, kind)) from None


def value_at(data: Any, path: Path) -> Any:
    """What stands at a path in plain data."""
    for key in path:
        data = data[key]
    return data


def type_at(kind: Any, path: Path) -> Any:
    """The type of what stands at a path in a record: as it is annotated, an optional one without its None."""
    for key in path:
        options = options_of(kind)
        inner = [get_args(option)[-1] for option in options if get_origin(option) in (list, dict)]
        kind = inner[0] if inner else next(hints[key] for option in options if key in (hints := fields_of(option)))
    return kind


def expected_at(kind: Any, path: Path) -> str:
    """What the type of a value says of it, or that of the list it stands in: the description in its `msgspec.Meta`."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    found = type_at(kind, path)
    for option in (found, *get_args(found)):
        for note in getattr(option, "__metadata__", ()):
            if note.description:
                return str(note.description)
    return ""


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a struct or TypedDict, and their types; none of what is neither."""
    return get_type_hints(kind, include_extras=True) if isinstance(kind, type) else {}


def _plain(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, NotRequired):
        kind = get_args(kind)[0]
    return kind


def options_of(kind: Any) -> list[Any]:
    """The types of which a value may be, without what is noted of them."""
    plain = _plain(kind)
    if get_origin(plain) not in (Union, types.UnionType):
        return [plain]
    return [inner for option in get_args(plain) for inner in options_of(option)]


def _misfit(text: str, data: Any, kind: Any) -> Misfit:
    found = _AT.search(text)
    text = text[: found.start()] if found is not None else text
    path = _path(found["path"] if found is not None else "", data, kind)
    for what, pattern in (("missing", _LACKS), ("unknown", _ODD)):
        if (match := pattern.search(text)) is not None:
            return Misfit(path, what, match[1], text)  # type: ignore[arg-type]  # One of the two.
    return Misfit(path, "wrong", "", text)


def _path(text: str, data: Any, kind: Any) -> Path:
    """The path that msgspec writes; of a table with any keys it does not say at which one."""
    path: list[str | int] = []
    for step in _STEP.finditer(text):
        if step["name"] is not None:
            path.append(step["name"])
        elif step["index"] is not None:
            path.append(int(step["index"]))
        else:
            table, inner = value_at(data, tuple(path)), type_at(kind, (*path, ""))
            path.append(next(key for key, value in table.items() if not _fits(key, str) or not _fits(value, inner)))
    return tuple(path)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
