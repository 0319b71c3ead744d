"""Why values lie as they do: for each of their axes a chain of steps back to an annotation, and why others are whole.

x : [8@dp, 64] annotated, h = MatMul(x, w), y = Relu(h)
    y is sharded over dp: follows %h through Relu; %h follows %x through MatMul; %x is annotated
    w is whole: no reader needs a block of it

Completion logs what it does as it does it. What it then decides otherwise (constants, values around conflicts), and
what only the way a node runs decides (parts of sums), is traced here in the completed graph.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.node_placement import why_whole
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.ir import Decision, Module, Node, Value
from irpar.ops import Kind
from irpar.sharding import Axis, Reduction, Sharding, filled_blocks

Cut = tuple[Value, str]
"""A value and the name of a mesh axis that shards it, or over which it is partial."""
Step = tuple[Cut, Decision]
"""What is explained next, and how."""

VERBS: dict[Reduction, str] = {
    "sum": "sums",
    "prod": "multiplies",
    "max": "takes the maximum",
    "min": "takes the minimum",
    "and": "takes all",
    "or": "takes any",
}


def explain_values(module: Module, flow: Flow, placements: Mapping[Node, Placement]) -> None:
    """Complete the log of decisions.

    After: the decisions of a value name each of its axes, and lead to an annotation by values that have this axis as
    well; a value that nothing shards has a decision that says why. Axes that no annotation brought (in a program that
    was read as text) are left as they are.

    Args:
        module: with the log.
        flow: completed, nothing redistributed yet.
        placements: how each node runs.
    """
    _Origins(module, flow, placements).run()


def cutting_names(sharding: Sharding | None) -> tuple[str, ...]:
    """The names of the axes of more than one device that a sharding has, partial ones included."""
    axes = sharding.canonical.all_axes if sharding is not None else ()
    return tuple(dict.fromkeys(axis.name for axis in axes))


def why_given_up(
    node: Node, view: RuleView | None, placement: Placement, tensor: int, lies: Sharding, needed: Sharding
) -> str:
    """Why a node cannot take or give a value as it is sharded; "" where one of its ways could, and another costs less.

    Args:
        node: the node.
        view: its rule, with all of its ways; None where it must run replicated.
        placement: how it runs.
        tensor: number of the value among the operands and results.
        lies, needed: how the value is sharded, and how the node takes or gives it.
    """
    if placement.rule is None or view is None:
        return f"{node.title} needs it in full ({why_whole(node)})"
    for dim, cut in given_up_dims(lies, needed):
        is_whole = f"{node.title} needs dim {dim} of it whole"
        whys = [_why_not(way, tensor, dim, cut) for way in view.ways]
        if all(why is not None for why in whys):
            return next((why for why in whys if why), is_whole)
    return ""


def why_dearer(view: RuleView | None, tensor: int, lies: Sharding, needed: Sharding) -> str:
    """That a node could take or give a value as it is sharded, where nothing but the cost is against it.

    Args:
        view, tensor, lies, needed: as of `why_given_up`.
    """
    for dim, cut in given_up_dims(lies, needed) if view is not None else ():
        assert view is not None
        way = next((way for way in view.ways if _why_not(way, tensor, dim, cut) is None), view)
        is_summed = any(way.rule.kinds[factor] is Kind.REDUCE for factor in way.tensors[tensor][dim])
        work = f"{view.node.title} could work along dim {dim} of it"
        if is_summed and not way.program_factors.issuperset(way.tensors[tensor][dim]):
            work += f" and reduce over {', '.join(map(str, cut))}"
        instead = "move it" if cutting_names(needed) else "bring it together"
        return f"{work}, at a greater cost than to {instead}"
    return "that sends least"


def given_up_dims(lies: Sharding, needed: Sharding) -> Iterator[tuple[int, tuple[Axis, ...]]]:
    """The dims that are sharded otherwise than they are needed, and what cuts them."""
    for dim, (cut, kept) in enumerate(zip(lies.axes, needed.axes, strict=True)):
        if cut != kept and lies.mesh.group_size(cut) > 1:
            yield dim, cut


def _why_not(view: RuleView, tensor: int, dim: int, cut: tuple[Axis, ...]) -> str | None:
    """Why a way to run a node has no blocks of a dim; None where it has, "" where it needs the dim whole."""
    parts, rule, mesh = view.tensors[tensor][dim], view.rule, view.mesh
    count = mesh.group_size(cut)
    found = view.project(tensor, [cut if other == dim else () for other in range(len(view.tensors[tensor]))])
    if math.prod(mesh.group_size(axes) for axes in found.values()) == count:
        return None
    sizes = [rule.sizes[factor] for factor in parts]
    cut_sizes = [mesh.group_size(found.get(factor, ())) for factor in parts]
    stop = next((n for n, (size, blocks) in enumerate(zip(sizes, cut_sizes, strict=True)) if size != blocks), None)
    if stop is None:
        return ""
    left = count // math.prod(cut_sizes[:stop])
    if rule.kinds[parts[stop]] in (Kind.REPLICATE, Kind.PERMUTE) and parts[stop] not in view.program_factors:
        if math.prod(sizes[:stop]) == 1:
            return ""
        sizes[stop], left = math.prod(sizes[:stop]), count
    inside = "x".join(str(rule.sizes[factor]) for factor in parts if rule.sizes[factor] > 1)
    if "x" in inside:
        return f"{view.node.title} takes dim {dim} of it as {inside}, and {sizes[stop]} do not divide over {left}"
    if filled_blocks(sizes[stop], left) < left:
        told = f"{sizes[stop]} over {left} leaves a rank without elements"
        return f"dim {dim}, {told}, on which {view.node.title} cannot run"
    least = view.least(parts[stop])
    if parts[stop] in view.program_factors and filled_blocks(least, left) < left:
        told = f"{least} over {left} leaves a rank without elements"
        return (
            f"dim {dim}, along which another of its tensors has {least}: {told}, on which {view.node.title} cannot run"
        )
    return f"dim {dim}, {sizes[stop]} over {left}, has no equal blocks, which {view.node.title} needs"


class _Origins:
    """One run.

    Attributes:
        cuts: per value the axes that cut it, as it should lie or as its node gives it.
        lost: cuts that nothing explains so far.
        lying: per node how each of its values lies there, as far as that was asked.
    """

    def __init__(self, module: Module, flow: Flow, placements: Mapping[Node, Placement]) -> None:
        self.module = module
        self.flow = flow
        self.mesh = flow.mesh
        self.placements = placements
        self.lying: dict[Node, list[tuple[Value, Sharding]]] = {}
        self.given = {
            value: given
            for node, placement in placements.items()
            for value, given in zip(node.results, placement.results, strict=True)
            if given is not None
        }
        self.cuts = {value: self._axes_of(value) for value in flow.values() if value.sharding is not None}
        self.lost: dict[Cut, None] = {(value, axis): None for value, axes in self.cuts.items() for axis in axes}

    def _axes_of(self, value: Value) -> tuple[str, ...]:
        names = (*cutting_names(value.sharding), *cutting_names(self.given.get(value)))
        return tuple(dict.fromkeys(names))

    def run(self) -> None:
        """Follow the log from the annotations on; then trace what is still lost."""
        for value, axes in self.cuts.items():
            self._forget(value, partial(_is_about_others, axes))
        roots = [cut for cut in self.lost if self._is_annotated(*cut)]
        for cut in roots:
            del self.lost[cut]
        reached = [*roots, *self._spread(roots, self._logged())]
        for step in (self._sharing, self._beside):
            if self.lost:
                reached += self._spread(reached, step)
        first = {axis: value.name for value, axis in reversed(roots)}
        for value, axis in self.lost:
            if axis in first:
                why = f"is sharded as %{first[axis]} does: that sends least"
                self._replace(value, Decision(why, first[axis], (axis,)))
        for value, axes in self.cuts.items():
            if not axes or (value in self.given and not cutting_names(self.given[value])):
                self._explain_whole(value)

    def _spread(self, start: list[Cut], step: Callable[[Cut], Iterator[Step]]) -> list[Cut]:
        """Explain lost cuts by those that are explained, nearest first; returns those that were found."""
        found: list[Cut] = []
        waiting = deque(start)
        while waiting and self.lost:
            for cut, decision in step(waiting.popleft()):
                if cut in self.lost:
                    del self.lost[cut]
                    self._replace(cut[0], decision)
                    found.append(cut)
                    waiting.append(cut)
        return found

    # -- the log --------------------------------------------------------------------------------------------------

    def _is_annotated(self, value: Value, axis: str) -> bool:
        """Whether the annotation of a value brought an axis to it, not completion of an open dim."""
        known = self.module.decisions.get(value.name, ())
        return value.name in self.module.annotated and not any(axis in decision.axes for decision in known)

    def _logged(self) -> Callable[[Cut], Iterator[Step]]:
        followers: dict[tuple[str, str], list[Step]] = {}
        for value, axis in self.lost:
            decision = self.module.decision(value.name, axis)
            if decision is not None and decision.follows is not None:
                followers.setdefault((decision.follows, axis), []).append(((value, axis), decision))
        return lambda cut: iter(followers.get((cut[0].name, cut[1]), ()))

    def _replace(self, value: Value, decision: Decision) -> None:
        """Log the only reason for an axis: the steps are a tree, whose roots are annotations."""
        known = self.module.decisions.get(value.name, ())
        if [other for other in known if set(other.axes) & set(decision.axes)] != [decision]:
            self._forget(value, lambda other: set(other.axes) & set(decision.axes))
            self.module.decide(value.name, decision)

    def _forget(self, value: Value, is_wrong: Callable[[Decision], object]) -> None:
        known = self.module.decisions.get(value.name)
        if known and any(map(is_wrong, known)):
            self.module.decisions[value.name] = [decision for decision in known if not is_wrong(decision)]

    # -- steps in the graph ---------------------------------------------------------------------------------------

    def _around(self, value: Value) -> Iterator[tuple[Node, list[tuple[Value, Sharding]]]]:
        """The nodes that give or read a value, with how each of their values lies there.

        Of a node that holds bodies: what is one tensor with the value, on both sides of the boundary.
        """
        for node in self.flow.neighbours(value):
            placement = self.placements.get(node)
            if node in self.flow.ties:
                for view in self.flow.views(node):
                    if value in view.values:
                        yield node, [(other, other.sharding) for other in view.values if other and other.sharding]
            elif placement is not None and placement.rule is not None:
                lying = self.lying.get(node)
                if lying is None:
                    values, shardings = (*node.operands, *node.results), (*placement.operands, *placement.results)
                    pairs = zip(values, shardings, strict=True)
                    lying = [(other, lies) for other, lies in pairs if other is not None and lies is not None]
                    self.lying[node] = lying
                yield node, lying

    def _sharing(self, cut: Cut) -> Iterator[Step]:
        """Values that the same axis cuts in the same node."""
        value, axis = cut
        for node, lying in self._around(value):
            having = [(other, lies) for other, lies in lying if axis in lies.axis_names]
            if not any(other is value for other, _ in having):
                continue
            for other, lies in having:
                if (other, axis) not in self.lost:
                    continue
                is_sum = any(mine.name == axis for mine in lies.partial)
                how = f"{node.title} {VERBS[lies.reduce]} over {axis}, which shards %{value.name}"
                why = how if is_sum else f"follows %{value.name} through {node.title}"
                yield (other, axis), Decision(why, value.name, (axis,))

    def _beside(self, cut: Cut) -> Iterator[Step]:
        """Values that the same axis cuts, but that are moved before or after the node."""
        value, axis = cut
        for node, lying in self._around(value):
            for other, _ in lying:
                if axis in self.cuts.get(other, ()) and (other, axis) in self.lost:
                    why = f"lies beside %{value.name} at {node.title}: that sends least"
                    yield (other, axis), Decision(why, value.name, (axis,))

    # -- full values ---------------------------------------------------------------------------------------------

    def _explain_whole(self, value: Value) -> None:
        if value.name not in self.module.annotated and self.mesh.size > 1:
            self.module.decisions[value.name] = [
                *(decision for decision in self.module.decisions.get(value.name, ()) if decision.axes),
                self._why_whole(value),
            ]

    def _why_whole(self, value: Value) -> Decision:
        node = value.node
        if node is not None and node not in self.flow.ties:
            return self._why_result_whole(node)
        holder = node
        if value.is_input and value.graph is not self.flow.graph and value.graph is not None:
            holder = value.graph.parent
        if holder is not None:
            return self._why_whole_at_boundary(value, holder)
        readers = [needs for _, lying in self._around(value) for other, needs in lying if other is value]
        if any(needs.partial for needs in readers):
            return Decision("not annotated, and counts once beside parts of a sum")
        if any(cutting_names(needs) for needs in readers):
            return Decision("not annotated, and its readers need it in different ways")
        return Decision("not annotated, and no reader needs a block of it")

    def _why_whole_at_boundary(self, value: Value, holder: Node) -> Decision:
        """Of an input of a body what goes into it, of a result of its holder what comes out."""
        for view in self.flow.views(holder):
            if value in view.values:
                sources = [source for source in view.values[: view.operand_count] if source is not None]
                outside = [source for source in sources if source in holder.operands]
                inside = [source for source in sources if source not in outside]
                source = next(iter(outside if value.is_input else [*inside, *outside]), None)
                if source is not None:
                    return Decision(f"{holder.title} takes it in full, as %{source.name}", source.name)
        return Decision(f"{holder.title} has it in full on every device")

    def _why_result_whole(self, node: Node) -> Decision:
        placement = self.placements[node]
        if placement.rule is None:
            return Decision(f"{node.title} runs replicated ({why_whole(node)})")
        first: Decision | None = None
        for tensor, (operand, needed) in enumerate(zip(node.operands, placement.operands, strict=True)):
            if operand is None or needed is None or operand.sharding is None or operand.is_constant:
                continue
            if cutting_names(operand.sharding) and not cutting_names(needed):
                view = self.flow.rule(node)
                why = why_given_up(node, view, placement, tensor, operand.sharding, needed)
                why = why or why_dearer(view, tensor, operand.sharding, needed)
                return Decision(f"{node.title} reads %{operand.name} whole: {why}", operand.name)
            if first is None:
                first = Decision(f"nothing shards %{operand.name}, which {node.title} reads", operand.name)
        return first or Decision(f"{node.title} reads nothing that is sharded")


def _is_about_others(axes: Sequence[str], decision: Decision) -> bool:
    """Whether a decision is about axes, but none of these."""
    return bool(decision.axes) and not set(decision.axes) & set(axes)
