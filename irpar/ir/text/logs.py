"""Lines of the text form with a module's logs: which annotations decided, and why values are sharded as they are.

They are no part of the program. Reproducers have them, so that what is replayed gives the same reasons.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from irpar.ir.annotation import Annotation
from irpar.ir.decisions import Conflict, Decision
from irpar.ir.module import Module

from .lexer import Lexer, quote

WORD = "log"


def logs_text(module: Module) -> str:
    """A line `log KIND "name" "JSON"` for each entry."""
    return "".join(
        f"{WORD} {kind} {quote(name)} {quote(json.dumps(entry))}\n" for kind, name, entry in _entries(module)
    )


def _entries(module: Module) -> Iterator[tuple[str, str, Any]]:
    for place, annotation in enumerate(module.annotations):
        yield "waiting", str(place), asdict(annotation)
    for name, annotation in module.annotated.items():
        yield "annotated", name, asdict(annotation)
    for name, decisions in module.decisions.items():
        yield "decisions", name, [asdict(decision) for decision in decisions]
    for name, conflict in module.conflicts.items():
        yield "conflict", name, asdict(conflict)
    for name, why in module.whole.items():
        yield "whole", name, why
    for name, why in module.placed.items():
        yield "placed", name, why
    for name, dims in module.dim_names.items():
        yield "dims", name, list(dims)
    for name in sorted(module.free_results):
        yield "free", name, True


def read_log(lexer: Lexer, module: Module) -> None:
    """Read one such line into a module.

    Raises:
        TextError: it has another form.
    """
    lexer.advance()
    start = lexer.start
    read = _READERS.get(lexer.take("name", f"one of {', '.join(_READERS)}"))
    if read is None:
        raise lexer.error(f"no such log: use one of {', '.join(_READERS)}", start)
    name = lexer.string("the name of a value in quotes")
    at = lexer.start
    text = lexer.string("JSON in quotes")
    try:
        read(module, name, json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise lexer.error("this is no entry of the log", at) from None


def _waiting(module: Module, name: str, entry: Any) -> None:
    place = int(name)
    if not 0 <= place < len(module.annotations):
        raise IndexError
    module.annotations[place] = _annotation(entry)


def _annotated(module: Module, name: str, entry: Any) -> None:
    module.annotated[name] = _annotation(entry)


def _decisions(module: Module, name: str, entry: Any) -> None:
    module.decisions[name] = [
        Decision(_text(each["why"]), _maybe(each["follows"]), tuple(map(_text, each["axes"]))) for each in entry
    ]


def _conflict(module: Module, name: str, entry: Any) -> None:
    kinds = {field.name: field.type for field in fields(Conflict)}
    if set(entry) != set(kinds) or any(type(entry[field]) is not kind for field, kind in kinds.items()):
        raise ValueError
    module.conflicts[name] = Conflict(**entry)


def _whole(module: Module, name: str, entry: Any) -> None:
    module.whole[name] = _text(entry)


def _placed(module: Module, name: str, entry: Any) -> None:
    module.placed[name] = _text(entry)


def _dims(module: Module, name: str, entry: Any) -> None:
    module.dim_names[name] = tuple(map(_maybe, entry))


def _free(module: Module, name: str, entry: Any) -> None:
    if entry is not True:
        raise ValueError
    module.free_results.add(name)


_READERS: Mapping[str, Callable[[Module, str, Any], None]] = {
    "waiting": _waiting,
    "annotated": _annotated,
    "decisions": _decisions,
    "conflict": _conflict,
    "whole": _whole,
    "placed": _placed,
    "dims": _dims,
    "free": _free,
}


def _annotation(entry: Mapping[str, Any]) -> Annotation:
    spec = tuple(dim if dim is None or isinstance(dim, str) else [_text(axis) for axis in dim] for dim in entry["spec"])
    behind = None if entry["behind"] is None else _annotation(entry["behind"])
    where, said = _text(entry["where"]), _text(entry["said"])
    return Annotation(_text(entry["pattern"]), spec, where, said, bool(entry["is_implied"]), behind)


def _text(entry: Any) -> str:
    if not isinstance(entry, str):
        raise TypeError
    return entry


def _maybe(entry: Any) -> str | None:
    return None if entry is None else _text(entry)
