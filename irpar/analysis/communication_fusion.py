"""Which collectives are sent together, as a module says it: of each kind, and of single tensors.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; fuse-communication reads
it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from irpar.analysis.cost.together import MOST_MB
from irpar.ir import Module
from irpar.sharding import IrparError

SAID = "irpar.communication_fusion"
"""The entry of a module's metadata."""

Mode = Literal["auto", "size", "index", "off"]


@dataclass(frozen=True)
class FusionMode:
    """How collectives of one kind are merged.

    Attributes:
        mode: auto: where the network says that it is faster, up to a size. size: up to that, whatever it says. index:
            all that stand between two of some numbers. off: none.
        size_mb: MB of what is sent at once, and of its result, at most; of auto and size.
        indices: of index: the numbers, from 0, at which a next one begins.
    """

    mode: Mode = "auto"
    size_mb: float = MOST_MB
    indices: tuple[int, ...] = ()


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
        found = json.loads(text)
        kinds = {str(kind): _mode(**entry) for kind, entry in found["kinds"].items()}
        return FusionSaid(kinds, {str(name): int(number) for name, number in found["numbers"].items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise IrparError(
            f"the metadata {SAID} of the module cannot be read",
            where=text if len(text) <= 100 else f"{text[:97]}...",
            do="take it out, and say anew what is sent together (irpar.annotations.mindspore)",
        ) from None


def _mode(mode: Mode, size_mb: float, indices: list[int]) -> FusionMode:
    if mode not in get_args(Mode):
        raise ValueError(mode)
    return FusionMode(mode, float(size_mb), tuple(map(int, indices)))


def say_fusion_of_kinds(module: Module, kinds: Mapping[str, FusionMode]) -> None:
    """Say how kinds of collectives are merged; what was said of kinds before is forgotten."""
    _say(module, replace(fusion_said(module), kinds=dict(kinds)))


def say_fusion_of_tensors(module: Module, numbers: Mapping[str, int]) -> None:
    """Say with which number tensors go, besides what was said of others."""
    said = fusion_said(module)
    _say(module, replace(said, numbers={**said.numbers, **numbers}))


def _say(module: Module, said: FusionSaid) -> None:
    module.metadata[SAID] = json.dumps(asdict(said))
