"""Arguments of the Python interface that have the wrong type, told in words."""

from collections.abc import Mapping
from typing import Any

from irpar.errors import IrparError

_WORDS: Mapping[str, str] = {
    "dict": "a dict",
    "list": "a list",
    "tuple": "a tuple",
    "set": "a set",
    "bytes": "bytes",
    "ndarray": "an array",
    "ModelProto": "a ModelProto",
    "Module": "a Module",
    "Partition": "a Partition",
    "Mesh": "a Mesh",
}
_LONGEST = 40


class ArgumentError(IrparError, TypeError):
    """An argument of a type that it cannot have."""


def require(name: str, given: object, kinds: type | tuple[type, ...], do: str) -> None:
    """Refuse an argument of another type; a bool is no number here.

    Args:
        name: what the argument is called.
        given: its value.
        kinds: the types that it may have.
        do: what to give instead.

    Raises:
        ArgumentError: it has none of them.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(given, allowed) or (isinstance(given, bool) and bool not in allowed):
        raise ArgumentError(f"{name} is {described(given)}", do=do)


def described(given: Any) -> str:
    """A value in words: `None`, `the number 3`, `the text "8"`, `a list`, `an object of the class Foo`."""
    if given is None or isinstance(given, bool):
        return str(given)
    if isinstance(given, (int, float)):
        return f"the number {given!r}"
    if isinstance(given, str):
        return f'the text "{given}"' if len(given) <= _LONGEST else f'the text "{given[: _LONGEST - 3]}..."'
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if callable(given):
        return f"the function {getattr(given, '__name__', type(given).__name__)}"
    kind = type(given).__name__
    return _WORDS.get(kind, f"an object of the class {kind}")
