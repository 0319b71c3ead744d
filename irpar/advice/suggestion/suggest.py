"""Which tensors to shard over a mesh, for people who have annotated nothing: what `irpar inspect --suggest` does.

Axes named dp, data or batch (a number may follow) shard the batch of the inputs; all others shard weights, as
Megatron-LM does (Shoeybi et al., 2019). Nothing is known of any model: the factor rules link dims that must lie alike,
and of these classes those are sharded that together save most, in FLOPs and weights against sent bytes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.node_placement import has_rank
from irpar.analysis.cost.figures import Figures
from irpar.analysis.types.symbols import require_static
from irpar.ir import Module, Value, clone_module
from irpar.ir.annotate import named_values
from irpar.ir.collector import collector_off
from irpar.ops.elementwise import is_random_dropout
from irpar.ops.training_batch_norm import trains
from irpar.pass_manager.progress import Progress
from irpar.passes.training_mode.inference import drop_nothing, use_statistics
from irpar.sharding import Axis, IrparError, Mesh, split_axis
from irpar.units import bytes_text, share_text

from .cut_choice import heaviest
from .cut_classes import CutClass, CutClasses, Shares
from .cut_rest import SingleCut, single_cuts
from .file import Spec, lines_of
from .minimum import alike, fewest, without_needless
from .order import order_of_use
from .report import Groups
from .result import Suggestion
from .trials import Estimate, Trials, Variant, flops_by_operator
from .words import CutWords, why_no_batch

_DATA_AXIS = re.compile(r"(dp|data|batch)_?\d*")
_LEAST_SHARE = 0.02
"""Of the average gain for each collective, or of all weights; what saves less is not worth one."""
_MOST_TRIED = 1_000
"""Nodes in all of the completions that look for lines that can be left out."""
_LEAST_TOLD = 0.05
"""Share of a rank's FLOPs that an operator has more than its part, to be told."""


