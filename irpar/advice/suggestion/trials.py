"""What annotations come to: in short, after completion alone, and as `irpar partition` comes to it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import cost_of_placements, placements_of
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.refinement import refine
from irpar.analysis.cost.figures import Figures
from irpar.analysis.cost.network import BYTES
from irpar.analysis.cost.node import graph_flops, node_flops
from irpar.analysis.memory.liveness import constant_bytes, peak
from irpar.analysis.redistribution import block_bytes
from irpar.analysis.types.control_flow import assumed_trips
from irpar.analysis.weights.by_heads import dim_of_heads, without_heads
from irpar.annotations.named import infer_undeclared_types
from irpar.ir import Annotation, Graph, Module, Node, Value, clone_module
from irpar.ir.annotate import apply_to, named_values
from irpar.output.parts import parts_of
from irpar.output.plan import make_plan
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import NORMALISE, SHARD
from irpar.pass_manager.progress import Progress
from irpar.passes.split_bias import split_biases
from irpar.passes.split_weights import give_operands
from irpar.sharding import Mesh, Sharding

from .completion import Completions
from .file import Spec
from .readings import Readings
from .refined_variants import RefinedVariants
from .result import Prediction, dims_of

_MOST_EXACT = 20_000
"""Nodes up to which a model is normalised anew for what it comes to in the end."""
_MOST_ANEW = 300
"""Nodes up to which each cut is refined from the start; of more what was found of a similar one is gone on from."""


@dataclass(frozen=True)
class Estimate:
    """One set of annotations, and what it comes to before collectives are simplified and joined.

    Attributes:
        tensors: the annotations.
        figures: what they come to.
        held: name of each input and constant to how ranks hold it.
    """

    tensors: dict[str, Spec]
    figures: Figures
    held: dict[str, frozenset[Sharding]]


@dataclass(frozen=True)
class Variant:
    """One set of annotations and what it comes to."""

    tensors: dict[str, Spec]
    prediction: Prediction
    shardings: dict[str, Spec]
    flops: dict[str, int]
    """Operator to what a rank computes of it."""
    peak_bytes: int
    """The most that a rank holds at once."""
    readings: Readings
    """What its nodes do with weights."""


class Trials:
    """Annotates copies of a model, runs passes over them, and tells what comes of it.

    Args:
        module: the model, without annotations.
        mesh: that it is sharded over.
        progress: is told of each pass.

    Attributes:
        work: the model, normalised.
        flops, weight_bytes, peak_bytes: of it on one device.
    """

    def __init__(self, module: Module, mesh: Mesh, progress: Callable[[Progress], None] | None) -> None:
        self.source = module
        self.mesh = mesh
        self.progress = progress
        self.tried = 0
        self.work = clone_module(module)
        self.work.annotations.clear()
        PassManager.parse(NORMALISE, self._instrumentation()).run(self.work)
        self.flops = graph_flops(self.work.graph)
        self.weight_bytes = constant_bytes(self.work.graph)
        self.peak_bytes = peak(self.work.graph).total_bytes
        split_biases(self.work)
        give_operands(self.work)
        self._refine = refine if len(self.work.graph) <= _MOST_ANEW else RefinedVariants().refine
        self._completions = Completions(self.work, mesh)
        self._estimates: dict[frozenset[tuple[str, Spec]], Estimate] = {}
        self._exact: dict[frozenset[tuple[str, Spec]], Variant] = {}

    @cached_property
    def ranked(self) -> Module:
        """The model as it was, without annotations, with the types that can be inferred."""
        ranked = clone_module(self.source)
        ranked.annotations.clear()
        infer_undeclared_types(ranked)
        return ranked

    def estimate(self, tensors: Mapping[str, Spec], least: float = -math.inf) -> Estimate:
        """What annotations come to, from completion and the moves that follow from it.

        Args:
            tensors: the annotations.
            least: the gain that is asked for. Where they would not come to it if nothing were sent, ways to send less
                are not looked for.
        """
        key = frozenset(tensors.items())
        if key not in self._estimates:
            self.tried += 1
            watch = self._instrumentation()
            work, flow = self._completions.completed(lambda work: self._annotate(work, tensors), watch)
            placements = placements_of(flow, BYTES)
            if least > -math.inf:
                found = self._estimated(work, flow, tensors, placements)
                if self.gain(replace(found.figures, sent_bytes=0)) < least:
                    return found
            placements = self._refine(flow, placements, BYTES, work.annotated)
            self._estimates[key] = self._estimated(work, flow, tensors, placements)
        return self._estimates[key]

    def exact(self, tensors: Mapping[str, Spec]) -> Variant:
        """What annotations come to, as `irpar partition` comes to it.

        It normalises what is annotated already: it folds no annotated constant, and keeps some sizes apart. Of a large
        model the difference is not worth the time.
        """
        key = frozenset(tensors.items())
        if key not in self._exact:
            if len(self.work.graph) <= _MOST_EXACT:
                work, pipeline = clone_module(self.ranked), f"{NORMALISE},{SHARD}"
            else:
                work, pipeline = clone_module(self.work), SHARD
            self.tried += 1
            work.set_mesh(self.mesh)
            self._annotate(work, tensors)
            PassManager.parse(pipeline, self._instrumentation()).run(work)
            self._exact[key] = self._variant(work, tensors)
        return self._exact[key]

    def gain(self, figures: Figures) -> float:
        """What it is worth to cut so."""
        return figures.gain(self.flops, self.weight_bytes)

    def _instrumentation(self) -> Instrumentation:
        """Of the passes of the next cut that is tried."""
        tell, tried = self.progress, self.tried
        if tell is None:
            return Instrumentation(reproducer=None)

        def told(event: Progress) -> None:
            tell(replace(event, name=f"{event.name} of trial {tried}") if tried else event)

        return Instrumentation(reproducer=None, progress=told)

    def _annotate(self, work: Module, tensors: Mapping[str, Spec]) -> None:
        values: dict[str, list[Value]] = {}
        for name, value in named_values(work):
            if name in tensors:
                values.setdefault(name, []).append(value)
        for name, spec in tensors.items():
            annotation = Annotation(name, dims_of(spec))
            apply_to(work, annotation, self.mesh, list(dict.fromkeys(values[name])))

    def _variant(self, work: Module, tensors: Mapping[str, Spec]) -> Variant:
        """Of a module that is a partition; weights stay where they are."""
        plan = make_plan(work, self.mesh, parts_of(work, self.mesh), pipeline="", source={}, original={})
        prediction = Prediction(
            self.flops,
            self.weight_bytes,
            plan.totals["flops_per_rank"],
            max(part["weight_bytes"] for part in plan.parts),
            plan.totals["by_kind"],
        )
        peak_bytes = max(rank["peak_bytes"] for rank in plan.ranks)
        return Variant(
            dict(tensors),
            prediction,
            shardings_of(work.graph, self.work.graph),
            flops_by_operator(work.graph),
            peak_bytes,
            Readings(work.graph, _heads_of(work.graph, self.work.graph)),
        )

    def _estimated(
        self, work: Module, flow: Flow, tensors: Mapping[str, Spec], placements: Mapping[Node, Placement]
    ) -> Estimate:
        """Of a completed module whose nodes run in these ways."""
        annotated = work.annotated
        sent, moves = cost_of_placements(flow, placements, BYTES, lambda value: value.name in annotated, annotated)
        flops = _rank_flops(work.graph, placements, self.mesh)
        held: dict[str, frozenset[Sharding]] = {}
        weight_bytes = 0
        for value in _held_values(work.graph):
            lies = _held(value, placements, value.is_input or value.name in annotated)
            held[value.source_name] = held.get(value.source_name, frozenset()) | lies
            if value.is_constant and value.is_static:
                weight_bytes += sum(block_bytes(each, value.shape, value.dtype.bits) for each in lies)
        return Estimate(dict(tensors), Figures(weight_bytes, round(flops), sent, moves), held)


def _held(value: Value, placements: Mapping[Node, Placement], is_said: bool) -> frozenset[Sharding]:
    """How ranks hold an input or constant: as was said, or as its readers need it; once where one needs it in full."""
    if value.sharding is None or not value.has_uses:
        return frozenset()
    if is_said:
        return frozenset({value.sharding})
    whole = Sharding.replicated(value.sharding.mesh, value.sharding.rank)
    needs = {placements[node].operands[index] if node in placements else whole for node, index in value.uses}
    found = frozenset(lies or whole for lies in needs)
    return frozenset({whole}) if whole in found else found


def _rank_flops(graph: Graph, placements: Mapping[Node, Placement], mesh: Mesh) -> float:
    """What one device computes of a graph and the bodies in it."""
    total = 0.0
    for node in graph:
        bodies = list(node.nested_graphs())
        placement = placements.get(node)
        if bodies:
            total += assumed_trips(node) * max(_rank_flops(body, placements, mesh) for body in bodies)
        else:
            total += node_flops(node) * (1 if placement is None else placement.largest_share(mesh))
    return total


def shardings_of(graph: Graph, model: Graph) -> dict[str, Spec]:
    """How inputs and constants lie, by their names in the source model, and in the dims that they have there."""
    shapes = _shapes(model)
    found: dict[str, Spec] = {}
    for value in _held_values(graph):
        if value.sharding is not None:
            name = value.source_name
            spec = tuple(tuple(axes) if axes else None for axes in value.sharding.spec())
            if name in shapes and value.is_static:
                spec = without_heads(spec, value.whole_shape, shapes[name])
            found[name] = spec if any(spec) else found.get(name, spec)
    return found


def _heads_of(graph: Graph, model: Graph) -> dict[str, int]:
    """How many heads weights have that have a dim of them, by their names in the source model, where they have none."""
    shapes = _shapes(model)
    found: dict[str, int] = {}
    for value in _held_values(graph):
        if value.source_name in shapes and value.is_static:
            dim = dim_of_heads(value.whole_shape, shapes[value.source_name])
            if dim is not None:
                found[value.source_name] = value.whole_shape[dim]
    return found


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {value.source_name: value.shape for value in _held_values(graph) if value.is_static}


def _held_values(graph: Graph) -> list[Value]:
    return [*(value for inner in graph.graphs() for value in inner.constants), *graph.inputs]


def flops_by_operator(graph: Graph) -> Counter[str]:
    """Of a graph and of the bodies in it, counted as `node_flops` counts them."""
    found: Counter[str] = Counter()
    for node in graph:
        bodies = list(node.nested_graphs())
        if not bodies:
            found[node.operator] += node_flops(node)
            continue
        times = assumed_trips(node)
        for operator, flops in flops_by_operator(max(bodies, key=graph_flops)).items():
            found[operator] += times * flops
    return found
