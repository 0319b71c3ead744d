"""Schedules of the learning rate: a pure function of the step."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from irpar.errors import IrparError

Kind = Literal["constant", "linear", "cosine"]
KINDS: tuple[str, ...] = get_args(Kind)


class ScheduleError(IrparError):
    """A schedule that cannot be."""


@dataclass(frozen=True)
class Schedule:
    """What the learning rate is at each step.

    Attributes:
        learning_rate: the largest.
        kind: constant; linear or cosine, from the largest down to `least`, which a step behind the last would have, as
            with PyTorch's and Hugging Face's schedules.
        warmup: how many steps it rises to the largest in, along a line.
        steps: of the whole run; only those of linear and cosine matter.
        least: what linear and cosine come to.
    """

    learning_rate: float
    kind: Kind = "constant"
    warmup: int = 0
    steps: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f'there is no schedule "{self.kind}"', do=f"use {', '.join(KINDS)}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise ScheduleError(f"a learning rate of {self.learning_rate}", do="give a number of 0 or more")
        if not (math.isfinite(self.least) and self.least >= 0):
            raise ScheduleError(f"a learning rate of {self.least} at the end", do="give a number of 0 or more")
        if self.warmup < 0:
            raise ScheduleError(f"a warm-up of {self.warmup} steps", do="give 0 steps or more")
        if self.kind != "constant" and self.steps < self.warmup:
            raise ScheduleError(
                f"a warm-up of {self.warmup} steps in a run of {self.steps}", do="give fewer steps of warm-up"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.learning_rate
        share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        left = 1 - share if self.kind == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.least + (self.learning_rate - self.least) * left

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
