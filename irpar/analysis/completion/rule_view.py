"""A factor rule beside the shapes of a node's values: from dims to factors and back, and the ways to run the node."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from irpar.ir import Node, Value
from irpar.ops import FactorRule, Kind, flops, program_factors, program_of
from irpar.ops.linear import carriers, is_addend
from irpar.sharding import Axis, Mesh, Sharding, are_disjoint, filled_blocks, join_axes, split_axis

from .placement import NOTHING, Axes, Carried, FactorAxes, Placement, Suggested
from .rule_memory import rule_memory

T = TypeVar("T")


class RuleView:
    """A rule beside the shapes of a node's values: which factors must divide evenly, and axes from dims and back.

    Args:
        node: the node.
        rule: how it may be sharded.
        mesh: the mesh.
        values: what the rule is about, where these are not all operands and results.

    Attributes:
        addends: which operands may always be parts beside others (see `is_addend`), as the node is first seen.
        program: the local program that works along factors of the rule, if the operator has one.
        ways: itself and the other rules by which the node may run, among which its placement is chosen.
        memo: what others found out of the node and holds for all of its kind, by what they call it; see `is_by_kind`.
    """

    def __init__(self, node: Node, rule: FactorRule, mesh: Mesh, values: Sequence[Value | None] | None = None) -> None:
        self.ways: tuple[RuleView, ...] = (self,)
        self.node = node
        self.mesh = mesh
        self.rule = rule
        self.values: tuple[Value | None, ...] = tuple(values or (*node.operands, *node.results))
        self.tensors = (*rule.operands, *rule.results)
        self.operand_count = len(rule.operands)
        self.addends = tuple(map(is_addend, self.values[: self.operand_count]))
        self.program = program_of(node, rule) if values is None else None
        self.program_factors = program_factors(node, rule, self.program)
        shapes = tuple(None if value is None else value.shape for value in self.values)
        self._memory = rule_memory(rule, mesh, shapes, self.program_factors)
        self.moves = self._memory.moves
        self.memo: dict[Hashable, Any] = {}

    @classmethod
    def like(cls, shared: Mapping[str, Any], node: Node) -> "RuleView":
        """The view of a node, where that of another of its kind is known: see `shared`."""
        view = cls.__new__(cls)
        view.__dict__.update(shared)
        view.node, view.values, view.ways = node, (*node.operands, *node.results), (view,)
        return view

    def shared(self) -> Mapping[str, Any]:
        """What is the same for all nodes of the kind: they have one rule, the same types and no other way to run."""
        names = (
            "mesh",
            "rule",
            "tensors",
            "operand_count",
            "addends",
            "program",
            "program_factors",
            "_memory",
            "moves",
            "memo",
        )
        known = ("reads_constants", "none_free", "operand_sizes", "result_sizes", "sums_products", "has_programs")
        return {name: getattr(self, name) for name in (*names, *known)}

    def fitting(self, factor: int, axes: Axes) -> Axes:
        """The longest major part of `axes` that may shard a factor.

        Evenly where it must; into blocks of which the last are empty where the rule accepts these. One element has
        nothing to divide.
        """
        if self.rule.kinds[factor] in (Kind.REPLICATE, Kind.PERMUTE) and factor not in self.program_factors:
            return ()
        size = self.rule.sizes[factor]
        for count in range(len(axes), 0, -1):
            parts = self.mesh.group_size(axes[:count])
            if factor in self.program_factors and filled_blocks(self._memory.least[factor], parts) < parts:
                continue  # In a local program every device takes part.
            if size % parts == 0 or (not self._memory.must_divide[factor] and self._takes(factor, parts)):
                return axes[:count]
        return ()

    def needs_whole(self, factor: int) -> bool:
        """Whether a node needs a factor whole, over whichever axis it would be sharded."""
        return self.rule.kinds[factor] in (Kind.REPLICATE, Kind.PERMUTE) and factor not in self._memory.able

    def least(self, factor: int) -> int:
        """The smallest dim that a factor stands for, of those along which a local program works."""
        return self._memory.least[factor]

    def _takes(self, factor: int, parts: int) -> bool:
        """Whether a factor may be sharded in blocks of several sizes."""
        size = self.rule.sizes[factor]
        if filled_blocks(size, parts) == parts:
            return True
        return size > 1 and self.rule.accepts_empty[factor]

    def fills(self, factor: int, axes: Axes) -> bool:
        """Whether `axes` may shard a factor so that every device gets elements of it."""
        parts = self.mesh.group_size(axes)
        return self.fitting(factor, axes) == axes and filled_blocks(self.rule.sizes[factor], parts) == parts

    def project(self, tensor: int, dims: Sequence[Axes]) -> Mapping[int, Axes]:
        """The factor axes that a tensor's dim axes mean, as far as they fit.

        Dim `(ij)` of sizes 2, 4 cut by an axis of 4: the axis is split, its major half goes to i, the minor to j.
        """
        key = tensor, tuple(dims)
        known = self._memory.projections.get(key)
        if known is None:
            known = self._memory.projections[key] = self._projected(*key)
        return known

    def _projected(self, tensor: int, dims: Sequence[Axes]) -> Mapping[int, Axes]:
        found: dict[int, Axes] = {}
        for parts, axes in zip(self.tensors[tensor], dims, strict=True):
            if axes and parts:
                for factor, cut in self._project_dim(parts, axes):
                    fitted = self.fitting(factor, cut)
                    if fitted:
                        found[factor] = fitted
                    if fitted != cut:
                        break
        return found

    def _project_dim(self, parts: tuple[int, ...], axes: Axes) -> Iterator[tuple[int, Axes]]:
        if len(parts) == 1:
            yield parts[0], axes
            return
        waiting = list(axes)
        for factor in parts:
            left = self.rule.sizes[factor]
            taken: list[Axis] = []
            while waiting and left > 1:
                size = self.mesh.axis_size(waiting[0])
                if left % size == 0:
                    taken.append(waiting.pop(0))
                    left //= size
                elif size % left == 0:
                    major, minor = split_axis(self.mesh, waiting[0], left)
                    taken.append(major)
                    waiting[0] = minor
                    left = 1
                else:
                    waiting.clear()
            yield factor, tuple(taken)
            if left > 1:
                return

    def assemble(self, tensor: int, factors: Sequence[Axes]) -> tuple[Axes, ...] | None:
        """The dim axes of a tensor under factor axes; None where they cannot be said: a minor factor of a dim may be
        cut only where the ones before it are cut down to 1."""
        key = tensor, tuple(factors)
        known = self._memory.assembled
        if key not in known:
            known[key] = self._assembled(*key)
        return known[key]

    def _assembled(self, tensor: int, factors: FactorAxes) -> tuple[Axes, ...] | None:
        dims = []
        for parts in self.tensors[tensor]:
            axes: list[Axis] = []
            complete = True
            for factor in parts:
                if factors[factor] and not complete:
                    return None
                axes.extend(factors[factor])
                complete = complete and self.mesh.group_size(factors[factor]) == self.rule.sizes[factor]
            dims.append(join_axes(self.mesh, axes))
        return tuple(dims)

    def all_expressible(self, factors: FactorAxes) -> tuple[tuple[Axes, ...], ...]:
        """The dim axes of each tensor under those of its factors that can be said.

        A minor factor whose majors are not cut down to 1 is left out.
        """
        known = self._memory.expressible.get(factors)
        if known is None:
            known = tuple([self._expressible(tensor, factors) for tensor in range(len(self.tensors))])
            self._memory.expressible[factors] = known
        return known

    def _expressible(self, tensor: int, factors: FactorAxes) -> tuple[Axes, ...]:
        present = {factor for parts in self.tensors[tensor] for factor in parts}
        left = [axes if factor in present else () for factor, axes in enumerate(factors)]
        dims = self.assemble(tensor, left)
        while dims is None:
            for parts in self.tensors[tensor]:
                is_complete = True
                for factor in parts:
                    left[factor] = left[factor] if is_complete else ()
                    is_complete = is_complete and self.mesh.group_size(left[factor]) == self.rule.sizes[factor]
            dims = self.assemble(tensor, left)
        return dims

    def merged(self, known: tuple[tuple[Axes, ...] | None, ...], held: FactorAxes | None = None) -> FactorAxes:
        """Per factor the axes on which values agree; of two factors that want one axis the earlier keeps it.

        Args:
            known: the dim axes of the values, None where they bind nobody.
            held: the axes of factors that are decided already, which go before both.
        """
        if held is not None:
            return tuple(self._merged(known, held))
        found = self._memory.merged.get(known)
        if found is None:
            found = self._memory.merged[known] = tuple(self._merged(known, ((),) * len(self.rule.sizes)))
        return found

    def _merged(self, known: Sequence[tuple[Axes, ...] | None], held: FactorAxes) -> list[Axes]:
        merged: list[Axes] = [()] * len(held)
        clash: list[Axes | None] = [None] * len(held)
        for tensor, dims in enumerate(known):
            for factor, axes in self.project(tensor, dims).items() if dims is not None else ():
                before = merged[factor]
                shorter, longer = (before, axes) if len(before) <= len(axes) else (axes, before)
                if longer[: len(shorter)] == shorter:
                    merged[factor] = longer
                else:
                    common = clash[factor]
                    clash[factor] = _common(before if common is None else common, axes)
        for factor, common in enumerate(clash):
            if common is not None:
                merged[factor] = common
        taken = [axis for axes in held for axis in axes]
        for factor in self._memory.reduced_last:
            count = len(held[factor])
            more = merged[factor][count:]
            if merged[factor][:count] == held[factor] and are_disjoint(self.mesh, [*taken, *more]):
                taken.extend(more)
            else:
                merged[factor] = held[factor]
        return merged

    @cached_property
    def operand_sizes(self) -> tuple[tuple[int, tuple[int, ...], int], ...]:
        """Of each operand that there is its number, shape and bits of an element."""
        return tuple(each for each in self._sizes() if each[0] < self.operand_count)

    @cached_property
    def result_sizes(self) -> tuple[tuple[int, tuple[int, ...], int], ...]:
        """The same of results, which are counted behind the operands."""
        return tuple(each for each in self._sizes() if each[0] >= self.operand_count)

    def _sizes(self) -> Iterator[tuple[int, tuple[int, ...], int]]:
        values = enumerate(self.values)
        return ((place, value.shape, value.dtype.bits) for place, value in values if value is not None)

    @cached_property
    def reads_constants(self) -> bool:
        """Whether one of the values is a constant."""
        return any(value is not None and value.is_constant for value in self.values)

    @property
    def is_by_kind(self) -> bool:
        """Whether which operands the node carries in parts, and what it was told, holds for all of its kind.

        Numbers of constants may say the first.
        """
        return not self.reads_constants and self.node.strategy is None

    def of_kind(self, what: Hashable, find: Callable[[], T]) -> T:
        """What is found out of the node; where it holds for all of its kind, it is found once for these."""
        if not self.is_by_kind:
            return find()
        if what not in self.memo:
            self.memo[what] = find()
        found: T = self.memo[what]
        return found

    @cached_property
    def none_free(self) -> tuple[bool, ...]:
        """That none of the values costs nothing."""
        return (False,) * len(self.values)

    @cached_property
    def flops(self) -> int:
        """What the node computes on one device."""
        return flops(self.node)

    @cached_property
    def sums_products(self) -> bool:
        """Whether a factor that is summed is one of several operands of floats."""
        floats = [
            {factor for parts in dims for factor in parts}
            for value, dims in zip(self.values, self.rule.operands, strict=False)
            if value is not None and value.dtype.is_float
        ]
        summed = {factor for factor, kind in enumerate(self.rule.kinds) if kind is Kind.REDUCE}
        return any(len([1 for factors in floats if factor in factors]) > 1 for factor in summed)

    @cached_property
    def has_programs(self) -> bool:
        """Whether one of `ways` has a local program."""
        return any(way.program is not None or way.program_factors for way in self.ways)

    @cached_property
    def program_kind(self) -> Hashable:
        """Equal for nodes whose local programs send alike, where `RuleMemory` and the types of values are equal."""
        programs = [way.program for way in self.ways if way.program is not None and way.program_factors]
        if not programs:
            return ()
        if any(program.reads_elements for program in programs):
            return self.node
        node = self.node
        dtypes = tuple(None if value is None else value.dtype for value in self.values)
        return node.identity, node.version, tuple(sorted(node.attributes.items())), dtypes

    def way_of(self, placement: Placement) -> "RuleView":
        """The one of `ways` that a placement follows."""
        return next((way for way in self.ways if way.rule == placement.rule), self)

    def program_axes(self, factors: Sequence[Axes]) -> Axes:
        """The axes that cut the factors along which the local program of the node works, major first."""
        return tuple(axis for factor in sorted(self.program_factors) for axis in factors[factor])

    def partial_axes(self, factors: Sequence[Axes], result: int | None = None) -> Axes:
        """The axes over which results are partial, or that one of them is: one that has a reduced factor is in blocks.

        Args:
            factors: the axes that cut each.
            result: its number among operands and results; None: all.
        """
        has = {factor for parts in self.tensors[result] for factor in parts} if result is not None else ()
        return tuple(
            axis
            for factor, (kind, axes) in enumerate(zip(self.rule.kinds, factors, strict=True))
            if kind is Kind.REDUCE and factor not in has
            for axis in axes
        )

    def placement(self, factors: FactorAxes, carried: Carried = NOTHING) -> Placement | None:
        """What the node needs and gives under factor axes; None where they are impossible."""
        key = tuple(factors), carried
        placements = self._memory.placements
        if key not in placements:
            placements[key] = self._placed(*key)
        return placements[key]

    def _placed(self, factors: FactorAxes, carried: Carried) -> Placement | None:
        reduced = self.partial_axes(factors)
        if any(factors[factor] for factor in self.program_factors) and not self._fills_all(factors):
            return None
        if not are_disjoint(self.mesh, [*(axis for axes in factors for axis in axes), *carried.axes]):
            return None
        if reduced and carried.axes and carried.reduce != self.rule.reduce:
            return None
        reduce = carried.reduce if carried.axes else self.rule.reduce
        shardings: list[Sharding | None] = []
        for tensor, value in enumerate(self.values):
            if value is None:
                shardings.append(None)
                continue
            dims = self.assemble(tensor, factors)
            if dims is None:
                return None
            if tensor >= self.operand_count:
                pending = join_axes(self.mesh, (*self.partial_axes(factors, tensor), *carried.axes))
            else:
                pending = carried.axes if tensor in carried.operands else ()
            shardings.append(Sharding.of_axes(self.mesh, dims, pending, reduce if pending else "sum"))
        count = self.operand_count
        return Placement(tuple(shardings[:count]), tuple(shardings[count:]), self.rule, factors, carried)

    def _fills_all(self, factors: FactorAxes) -> bool:
        """Whether every device has elements of all factors, as a local program needs it."""
        return all(not axes or self.fills(factor, axes) for factor, axes in enumerate(factors))

    def suggested(self, known: tuple[tuple[Axes, ...] | None, ...]) -> Suggested:
        """See the function of that name; nodes that are alike ask once."""
        found = self._memory.suggestions
        if known not in found:
            found[known] = tuple(self._suggested(known))
        return found[known]

    def _suggested(self, known: Sequence[tuple[Axes, ...] | None]) -> Iterator[tuple[Axes, ...]]:
        projected = [self.project(tensor, dims) for tensor, dims in enumerate(known) if dims is not None]
        found = [
            dict.fromkeys(by_factor[factor] for by_factor in projected if factor in by_factor)
            for factor in range(len(self.rule.sizes))
        ]
        for factor, ways in enumerate(found):
            others = [axis for other, axes in enumerate(found) if other != factor for way in axes for axis in way]
            left = dict.fromkeys(_without(self, way, others) for way in ways if len(way) > 1) if others else {}
            fitting = {way: None for way in left if way and self.fitting(factor, way) == way}
            yield (*sorted(ways | fitting, key=lambda axes: -self.mesh.group_size(axes)), ())

    def joined(self, lies: tuple[tuple[tuple[Axes, ...], ...], ...]) -> tuple[FactorAxes, ...]:
        """The factor axes that one value suggests alone, or joined with what another suggests beside it; last: none.

        Args:
            lies: per value the ways in which it lies, or might.
        """
        found = self._memory.joined
        if lies not in found:
            found[lies] = tuple(dict.fromkeys(self._joined(lies)))
        return found[lies]

    def _joined(self, lies: Sequence[Sequence[tuple[Axes, ...]]]) -> Iterator[FactorAxes]:
        none: tuple[tuple[Axes, ...] | None, ...] = (None,) * len(lies)
        alone = [
            [tuple(choices[0] for choices in self.suggested((*none[:at], axes, *none[at + 1 :]))) for axes in ways]
            for at, ways in enumerate(lies)
        ]
        # A third value that suggests what two others do adds nothing; a sum of many operands has hundreds.
        alone = [alone[at] for at in _up_to_two_of_each(alone)]
        for at, ways in enumerate(alone):
            for factors in ways:
                yield factors
                for beside in (more for other, found in enumerate(alone) if other != at for more in found):
                    yield tuple(mine or others for mine, others in zip(factors, beside, strict=True))
        yield tuple(() for _ in self.rule.sizes)

    def agreed(self, known: tuple[tuple[Axes, ...] | None, ...]) -> Placement | None:
        """How the node runs where all values are sharded already as it needs them; None where they do not agree.

        Args:
            known: the dim axes of the values, None where they do not matter.
        """
        found = self._memory.agreements
        if known not in found:
            options = suggested(self, known)
            factors = tuple(choices[0] for choices in options)
            # A local program may cost more than to bring the values together.
            runs_alone = not any(factors[factor] for factor in self.program_factors)
            is_clear = runs_alone and all(len(choices) <= 2 for choices in options)
            is_clear = is_clear and _agrees(self, factors, known)
            found[known] = self.placement(factors) if is_clear else None
        return found[known]

    def carriable(self, lies: Sequence[Sharding | None], *, in_runs: bool = True) -> list[Carried]:
        """The ways in which partial operands may stay partial, and last: none does.

        With `in_runs` also what is worth it only where something smaller follows, and what is added to them may become
        parts.
        """
        found = [NOTHING]
        operands = lies[: self.operand_count]
        for reduce in dict.fromkeys(sharding.reduce for sharding in operands if sharding and sharding.partial):
            for places in carriers(self.node, reduce, in_runs=in_runs):
                may_join = in_runs and len(places) > 1
                of_parts = [n for n in places if not (may_join and self.addends[n]) or _is_partial(operands[n])]
                pending = [lie.partial if (lie := operands[n]) and lie.reduce == reduce else () for n in of_parts]
                axes = tuple(axis for axis in pending[0] if all(axis in other for other in pending)) if pending else ()
                if axes:
                    found.insert(0, Carried(places, axes, reduce))
        return found


def _is_partial(lies: Sharding | None) -> bool:
    return lies is not None and bool(lies.partial)


def _up_to_two_of_each(items: Sequence[Sequence[FactorAxes]]) -> Iterator[int]:
    """The places of the first two of equal items."""
    seen = Counter[tuple[FactorAxes, ...]]()
    for at, item in enumerate(map(tuple, items)):
        seen[item] += 1
        if seen[item] <= 2:
            yield at


def _common(a: Axes, b: Axes) -> Axes:
    """The axes with which both begin."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return a[:count]


def suggested(view: RuleView, known: Sequence[tuple[Axes, ...] | None]) -> Suggested:
    """For each factor the ways that the dim axes of some value suggest, longest first, and last: not sharded.

    Of axes that another factor wants too, those that it leaves may cut this one all the same:

    d : [e, g@(dp,ep), m], w : [e@ep, m, h]      e over ep; g over (dp, ep), over dp alone, or not
    """
    return view.suggested(tuple(known))


def _without(view: RuleView, axes: Axes, others: Sequence[Axis]) -> Axes:
    """The axes that have nothing in common with others."""
    return tuple(axis for axis in axes if all(are_disjoint(view.mesh, [axis, other]) for other in others))


def _agrees(view: RuleView, factors: FactorAxes, known: Sequence[tuple[Axes, ...] | None]) -> bool:
    """True where every value is sharded already as the factor axes want it."""
    return all(dims is None or view.assemble(tensor, factors) == dims for tensor, dims in enumerate(known))
