"""Which tensors to cut over a mesh, for people who have annotated nothing: what `irpar inspect --suggest` does.

Axes named dp, data or batch (a number may follow) cut the batch of the inputs; all others cut weights, as Megatron-LM
does (Shoeybi et al., 2019). Nothing is known of any model: the factor rules link dims that must lie alike, and of these
classes those are cut that together save most, in FLOPs and weights against sent bytes.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from irpar.analysis.control_flow import trip_count
from irpar.analysis.cost import graph_flops, node_flops
from irpar.analysis.cut_choice import heaviest
from irpar.analysis.cut_classes import CutClass, CutClasses, Shares
from irpar.analysis.cut_rest import SingleCut, single_cuts
from irpar.analysis.flow import Flow
from irpar.analysis.liveness import constant_bytes
from irpar.analysis.order import order_of_use
from irpar.analysis.parts import parts_of
from irpar.analysis.placement import has_rank
from irpar.analysis.plan import make_plan
from irpar.analysis.symbols import require_static
from irpar.instrumentation import Progress
from irpar.ir import Annotation, Graph, Module, Value, clone_module, rewrite
from irpar.ir.annotate import apply_to, named_values
from irpar.ops.matmul import decompose_gemm_bias
from irpar.pass_manager import Instrumentation, PassManager
from irpar.sharding import Axis, IrparError, Mesh, split_axis

from .default_pipeline import COMPLETE, NORMALISE, SHARD, know_ranks
from .display import share_text
from .suggestion_file import Spec, lines_of
from .suggestion_minimum import alike, fewest
from .suggestion_report import Groups
from .suggestion_result import Prediction, Suggestion, dims_of
from .suggestion_words import CutWords, why_no_batch

_DATA_AXIS = re.compile(r"(dp|data|batch)_?\d*")
_LEAST_SHARE = 0.02
"""Of the average gain for each collective, or of all weights; what saves less is not worth one."""
_MOST_EXACT = 20_000
"""Nodes up to which the choice is run once more from the start."""
_LEAST_TOLD = 0.05
"""Share of a rank's FLOPs that an operator has more than its part, to be told."""


def suggest(module: Module, mesh: Mesh, progress: Callable[[Progress], None] | None = None) -> Suggestion:
    """Choose what to cut. The module stays as it is.

    Args:
        module: from `irpar.load`, with all symbols bound; its annotations are not looked at.
        mesh: axes named dp, data or batch cut the inputs, all others the weights.
        progress: is told of each pass of each cut that is tried.

    Raises:
        UnboundSymbolError: a size of the inputs is not known.
        IrparError: the model cannot be partitioned at all, or is one already.
    """
    if module.meshes and not module.is_local:
        raise IrparError(
            f"the module is annotated for the mesh {next(iter(module.meshes.values()))} already",
            do="ask before the module has a mesh, or load the model again",
        )
    if module.is_local:
        raise IrparError("the model is a partition already", do="give the model that it was made of")
    require_static(module)
    return _Suggester(module, mesh, progress).run()


@dataclass(frozen=True)
class _Variant:
    """One set of annotations and what it comes to."""

    tensors: dict[str, Spec]
    prediction: Prediction
    shardings: dict[str, Spec]
    flops: dict[str, int]
    """Operator to what a rank computes of it."""


