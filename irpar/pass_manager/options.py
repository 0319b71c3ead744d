"""Options of a pass: between the text of a pipeline and the typed fields of a dataclass.

An option is called like its field, with hyphens for underscores. A field whose type is a mapping takes every option
that no other field is called like, under the name as written: the sizes of `bind-dims{batch=8}`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Raw = str | list[str]
"""A value as written: one word, or a list of words in brackets."""

_BARE = re.compile(r"[^\s,{}\[\]=\"]+")


class OptionError(ValueError):
    """A value that does not fit the type of its option; the message says what is allowed."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a pass.

    Attributes:
        name: as in a pipeline, with hyphens.
        field: the dataclass field.
        type: the Python type of a value.
        default: the value when it is not given; `dataclasses.MISSING` where it must be given.
    """

    name: str
    field: str
    type: Any
    default: Any

    def describe(self) -> str:
        """One line for messages: `size-mb (number, default 25)`."""
        default = "" if self.default is dataclasses.MISSING else f", default {format_value(self.default)}"
        return f"{self.name} ({allowed(self.type)}{default})"


@dataclasses.dataclass(frozen=True)
class Options:
    """All options of a pass: those with a name, and the field that takes any other name, if there is one."""

    named: tuple[Option, ...]
    rest: Option | None

    def find(self, name: str) -> Option | None:
        """The option of that name; the one that takes any name where no other fits."""
        return next((option for option in self.named if option.name == name), self.rest)


@cache
def options_of(pass_type: type) -> Options:
    """The options of a pass class, a dataclass, in the order of its fields."""
    hints = get_type_hints(pass_type)
    named: list[Option] = []
    rest = None
    for field in dataclasses.fields(pass_type):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        hint = hints[field.name]
        if get_origin(hint) in (dict, Mapping):
            rest = Option(field.name, field.name, get_args(hint)[1], default)
        else:
            named.append(Option(field.name.replace("_", "-"), field.name, hint, default))
    return Options(tuple(named), rest)


def parse_value(type_: Any, raw: Raw) -> Any:
    """A value of an option from its text.

    Raises:
        OptionError: the text does not fit the type.
    """
    origin = get_origin(type_)
    if origin is tuple:
        words = raw if isinstance(raw, list) else [raw]
        return tuple(parse_value(get_args(type_)[0], word) for word in words)
    if origin in (Union, UnionType):
        return _parse_union(type_, raw)
    if isinstance(raw, list):
        raise OptionError(f"expected {allowed(type_)}, not a list")
    if origin is Literal:
        for choice in get_args(type_):
            if str(choice) == raw:
                return choice
        raise OptionError(f"expected {allowed(type_)}")
    parse = _PARSERS.get(type_)
    if parse is None:
        raise OptionError(f"an option of type {type_} cannot be written as text")
    try:
        return parse(raw)
    except (ValueError, KeyError):
        raise OptionError(f"expected {allowed(type_)}") from None


def _parse_union(type_: Any, raw: Raw) -> Any:
    choices = get_args(type_)
    if raw == "none" and NoneType in choices:
        return None
    for choice in choices:
        if choice is NoneType:
            continue
        try:
            return parse_value(choice, raw)
        except OptionError:
            continue
    raise OptionError(f"expected {allowed(type_)}")


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: {"true": True, "yes": True, "false": False, "no": False}.__getitem__,
    int: int,
    float: float,
    str: str,
}

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    NoneType: "none",
}


def allowed(type_: Any) -> str:
    """What may be written for a type, in words."""
    origin = get_origin(type_)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(type_)))
    if origin is tuple:
        return f"a list [..] of {allowed(get_args(type_)[0]).removeprefix('an ').removeprefix('a ')}"
    if origin in (Union, UnionType):
        return " or ".join(map(allowed, get_args(type_)))
    return _WORDS.get(type_, str(type_))


def format_value(value: Any) -> str:
    """A value as a pipeline writes it."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(format_value, value))}]"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return format_word(str(value))


def format_word(text: str) -> str:
    """A word as a pipeline writes it: in quotes where it holds spaces or punctuation of the syntax."""
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
