"""Which collectives are sent together, as a module says it: of each kind, and of single tensors.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; fuse-communication reads
it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, TypeGuard, get_args

from irpar.analysis.cost.together import MOST_MB
from irpar.ir import Module
from irpar.ops.collectives import OF_KIND
from irpar.sharding import IrparError

from .said import write_said

SAID = "irpar.communication_fusion"
"""The entry of a module's metadata."""

_NO_SIZE_MB = 1e15
"""More than any memory holds, and few enough that they are a finite number of bytes."""

Mode = Literal["auto", "size", "index", "off"]


@dataclass(frozen=True)
class FusionMode:
    """How collectives of one kind are merged.

    Attributes:
        mode: auto: where the network says that it is faster, up to a size. size: up to that, whatever it says. index:
            all that stand between two of some numbers. off: none.
        size_mb: MB of what is sent at once, and of its result, at most; of auto and size.
        indices: of index: the numbers, from 0, at which a next one begins.

    Raises:
        IrparError: a mode, a size or indices that there cannot be; it names no place.
    """

    mode: Mode = "auto"
    size_mb: float = MOST_MB
    indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise IrparError(f"there is no mode {self.mode!r}", do=f"choose from {', '.join(get_args(Mode))}")
        if not is_size(self.size_mb):
            raise IrparError(f"size_mb is {self.size_mb!r}", do="give a number of MB above 0, such as 25")
        if self.indices and self.mode != "index":
            raise IrparError(
                f"there are indices {list(self.indices)} in mode {self.mode}",
                do="give the mode index with indices that ascend, such as [20, 35]",
            )
        if not _ascend(self.indices):
            raise IrparError(
                f"the indices are {list(self.indices)}", do="give indices that ascend from 0, such as [20, 35]"
            )


def is_size(given: object) -> TypeGuard[float]:
    """Whether it is a size in MB: a number above 0, of so many MB that bytes are finite."""
    return isinstance(given, (int, float)) and type(given) is not bool and 0 < given < _NO_SIZE_MB


def _ascend(given: Sequence[object]) -> bool:
    numbers = [index for index in given if type(index) is int and index >= 0]
    return len(numbers) == len(given) and all(first < second for first, second in pairwise(numbers))


@dataclass(frozen=True)
class FusionSaid:
    """What a module says.

    Attributes:
        kinds: of kinds of collectives, as plan.json calls them; of others nothing is said.
        numbers: name of a tensor to a number: its collectives, and those of its gradient, go with those of the same
            number, and with no others; 0: alone.
    """

    kinds: Mapping[str, FusionMode] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    def number_of(self, names: tuple[str, ...]) -> int | None:
        """What is said of the first of some names that it says something of; `grad.` and a tensor is its gradient."""
        known = (name.removeprefix("grad.") for name in names)
        return next((self.numbers[name] for name in known if name in self.numbers), None)


def fusion_said(module: Module) -> FusionSaid:
    """What a module says.

    Raises:
        IrparError: its metadata cannot be read.
    """
    text = module.metadata.get(SAID)
    if text is None:
        return FusionSaid()
    try:
        found = _of_keys(_parsed(text), "it", FusionSaid)
        kinds = {kind: _mode(kind, entry) for kind, entry in _object(found["kinds"], "kinds").items()}
        numbers = {name: _number(name, number) for name, number in _object(found["numbers"], "numbers").items()}
        return FusionSaid(kinds, numbers)
    except IrparError as error:
        raise IrparError(
            f"the metadata {SAID} of the module cannot be read: {error.what}",
            where=text if len(text) <= 100 else f"{text[:97]}...",
            do=error.do or "take it out, and say anew what is sent together (irpar.annotations.mindspore)",
        ) from None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise IrparError("it is no JSON") from None


def _object(found: object, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise IrparError(f"{what} is {found!r}, no object")
    return found


def _of_keys(found: object, what: str, record: type[FusionSaid | FusionMode]) -> dict[str, Any]:
    """An object that has the fields of a class."""
    names = [field.name for field in fields(record)]
    if _object(found, what).keys() != set(names):
        raise IrparError(f"{what} has not the entries {', '.join(names)}, and no others")
    return _object(found, what)


def _mode(kind: str, entry: object) -> FusionMode:
    what = f"kinds.{kind}"
    if kind not in OF_KIND:
        raise IrparError(f"{what} is of no kind of collective", do=f"choose from {', '.join(OF_KIND)}")
    found = _of_keys(entry, what, FusionMode)
    if not isinstance(found["indices"], list):
        raise IrparError(f"{what}.indices is {found['indices']!r}, no list")
    try:
        return FusionMode(found["mode"], found["size_mb"], tuple(found["indices"]))
    except IrparError as error:
        raise IrparError(f"in {what} {error.what}", do=error.do) from None


def _number(name: str, number: object) -> int:
    if type(number) is not int or number < 0:
        raise IrparError(f"numbers.{name} is {number!r}", do="give an integer from 0; 0 means alone")
    return number


def say_fusion_of_kinds(module: Module, kinds: Mapping[str, FusionMode]) -> None:
    """Say how kinds of collectives are merged; what was said of kinds before is forgotten."""
    write_said(module, SAID, replace(fusion_said(module), kinds=dict(kinds)))


def say_fusion_of_tensors(module: Module, numbers: Mapping[str, int]) -> None:
    """Say with which number tensors go, besides what was said of others."""
    said = fusion_said(module)
    write_said(module, SAID, replace(said, numbers={**said.numbers, **numbers}))
