"""What to annotate otherwise so that no redistribution is too large: tried by planning again before it is reported."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from irpar.analysis.explanation.reasons import annotations_of_text, spec_of_text, spec_text
from irpar.annotations.named import infer_undeclared_types
from irpar.ir import Annotation, Module, Value
from irpar.ir.annotate import apply_to, matching, named_values
from irpar.ops.collectives import collective_axes
from irpar.output.entries import known_times
from irpar.output.plan_entries import collective_entries
from irpar.pass_manager import Pass, PassManager
from irpar.pass_manager.instrumentation import Instrumentation
from irpar.sharding import DimSpec, IrparError, Sharding
from irpar.units import bytes_text

from .redistributions import MEGABYTE, Redistribution, redistributions_of

_MOST_TRIES = 12
_MOST_NODES = 6_000
"""That are planned again, all tries together, which is some seconds; a model with more is not tried at all."""
_MOST_ANNOTATED = 4
"""Tensors that one piece of advice names, unless a glob names them all."""
_MOST_TOLD = 2
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class _Annotate:
    """One more annotation, in place of the one by the same name."""

    pattern: str
    spec: str
    dims: tuple[DimSpec, ...] = field(compare=False)

    def __str__(self) -> str:
        return f'annotate "{self.pattern}" as {self.spec}'

    def apply(self, module: Module) -> None:
        annotation = Annotation(self.pattern, self.dims)
        values = module.named_values.matches(annotation)
        for value in values:
            known = module.annotated.get(value.name)
            if known is None:
                continue
            if known.pattern == self.pattern or (known.names(value) and annotation.names(value)):
                _clear(module, value)
        apply_to(module, annotation, module.mesh, values)


@dataclass(frozen=True)
class _LeaveOut:
    """One annotation less."""

    title: str

    def __str__(self) -> str:
        return f"leave out the annotation {self.title}"

    def apply(self, module: Module) -> None:
        others = {known.title: known for known in module.annotated.values() if known.title != self.title}
        for value in list(dict.fromkeys(value for _, value in named_values(module))):
            known = module.annotated.get(value.name)
            if known is None or known.title != self.title:
                continue
            _clear(module, value)
            for other in others.values():
                if matching(other.pattern, {value.source_name: [value]}):
                    apply_to(module, other, module.mesh, [value])
            if known.behind is not None and value.name not in module.annotated:
                apply_to(module, known.behind, module.mesh, [value])


_Change = _Annotate | _LeaveOut
_Changes = tuple[_Change, ...]


def _clear(module: Module, value: Value) -> None:
    value.sharding = None
    module.annotated.pop(value.name, None)
    module.decisions.pop(value.name, None)


@dataclass(eq=False)
class _Plan:
    """What became of some changes.

    Attributes:
        changes: made to the annotations.
        module: planned with them, local.
        moves: its redistributions, the largest first.
        sent_bytes: by a device in a step, sums included.
    """

    changes: _Changes
    module: Module
    moves: list[Redistribution]
    sent_bytes: int

    @property
    def most(self) -> int:
        """That a device sends for the largest redistribution."""
        return self.moves[0].sent_bytes if self.moves else 0

    def score(self, most_mb: float) -> tuple[int, int]:
        """Less is better: the largest redistribution, then how many are too large."""
        return self.most, sum(move.sent_bytes / MEGABYTE > most_mb for move in self.moves)

    def sends_more_than(self, other: "_Plan") -> bool:
        """Whether another plan is better in all, not only in its largest redistribution."""
        return other.sent_bytes < self.sent_bytes


class Advisor:
    """Looks for annotations with which no redistribution sends too much.

    Args:
        most_mb: megabytes that a device may send for one.
        prepared: makes the annotated module, each time anew.
        passes: of the pipeline, to the end.
    """

    def __init__(self, most_mb: float, prepared: Callable[[], Module], passes: Sequence[Pass]) -> None:
        self.most_mb = most_mb
        self.prepared = prepared
        self.passes = passes
        self.tries = self.tried = 0

    def advice(self, module: Module, moves: list[Redistribution], sent_bytes: int) -> list[str]:
        """Ways out that were tried and with which less is sent in all, in words; none where none of them helps.

        Args:
            module: as it was planned.
            moves: its redistributions, the largest first.
            sent_bytes: that a device sends in a step.
        """
        nodes = sum(1 for _ in module.graph.walk())
        self.tries = min(_MOST_TRIES, _MOST_NODES // max(nodes, 1))
        first = best = _Plan((), module, moves, sent_bytes)
        while self.tries:
            better = self._improved(best)
            within = [plan for plan in better if plan.most / MEGABYTE <= self.most_mb]
            done = sorted(filter(first.sends_more_than, within), key=lambda plan: plan.sent_bytes)
            if done:
                return [self._told(first, plan) for plan in done[:_MOST_TOLD]]
            rest = [plan for plan in better if plan not in within]
            if not rest:
                break
            best = min(rest, key=lambda plan: plan.score(self.most_mb))
        return [self._told(first, best)] if first.sends_more_than(best) else []

    def _improved(self, before: _Plan) -> list[_Plan]:
        """What is better than a plan, by one more change."""
        found = []
        for change in _candidates(before, self.most_mb):
            if not self.tries:
                break
            self.tries -= 1
            self.tried += 1
            plan = self._planned((*before.changes, *change))
            if plan is not None and plan.score(self.most_mb) < before.score(self.most_mb):
                found.append(plan)
        return found

    def _planned(self, changes: _Changes) -> _Plan | None:
        """The plan with some changes; None where they are refused."""
        try:
            module = self.prepared()
            infer_undeclared_types(module)
            for change in changes:
                change.apply(module)
            PassManager(self.passes, Instrumentation(reproducer=None)).run(module)
        except IrparError:
            return None
        entries = collective_entries(module, module.mesh)
        sent = sum(known_times(entry) * entry["sent_bytes"] for entry in entries)
        return _Plan(changes, module, redistributions_of(module, entries), sent)

    def _told(self, first: _Plan, plan: _Plan) -> str:
        changes = " and ".join(map(str, plan.changes))
        sent = f"a device then sends {bytes_text(plan.sent_bytes)} a step in all, now {bytes_text(first.sent_bytes)}"
        if plan.most / MEGABYTE <= self.most_mb:
            return f"{changes} (tried: {sent})"
        most, many = plan.score(self.most_mb)
        rest = f"the largest redistribution is then {bytes_text(most)}, {many} of {first.score(self.most_mb)[1]} remain"
        return f"{changes} (tried: {rest} above the limit; {sent})"


def _candidates(plan: _Plan, most_mb: float) -> Iterator[_Changes]:
    """Changes that may spare the largest redistribution, the least first."""
    tried = {*plan.changes}
    for change in dict.fromkeys(_all_candidates(plan, most_mb)):
        if not tried.intersection(change):
            yield change


def _all_candidates(plan: _Plan, most_mb: float) -> Iterator[_Changes]:
    first = plan.moves[0]
    large = [move for move in plan.moves if move.sent_bytes / MEGABYTE > most_mb]
    alike = [move for move in large if _shape_of_name(move) == _shape_of_name(first)]
    yield from _of_others(first)
    for wanted in (_end, _start):
        single = _annotation(plan.module, first, wanted(first))
        if single is None:
            continue
        yield (single,)
        if len(alike) > 1:
            yield from _for_all(plan.module, alike, single, wanted)
    for title in _origins(plan.module, first):
        yield (_LeaveOut(title),)


def _of_others(move: Redistribution) -> Iterator[_Changes]:
    """Annotations of other tensors that its conflict names: one further on may keep a cut from passing."""
    for name, spec in annotations_of_text(move.conflict.avoid) if move.conflict is not None else ():
        if name != move.value.source_name:
            yield (_Annotate(name, spec, spec_of_text(spec)),)


def _start(move: Redistribution) -> Sharding | None:
    return move.value.sharding


def _end(move: Redistribution) -> Sharding | None:
    return move.target


def _for_all(
    module: Module,
    alike: Sequence[Redistribution],
    single: _Annotate,
    wanted: Callable[[Redistribution], Sharding | None],
) -> Iterator[_Changes]:
    """An annotation for the same tensor of all layers: by a glob, or by their names."""
    known = [module.annotated.get(move.value.name) for move in alike]
    patterns = {"" if annotation is None or annotation.said else annotation.pattern for annotation in known}
    pattern = patterns.pop() if len(patterns) == 1 else ""
    yield (_Annotate(pattern or _glob(alike), single.spec, single.dims),)
    each = dict.fromkeys(_annotation(module, move, wanted(move)) for move in alike)
    changes = tuple(change for change in each if change is not None)
    if len(changes) <= _MOST_ANNOTATED:
        yield changes


def _annotation(module: Module, move: Redistribution, wanted: Sharding | None) -> _Annotate | None:
    """A value annotated otherwise; None where its sharding cannot be written."""
    if wanted is None or wanted.partial:
        return None
    known = module.annotated.get(move.value.name)
    name = known.pattern if known is not None and known.names(move.value) and not known.said else None
    dims = tuple([str(axis) for axis in axes] or None for axes in wanted.axes)
    return _Annotate(name or move.value.source_name, spec_text(wanted), dims)


def _shape_of_name(move: Redistribution) -> tuple[str, Sharding | None, Sharding | None]:
    """What is equal for the same tensor of all layers."""
    return _DIGITS.sub("*", move.value.source_name), move.value.sharding, move.target


def _glob(moves: Sequence[Redistribution]) -> str:
    """One glob for names that differ in numbers alone."""
    split = [re.split(r"(\d+)", move.value.source_name) for move in moves]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def _origins(module: Module, move: Redistribution) -> list[str]:
    """The titles of the annotations that a move stands between, that of the value itself last."""
    titles: dict[str, None] = {}
    for axis in dict.fromkeys(axis.name for node in move.nodes for axis in collective_axes(node)):
        chain = module.chain(move.value.name, axis)
        annotation = module.annotated.get(chain[-1][0]) if chain else None
        if annotation is not None and annotation.can_be_left_out:
            titles[annotation.title] = None
    if move.conflict is not None:
        told = f"{move.conflict.because} {move.conflict.needed_because}"
        named = (a for a in module.annotated.values() if f"annotated {a.title}" in told)
        titles |= dict.fromkeys(a.title for a in named if a.can_be_left_out)
    own = module.annotated.get(move.value.name)
    return sorted(titles, key=lambda title: own is not None and title == own.title)


def may_avoid(module: Module, move: Redistribution) -> str:
    """What may spare a move; not tried."""
    if move.conflict is not None:
        return move.conflict.avoid
    titles = _origins(module, move)
    if titles:
        return f"leave out the annotation {' or '.join(titles)}"
    return f'annotate "{move.value.source_name}" as [{", ".join(["null"] * len(move.value.shape))}]'
