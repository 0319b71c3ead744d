"""Samples of a step that goes over micro-batches, and of one that does not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.errors import IrparError
from irpar.sharding import spelled

if TYPE_CHECKING:
    from irpar.analysis.training_facts import TrainingFacts

Array = np.ndarray[Any, Any]
Entry = Mapping[str, Any]
"""Of an input, in plan.json."""


SAMPLE_COUNT = "sample_count"
"""The name of the input that says how many samples of a step count."""


class BatchSizeError(IrparError):
    """A batch that does not make the micro-batches of a step."""


def stacked_inputs(facts: "TrainingFacts | Mapping[str, Any] | None") -> tuple[int, frozenset[str]]:
    """How many micro-batches a step has, and which inputs have a dim that counts them; 1 and none where it has one."""
    found = (facts or {}).get("micro_batches")
    return (1, frozenset()) if found is None else (found["count"], frozenset(found["inputs"]))


def as_samples(facts: "TrainingFacts", name: str, entry: Entry) -> Entry:
    """An input as data have it: its first dim counts all samples of a step."""
    count, names = stacked_inputs(facts)
    if name not in names:
        return entry
    _, rows, *rest = entry["shape"]
    return {**entry, "shape": [count * rows, *rest]}


def as_one_batch(facts: "TrainingFacts | Mapping[str, Any] | None", entry: Entry) -> Entry:
    """An input as the model has it, whose step is of one micro-batch."""
    if entry["name"] not in stacked_inputs(facts)[1]:
        return entry
    sharding = entry["sharding"]
    return {**entry, "shape": entry["shape"][1:], "sharding": None if sharding is None else sharding[1:]}


def takes_short(facts: "TrainingFacts | Mapping[str, Any] | None") -> bool:
    """Whether steps may have fewer samples than their micro-batches take."""
    found = (facts or {}).get("micro_batches")
    return found is not None and bool(found.get("short"))


def taker(facts: "TrainingFacts | Mapping[str, Any] | None") -> str:
    """What takes samples, in words: a step, of so many micro-batches."""
    count, names = stacked_inputs(facts)
    return f"a step of {count} micro-batches" if names else "a step"


def in_micro_batches(facts: "TrainingFacts", rows: Array, batch: int) -> Array:
    """Numbers of samples in the order in which a step takes them: of several micro-batches a row of each.

    The last sample comes again in place of those that are missing.

    Args:
        facts: of the step.
        rows: the samples.
        batch: how many a step takes.
    """
    count, names = stacked_inputs(facts)
    return np.pad(rows, (0, batch - len(rows)), mode="edge").reshape(count, -1) if names else rows


def stacked(
    facts: "TrainingFacts", given: Mapping[str, Any], entries: Mapping[str, tuple[Any, ...]]
) -> tuple[dict[str, Any], int | None]:
    """Inputs of a step with a dim that counts micro-batches, also of those that were given as one batch.

    Where a step may have fewer samples than it takes, the last one comes again in place of those that are missing.

    Args:
        facts: of the step.
        given: arrays by name.
        entries: the shape of each input, as the program has it.

    Returns:
        These; how many samples there are, where some were given as one batch.

    Raises:
        BatchSizeError: one has neither that many samples nor that dim, or another number than others.
    """
    _, names = stacked_inputs(facts)
    found = dict(given)
    samples: dict[str, int] = {}
    for name in names & given.keys():
        shape, array = entries[name], np.asarray(given[name])
        if array.ndim != len(shape) - 1:
            continue
        count, rows = shape[:2]
        samples[name] = len(array)
        least = 1 if takes_short(facts) else count * rows
        if not least <= len(array) <= count * rows:
            options = ["bind", "micro_batches", *([] if takes_short(facts) else ["short_batches"])]
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise BatchSizeError(
                f"{name} has {len(array)} samples, and a step takes {count} micro-batches of {rows}",
                do=f"give {'1 to ' if takes_short(facts) else ''}{count * rows} samples, or make the step for others: "
                + spelled(flags, ", ".join(options)),
            )
        if len(array) < count * rows:
            array = np.concatenate([array, np.repeat(array[-1:], count * rows - len(array), axis=0)])
        found[name] = array.reshape(count, rows, *array.shape[1:])
    if len(set(samples.values())) > 1:
        words = ", ".join(f"{name} has {size}" for name, size in sorted(samples.items()))
        raise BatchSizeError(f"inputs have different numbers of samples: {words}", do="give equally many of each")
    return found, next(iter(samples.values()), None)
