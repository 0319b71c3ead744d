"""irpar's own facts in ONNX metadata: `irpar.sharding` and the like, on models, values and nodes.

A model that irpar wrote reads back with meshes, shardings, global shape, sources and node facts.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NotRequired, TypedDict, get_args

import numpy as np
from msgspec import Meta

from irpar.files.records import read_record
from irpar.ir import Graph, InflightType, JoinedTensor, LazyTensor, Module, Node, State, Tensor, Value, tensor_type
from irpar.ir.graph import Phase, Place
from irpar.ir.state import StateKind
from irpar.ir.state_rules import state_problems
from irpar.ir.value import Memory
from irpar.sharding import Axis, IrparError, Mesh, Sharding

from .errors import OnnxError
from .scopes import scope_of

PREFIX = "irpar."
INPUT_DEFAULT = "irpar.input_default"
"""On a constant: it was the default of a graph input that irpar dropped."""
SECTIONS = "irpar.sections"
"""On a constant of a part: along which dim the blocks of several sections of the source's tensor stand side by side."""
QUANTIZATION = "irpar.quantization"
"""On a value: its quantization_annotation, JSON of parameter to tensor name."""

_PHASES, _PLACES, _MEMORIES = get_args(Phase), get_args(Place), get_args(Memory)


# -- models -------------------------------------------------------------------------------------------------------


def model_facts(module: Module, graph: Graph) -> dict[str, str]:
    """Meshes, view and ranks, as metadata of the model that holds `graph`."""
    found: dict[str, str] = {}
    meshes = list(module.meshes.values())
    if len(meshes) == 1:
        found["irpar.mesh"] = str(meshes[0])
    if len(meshes) > 1 or any(mesh.devices is not None or mesh.name != "m" for mesh in meshes):
        listed = [{"name": mesh.name, "axes": dict(mesh.axes), "devices": mesh.devices} for mesh in meshes]
        found["irpar.meshes"] = json.dumps(listed)
    if graph.view == "local":
        found["irpar.view"] = "local"
        found["irpar.ranks"] = json.dumps(list(graph.ranks))
    return found


def take_model_facts(module: Module, metadata: dict[str, str]) -> None:
    """Move `model_facts` out of the metadata of a model into the module and its graph.

    Raises:
        OnnxError: an entry cannot be read.
    """
    listed = metadata.pop("irpar.meshes", None)
    plain = metadata.pop("irpar.mesh", None)
    if listed is not None:
        for mesh in _parsed("irpar.meshes", listed, _meshes):
            module.meshes[mesh.name] = mesh
    elif plain is not None:
        module.meshes["m"] = _parsed("irpar.mesh", plain, Mesh.parse)
    if metadata.pop("irpar.view", "") == "local":
        module.graph.view = "local"
    ranks = metadata.pop("irpar.ranks", None)
    if ranks is not None:
        module.graph.ranks = _parsed("irpar.ranks", ranks, _ints)


STATES = "irpar.states"
"""On a model: its state, JSON of what `State` holds, inputs and results by their places."""
_Place = Annotated[int, Meta(ge=0)]


class _StateEntry(TypedDict):
    """One of these."""

    input: _Place
    kind: StateKind
    output: _Place | None
    parameter: str | None
    is_zero: NotRequired[bool]


def state_facts(graph: Graph) -> dict[str, str]:
    """The states of a graph as metadata of the model that holds it; what they begin with stands beside it."""
    if not graph.states:
        return {}
    listed = [
        {
            "input": value.index,
            "kind": state.kind,
            "output": state.output,
            "parameter": state.parameter,
            **({"is_zero": True} if state.data is None else {}),
        }
        for value, state in graph.states.items()
    ]
    return {STATES: json.dumps(listed)}


def beginnings(graph: Graph, *, zeros: bool) -> dict[Value, Tensor]:
    """What states begin with, which a model of its own has as defaults of its inputs.

    Args:
        graph: of the model.
        zeros: whether those that begin as zeros are among them.
    """
    found = {value: state.data or (_zeros(value) if zeros else None) for value, state in graph.states.items()}
    return {value: data for value, data in found.items() if data is not None}


def _zeros(value: Value) -> Tensor | None:
    found = tensor_type(value.type)
    if found is None or not found.is_static:
        return None
    shape, dtype = found.static_shape, found.dtype
    return LazyTensor(dtype, shape, lambda: np.zeros(shape, dtype.numpy))


