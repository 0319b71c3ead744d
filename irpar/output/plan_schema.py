"""What plan.json holds, field by field, as types; and the check of plain data against them."""

import json
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

_MOST = 2**100
"""Larger numbers are no sizes of anything."""
_NAMES = {
    int: "a whole number of 0 or more",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}

Shardings = list[list[str] | None]


class External(TypedDict):
    """A file with weights of the source model."""

    file: str
    size: int | None
    mtime: float | None


class Source(TypedDict):
    """The source model."""

    model: str | None
    sha256: str | None
    external: list[External]


class MeshFields(TypedDict):
    """The devices."""

    axes: dict[str, int]
    devices: list[int] | None


class Memory(TypedDict):
    """What the peak of a rank is made of."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int


class Rank(TypedDict):
    """A place on the mesh."""

    rank: int
    coords: list[int]
    part: int
    peak_bytes: int
    memory: NotRequired[Memory]


class Written(TypedDict):
    """A model.onnx or weights.bin."""

    size: int
    digest: str


class SegmentEntry(TypedDict):
    """Nodes of a program that run without communication."""

    first: str
    last: str
    nodes: int
    after: int | None
    times: int | None


class PartFields(TypedDict):
    """A program."""

    model: str
    weight_bytes: int
    flops: int
    segments: NotRequired[list[SegmentEntry]]
    program: NotRequired[Written | None]
    weights: Written | None


class Spec(TypedDict):
    """An input or output."""

    name: str
    dtype: str | None
    shape: list[int | None] | None
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


class Collective(TypedDict):
    """What is sent."""

    id: int
    kind: str
    reduce: str | None
    axes: list[str]
    group_size: int
    dtype: str
    bytes: int
    sent_bytes: int
    times: int | None
    value: str
    phase: str | None
    reason: str | None
    conflict: ConflictEntry | None
    pairs: NotRequired[list[int]]


_SHOWN_PAIRS = 4


def over_text(entry: Mapping[str, Any]) -> str:
    """Between which ranks something of plan.json goes: the axes that it runs over, or the ranks, by pairs."""
    pairs: list[int] = entry.get("pairs", [])
    listed = [f"{source} to {target}" for source, target in zip(pairs[::2], pairs[1::2], strict=True)]
    if len(listed) > _SHOWN_PAIRS:
        listed[_SHOWN_PAIRS - 1 :] = [f"{len(listed) - _SHOWN_PAIRS + 1} more"]
    return ",".join(entry["axes"]) or f"ranks {', '.join(listed)}"


def known_times(entry: Mapping[str, Any]) -> int:
    """How often a collective of plan.json runs; one in a body whose runs nobody knows before counts once."""
    times: int | None = entry["times"]
    return 1 if times is None else times


class Replicated(TypedDict):
    """What is whole on every rank: a value or an op."""

    value: NotRequired[str]
    op: NotRequired[str]
    bytes: int | None
    why: str


class OfKind(TypedDict):
    """All collectives of one kind."""

    collectives: int
    sent_bytes: int


class Totals(TypedDict):
    """All collectives, and the part with the most FLOPs."""

    collectives: int
    sent_bytes: int
    by_kind: dict[str, OfKind]
    flops_per_rank: int


class OriginalFields(TypedDict, total=False):
    """The whole model on one device."""

    peak_bytes: int | None
    weight_bytes: int | None
    flops: int | None
    step_seconds: float | None


class Reason(TypedDict):
    """Why a value is cut so."""

    why: str
    follows: str | None
    axes: list[str]


class Sections(TypedDict):
    """Which sections of a tensor stand side by side."""

    dim: int
    of: list[list[int]]


class ValueFields(TypedDict):
    """A value that is cut."""

    name: str
    source: str
    shape: list[int | None]
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
    collectives: list[Collective]
    replicated: list[Replicated]
    totals: Totals
    original: OriginalFields
    values: NotRequired[list[ValueFields]]
    network: NotRequired[str]
    predicted: NotRequired[dict[str, float | None] | None]
    not_as_annotated: NotRequired[list[AnnotationEntry]]
    state: NotRequired[list[StateEntry]]


def misfit(value: Any, kind: Any = PlanFields, place: str = "") -> str | None:
    """The first thing in plain data that is not of its type; None where all is. Fields that no type has are left out.

    Args:
        value: as JSON gives it.
        kind: a TypedDict, a list or dict of one, a union, int (0 or more), float, str, bool or None.
        place: where `value` is, such as `ranks[0]`.
    """
    return next(_misfits(value, kind, place), None)


def _misfits(value: Any, kind: Any, place: str) -> Iterator[str]:
    if kind is Any:
        return
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        known = [option for option in inner if option is not types.NoneType]
        if value is None and len(known) < len(inner):
            return
        assert len(known) == 1, "what is wrong in one of several options cannot be told"
        yield from _misfits(value, known[0], place)
    elif is_typeddict(kind):
        yield from _table(value, kind, place)
    elif origin in (list, dict):
        if not isinstance(value, origin):
            yield f"{place or 'it'} is {_shown(value)}, expected a {'list' if origin is list else 'table'}"
            return
        entries = enumerate(value) if isinstance(value, list) else value.items()
        for key, entry in entries:
            yield from _misfits(entry, inner[-1], f"{place}[{json.dumps(key)}]")
    elif not _is_leaf(value, kind):
        yield f"{place} is {_shown(value)}, expected {_NAMES[kind]}"


def _table(value: Any, kind: Any, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place or 'it'} is {_shown(value)}, expected a table"
        return
    for name, expected in _fields(kind).items():
        inside = f"{place}.{name}" if place else name
        if name in value:
            yield from _misfits(value[name], expected, inside)
        elif name in kind.__required_keys__:
            yield f"{inside} is missing"


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_leaf(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and 0 <= value < _MOST
    if kind is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST)
    return isinstance(value, kind)


def _shown(value: Any) -> str:
    text = (
        json.dumps(value) if not isinstance(value, (dict, list)) else "a table" if isinstance(value, dict) else "a list"
    )
    return text if len(text) <= 40 else f"{text[:37]}..."