class _Suggester:
    """One run: normalise, choose the batch, choose the weights, try it, leave out what follows."""

    def __init__(self, module: Module, mesh: Mesh, progress: Callable[[Progress], None] | None) -> None:
        self.mesh = mesh
        self.progress = progress
        self.tried = 0
        self.source = module
        self.work = clone_module(module)
        self.work.annotations.clear()
        PassManager.parse(NORMALISE, self._instrumentation()).run(self.work)
        self.flops = graph_flops(self.work.graph)
        self.weight_bytes = constant_bytes(self.work.graph)
        rewrite(self.work.graph, self.work.opsets, {"Gemm": decompose_gemm_bias})
        known = dict(named_values(module))
        self.sources = {name for name, value in known.items() if value.is_constant}
        self.names = set(known)
        self.flow = Flow(self.work.graph, mesh)
        self.notes: list[str] = []
        self.classes: list[CutClasses] = []
        self.places = order_of_use(self.flow)

    def _instrumentation(self) -> Instrumentation:
        """Of the passes of the next cut that is tried."""
        tell, tried = self.progress, self.tried
        if tell is None:
            return Instrumentation(reproducer=None)

        def told(event: Progress) -> None:
            tell(replace(event, name=f"{event.name} of cut {tried}") if tried else event)

        return Instrumentation(reproducer=None, progress=told)

    def _classes(self, axes: tuple[Axis, ...], shares: Shares | None = None) -> CutClasses:
        self.classes.append(CutClasses(self.work.graph, self.mesh, axes, shares, self.flow))
        return self.classes[-1]

    @cached_property
    def pinnable(self) -> set[str]:
        """The names that an annotation may give to values whose rank is known before normalising."""
        ranked = clone_module(self.source)
        know_ranks(ranked)
        return {name for name, value in named_values(ranked) if has_rank(value)}

    def run(self) -> Suggestion:
        data = tuple(Axis(name) for name in self.mesh.axis_names if _DATA_AXIS.fullmatch(name))
        other = tuple(Axis(name) for name in self.mesh.axis_names if not _DATA_AXIS.fullmatch(name))
        entries: dict[str, Spec] = {}
        shares = Shares()
        if self.mesh.group_size(data) > 1:
            entries, shares = self._cut_batch(data)
        if self.mesh.group_size(other) == 1:
            return self._told(self._fewest(self._try(entries)), None)
        classes = self._classes(other, shares)
        chosen = self._choose(classes)
        variant = self._best(classes, chosen, entries)
        if variant.prediction.gain <= 0:
            chosen, variant = {}, self._try(entries)
        return self._told(self._fewest(variant), CutWords(classes, chosen, other))

    # -- the batch ----------------------------------------------------------------------------------------------

    def _cut_batch(self, axes: tuple[Axis, ...]) -> tuple[dict[str, Spec], Shares]:
        """The inputs' dims that go through the model side by side."""
        classes = self._classes(axes)
        able = {
            number: held
            for number, held in sorted(classes.classes.items())
            if held.inputs and not held.sums_weights and held.twice is None
        }
        # Of dims that are worth the same the outer one.
        worths = {number: held.gain * (1 + 1e-9 / (1 + place)) for place, (number, held) in enumerate(able.items())}
        numbers = heaviest(worths, classes.conflicts(able))
        chosen = self._with_others(able, {number: able[number] for number in sorted(numbers)}, axes)
        if not chosen:
            cut = " and ".join(f"{axis}={self.mesh.axis_size(axis)}" for axis in axes)
            self.notes.append(f"{cut} cuts nothing: {why_no_batch(classes)}")
        return self._of_inputs(chosen, axes), classes.shares_of(chosen)

    def _of_inputs(self, chosen: Mapping[int, CutClass], axes: tuple[Axis, ...]) -> dict[str, Spec]:
        return {
            value.source_name: _spec(value, dim, axes) for held in chosen.values() for value, dim in held.inputs.items()
        }

    def _with_others(
        self, able: Mapping[int, CutClass], chosen: dict[int, CutClass], axes: tuple[Axis, ...]
    ) -> dict[int, CutClass]:
        """Batches of other inputs that meet a chosen one in some tensor, where that is worth it: images and texts that
        are compared in pairs go through their own layers side by side, and are brought together for the comparison."""
        taken = {value for held in chosen.values() for value in held.inputs}
        others = [(n, held) for n, held in able.items() if n not in chosen and not taken & set(held.inputs)]
        if not chosen or not others:
            return chosen
        best = self._try(self._of_inputs(chosen, axes))
        for number, held in sorted(others, key=lambda item: -item[1].gain):
            if taken & set(held.inputs):
                continue
            more = chosen | {number: held}
            variant = self._try(self._of_inputs(more, axes))
            if variant.prediction.gain > best.prediction.gain:
                chosen, best = more, variant
                taken |= set(held.inputs)
        return chosen

    # -- the weights --------------------------------------------------------------------------------------------

    def _choose(self, classes: CutClasses) -> dict[int, CutClass]:
        """The classes that together are worth most; collectives for next to nothing are left out."""
        able = self._able(classes)
        numbers = heaviest({number: held.gain for number, held in able.items()}, classes.conflicts(able))
        chosen = {number: able[number] for number in sorted(numbers)}
        launches = sum(held.collectives for held in chosen.values())
        least_gain = _LEAST_SHARE * sum(held.gain for held in chosen.values()) / max(launches, 1)
        least_bytes = _LEAST_SHARE * self.weight_bytes
        return {
            number: held
            for number, held in chosen.items()
            if held.gain >= least_gain * held.collectives or held.weight_bytes >= least_bytes * held.collectives
        }

    def _able(self, classes: CutClasses) -> dict[int, CutClass]:
        """The classes that axes for weights may cut."""
        return {
            number: held
            for number, held in classes.classes.items()
            if (not held.inputs or held.sums_weights) and held.twice is None and any(map(self._is_source, held.weights))
        }

    def _is_source(self, value: Value) -> bool:
        return value.source_name in self.sources

    def _best(self, classes: CutClasses, chosen: dict[int, CutClass], entries: dict[str, Spec]) -> _Variant:
        """Of the ways to write the choice down the one that turns out best.

        Heads that only a part of the axes divides, such as those of k and v in grouped attention, are cut by completion
        as far as they go, or by that part of the axes throughout; whether it is better to cut their columns and bring
        them together shows when all are run. The same for nodes that the classes leave whole.
        """
        fits = {number: max(map(classes.parts_that_fit, held.gathered), default=1) for number, held in chosen.items()}
        partly = {number: held for number, held in chosen.items() if fits[number] > 1}
        first = {number: held for number, held in chosen.items() if number not in partly}
        variants = [self._try(entries | self._entries(classes, first))]
        if partly:
            variants.append(self._try(entries | self._entries(classes, chosen)))
            variants.append(self._try(entries | self._by_parts(classes, chosen, partly, max(fits.values()))))
        best = _best_of(variants)
        rest = single_cuts(classes, chosen, self._is_source)
        least = _LEAST_SHARE * best.prediction.gain / max(best.prediction.collectives, 1)
        rest = [single for single in rest if single.gain >= least]
        if rest:
            more = [self._try(best.tensors | self._single(classes, rest, keep=keep)) for keep in (False, True)]
            best = _best_of([best, *more])
        return best

    def _entries(self, classes: CutClasses, chosen: Mapping[int, CutClass]) -> dict[str, Spec]:
        return {
            value.source_name: _spec(value, dim, classes.axes)
            for held in chosen.values()
            for value, dim in held.weights.items()
            if self._is_source(value)
        }

    def _by_parts(
        self, classes: CutClasses, chosen: Mapping[int, CutClass], partly: Mapping[int, CutClass], count: int
    ) -> dict[str, Spec]:
        """The choice with the part of the axes that makes `count` parts, for all that hangs together with `partly`."""
        axes = _major_part(self.mesh, classes.axes, count)
        lesser = self._classes(axes, classes.shares)
        wanted = {place for held in partly.values() for place in held.weights.items()}
        able = {
            number: held for number, held in self._able(lesser).items() if not wanted.isdisjoint(held.weights.items())
        }
        numbers = heaviest({number: held.gain for number, held in able.items()}, lesser.conflicts(able))
        found = {number: able[number] for number in sorted(numbers)}
        taken = {value for held in found.values() for value in held.weights}
        kept = {number: held for number, held in chosen.items() if taken.isdisjoint(held.weights)}
        return self._entries(classes, kept) | self._entries(lesser, found)

    def _single(self, classes: CutClasses, rest: Sequence[SingleCut], *, keep: bool) -> dict[str, Spec]:
        entries: dict[str, Spec] = {}
        for single in rest:
            value, dim = single.weight
            entries[value.source_name] = _spec(value, dim, classes.axes)
            for other in single.kept_whole if keep else ():
                if other.source_name in self.pinnable and other.is_static:
                    entries[other.source_name] = (None,) * len(other.shape)
        return entries

    # -- trying it ----------------------------------------------------------------------------------------------

    def _fewest(self, variant: _Variant) -> _Variant:
        """What the fewest entries come to that are worth as much, in order of the model.

        Which entries are needed is looked up by completion alone. What they come to is then said as `irpar partition`
        comes to it, which normalises what is annotated already: it folds no annotated constant, and keeps some sizes
        apart. Of a large model the difference is not worth the time.

        Args:
            variant: with all entries.
        """
        last = len(self.places)
        tensors = dict(sorted(variant.tensors.items(), key=lambda item: self.places.get(item[0], last)))
        run = self._try_exact if len(self.work.graph) <= _MOST_EXACT else self._try
        whole = cache(lambda: run(tensors))
        if not tensors:
            return whole()
        values: dict[str, list[Value]] = {}
        for value in self.flow.values():
            values.setdefault(value.source_name, []).append(value)
        wanted = self._completed(tensors)
        tried: list[_Variant] = []

        def completed(entries: Mapping[str, Spec]) -> tuple[Mapping[str, Spec], Mapping[str, Spec]]:
            return entries, self._completed(entries)

        def missing(found: tuple[Mapping[str, Spec], Mapping[str, Spec]]) -> list[str] | None:
            entries, lies = found
            other = [name for name in tensors if lies.get(name) != wanted.get(name)]
            if other:
                return other
            tried.append(run(entries))
            made = tried[-1].prediction
            if made.is_as_good(variant.prediction) or made.is_as_good(whole().prediction):
                return None
            return [name for name in tensors if tried[-1].shardings.get(name) != whole().shardings.get(name)] or [
                *tensors
            ]

        is_found = fewest(tensors, alike(tensors, values, self.classes), completed, missing) is not None
        return tried[-1] if is_found else whole()

    def _completed(self, tensors: Mapping[str, Spec]) -> dict[str, Spec]:
        """How inputs and constants lie after completion with some annotations."""
        work = clone_module(self.work)
        self._annotate(work, tensors)
        PassManager.parse(COMPLETE, self._instrumentation()).run(work)
        return _shardings(work.graph)

    def _try_exact(self, tensors: Mapping[str, Spec]) -> _Variant:
        """As a whole, from the model as it is."""
        work = clone_module(self.source)
        work.annotations.clear()
        know_ranks(work)
        return self._partition(work, f"{NORMALISE},{SHARD}", tensors)

    def _try(self, tensors: Mapping[str, Spec]) -> _Variant:
        """Complete and localize a copy of what is normalised already."""
        return self._partition(clone_module(self.work), SHARD, tensors)

    def _partition(self, work: Module, pipeline: str, tensors: Mapping[str, Spec]) -> _Variant:
        """Annotate a module and run passes over it; weights stay where they are."""
        self._annotate(work, tensors)
        PassManager.parse(pipeline, self._instrumentation()).run(work)
        plan = make_plan(work, self.mesh, parts_of(work, self.mesh), pipeline="", source={}, original={})
        prediction = Prediction(
            self.flops,
            self.weight_bytes,
            plan.totals["flops_per_rank"],
            max(part["weight_bytes"] for part in plan.parts),
            plan.totals["by_kind"],
        )
        return _Variant(dict(tensors), prediction, _shardings(work.graph), _flops_by_operator(work.graph))

    def _annotate(self, work: Module, tensors: Mapping[str, Spec]) -> None:
        self.tried += 1
        work.set_mesh(self.mesh)
        values: dict[str, list[Value]] = {}
        for name, value in named_values(work):
            if name in tensors:
                values.setdefault(name, []).append(value)
        for name, spec in tensors.items():
            annotation = Annotation(name, dims_of(spec))
            apply_to(work, annotation, self.mesh, list(dict.fromkeys(values[name])))

    # -- telling it ---------------------------------------------------------------------------------------------

    def _told(self, variant: _Variant, words: CutWords | None) -> Suggestion:
        groups = Groups(self.work.graph, self.sources, words)
        cut, whole = groups.made(variant.shardings, variant.tensors, self.places)
        named = {name for group in cut for name in group.names}
        told = [*(group.names for group in cut), *([name] for name in variant.tensors if name not in named)]
        lines = lines_of(variant.tensors, sorted(told, key=self._place), self.names)
        self._tell_undivided(variant, words)
        return Suggestion(
            mesh=self.mesh,
            tensors=variant.tensors,
            lines=lines,
            comments=groups.comments(lines, cut),
            cut=tuple(cut),
            whole=tuple(whole),
            notes=tuple(self.notes),
            prediction=variant.prediction,
        )

    def _place(self, names: Sequence[str]) -> int:
        """Where the first of some tensors is used in the model."""
        return min(self.places.get(name, len(self.places)) for name in names)

    def _tell_undivided(self, variant: _Variant, words: CutWords | None) -> None:
        """Say where a rank computes much more than its part, and where nothing was cut."""
        used = {Axis.parse(axis).name for spec in variant.shardings.values() for axes in spec for axis in axes or ()}
        if words is None:
            self.notes.append("every rank holds the weights whole: no axis is given that cuts them, such as tp=2")
        elif used.isdisjoint(axis.name for axis in words.axes):
            self.notes.append(f"{words.said} cuts nothing: no weight is worth it, for the reasons above")
        for operator, flops in _flops_by_operator(self.work.graph).items():
            own = variant.flops.get(operator, 0)
            if own - flops / self.mesh.size >= _LEAST_TOLD * variant.prediction.flops_per_rank:
                self.notes.append(
                    f"of the FLOPs of all {operator} nodes a rank has {share_text(own, flops)}, "
                    f"not {share_text(1, self.mesh.size)}"
                )


