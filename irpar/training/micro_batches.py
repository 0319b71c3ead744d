"""Samples of a step that goes over micro-batches, and of one that does not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.errors import IrparError

if TYPE_CHECKING:
    from irpar.output.training_facts import TrainingFacts

Array = np.ndarray[Any, Any]
Entry = Mapping[str, Any]
"""Of an input, in plan.json."""


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


def in_micro_batches(facts: "TrainingFacts", rows: Array) -> Array:
    """Numbers of samples in the order in which a step takes them: of several micro-batches a row of each."""
    count, names = stacked_inputs(facts)
    return rows.reshape(count, -1) if names else rows


def stacked(facts: "TrainingFacts", given: Mapping[str, Any], entries: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Inputs of a step with a dim that counts micro-batches, also of those that were given as one batch.

    Args:
        facts: of the step.
        given: arrays by name.
        entries: the shape of each input, as the program has it.

    Raises:
        BatchSizeError: one has neither that many samples nor that dim.
    """
    _, names = stacked_inputs(facts)
    found = dict(given)
    for name in names & given.keys():
        shape, array = entries[name], np.asarray(given[name])
        if array.ndim != len(shape) - 1:
            continue
        count, rows = shape[:2]
        if len(array) != count * rows:
            raise BatchSizeError(
                f"{name} has {len(array)} samples, and a step takes {count} micro-batches of {rows}",
                do=f"give {count * rows} samples, or make the step for others: --bind, --micro-batches",
            )
        found[name] = array.reshape(count, rows, *array.shape[1:])
    return found
