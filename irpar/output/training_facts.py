"""What a program says of the training step that it is: in the metadata of its model, and in plan.json."""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

METADATA = "irpar.training"
"""The key in a model's metadata."""


class TrainingFacts(TypedDict):
    """A training step.

    Attributes:
        loss: as `train_step` was asked for it.
        optimizer: its name.
        learning_rate: what runs take where they are not told otherwise.
        target: the input that the loss compares with; None: it has none.
        classes: how many there are, where targets are numbers of classes.
        ignore_index: the number of targets that do not count.
        inputs: the inputs that are samples, along whose first dim the batch is.
        settings: all that `train_step` was asked for.
        bind: sizes of symbolic dims.
    """

    loss: str
    optimizer: str
    learning_rate: float
    target: str | None
    classes: int | None
    ignore_index: int | None
    inputs: list[str]
    settings: dict[str, Any]
    bind: dict[str, int]


def facts_of(metadata: Mapping[str, str]) -> TrainingFacts | None:
    """What a model's metadata say; None where it is no training step, or they are not readable."""
    from irpar.files.records import MisfitError, read_record

    try:
        return read_record(json.loads(metadata[METADATA]), TrainingFacts)
    except (KeyError, ValueError, MisfitError):
        return None


def metadata_of(facts: TrainingFacts) -> dict[str, Any]:
    """The entry of a model's metadata."""
    return {METADATA: json.dumps(facts)}
