"""In which order samples come: epoch by epoch, shuffled by a seed."""

from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Order:
    """Which samples each step takes: a pure function of the seed and the step, so that a run can go on anywhere.

    An epoch has as many steps as there are whole batches; what is left over comes in other epochs, where samples are
    shuffled, or makes one more step.

    Args:
        samples: how many there are.
        batch: how many a step takes.
        seed: of the shuffling.
        is_shuffled: whether samples come in another order in each epoch; else as they lie.
        has_short: whether what is left over makes a step of its own.
    """

    def __init__(
        self, samples: int, batch: int, seed: int = 0, is_shuffled: bool = True, has_short: bool = False
    ) -> None:
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.is_shuffled = is_shuffled
        self.has_short = has_short
        self.steps_per_epoch = -(-samples // batch) if has_short else samples // batch

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and which batch of it the step takes, both from 0."""
        return divmod(step, self.steps_per_epoch)

    def rows(self, step: int) -> Array:
        """The samples of a step, from 0."""
        epoch, number = self.place(step)
        first = number * self.batch
        if not self.is_shuffled:
            return np.arange(first, min(first + self.batch, self.samples))
        return _shuffled(self.samples, self.seed, epoch)[first : first + self.batch]


@lru_cache(maxsize=2)
def _shuffled(samples: int, seed: int, epoch: int) -> Array:
    return np.random.default_rng([seed, epoch]).permutation(samples)
