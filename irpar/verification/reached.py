"""Which branches and loop bodies of a model run on given inputs.

ONNX Runtime's profile tells which nodes of a model ran. What is profiled is the model's control alone: the nodes that
hold graphs, and what these need.
"""

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, helper

from irpar.ir import Graph
from irpar.ops import traits_of_operator
from irpar.process import import_native
from irpar.sharding import IrparError

from .original import Original, first_line, run_session

_MARK = "irpar.ran."

_Key = tuple[str, str, str]
"""Domain, name and overload of a function."""

_MOST_EVENTS = 1_000_000
"""ONNX Runtime records no more of them."""


class ProfileError(IrparError):
    """What ran cannot be told."""


@dataclass(frozen=True)
class Body:
    """A branch, or the body of a loop.

    Attributes:
        holder: the name of the node that holds it, else its operator and first result.
        operator: of that node.
        attribute: that has it: then_branch, else_branch or body.
        nodes: how many it has, those of bodies in it not counted.
        results: names of what the holder gives; in a function with the path of the call before them, for each call.
        follows_inputs: the numbers in the inputs decide how often it runs.
    """

    holder: str
    operator: str
    attribute: str
    nodes: int
    results: tuple[str, ...]
    follows_inputs: bool

    def __str__(self) -> str:
        what = "body" if self.attribute == "body" else self.attribute
        count = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{what} of {self.operator} {self.holder} ({count})"

    def as_json(self) -> dict[str, Any]:
        """As `not_run` of the answer lists it."""
        return {"node": self.holder, "operator": self.operator, "branch": self.attribute, "nodes": self.nodes}


Counts = tuple[int, ...]
"""How often each body ran."""