def take_states(graph: Graph, text: str, names: Sequence[str]) -> None:
    """Set the states of a graph that was read, and let the constants with which they begin be inputs again.

    Args:
        graph: the graph.
        text: the entry.
        names: of the model's inputs, in order, those with a default included.

    Raises:
        OnnxError: the entry cannot be read, or does not fit the graph.
    """

    def parse(text: str) -> None:
        known = {value.name: value for value in (*graph.inputs, *graph.constants)}
        for entry in read_record(json.loads(text), list[_StateEntry]):
            value, output = known[names[entry["input"]]], entry["output"]
            if value in graph.states or (output is not None and output >= len(graph.outputs)):
                raise ValueError(entry)
            data = None if entry.get("is_zero") else value.data
            if value.is_constant:
                graph.constant_to_input(value)
                value.metadata = _without_default(value)
            graph.states[value] = State(entry["kind"], output, data, entry["parameter"])

    _parsed(STATES, text, parse)
    _check_states(graph)
    places = {name: place for place, name in enumerate(names)}
    graph.inputs.sort(key=lambda value: places.get(value.name, len(places)))
    for index, value in enumerate(graph.inputs):
        value.index = index


def _without_default(value: Value) -> dict[str, str] | None:
    kept = {key: text for key, text in (value.metadata or {}).items() if key != INPUT_DEFAULT}
    return kept or None


def _check_states(graph: Graph) -> None:
    known = {value.source_name for value in (*graph.inputs, *graph.constants)}
    for value, state in graph.states.items():
        problems = state_problems(graph, value, state)
        if graph.view != "local" and state.parameter not in (None, *known):
            problems.append(f'belongs to "{state.parameter}", which is no input and no weight')
        if problems:
            raise OnnxError(
                f"metadata {STATES} does not fit the model: %{value.name} {problems[0]}",
                do="mend the entry, or remove it and name the state with Module.add_state",
            )


def _meshes(text: str) -> list[Mesh]:
    return [
        Mesh(item["axes"], None if item["devices"] is None else tuple(item["devices"]), item["name"])
        for item in json.loads(text)
    ]


