"""What a program says of the training step that it is: in the metadata of its model, and in plan.json."""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

METADATA = "irpar.training"
"""The key in a model's metadata."""


class ZeroParameter(TypedDict):
    """A parameter that ZeRO leaves as it is, or shards unevenly.

    Attributes:
        parameter: its name.
        sharding: of its masters and moments where nothing else was said of them, and of what else the stage shards.
        is_sharded: whether the axes of ZeRO shard a dim.
        why: why not, or why blocks are uneven.
    """

    parameter: str
    sharding: list[list[str] | None]
    is_sharded: bool
    why: str


class ZeroFacts(TypedDict):
    """What the pass `zero` did.

    Attributes:
        stage: 1, 2 or 3.
        axes: what it shards over.
        threshold_kb: parameters of which a rank holds fewer than so many times 1,000 bytes stay as they are.
        regather: whether parameters are gathered again in the backward pass.
        parameters: those of which there is something to say.
    """

    stage: int
    axes: list[str]
    threshold_kb: float
    regather: bool
    parameters: list[ZeroParameter]


class MicroBatchFacts(TypedDict):
    """What the pass `accumulate` did.

    Attributes:
        count: how many micro-batches a step has.
        inputs: the inputs that are [count, b, ...]; each trip reads the others whole.
        reduce: whether gradients of which ranks hold shares are reduced once a "step" or in each "micro-batch".
        gather: the same of parameters that ranks hold shares of.
        why: why so, where memory was looked at; else "".
        short: whether steps may have fewer samples: the input `sample_count` says how many of them count.
    """

    count: int
    inputs: list[str]
    reduce: str
    gather: str
    why: str
    short: bool


class TrainingFacts(TypedDict):
    """A training step.

    Attributes:
        loss: as `train_step` was asked for it.
        optimizer: its name.
        learning_rate: what runs take where they are not told otherwise.
        target: the input that the loss compares with; None: it has none.
        classes: how many there are, where targets are numbers of classes.
        ignore_index: the number of targets that do not count.
        inputs: the inputs that are samples, along whose first dim the batch is; of micro-batches along the first two.
        settings: all that `train_step` was asked for.
        bind: sizes of symbolic dims.
        zero: how optimizer state is sharded, where the pass `zero` ran.
        micro_batches: what the step goes over one after the other, where there are several.
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
    zero: NotRequired[ZeroFacts]
    micro_batches: NotRequired[MicroBatchFacts]


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
