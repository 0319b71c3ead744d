"""Class numbers that the loss of a training step takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from irpar.analysis.training_facts import TrainingFacts

from .dataset import Limits, check_range


def limits_of(facts: TrainingFacts | None) -> Limits:
    """What numbers the targets of a step may be; nothing of what is no step, or takes no classes."""
    if facts is None or facts["target"] is None or facts["classes"] is None:
        return {}
    return {facts["target"]: (0, facts["classes"] - 1, facts["ignore_index"])}


def limits_of_runs(facts: TrainingFacts | None) -> Limits:
    """The same where a run may say that some of its samples do not count: their targets may be any."""
    is_short = facts is not None and facts.get("micro_batches", {}).get("short", False)
    return {} if is_short else limits_of(facts)


def check_targets(limits: Limits, given: Mapping[str, Any], where: str = "") -> None:
    """Refuse class numbers that there are not among what a run is given.

    Raises:
        DataError: naming the first such number.
    """
    for name, (low, high, other) in limits.items():
        numbers = given.get(name)
        if isinstance(numbers, (list, tuple)):
            numbers = np.asarray(numbers)
        if isinstance(numbers, np.ndarray) and numbers.dtype.kind in "iu":  # Others do not fit, which a run refuses.
            check_range(name, numbers, low, high, other, where)