def _ints(text: str) -> tuple[int, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(type(item) is int and item >= 0 for item in found):
        raise ValueError("not a list of sizes")
    return tuple(found)


def _parsed(key: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (IrparError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = error.what if isinstance(error, IrparError) else "it has another form than irpar writes"
        raise OnnxError(
            f"metadata {key} cannot be read: {what}",
            notes=(f"{key}: {text[:100]}",),
            do="remove the entry, or partition the model again",
        ) from None


# -- values -------------------------------------------------------------------------------------------------------


def value_facts(value: Value, name: str, module: Module) -> dict[str, str]:
    """What irpar knows of a value that ONNX has no field for; `name` is what the model calls it."""
    found: dict[str, str] = {}
    if value.sharding is not None:
        found["irpar.sharding"] = _sharding_text(value.sharding, len(module.meshes))
    if value.global_shape is not None:
        found["irpar.global_shape"] = _shape_text(value.global_shape)
    if isinstance(value.data, JoinedTensor) and value.data.sections is not None:
        found[SECTIONS] = json.dumps({"dim": value.data.dim, "of": value.data.sections})
    source = source_fact(value, name, module)
    if source is not None:
        found["irpar.source"] = source
    if value.memory != "device":
        found["irpar.memory"] = value.memory
    if type(value.type) is InflightType:
        found["irpar.inflight"] = "true"
    return found


def source_fact(value: Value, name: str, module: Module) -> str | None:
    """What a value says of its source: None where nothing need be said.

    In a part, a value that stands for none of the source model says so; elsewhere its name becomes its source.
    """
    source = value.source
    if source == name or (source is None and not module.is_local):
        return None
    return source or ""


@lru_cache(maxsize=4096)
def _shape_text(shape: tuple[int, ...]) -> str:
    return json.dumps(list(shape))


@lru_cache(maxsize=4096)
def _sharding_text(sharding: Sharding, mesh_count: int) -> str:
    entry: dict[str, Any] = {"spec": sharding.spec()}
    if sharding.partial:
        entry["partial"] = [str(axis) for axis in sharding.partial]
        entry["reduce"] = sharding.reduce
    if mesh_count > 1:
        entry["mesh"] = sharding.mesh.name
    return json.dumps(entry)


def take_value_facts(value: Value, metadata: dict[str, str], module: Module) -> None:
    """Set what `value_facts` states, and keep the rest of the metadata on the value.

    Raises:
        OnnxError: an entry cannot be read, or does not fit the value.
    """
    for key in [key for key in metadata if key.startswith(PREFIX)]:
        taker = _VALUE_TAKERS.get(key)
        if taker is not None:
            taker(value, metadata.pop(key), module)
    if metadata:
        value.metadata = value.metadata | metadata if value.metadata else metadata


def _take_sharding(value: Value, text: str, module: Module) -> None:
    def parse(text: str) -> Sharding:
        entry = json.loads(text)
        mesh = module.meshes[entry["mesh"]] if "mesh" in entry else module.mesh
        sharding = Sharding.of_spec(mesh, entry["spec"])
        partial = [Axis.parse(axis) for axis in entry.get("partial", ())]
        return sharding.with_partial(partial, entry.get("reduce", "sum")) if partial else sharding

    sharding: Sharding = _parsed("irpar.sharding", text, parse)
    type_ = tensor_type(value.type)
    if type_ is not None and type_.shape is not None and len(type_.shape) != sharding.rank:
        raise OnnxError(
            f"metadata irpar.sharding has {sharding.rank} dims, but the value is {type_}",
            do="remove the entry, or partition the model again",
        )
    value.sharding = sharding


def _take_global_shape(value: Value, text: str, module: Module) -> None:
    value.global_shape = _parsed("irpar.global_shape", text, _ints)


def _take_source(value: Value, text: str, module: Module) -> None:
    value.source = text or None


def _take_memory(value: Value, text: str, module: Module) -> None:
    value.memory = _one_of("irpar.memory", text, _MEMORIES)


def _take_inflight(value: Value, text: str, module: Module) -> None:
    if type(value.type) is not InflightType:
        value.type = InflightType(value.type)


_VALUE_TAKERS: dict[str, Callable[[Value, str, Module], None]] = {
    "irpar.inflight": _take_inflight,
    "irpar.sharding": _take_sharding,
    "irpar.global_shape": _take_global_shape,
    "irpar.source": _take_source,
    "irpar.memory": _take_memory,
}


def _one_of(key: str, text: str, choices: tuple[str, ...]) -> Any:
    if text not in choices:
        raise OnnxError(f'metadata {key} is "{text}"', do=f"write one of {', '.join(choices)}")
    return text


# -- nodes --------------------------------------------------------------------------------------------------------


def node_origin(node: Node) -> dict[str, str]:
    """Where a node comes from, where neither its name nor its other metadata tell."""
    found: dict[str, str] = {}
    if node.source != (node.name or None):
        found["irpar.source"] = node.source or ""
    if node.scope != scope_of(node.name, node.metadata):
        found["irpar.scope"] = node.scope or ""
    return found


def node_facts(node: Node) -> dict[str, str]:
    """What else irpar knows of a node that ONNX's fields do not tell."""
    found: dict[str, str] = {}
    if node.phase is not None:
        found["irpar.phase"] = node.phase
    if node.stage is not None:
        found["irpar.stage"] = str(node.stage)
    if node.place is not None:
        found["irpar.place"] = node.place
    return found


def take_node_facts(node: Node, metadata: dict[str, str]) -> None:
    """Set what `node_origin` and `node_facts` state; the rest of the metadata stays on the node.

    Raises:
        OnnxError: an entry cannot be read.
    """
    node.metadata = metadata
    node.scope = scope_of(node.name, metadata)
    for key in [key for key in metadata if key.startswith(PREFIX)]:
        taker = _NODE_TAKERS.get(key)
        if taker is not None:
            taker(node, metadata.pop(key))
    if not metadata:
        node.metadata = None


def _take_node_source(node: Node, text: str) -> None:
    node.source = text or None


def _take_scope(node: Node, text: str) -> None:
    node.scope = text or None


def _take_phase(node: Node, text: str) -> None:
    node.phase = _one_of("irpar.phase", text, _PHASES)


def _take_stage(node: Node, text: str) -> None:
    node.stage = _parsed("irpar.stage", text, int)


def _take_place(node: Node, text: str) -> None:
    node.place = _one_of("irpar.place", text, _PLACES)


_NODE_TAKERS: dict[str, Callable[[Node, str], None]] = {
    "irpar.source": _take_node_source,
    "irpar.scope": _take_scope,
    "irpar.phase": _take_phase,
    "irpar.stage": _take_stage,
    "irpar.place": _take_place,
}
