"""What may be state of a graph, and making it so."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from irpar.arguments import described, require
from irpar.errors import listed, nearest_names
from irpar.sharding import Sharding

from .dtypes import DType
from .graph import Graph
from .module import Module
from .state import STATE_KINDS, State, StateError, StateKind
from .tensor import ArrayTensor, Tensor, TensorError
from .types import TensorType
from .value import Value


def add_state(
    module: Module,
    name: str,
    output: str | None = None,
    *,
    kind: StateKind = "cache",
    data: Tensor | np.ndarray[Any, Any] | None = None,
    parameter: str | None = None,
) -> Value:
    """Let an input be state: what the module was given last is there in the next run. See `Module.add_state`.

    Raises:
        StateError: there is no such input, constant or result, or they do not fit each other.
        ArgumentError: an argument has another type.
    """
    require("name", name, str, "name an input or a weight")
    require("output", output, (str, type(None)), "name the result that replaces the state, or leave it out")
    require("parameter", parameter, (str, type(None)), "name the parameter that the state belongs to")
    return _add(module, _named(module.graph), name, output, State(kind, None, None, parameter), data)


def add_states(module: Module, kinds: Mapping[str, StateKind]) -> list[Value]:
    """Let inputs or constants be state that nothing replaces, many at once, by name.

    Raises:
        StateError: as from `add_state`.
    """
    named = _named(module.graph)
    return [_add(module, named, name, None, State(kind, None, None, None), None) for name, kind in kinds.items()]


def _named(graph: Graph) -> dict[str, Value]:
    """Inputs and constants by the names that they have in the model, and by those that they have now."""
    values = (*graph.inputs, *graph.constants)
    return {value.source_name: value for value in values} | {value.name: value for value in values}


def _add(
    module: Module,
    found: Mapping[str, Value],
    name: str,
    output: str | None,
    wanted: State,
    data: Tensor | np.ndarray[Any, Any] | None,
) -> Value:
    graph, kind, parameter = module.graph, wanted.kind, wanted.parameter
    if kind not in STATE_KINDS:
        raise StateError(f'there is no kind of state "{kind}"', do=f"use one of {', '.join(STATE_KINDS)}")
    if module.is_local:
        raise StateError("the module is in local view", do="name its state before it is partitioned")
    value = found.get(name)
    if value is None:
        raise StateError(
            f'no input and no constant is called "{name}"',
            notes=nearest_names(name, found),
            do="name an input, whose value stays from run to run, or a weight, which becomes one",
        )
    if value in graph.states:
        raise StateError(f'"{name}" is state already: {graph.states[value].kind}', do="name it once")
    if value.source_name in module.fixed:
        raise StateError(f'"{name}" is an input that is fixed', do="leave it out of `set`, or do not make it state")
    place = None if output is None else _output(graph, output)
    replaced = graph.states.items() if place is not None else ()
    taken = next((other for other, known in replaced if known.output == place), None)
    if taken is not None:
        raise StateError(
            f'the result "{output}" replaces the state "{taken.source_name}" already',
            do=f'name another result for "{name}", or none if it stays as it is',
        )
    state = State(kind, place, value.data if data is None else _tensor(data, value), parameter)
    _check_parameter(name, state, found)
    _refuse(name, _problems(graph, value, state))
    if value.is_constant:
        graph.constant_to_input(value)
    graph.states[value] = state
    return value


def _tensor(data: Any, value: Value) -> Tensor:
    """What a state begins with; lists and numbers take its dtype, arrays keep theirs."""
    if isinstance(data, Tensor):
        return data
    dtype = None if isinstance(data, (np.ndarray, np.generic)) else value.dtype.numpy
    try:
        return ArrayTensor(np.asarray(data, dtype))
    except (TypeError, ValueError, OverflowError, TensorError):
        raise StateError(
            f'"{value.source_name}" cannot begin as {described(data)}', do="give an array of numbers, or a tensor"
        ) from None


def _check_parameter(name: str, state: State, known: Collection[str]) -> None:
    if state.parameter is not None and state.parameter not in known:
        raise StateError(
            f'"{name}" cannot belong to "{state.parameter}": no input and no weight is called so',
            notes=nearest_names(state.parameter, known),
            do="name the parameter by its name in the model, or leave it out",
        )


def _output(graph: Graph, name: str) -> int:
    if name in graph.output_names:
        return graph.output_names.index(name)
    for index, value in enumerate(graph.outputs):
        if name in (value.name, value.source):
            return index
    raise StateError(
        f'no result is called "{name}"',
        notes=nearest_names(name, graph.output_names),
        do=f"name one of {listed(graph.output_names, 5)}",
    )


def state_problems(graph: Graph, value: Value, state: State) -> list[str]:
    """What is wrong with one state of a graph, each as the end of a sentence that the state starts."""
    missing = [] if _is_input(graph, value) else ["is no input of the graph"]
    return missing + _problems(graph, value, state)


def _is_input(graph: Graph, value: Value) -> bool:
    return value.index < len(graph.inputs) and graph.inputs[value.index] is value


def _same_blocks(before: Sharding | None, after: Sharding | None) -> bool:
    """Whether two shardings give each device the same block, however they are spelled."""
    if before is None or after is None:
        return before is after
    return before.canonical == after.canonical


def _problems(graph: Graph, value: Value, state: State, *, is_alone: bool = False) -> list[str]:
    """The same of a value that is an input, or will be; `is_alone`: no other state has its result."""
    found = []
    if state.kind not in STATE_KINDS:
        found.append(f"has the kind {state.kind!r}, which is none of {', '.join(STATE_KINDS)}")
    if not isinstance(value.type, TensorType):
        found.append(f"is {value.type}, and only a tensor can be state")
        return found
    if value.type.dtype is DType.STR:
        found.append("holds texts, and only numbers can be state")
    whole = value.type if value.global_shape is None else value.type.with_shape(value.global_shape)
    if state.data is not None and state.data.type != whole:
        found.append(f"is {whole}, and begins as {state.data.type}")
    if state.output is None:
        return found
    if not 0 <= state.output < graph.output_count:
        found.append(f"is replaced by result {state.output} of {graph.output_count}")
        return found
    after = graph.output(state.output)
    for what in ("type", "global_shape", "memory"):
        before, now = getattr(value, what), getattr(after, what)
        if before != now and not (what == "type" and repr(now) == "?"):
            found.append(f"has the {what.replace('_', ' ')} {before}, and %{after.name}, which replaces it, {now}")
    if graph.view == "local" and not _same_blocks(value.sharding, after.sharding):
        found.append(f"is sharded {value.sharding}, and %{after.name}, which replaces it, {after.sharding}")
    if not is_alone and any(
        other.output == state.output for known, other in graph.states.items() if known is not value
    ):
        found.append(f"is not the only state that %{after.name} replaces")
    return found


def set_states(graph: Graph, states: Mapping[Value, State]) -> None:
    """Let inputs of a graph be state, many at once: what a pass has made.

    Raises:
        StateError: what replaces one does not fit it.
    """
    graph.states.update(states)
    for value, state in states.items():
        _refuse(value.source_name, _problems(graph, value, state, is_alone=True))


def _refuse(name: str, problems: Sequence[str]) -> None:
    if problems:
        raise StateError(
            f'"{name}" cannot be state: it {listed(problems, 3)}',
            do="a state, what it begins with and what replaces it have one type; change the model so that they do",
        )


def replace_outputs(graph: Graph, outputs: Sequence[tuple[str, Value]]) -> None:
    """Give a graph other results, by name, among them those that replace its states, under the names that they had.

    Raises:
        StateError: one of those is not there.
    """
    names = {value: graph.output_names[s.output] for value, s in graph.states.items() if s.output is not None}
    graph.set_outputs([value for _, value in outputs], [name for name, _ in outputs])
    for value, name in names.items():
        graph.states[value] = replace(graph.states[value], output=_output(graph, name))


def states_of(graph: Graph, values: dict[Value, Value]) -> dict[Value, State]:
    """The states of a graph for a copy of it; `values` says what stands for each value there."""
    return {values[value]: state for value, state in graph.states.items() if value in values}
