"""How many layers of a model a layer stands for, in a module that has a few of many equal ones."""

import re
from collections.abc import Mapping

from irpar.sharding import IrparError

from .value import Value

_NUMBERED = re.compile(r"(.*)_[0-9]+", re.DOTALL)


class NeedsAllLayersError(IrparError):
    """What a few layers cannot tell of many: who planned with a few plans again with all of them."""


def layers_of(value: Value, repeats: Mapping[str, int]) -> int:
    """How many layers have what a value is; `repeats` as in `Module.repeats`."""
    name = value.name
    while repeats and name not in repeats and (match := _NUMBERED.fullmatch(name)) is not None:
        name = match[1]  # What a pass has made of a value of the layer.
    return repeats.get(name, 1)


def only_with_all_layers(what: str) -> NeedsAllLayersError:
    """The error that says what that is."""
    return NeedsAllLayersError(
        f"{what} depends on how many layers there are, and the module has a few for all of them",
        do="plan the module with all of its layers",
    )