class Control:
    """The branches and loops of a model that a partition of it has as well.

    Attributes:
        bodies: those.
    """

    def __init__(self, original: Original, graphs: Sequence[Graph]) -> None:
        self._original = original
        self._proto: onnx.ModelProto | None = None
        held: dict[str, Body] = {}
        # Most partitions have none, and a model may be large.
        if present := _holders(graphs):
            proto = original.proto()
            held = {mark: body for mark, body in _Finder(proto).found.items() if not present.isdisjoint(body.results)}
            self._proto = _control_of(proto) if held else None
        self.bodies = tuple(held.values())
        self._marks = tuple(held)

    def counts(self, inputs: Iterable[Mapping[str, Any]]) -> list[Counts | None]:
        """How often each body runs on each of several inputs; None where the model refuses them.

        Raises:
            ProfileError: it cannot be told.
        """
        if self._proto is None:
            return [() for _ in inputs]
        onnxruntime = import_native("onnxruntime")
        from irpar.runtime.engines.ort_values import exact_options

        options = exact_options(
            value.dtype for graph in self._original.module.all_graphs() for value in graph.constants
        )
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        self._original.find_weights(options)
        with tempfile.TemporaryDirectory(prefix="irpar-") as folder:
            options.profile_file_prefix = str(Path(folder) / "profile")
            try:
                session = onnxruntime.InferenceSession(
                    self._proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:
                raise ProfileError(f"ONNX Runtime does not profile the model: {first_line(error)}") from error
            taken = {value.name for value in session.get_inputs()}
            names = [value.name for value in session.get_outputs()]
            ends = [_run(session, names, {key: given[key] for key in taken}) for given in inputs]
            events = json.loads(Path(session.end_profiling()).read_text())
        if len(events) >= _MOST_EVENTS:
            raise ProfileError(f"ONNX Runtime's profile ends after {_MOST_EVENTS:,} events")
        return _by_draw(_by_run(events, self._marks), ends)


class _End(Enum):
    """How a run ended."""

    DONE = auto()
    IN_A_NODE = auto()
    REFUSED = auto()
    """By checks before anything runs; or for a reason that ONNX Runtime tells in other words."""


def _run(session: Any, names: Sequence[str], inputs: Mapping[str, Any]) -> _End:
    try:
        run_session(session, names, inputs)
    except Exception as error:
        return _End.IN_A_NODE if "returned while running" in str(error) else _End.REFUSED
    return _End.DONE


def _by_draw(counted: Sequence[Counts], ends: Sequence[_End]) -> list[Counts | None]:
    """The counts of each draw: the profile has the runs that a node ended too, but not those that checks refuse.

    Raises:
        ProfileError: the profile has other runs than were made.
    """
    begun = [place for place, end in enumerate(ends) if end is not _End.REFUSED]
    if len(counted) == len(ends):
        begun = list(range(len(ends)))
    if len(counted) != len(begun):
        raise ProfileError(f"ONNX Runtime's profile has {len(counted)} runs of {len(begun)}")
    of = dict(zip(begun, counted, strict=True))
    return [of[place] if end is _End.DONE else None for place, end in enumerate(ends)]


def _by_run(events: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> list[Counts]:
    """How often each mark is in each run, in the order in which they began."""
    begins = sorted(event["ts"] for event in events if event["name"] == "model_run")
    made = [[0] * len(marks) for _ in begins]
    places = {mark: place for place, mark in enumerate(marks)}
    for event in events:
        name = event["name"]
        start = name.find(_MARK)
        if start < 0 or not name.endswith("_kernel_time"):
            continue
        place = places.get(name[start : name.index(";", start) + 1])
        run = bisect_right(begins, event["ts"]) - 1
        if place is not None and run >= 0:
            made[run][place] += 1
    return [tuple(counts) for counts in made]


class _Finder:
    """Finds the bodies of a model, and gives one node of each a name that the profile tells.

    Attributes:
        found: the mark to the body.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.found: dict[str, Body] = {}
        self._functions = {_key(function) for function in proto.functions}
        self._nodes(proto.graph.node, {value.name for value in proto.graph.input})
        calls = _Calls(proto)
        for function in proto.functions:
            first = len(self.found)
            self._nodes(function.node, set(function.input))
            for mark in list(self.found)[first:]:
                body = self.found[mark]
                names = chain.from_iterable(calls.outside(function, name) for name in body.results)
                self.found[mark] = replace(body, results=tuple(dict.fromkeys(names)))

    def _nodes(self, nodes: Iterable[onnx.NodeProto], moving: set[str]) -> None:
        """Walk nodes in order; `moving` names the values that the inputs' numbers decide, and grows."""
        for node in nodes:
            reads = any(name in moving for name in (*node.input, *_captured(node)))
            for attribute in _bodies(node):
                self._body(node, attribute, moving)
            if reads and not traits_of_operator(node.domain, node.op_type).reads_sizes:
                moving.update(name for name in node.output if name)

    def _body(self, node: onnx.NodeProto, attribute: AttributeProto, moving: set[str]) -> None:
        graph = attribute.g
        inner = set(moving)
        inner.update(inside.name for inside, name in _carried(node, graph) if name in moving)
        self._nodes(graph.node, inner)
        if node.op_type == "Loop":
            follows = any(name in moving for name in node.input[:2]) or graph.output[0].name in inner
        else:
            follows = node.op_type == "If" and node.input[0] in moving
        if not graph.node:
            return
        results = tuple(filter(None, node.output))
        mark = f"{_MARK}{len(self.found)};"
        count = len(graph.node)
        _mark(graph, mark, self._functions)
        self.found[mark] = Body(
            node.name or (results[0] if results else ""),
            node.op_type,
            attribute.name,
            count,
            results,
            follows,
        )


class _Calls:
    """The calls of a model's functions, wherever they are: in its graph, in bodies, in other functions."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._calls: dict[_Key, list[tuple[onnx.NodeProto, onnx.FunctionProto | None]]] = {}
        for function in proto.functions:
            self._calls[_key(function)] = []
        for caller in (None, *proto.functions):
            for node in _walk((proto.graph if caller is None else caller).node):
                if (calls := self._calls.get(_called(node))) is not None:
                    calls.append((node, caller))

    def outside(self, function: onnx.FunctionProto, name: str) -> Iterator[str]:
        """What a partition calls a value of a function's body, once for each path of calls that leads there.

        Before it stand the names of the calls; a result of the function has the name that it has at the call.
        """
        for node, caller in self._calls[_key(function)]:
            given = dict(reversed([*zip(function.output, node.output, strict=False)])).get(name)
            if caller is None:
                yield given or _joined(node, name)
            elif given:
                yield from self.outside(caller, given)
            else:
                yield from (_joined(node, name, path) for path in self._paths(caller))

    def _paths(self, function: onnx.FunctionProto) -> Iterator[tuple[str, ...]]:
        """The names of the calls that lead to a function, the outermost first."""
        for node, caller in self._calls[_key(function)]:
            own = (node.name,) if node.name else ()
            yield from [own] if caller is None else ((*path, *own) for path in self._paths(caller))


def _joined(call: onnx.NodeProto, name: str, path: tuple[str, ...] = ()) -> str:
    return "/".join((*path, *filter(None, [call.name]), name))


def _key(function: onnx.FunctionProto) -> _Key:
    return function.domain, function.name, function.overload


def _called(node: onnx.NodeProto) -> _Key:
    """The function that a node calls, where the model has it."""
    return node.domain, node.op_type, node.overload


def _walk(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of their bodies."""
    for node in nodes:
        yield node
        for attribute in _bodies(node):
            yield from _walk(attribute.g.node)


def _carried(node: onnx.NodeProto, graph: onnx.GraphProto) -> Iterator[tuple[Any, str]]:
    """The inputs of a body, and the operand that each starts as; If has none."""
    if node.op_type in ("Loop", "Scan", "SequenceMap"):
        yield from zip(graph.input, node.input, strict=False)


def _mark(graph: onnx.GraphProto, mark: str, functions: Set[_Key]) -> None:
    """Name a node of a body that runs whenever the body does; constants are not run, nor are calls once opened."""
    node = next((node for node in graph.node if node.op_type != "Constant" and _called(node) not in functions), None)
    if node is None:
        graph.node.append(helper.make_node("Identity", [graph.output[0].name], [mark], name=mark))
    else:
        node.name = mark


def _bodies(node: onnx.NodeProto) -> Iterator[AttributeProto]:
    return (attribute for attribute in node.attribute if attribute.type == AttributeProto.GRAPH)


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the bodies of a node read, from wherever."""
    for attribute in _bodies(node):
        yield from (value.name for value in attribute.g.output)
        for inside in attribute.g.node:
            yield from inside.input
            yield from _captured(inside)


def _control_of(proto: onnx.ModelProto) -> onnx.ModelProto:
    """What a model does for its branches and loops, as a model of its own."""
    functions = _holding(proto.functions)
    holding = [place for place, node in enumerate(proto.graph.node) if _holds(node, functions)]
    held = set(holding)
    needed: set[str] = set()
    kept = []
    for place, node in reversed([*enumerate(proto.graph.node)]):
        if place in held or any(name in needed for name in node.output if name):
            kept.append(node)
            needed.update(name for name in (*node.input, *_captured(node)) if name)
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    del graph.node[:], graph.output[:], graph.value_info[:], graph.quantization_annotation[:]
    graph.node.extend(reversed(kept))
    for weights in (graph.initializer, graph.sparse_initializer):
        left = [w for w in weights if (w.name if hasattr(w, "name") else w.values.name) in needed]
        del weights[:]
        weights.extend(left)
    ends = dict.fromkeys(next(filter(None, proto.graph.node[place].output), "") for place in holding)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in ends if name)
    return made


def _holds(node: onnx.NodeProto, functions: Set[_Key]) -> bool:
    """Whether a node has bodies, or calls one of the functions that have."""
    return _called(node) in functions or next(_bodies(node), None) is not None


def _holding(functions: Sequence[onnx.FunctionProto]) -> set[_Key]:
    """The functions that have bodies, or call such, each looked at once."""
    callers: dict[_Key, list[_Key]] = {}
    for function in functions:
        for node in function.node:
            callers.setdefault(_called(node), []).append(_key(function))
    waiting = [
        _key(function) for function in functions if any(next(_bodies(node), None) is not None for node in function.node)
    ]
    found = set(waiting)
    while waiting:
        more = set(callers.get(waiting.pop(), ())) - found
        found |= more
        waiting += more
    return found


def _holders(graphs: Sequence[Graph]) -> set[str]:
    """What the source model calls the results of nodes of programs that hold graphs."""
    nodes = (node for graph in graphs for node in graph.walk() if next(iter(node.nested_graphs()), None) is not None)
    return {value.source for node in nodes for value in node.results if value.source}
