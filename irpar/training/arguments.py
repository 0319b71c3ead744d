"""The options of a training step, checked."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from irpar.analysis.trips import WHEN
from irpar.arguments import ArgumentError, described
from irpar.errors import nearest_names
from irpar.passes.optimizer import LOSS_SCALES, OPTIMIZERS

from .schedule import Schedule
from .settings import Settings

_CHOICES = {
    "precision": ("f32", "bf16", "fp16"),
    "loss_scale": LOSS_SCALES,
    "optimizer": OPTIMIZERS,
    "reduce_gradients": WHEN,
    "gather_parameters": WHEN,
}
_ALSO = {"lr": "learning_rate"}
"""Options that have a short name, too, as on the command line."""
_LISTS = ("no_decay", "trainable", "also_trainable", "freeze", "undivided")


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Settings of the arguments of `train_step`.

    Raises:
        ArgumentError: there is no such option, or it has the wrong type.
        ScheduleError: the learning rate is no number of 0 or more.
    """
    known = [field.name for field in fields(Settings)]
    options = {_ALSO.get(name, name): given for name, given in options.items()}
    for name, given in options.items():
        if name not in known:
            raise ArgumentError(
                f"train_step has no option {name}", notes=nearest_names(name, known), do=f"use {', '.join(known)}"
            )
        if name in _LISTS and isinstance(given, str):
            raise ArgumentError(f"{name} is {described(given)}", do=f'write a list of names or globs: {name}=["h.*"]')
        if name in _CHOICES and given not in _CHOICES[name]:
            raise ArgumentError(f"{name} is {described(given)}", do=f"use {', '.join(_CHOICES[name])}")
    try:
        settings = msgspec.convert(dict(options), Settings)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        name = where.strip("`").removeprefix("$.") or "an option"
        given = options.get(name.split("[")[0])
        default = getattr(Settings(), name.split("[")[0], None)
        do = f"give that, or leave it out: it is {default!r} then"
        raise ArgumentError(f"{name} is {described(given)}", notes=(what,), do=do) from None
    Schedule(settings.learning_rate)
    return settings
