"""Pipelines: passes, their options, and the text that names them.

pipeline = [ pass { "," pass } ]
pass     = NAME [ "{" [ option { "," option } ] "}" ]
option   = WORD "=" ( WORD | "[" [ WORD { "," WORD } ] "]" )
WORD     = characters without space , { } [ ] = "   or a quoted string with JSON escapes
"""

import dataclasses
import importlib
import importlib.util
import json
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar

from irpar.ir import Module
from irpar.sharding import IrparError, nearest_names

from .options import Option, OptionError, Raw, format_value, format_word, options_of, parse_value

ENTRY_POINTS = "irpar.passes"
"""The entry point group in which other packages name their passes."""


class PipelineError(IrparError):
    """A pipeline that cannot be read: its syntax, a pass or an option is not known, or a value does not fit."""


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        changed: whether the module is another one now.
        notes: what the user should know, a line each.
        statistics: counts, by what is counted.
    """

    changed: bool
    notes: tuple[str, ...] = ()
    statistics: dict[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass(ABC):
    """One transformation of a module. Subclasses are frozen dataclasses whose fields are the options.

    The module `irpar.passes.fuse_communication` holds the pass whose `name` is `fuse-communication`; its docstring says
    what must hold before and what holds after.

    A pass raises `IrparError` where the user's model or options are at fault; any other exception counts as a bug.

    `takes_out` says why values that were annotated are not there any more after it.
    """

    name: ClassVar[str]
    takes_out: ClassVar[str] = ""

    @abstractmethod
    def run(self, module: Module) -> PassResult:
        """Change the module in place."""

    def __str__(self) -> str:
        return format_pass(self)


@dataclass(frozen=True)
class PassWithinLimit(Pass):
    """A pass without which programs are as right, and after which ranks may hold more.

    It does not act where that would break the module's memory limit.
    """

    @abstractmethod
    def most_held(self, module: Module) -> int:
        """The most bytes that a rank of a local module holds."""


# -- finding passes -----------------------------------------------------------------------------------------------


def find_pass(name: str) -> type[Pass]:
    """The pass of that name: of the package irpar.passes, else of an entry point in the group `irpar.passes`.

    Raises:
        PipelineError: there is none; the message lists the nearest names.
    """
    found = _own_pass(name) if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) else None
    if found is None:
        found = next((entry.load() for entry in entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is not None:
        if isinstance(found, type) and issubclass(found, Pass) and dataclasses.is_dataclass(found):
            return found
        raise PipelineError(
            f'entry point "{name}" is {found!r}, not a pass',
            do="let the entry point name a frozen dataclass derived from irpar.pass_manager.manager.Pass",
        )
    raise PipelineError(
        f'no pass "{name}"',
        notes=nearest_names(name, available_passes()),
        do=f"choose from: {', '.join(available_passes())}",
    )


def _own_pass(name: str) -> type[Pass] | None:
    path = f"irpar.passes.{name.replace('-', '_')}"
    if importlib.util.find_spec(path) is None:
        return None
    module = importlib.import_module(path)
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, Pass) and getattr(found, "name", "") == name:
            return found
    return None


def available_passes() -> list[str]:
    """Names of all passes that can be found, sorted; no pass is imported."""
    import irpar.passes

    own = (info.name for info in pkgutil.iter_modules(irpar.passes.__path__))
    names = {name.replace("_", "-") for name in own if not name.startswith("_")}
    return sorted(names | {entry.name for entry in entry_points(group=ENTRY_POINTS)})


# -- writing ------------------------------------------------------------------------------------------------------


def format_pass(pass_: Pass) -> str:
    """A pass as a pipeline names it, with the options that differ from their defaults."""
    options = options_of(type(pass_))
    parts = []
    for option in options.named:
        value = getattr(pass_, option.field)
        if value != option.default:
            parts.append(f"{option.name}={format_value(value)}")
    if options.rest is not None:
        rest = getattr(pass_, options.rest.field)
        parts.extend(f"{format_word(key)}={format_value(value)}" for key, value in rest.items())
    return pass_.name + (f"{{{', '.join(parts)}}}" if parts else "")


def format_pipeline(passes: Iterable[Pass]) -> str:
    """The text that `parse_pipeline` reads back to equal passes."""
    return ",".join(map(format_pass, passes))


# -- reading ------------------------------------------------------------------------------------------------------


def parse_pipeline(text: str) -> list[Pass]:
    """Passes from a text such as `complete-sharding,fuse-communication{mode=size, size-mb=25}`.

    Raises:
        PipelineError: with the place in the text.
    """
    return _Parser(text).pipeline()


_TOKEN = re.compile(r'\s*(?:([,{}\[\]=])|([^\s,{}\[\]="]+)|("(?:[^"\\]|\\.)*"))', re.DOTALL)


class _Parser:
    """Recursive descent over the grammar above."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.start = 0

    def pipeline(self) -> list[Pass]:
        passes: list[Pass] = []
        if self.peek() == "":
            return passes
        while True:
            passes.append(self.one_pass())
            if self.peek() == "":
                return passes
            self.expect(",", "after a pass")

    def one_pass(self) -> Pass:
        name = self.word("the name of a pass")
        place = self.start
        try:
            pass_type = find_pass(name)
        except PipelineError as error:
            raise self.error(error.what, place, notes=error.notes, do=error.do) from None
        values = self.options(pass_type) if self.peek() == "{" else {}
        missing = [option.name for option in options_of(pass_type).named if _is_missing(option, values)]
        if missing:
            raise self.error(f"{name} needs the option {missing[0]}", place, do=_listed(pass_type))
        try:
            return pass_type(**values)
        except IrparError as error:
            raise self.error(error.what, place, notes=error.notes, do=error.do) from error

    def options(self, pass_type: type[Pass]) -> dict[str, Any]:
        self.expect("{", "")
        values: dict[str, Any] = {}
        if self.peek() == "}":
            self.take()
            return values
        while True:
            self.option(pass_type, values)
            if self.peek() == "}":
                self.take()
                return values
            self.expect(",", 'or "}" after an option')

    def option(self, pass_type: type[Pass], values: dict[str, Any]) -> None:
        name = self.word("the name of an option")
        place = self.start
        options = options_of(pass_type)
        option = options.find(name)
        if option is None:
            raise self.error(f'{pass_type.name} has no option "{name}"', place, do=_listed(pass_type))
        target, key = (values.setdefault(option.field, {}), name) if option is options.rest else (values, option.field)
        if key in target:
            raise self.error(f'option "{name}" is given twice', place, do="keep one of the two")
        self.expect("=", f'after the option "{name}"')
        raw = self.value()
        try:
            target[key] = parse_value(option.type, raw)
        except OptionError as error:
            written = f"[{', '.join(raw)}]" if isinstance(raw, list) else raw
            raise self.error(
                f'{pass_type.name} cannot take "{written}" for {name}', self.start, do=f"{name}: {error}"
            ) from None

    def value(self) -> Raw:
        if self.peek() != "[":
            return self.word("a value")
        self.take()
        place, words = self.start, []
        while self.peek() != "]":
            words.append(self.word('a value, or "]"'))
            if self.peek() != "]":
                self.expect(",", 'or "]" in a list')
        self.take()
        self.start = place
        return words

    def word(self, wanted: str) -> str:
        token = self.take()
        if token == "" or token in ",{}[]=":
            raise self.error(f"expected {wanted}", self.start, do=_SYNTAX)
        if token[0] != '"':
            return token
        try:
            return str(json.loads(token, strict=False))
        except json.JSONDecodeError as error:
            raise self.error(f"a quoted word that cannot be read: {error.msg}", self.start, do=_SYNTAX) from None

    def expect(self, token: str, where: str) -> None:
        if self.take() != token:
            raise self.error(f'expected "{token}" {where}'.rstrip(), self.start, do=_SYNTAX)

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.position)
        if match is not None:
            return match.group().strip()
        rest = self.text[self.position :]
        if rest.strip():
            place = self.position + len(rest) - len(rest.lstrip())
            raise self.error("a quoted word without its closing quote", place, do=_SYNTAX)
        return ""

    def take(self) -> str:
        token = self.peek()
        match = _TOKEN.match(self.text, self.position)
        self.start = match.end() - len(token) if match else len(self.text.rstrip())
        self.position = match.end() if match else len(self.text)
        return token

    def error(self, what: str, place: int, *, notes: Sequence[str] = (), do: str) -> PipelineError:
        line, caret = _excerpt(self.text, place)
        return PipelineError(what, where=f"{line}\n  {caret}", notes=tuple(notes), do=do)


_SYNTAX = "write passes as name{option=value, option=[a, b]}, with commas between them"


def _is_missing(option: Option, values: dict[str, Any]) -> bool:
    return option.default is dataclasses.MISSING and option.field not in values


def _listed(pass_type: type[Pass]) -> str:
    options = options_of(pass_type)
    if not options.named:
        return f"{pass_type.name} has no options"
    return f"the options of {pass_type.name}: " + ", ".join(option.describe() for option in options.named)


def _excerpt(text: str, place: int, width: int = 90) -> tuple[str, str]:
    """The line around a place, at most about `width` characters of it, and a line with a caret below the place."""
    first = text.rfind("\n", 0, place) + 1
    line = text[first:].split("\n", 1)[0]
    column = place - first
    start = max(0, min(column - width // 2, len(line) - width))
    shown = ("..." if start else "") + line[start : start + width] + ("..." if start + width < len(line) else "")
    return shown, " " * (column - start + (3 if start else 0)) + "^"
