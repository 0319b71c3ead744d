"""What plan.json holds, field by field, as types; and the check of plain data against them."""

import json
import re
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from irpar.analysis.training_facts import TrainingFacts
from irpar.files.records import MisfitError, fields_of, options_of, read_record, type_at, value_at

Count = Annotated[int, Meta(ge=0)]
"""A number of things, of bytes, of FLOPs."""
Shardings = list[list[str] | None]


class External(TypedDict):
    """A file with weights of the source model."""

    file: str
    size: Count | None
    mtime: float | None


class Source(TypedDict):
    """The source model."""

    model: str | None
    sha256: str | None
    external: list[External]


class MeshFields(TypedDict):
    """The devices."""

    axes: dict[str, Count]
    devices: list[Count] | None


class Memory(TypedDict):
    """What the peak of a rank is made of."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    buffers: Count


class Rank(TypedDict):
    """A place on the mesh."""

    rank: Count
    coords: list[Count]
    part: Count
    peak_bytes: Count
    arena_bytes: NotRequired[Count]
    memory: NotRequired[Memory]
    host_bytes: NotRequired[Count]
    disk_bytes: NotRequired[Count]


class Written(TypedDict):
    """A model.onnx or weights.bin."""

    size: Count
    digest: str


class SegmentEntry(TypedDict):
    """Nodes of a program that run without communication."""

    first: str
    last: str
    nodes: Count
    after: Count | None
    times: Count | None
    place: NotRequired[str]


class PartFields(TypedDict):
    """A program."""

    model: str
    weight_bytes: Count
    flops: Count
    segments: NotRequired[list[SegmentEntry]]
    program: NotRequired[Written | None]
    weights: Written | None


class Spec(TypedDict):
    """An input or output."""

    name: str
    dtype: str | None
    shape: list[Count | None] | None
    sharding: Shardings | None


class InputSpec(Spec):
    """An input."""

    value: NotRequired[Any]


class ConflictEntry(TypedDict):
    """Between which annotations a value is moved."""

    value: str
    lies: str
    because: str
    node: str
    needed: str
    needed_because: str
    rematerialized: bool
    avoid: str


class CollectiveEntry(TypedDict):
    """What is sent."""

    id: Count
    kind: str
    reduce: str | None
    axes: list[str]
    group_size: Count
    dtype: str
    bytes: Count
    sent_bytes: Count
    times: Count | None
    value: str
    phase: str | None
    reason: str | None
    conflict: ConflictEntry | None
    pairs: NotRequired[list[Count]]


class Replicated(TypedDict):
    """What is whole on every rank: a value or an op."""

    value: NotRequired[str]
    op: NotRequired[str]
    bytes: Count | None
    why: str


class OfKind(TypedDict):
    """All collectives of one kind."""

    collectives: Count
    sent_bytes: Count


CopyEntry = TypedDict(
    "CopyEntry",
    {
        "id": Count,
        "from": str,
        "to": str,
        "bytes": Count,
        "times": Count | None,
        "value": str,
        "phase": str | None,
        "reason": NotRequired[str | None],
        "before": NotRequired[str | None],
        "reader": NotRequired[str | None],
    },
)
"""What is copied between memories of one rank."""


class MemoryEntry(TypedDict):
    """Where something lies that is there when a run begins."""

    value: str
    kind: str
    memory: str
    bytes: Count
    why: str | None


class Totals(TypedDict):
    """All collectives, and the part with the most FLOPs."""

    collectives: Count
    sent_bytes: Count
    copied_bytes: NotRequired[Count]
    by_kind: dict[str, OfKind]
    flops_per_rank: Count


class OriginalFields(TypedDict, total=False):
    """The whole model on one device."""

    peak_bytes: Count | None
    weight_bytes: Count | None
    flops: Count | None
    state_bytes: Count | None
    step_seconds: float | None


class Reason(TypedDict):
    """Why a value is sharded so."""

    why: str
    follows: str | None
    axes: list[str]


class Sections(TypedDict):
    """Which sections of a tensor stand side by side."""

    dim: Count
    of: list[list[Count]]


class ValueFields(TypedDict):
    """A value that is sharded."""

    name: str
    source: str
    shape: list[Count | None]
    sharding: Shardings
    partial: list[str]
    sections: NotRequired[Sections | None]
    why: list[Reason]


class AnnotationEntry(TypedDict):
    """An annotation that has another effect than it says, or none."""

    name: str
    annotation: str
    lies: Shardings | None
    why: str


class StateEntry(Spec):
    """An input that keeps its value from run to run."""

    input: str
    output: str | None
    kind: str
    parameter: str | None
    memory: str
    file: str | None


class FunctionEntry(TypedDict):
    """A function of communication in the programs."""

    name: str
    nodes: Count
    buffers: Count
    bytes: Count
    collectives: list[Count]


class PlanFields(TypedDict):
    """The whole file."""

    format: str
    id: str | None
    source: Source
    pipeline: str
    mesh: MeshFields
    ranks: list[Rank]
    parts: list[PartFields]
    inputs: list[InputSpec]
    outputs: list[Spec]
    collectives: list[CollectiveEntry]
    replicated: list[Replicated]
    totals: Totals
    original: OriginalFields
    values: NotRequired[list[ValueFields]]
    network: NotRequired[str]
    memory_limit: NotRequired[Count | None]
    predicted: NotRequired[dict[str, float | None] | None]
    not_as_annotated: NotRequired[list[AnnotationEntry]]
    state: NotRequired[list[StateEntry]]
    copies: NotRequired[list[CopyEntry]]
    memories: NotRequired[list[MemoryEntry]]
    training: NotRequired[TrainingFacts | None]
    functions: NotRequired[list[FunctionEntry]]
    dialect: NotRequired[str]


def misfit(data: Any) -> str | None:
    """The first thing in plain data that is not as plan.json has it; None where all is. Other fields do not matter."""
    try:
        read_record(data, PlanFields)
    except MisfitError as error:
        found = error.misfit
        if found.what == "missing":
            return f"{_place((*found.path, found.field))} is missing"
        shown = _shown(value_at(data, found.path))
        return f"{_place(found.path)} is {shown}, expected {_expected(found.text)}"
    return None


def _place(path: tuple[str | int, ...]) -> str:
    """A path as text: `ranks[0].coords`, `mesh.axes["dp"]`."""
    text = ""
    for depth, key in enumerate(path):
        is_field = any(key in fields_of(option) for option in options_of(type_at(PlanFields, path[:depth])))
        text += f".{key}" if is_field else f"[{json.dumps(key)}]"
    return text.removeprefix(".")


_NAMES = {
    "int": "a whole number of 0 or more",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a table",
}


def _expected(text: str) -> str:
    """What msgspec expects, in words."""
    kinds = [kind for kind in re.findall(r"\w+", text.partition(",")[0]) if kind in _NAMES]
    return " or ".join(_NAMES[kind] for kind in kinds if kind != "null" or len(kinds) == 1)


def _shown(value: Any) -> str:
    text = (
        json.dumps(value) if not isinstance(value, (dict, list)) else "a table" if isinstance(value, dict) else "a list"
    )
    return text if len(text) <= 40 else f"{text[:37]}..."