def suggest(module: Module, mesh: Mesh, progress: Callable[[Progress], None] | None = None) -> Suggestion:
    """Choose what to shard. The module stays as it is.

    Args:
        module: from `irpar.load`, with all symbols bound; its annotations are not looked at.
        mesh: axes named dp, data or batch shard the inputs, all others the weights.
        progress: is told of each pass of each trial.

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
    with collector_off():
        used = _as_used(module)
        suggester = _Suggester(module if used is None else used, mesh, progress)
        if used is not None:
            suggester.notes.append(
                "the model is in training mode: this is for it as it is used, with nothing dropped, and for irpar train"
            )
        return suggester.run()


def _as_used(module: Module) -> Module | None:
    """A model in training mode as it is used: random numbers cannot be sharded, and nothing else differs. Else None."""
    dropouts = (node for node in module.graph.walk() if node.identity == ("", "Dropout"))
    if not any(map(is_random_dropout, dropouts)) and not any(map(trains, module.graph.walk())):
        return None
    used = clone_module(module)
    use_statistics(used)
    drop_nothing(used)
    return used


class _Suggester:
    """One run: normalise, choose the batch, choose the weights, try it, leave out what follows."""

    def __init__(self, module: Module, mesh: Mesh, progress: Callable[[Progress], None] | None) -> None:
        self.mesh = mesh
        self.trials = Trials(module, mesh, progress)
        self.graph = self.trials.work.graph
        known = dict(named_values(module))
        self.sources = {name for name, value in known.items() if value.is_constant}
        self.names = set(known)
        self.flow = Flow(self.graph, mesh)
        self.notes: list[str] = []
        self.classes: list[CutClasses] = []
        self.places = order_of_use(self.flow)

    def _classes(self, axes: tuple[Axis, ...], shares: Shares | None = None) -> CutClasses:
        self.classes.append(CutClasses(self.graph, self.mesh, axes, shares, self.flow))
        return self.classes[-1]

    @cached_property
    def pinnable(self) -> set[str]:
        """The names that an annotation may give to values whose rank is known before normalising."""
        return {name for name, value in named_values(self.trials.ranked) if has_rank(value)}

    def run(self) -> Suggestion:
        data = tuple(Axis(name) for name in self.mesh.axis_names if _DATA_AXIS.fullmatch(name))
        other = tuple(Axis(name) for name in self.mesh.axis_names if not _DATA_AXIS.fullmatch(name))
        entries: dict[str, Spec] = {}
        shares = Shares()
        if self.mesh.group_size(data) > 1:
            entries, shares = self._cut_batch(data)
        if self.mesh.group_size(other) == 1:
            return self._told(self._fewest(self.trials.estimate(entries)), None)
        classes = self._classes(other, shares)
        chosen = self._choose(classes)
        best = self._best(classes, chosen, entries)
        if self.trials.gain(best.figures) <= 0:
            chosen, best = {}, self.trials.estimate(entries)
        found = self._fewest(best)
        return self._told(found, CutWords(classes, chosen, other, found.readings))

    # -- the batch ----------------------------------------------------------------------------------------------

    def _cut_batch(self, axes: tuple[Axis, ...]) -> tuple[dict[str, Spec], Shares]:
        """The inputs' dims that go through the model side by side."""
        classes = self._classes(axes)
        able = {
            number: held
            for number, held in sorted(classes.classes.items())
            if held.inputs and not held.sums_weights and held.twice is None
        }
        starts = [_worth_most(some, classes) for some in (able, _outer(able))]
        if starts[0] == starts[1]:
            del starts[1:]
        found = [self._with_others(able, start, axes) for start in starts]
        chosen = max(found, key=lambda each: self._gain(each, axes)) if len(found) > 1 else found[0]
        if not chosen:
            cut = " and ".join(f"{axis}={self.mesh.axis_size(axis)}" for axis in axes)
            self.notes.append(f"{cut} shards nothing: {why_no_batch(classes)}")
        return self._of_inputs(chosen, axes), classes.shares_of(chosen)

    def _gain(self, chosen: Mapping[int, CutClass], axes: tuple[Axis, ...]) -> float:
        """What it is worth to cut inputs so."""
        return self.trials.gain(self.trials.estimate(self._of_inputs(chosen, axes)).figures)

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
        best = self.trials.estimate(self._of_inputs(chosen, axes))
        for number, held in sorted(others, key=lambda item: -item[1].gain):
            if taken & set(held.inputs):
                continue
            more = chosen | {number: held}
            found = self.trials.estimate(self._of_inputs(more, axes))
            if self.trials.gain(found.figures) > self.trials.gain(best.figures):
                chosen, best = more, found
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
        least_bytes = _LEAST_SHARE * self.trials.weight_bytes
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

    def _best(self, classes: CutClasses, chosen: dict[int, CutClass], entries: dict[str, Spec]) -> Estimate:
        """Of the ways to write the choice down the one that turns out best.

        Heads that only a part of the axes divides, such as those of k and v in grouped attention, are cut by completion
        as far as they go, or by that part of the axes throughout; whether it is better to cut their columns and bring
        them together shows when all are run. The same for nodes that the classes leave whole.
        """
        fits = {number: max(map(classes.parts_that_fit, held.gathered), default=1) for number, held in chosen.items()}
        partly = {number: held for number, held in chosen.items() if fits[number] > 1}
        first = {number: held for number, held in chosen.items() if number not in partly}
        estimate = self.trials.estimate
        found = [estimate(entries | self._entries(classes, first))]
        if partly:
            found.append(estimate(entries | self._entries(classes, chosen)))
            found.append(estimate(entries | self._by_parts(classes, chosen, partly, max(fits.values()))))
        best = self._best_of(found)
        rest = single_cuts(classes, chosen, self._is_source)
        least = _LEAST_SHARE * self.trials.gain(best.figures) / max(best.figures.collectives, 1)
        rest = [single for single in rest if single.gain >= least]
        if rest:
            gain = self.trials.gain(best.figures)
            enough = gain - _LEAST_SHARE * max(gain, 0.0)  # All collectives of the best are priced at that share.
            more = [estimate(best.tensors | self._single(classes, rest, keep=keep), enough) for keep in (False, True)]
            best = self._best_of([best, *more])
        return best

    def _best_of(self, found: Sequence[Estimate]) -> Estimate:
        """The best of several, the first among equals; each collective has its price.

        Collectives that estimates have too many are joined in the end, so that where they decide it is looked up.
        """
        figures = [one.figures for one in found]
        plain = max(range(len(found)), key=lambda index: self.trials.gain(figures[index]))
        priced = self._best_priced(figures)
        if plain != priced:
            figures[plain], figures[priced] = (
                self.trials.exact(found[index].tensors).prediction.figures for index in (plain, priced)
            )
            first, second = sorted((plain, priced))
            priced = (first, second)[self._best_priced([figures[first], figures[second]])]
        return found[priced]

    def _best_priced(self, figures: Sequence[Figures]) -> int:
        """The number of the best, the first among equals."""
        gain = self.trials.gain
        price = _LEAST_SHARE * max(gain(figures[0]), 0.0) / max(figures[0].collectives, 1)
        return max(range(len(figures)), key=lambda index: gain(figures[index]) - price * figures[index].collectives)

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

    # -- leaving out what follows -------------------------------------------------------------------------------

    def _fewest(self, best: Estimate) -> Variant:
        """What the fewest entries come to that come to as much, in order of the model.

        Which entries are needed is looked up by estimates; what is reported is what `irpar partition` comes to.

        Args:
            best: with all entries.
        """
        last = len(self.places)
        tensors = dict(sorted(best.tensors.items(), key=lambda item: self.places.get(item[0], last)))
        if not tensors:
            return self.trials.exact(tensors)
        values: dict[str, list[Value]] = {}
        for value in self.flow.values():
            values.setdefault(value.source_name, []).append(value)

        def missing(found: Estimate) -> list[str] | None:
            if found.figures.is_as_good(best.figures):
                return None
            return [name for name in tensors if found.held.get(name) != best.held.get(name)] or [*tensors]

        found = fewest(tensors, alike(tensors, values, self.classes), self.trials.estimate, missing)
        entries = tensors if found is None else found.tensors
        entries = without_needless(
            entries,
            sorted(entries, key=lambda name: self._saved(values.get(name, ()), entries[name])),
            lambda some: self.trials.estimate(some).figures.is_as_good(best.figures),
            _MOST_TRIED // max(1, len(self.graph)),
        )
        return self._as_good(self.trials.exact(entries), best)

    def _as_good(self, found: Variant, best: Estimate) -> Variant:
        """What was found, or all entries, where it is worse than its estimate said, and than all are."""
        figures = replace(found.prediction.figures, collectives=0)
        if figures.is_as_good(self.trials.estimate(found.tensors).figures):
            return found
        whole = self.trials.exact(best.tensors)
        return found if found.prediction.figures.is_as_good(whole.prediction.figures) else whole

    def _saved(self, values: Sequence[Value], spec: Spec) -> float:
        """What it saves to shard a tensor so, and all that lies alike."""
        held = (
            known.class_of(value, dim)
            for known in self.classes
            for value in values
            for dim, axes in enumerate(spec)
            if axes
        )
        return max((one.gain for one in held if one is not None), default=0.0)

    # -- telling it ---------------------------------------------------------------------------------------------

    def _told(self, variant: Variant, words: CutWords | None) -> Suggestion:
        groups = Groups(self.graph, self.sources, words)
        cut, whole = groups.made(variant.shardings, variant.tensors, self.places)
        named = {name for group in cut for name in group.names}
        told = [*(group.names for group in cut), *([name] for name in variant.tensors if name not in named)]
        lines = lines_of(variant.tensors, sorted(told, key=self._place), self.names)
        self._tell_undivided(variant, words)
        self._tell_peak(variant)
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

    def _tell_undivided(self, variant: Variant, words: CutWords | None) -> None:
        """Say where a rank computes much more than its part, and where nothing was sharded."""
        used = {Axis.parse(axis).name for spec in variant.shardings.values() for axes in spec for axis in axes or ()}
        if words is None:
            self.notes.append("every rank holds the weights in full: no axis is given that shards them, such as tp=2")
        elif used.isdisjoint(axis.name for axis in words.axes):
            self.notes.append(f"{words.said} shards nothing: {self._why_no_weight()}")
        for operator, flops in flops_by_operator(self.graph).items():
            own = variant.flops.get(operator, 0)
            if own - flops / self.mesh.size >= _LEAST_TOLD * variant.prediction.flops_per_rank:
                self.notes.append(
                    f"of the FLOPs of all {operator} nodes a rank has {share_text(own, flops)}, "
                    f"not {share_text(1, self.mesh.size)}"
                )

    def _why_no_weight(self) -> str:
        if any(state.is_trained for state in self.graph.states.values()):
            return (
                "this is a training step, whose parameters are no weights but state; ask for the model that it was "
                "made of, and give what is written to irpar train: --shardings FILE"
            )
        return "no weight is worth it, for the reasons above"

    def _tell_peak(self, variant: Variant) -> None:
        """Say where a rank holds more at once than one device would: copies on their way, whole next to their parts."""
        if variant.peak_bytes > self.trials.peak_bytes:
            self.notes.append(
                f"a rank holds {bytes_text(variant.peak_bytes)} at its peak, one device would "
                f"{bytes_text(self.trials.peak_bytes)}: {share_text(variant.peak_bytes, self.trials.peak_bytes)} of it"
            )


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


def _worth_most(able: Mapping[int, CutClass], classes: CutClasses) -> dict[int, CutClass]:
    """The classes that together are worth most; of dims that are worth the same the outer one."""
    worths = {number: held.gain * (1 + 1e-9 / (1 + place)) for place, (number, held) in enumerate(able.items())}
    return {number: able[number] for number in sorted(heaviest(worths, classes.conflicts(able)))}


def _outer(able: Mapping[int, CutClass]) -> dict[int, CutClass]:
    """The classes that cut inputs along the first of the dims that may be cut: the batches, where there are such."""
    first: dict[Value, int] = {}
    for value, dim in (each for held in able.values() for each in held.inputs.items()):
        first[value] = min(dim, first.get(value, dim))
    is_first = {number: all(dim == first[value] for value, dim in held.inputs.items()) for number, held in able.items()}
    return {number: held for number, held in able.items() if is_first[number]}


def _spec(value: Value, dim: int, axes: Iterable[Axis]) -> Spec:
    return tuple(tuple(map(str, axes)) if place == dim else None for place in range(len(value.shape)))
