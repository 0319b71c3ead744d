"""Which branches and loop bodies of a model run on given inputs.

ONNX Runtime's profile tells which nodes of a model ran. What is profiled is the model's control alone: the nodes that
hold graphs, and what these need.
"""

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, helper

from irpar.ir import Graph
from irpar.process import import_native
from irpar.sharding import IrparError

from .original import Original, first_line, run_session

_MARK = "irpar.ran."
_WHOLE = frozenset({"Shape", "Size"})
"""Operators whose results depend on the shapes of their operands alone."""


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
        results: names of what the holder gives.
        follows_inputs: the numbers in the inputs decide how often it runs.
        in_function: it belongs to a function of the model.
    """

    holder: str
    operator: str
    attribute: str
    nodes: int
    results: tuple[str, ...]
    follows_inputs: bool
    in_function: bool

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
            held = {mark: body for mark, body in _Finder(proto).found.items() if _is_held(body, present)}
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
        from irpar.runtime.ort_values import exact_options

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
        self._in_function = False
        self._nodes(proto.graph.node, {value.name for value in proto.graph.input})
        self._in_function = True
        for function in proto.functions:
            first = len(self.found)
            self._nodes(function.node, set(function.input))
            called = _called_as(function, proto.graph)
            for mark in list(self.found)[first:]:
                body = self.found[mark]
                names = (called.get(name, ()) for name in body.results)
                self.found[mark] = replace(body, results=(*body.results, *chain.from_iterable(names)))

    def _nodes(self, nodes: Iterable[onnx.NodeProto], moving: set[str]) -> None:
        """Walk nodes in order; `moving` names the values that the inputs' numbers decide, and grows."""
        for node in nodes:
            reads = any(name in moving for name in (*node.input, *_captured(node)))
            for attribute in _bodies(node):
                self._body(node, attribute, moving)
            if reads and node.op_type not in _WHOLE:
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
        _mark(graph, mark)
        self.found[mark] = Body(
            node.name or (results[0] if results else ""),
            node.op_type,
            attribute.name,
            count,
            results,
            follows,
            self._in_function,
        )


def _called_as(function: onnx.FunctionProto, graph: onnx.GraphProto) -> dict[str, list[str]]:
    """The results of a function, to what its calls name them."""
    found: dict[str, list[str]] = {}
    for node in graph.node:
        if (node.domain, node.op_type) == (function.domain, function.name):
            for own, outside in zip(function.output, node.output, strict=False):
                found.setdefault(own, []).append(outside)
    return found


def _carried(node: onnx.NodeProto, graph: onnx.GraphProto) -> Iterator[tuple[Any, str]]:
    """The inputs of a body, and the operand that each starts as; If has none."""
    if node.op_type in ("Loop", "Scan", "SequenceMap"):
        yield from zip(graph.input, node.input, strict=False)


def _mark(graph: onnx.GraphProto, mark: str) -> None:
    """Name a node of a body that runs whenever the body does; constants are not run."""
    node = next((node for node in graph.node if node.op_type != "Constant"), None)
    if node is None:
        node = helper.make_node("Identity", [graph.output[0].name], [mark])
        graph.node.append(node)
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
    functions = {(function.domain, function.name): function for function in proto.functions}
    holding = [node for node in proto.graph.node if _holds(node, functions)]
    needed: set[str] = set()
    kept = []
    for node in reversed(proto.graph.node):
        if any(node is holder for holder in holding) or any(name in needed for name in node.output if name):
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
    ends = dict.fromkeys(next(filter(None, node.output), "") for node in holding)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in ends if name)
    return made


def _holds(node: onnx.NodeProto, functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> bool:
    """Whether a node has bodies, or calls a function that has."""
    called = functions.get((node.domain, node.op_type))
    if called is not None:
        return any(_holds(inside, functions) for inside in called.node)
    return next(_bodies(node), None) is not None


def _holders(graphs: Sequence[Graph]) -> set[str]:
    """What the source model calls the results of nodes of programs that hold graphs."""
    nodes = (node for graph in graphs for node in graph.walk() if next(iter(node.nested_graphs()), None) is not None)
    return {value.source for node in nodes for value in node.results if value.source}


def _is_held(body: Body, present: set[str]) -> bool:
    """Whether a partition has a body: what a pass took out does not have to run."""
    if not body.in_function:
        return not present.isdisjoint(body.results)
    # What a function's body gives has the name of the call before its own.
    return not present.isdisjoint(body.results) or any(name.rpartition("/")[2] in body.results for name in present)
