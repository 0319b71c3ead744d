"""How many layers of a model a layer stands for, in a module that has a few of many equal ones."""

from collections.abc import Mapping

from irpar.sharding import IrparError

from .value import Value, made_of


class NeedsAllLayersError(IrparError):
    """What a few layers cannot tell of many: who planned with a few plans again with all of them."""


def layers_of(value: Value, repeats: Mapping[str, int]) -> int:
    """How many layers have what a value is; `repeats` as in `Module.repeats`."""
    return next((repeats[name] for name in made_of(value.name) if name in repeats), 1) if repeats else 1


def only_with_all_layers(what: str) -> NeedsAllLayersError:
    """The error that says what that is."""
    return NeedsAllLayersError(
        f"{what} depends on how many layers there are, and the module has a few for all of them",
        do="plan the module with all of its layers",
    )