def _shardings(graph: Graph) -> dict[str, Spec]:
    """How inputs and constants lie, by their names in the source model."""
    found: dict[str, Spec] = {}
    for value in (*(value for inner in graph.graphs() for value in inner.constants), *graph.inputs):
        if value.sharding is not None:
            spec = tuple(tuple(axes) if axes else None for axes in value.sharding.spec())
            name = value.source_name
            found[name] = spec if any(spec) else found.get(name, spec)
    return found


def _major_part(mesh: Mesh, axes: Sequence[Axis], count: int) -> tuple[Axis, ...]:
    """The outer part of some axes that makes `count` parts, as far as they can be divided so."""
    part: list[Axis] = []
    for axis in axes:
        size = mesh.axis_size(axis)
        if count % size == 0:
            part.append(axis)
            count //= size
            continue
        if count > 1 and size % count == 0:
            part.append(split_axis(mesh, axis, count)[0])
        break
    return tuple(part)


def _flops_by_operator(graph: Graph) -> Counter[str]:
    """Of a graph and of the bodies in it, counted as `node_flops` counts them."""
    found: Counter[str] = Counter()
    for node in graph:
        bodies = list(node.nested_graphs())
        if not bodies:
            found[node.operator] += node_flops(node)
            continue
        times = trip_count(node) or 1
        for operator, flops in _flops_by_operator(max(bodies, key=graph_flops)).items():
            found[operator] += times * flops
    return found


def _best_of(variants: Sequence[_Variant]) -> _Variant:
    """The best of several variants, the first among equals; each collective has its price."""
    first = variants[0].prediction
    price = _LEAST_SHARE * max(first.gain, 0.0) / max(first.collectives, 1)
    return max(variants, key=lambda variant: variant.prediction.gain - price * variant.prediction.collectives)


def _spec(value: Value, dim: int, axes: Iterable[Axis]) -> Spec:
    return tuple(tuple(map(str, axes)) if place == dim else None for place in range(len(value.shape)))
