"""Why a collective is there, in words, and which annotations it stands between."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.placement import Placement
from irpar.analysis.redistribution import Step
from irpar.ir import Conflict, Decision, Module, Node, Value
from irpar.ops import Kind
from irpar.ops.effects import is_compute
from irpar.sharding import Axis, DimSpec, Sharding

from .closing_annotations import Closing, closing_annotation
from .joined_reasons import few_texts
from .origins import VERBS, cutting_names, given_up_dims, why_dearer, why_given_up

REDUCTIONS = frozenset({"AllReduce", "ReduceScatter", "AllSlice"})
"""What brings parts of a sum together, and cuts what comes of it."""


@dataclass(frozen=True)
class Side:
    """One of the two ways in which a value should lie.

    Attributes:
        text: why.
        origin: the name of the value that the chain of steps ends at: what was annotated.
        closing: the annotation further on that keeps it from being otherwise.
    """

    text: str
    origin: str | None = None
    closing: Closing | None = None

    @property
    def introduced(self) -> str:
        """The text behind a colon."""
        return f": {self.text}" if self.text else ""


class Origins:
    """Where the chains of decisions about values end; each step is followed once, however many chains lead over it.

    Args:
        module: whose log it is; decisions about values that were asked for stay as they are.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._ends: dict[tuple[str, str | None], tuple[str, Decision]] = {}

    def of(self, name: str, axis: str | None = None) -> tuple[str, Decision] | None:
        """The last value of the chain from a value's cut by an axis, and the decision about it; None without any."""
        path: list[str] = []
        step: str | None = name
        end: tuple[str, Decision] | None = None
        while step is not None:
            known = self._ends.get((step, axis))
            if known is not None:
                end = known
                break
            decision = self.module.decision(step, axis)
            if decision is None:
                break
            end = self._ends[step, axis] = step, decision
            path.append(step)
            step = decision.follows
        for passed in path:
            assert end is not None
            self._ends[passed, axis] = end
        return end

    def end(self, value: Value, axis: str | None = None) -> str | None:
        """The name of the value at which the chain ends."""
        found = self.of(value.name, axis)
        return None if found is None else found[0]

    def because(self, value: Value, axis: str | None = None) -> str:
        """The annotation that a value's sharding, or its cut by an axis, goes back to; in brackets."""
        end = self.of(value.name, axis)
        if end is None:
            return ""
        name, decision = end
        return f" ({decision.why})" if name == value.name else f" (as %{name}: {decision.why})"


class Reasons:
    """Words for the collectives of one graph.

    Args:
        module: its log of decisions tells where a sharding comes from.
        flow: the graph and the bodies in it.
        placements: how each node runs.
    """

    def __init__(self, module: Module, flow: Flow, placements: Mapping[Node, Placement]) -> None:
        self.module = module
        self.origins = Origins(module)
        self.flow = flow
        self.placements = placements
        self.outputs = set(module.graph.outputs)

    # -- why ------------------------------------------------------------------------------------------------------

    def of_need(self, node: Node, value: Value, needed: Sharding) -> str:
        """Why an operand is brought to where its reader needs it."""
        assert value.sharding is not None
        lies, needs = self._sides(node, value, value.sharding, needed)
        if self.placements[node].is_boundary:
            return f"{needs.text}; %{value.name} is sharded as {value.sharding}{lies.introduced}"
        if needed.partial and not value.sharding.partial:
            return (
                f"{node.title} takes it beside parts over {', '.join(map(str, needed.partial))}, so that it counts once"
            )
        way = f" as {needed}" if self.placements[node].rule is not None else ""
        found = f"%{value.name} is sharded as {value.sharding}{lies.introduced}"
        return f"{node.title} needs it{way}{needs.introduced}; {found}"

    def _boundary(self, node: Node, value: Value, needed: Sharding) -> str:
        """Why what passes the boundary of a body must lie in one way."""
        if node is self.flow.graph.return_node:
            return f"the next run takes it as {needed}, as the state lies that it replaces"
        holder = self.flow.holder(node)
        if holder is not None:
            return f"{holder.title} takes it out of its body as {needed}, as it lies on the other side"
        if needed.is_replicated and value in self.flow.deciding(node):
            return f"{node.title} needs it in full: all devices must decide alike"
        if value in node.results:
            return f"{node.title} produces it as it is in its body, {needed}"
        return f"{node.title} takes it into its body as {needed}"

    def of_result(self, node: Node, value: Value, given: Sharding, target: Sharding) -> str:
        """Why a result is brought to where its readers want it."""
        if given.partial:
            return self._of_partial(node, given)
        gives, wants = self._sides(node, value, given, target)
        told = f"{node.title} produces %{value.name} as {given}{gives.introduced}"
        return f"{told}; its readers want {target}{wants.introduced}"

    def of_layout(self, node: Node, value: Value, given: Sharding, target: Sharding) -> str:
        """Why a sum is brought to another layout than it is given in; "" where it is not, or nothing is summed."""
        summed = given.with_partial(())
        if not given.partial or summed.canonical == target.canonical:
            return ""
        _, wants = self._sides(node, value, summed, target)
        return f"%{value.name} is sharded as {summed} once it is summed; its readers want {target}{wants.introduced}"

    def _of_partial(self, node: Node, given: Sharding) -> str:
        axes = ", ".join(map(str, given.partial))
        reasons = []
        for maker in self._makers(node):
            cut = [
                f"%{operand.name}{self.origins.because(operand, given.partial[0].name)}"
                for operand in self._cut_operands(maker)
            ]
            reasons.append(f"{maker.title} {VERBS[given.reduce]} over {axes}, which shards {' and '.join(cut)}")
        return few_texts(reasons)

    # -- conflicts ------------------------------------------------------------------------------------------------

    def conflict(
        self, node: Node, value: Value, lies: Sharding, needed: Sharding, steps: Sequence[Step]
    ) -> Conflict | None:
        """The two sides between which a value is moved; None where parts are only reduced, or a reader has no rule.

        Args:
            node: its reader, or what gives it.
            value: what is moved.
            lies, needed: from where and to where.
            steps: how.
        """
        is_read = value in node.inputs
        placement = self.placements[node]
        if is_read and placement.rule is None and not placement.is_boundary:
            return None
        ops = [step.op for step in steps]
        if lies.partial and (REDUCTIONS.issuperset(ops) or lies.with_partial(()).canonical == needed.canonical):
            return None
        one, other = self._sides(node, value, lies, needed, "it" if is_read else node.title)
        reader = next(iter([] if is_read else self._readers(value, needed)), node)
        is_direct = "AllGather" not in ops or "AllSlice" not in ops[ops.index("AllGather") :]
        return Conflict(
            value=value.source_name,
            lies=str(lies),
            because=one.text,
            node=reader.title,
            needed=str(needed),
            needed_because=other.text,
            rematerialized=not is_direct,
            avoid=self._ways_out(value, needed if is_read else lies, (one, other), is_direct=is_direct),
        )

    def _sides(
        self, node: Node, value: Value, lies: Sharding, needed: Sharding, subject: str = "it"
    ) -> tuple[Side, Side]:
        """Why a value is sharded as it is, and why it is needed otherwise; `subject` is what the node is called."""
        contested = _contested(lies, needed)
        own = self._annotation(value, contested)
        if value in node.inputs:
            return own, self._other_side(node, value, needed, lies, subject)
        mine = self._other_side(node, value, lies, needed, subject)
        return mine, self._side_of_readers(value, lies, needed) or own

    def _annotation(self, value: Value, contested: set[str]) -> Side:
        """What a value's own contested axes go back to."""
        assert value.sharding is not None
        axis = next((axis.name for axis in value.sharding.all_axes if axis.name in contested), None)
        return Side(self.origins.because(value, axis).strip(" ()"), self.origins.end(value, axis))

    def _other_side(self, node: Node, value: Value, here: Sharding, elsewhere: Sharding, subject: str) -> Side:
        """Why a value cannot be sharded as elsewhere at a node, or what else the contested axes cut there."""
        placement = self.placements[node]
        if placement.is_boundary:
            return Side(self._boundary(node, value, here))
        contested = _contested(here, elsewhere)
        tensor = next(n for n, other in enumerate((*node.operands, *node.results)) if other is value)
        if node.strategy is not None and _is_said(node, tensor):
            return Side(f"{subject} is to run {node.strategy.annotation.title}")
        view = self.flow.rule(node)
        why = why_given_up(node, view, placement, tensor, elsewhere, here)
        meets = "" if why else self._meets(node, value, elsewhere, here)
        for other, needs in self._beside(node, value):
            held = contested.intersection(cutting_names(needs), cutting_names(other.sharding))
            is_moved = other.sharding != needs or (other.node is not None and not is_compute(other.node))
            if held and meets and is_moved:
                continue  # It is moved for the same reason.
            if held:
                found = self._side(f"{meets}, and" if meets else subject, node, other, needs, min(held))
                return replace(found, text=why) if why else found
        if meets:
            return Side(f"{meets}: as {here} costs least")
        if why:
            return Side(why)
        dearer = why_dearer(view, tensor, elsewhere, here)
        closing = self._closing(node, value, elsewhere, here)
        return Side(dearer) if closing is None else self._closed(dearer, closing)

    def _closing(self, node: Node, value: Value, lies: Sharding, needed: Sharding) -> Closing | None:
        """What closes, further on, the dims that a reader does not take as they are sharded."""
        if value not in node.operands:
            return None
        cut = dict(given_up_dims(lies, needed))
        return closing_annotation(self.flow, self.placements, self.module.annotated, node, value, cut)

    def _closed(self, dearer: str, closing: Closing) -> Side:
        """That a cut would be dearer because what is made of a value is annotated without it."""
        value, start = closing.value, closing.start
        made = "" if value is start else f"%{start.name}, of which "
        verb = "" if value is start else " is made"
        told = f"{closing.lies} (annotated {self.module.annotated[value.name].title})"
        return Side(f"{dearer}: it produces {made}%{value.name}{verb} as {told}", value.name, closing)

    def _meets(self, node: Node, value: Value, lies: Sharding, needed: Sharding) -> str:
        """What must come together at a node for which a dim of an operand is given up; "" where nothing must."""
        view = self.flow.rule(node)
        if view is None or value not in node.operands or not view.rule.meets:
            return ""
        moving = {source for source, _ in view.rule.moves}
        dims = zip(lies.axes, needed.axes, view.tensors[node.operands.index(value)], strict=True)
        if not any(cut and cut != kept and moving.intersection(parts) for cut, kept, parts in dims):
            return ""
        return f"{view.node.title} needs {view.rule.meets}"

    def _readers(self, value: Value, needed: Sharding) -> list[Node]:
        """The nodes that read a value as it is needed."""
        found = []
        for reader in value.users:
            placement = self.placements.get(reader)
            pairs = () if placement is None else zip(reader.operands, placement.operands, strict=True)
            if any(operand is value and lies == needed for operand, lies in pairs):
                found.append(reader)
        return found

    def _side_of_readers(self, value: Value, lies: Sharding, needed: Sharding) -> Side | None:
        """What the readers of a value want; None where its own annotation says so."""
        annotation = self.module.annotated.get(value.name)
        if annotation is not None:
            said = Sharding.of_spec(needed.mesh, annotation.spec).axes
            if all(axes[: len(named)] == named for axes, named in zip(needed.axes, said, strict=True)):
                return None
        contested = _contested(lies, needed)
        readers = self._readers(value, needed)
        for reader in readers:
            if self._meets(reader, value, lies, needed):
                return self._other_side(reader, value, needed, lies, reader.title)
            for other, needs in self._beside(reader, value):
                names = contested.intersection(cutting_names(needs))
                if names:
                    return self._side(reader.title, reader, other, needs, min(names))
        if not readers or contested.intersection(cutting_names(needed)):
            return None
        reader = next((reader for reader in readers if self._closing(reader, value, lies, needed)), readers[0])
        return self._other_side(reader, value, needed, lies, reader.title)

    def _beside(self, node: Node, value: Value) -> Iterator[tuple[Value, Sharding]]:
        """The other tensors of a node, with how it needs and gives them."""
        placement = self.placements[node]
        needed = (*placement.operands, *placement.results)
        for other, needs in zip((*node.operands, *node.results), needed, strict=True):
            if other is not None and needs is not None and other is not value:
                yield other, needs

    def _side(self, subject: str, node: Node, value: Value, needs: Sharding, axis: str) -> Side:
        """That an axis cuts another tensor of a node."""
        verb = "produces" if value in node.results else "reads"
        text = f"{subject} {verb} %{value.name} as {needs}{self.origins.because(value, axis)}"
        return Side(text, self.origins.end(value, axis))

    def _ways_out(self, value: Value, wanted: Sharding, sides: tuple[Side, Side], *, is_direct: bool) -> str:
        """The annotations with which a value would not be moved, the least change first.

        Args:
            value: what is moved.
            wanted: how it should lie for that.
            sides: why it is sharded as it is, and why it is needed otherwise.
            is_direct: it is moved without being gathered and cut again. Otherwise an annotation on a value that had
                none would only move this on to what gives it.
        """
        annotated = self.module.annotated
        ways = []
        closing = next((side.closing for side in sides if side.closing is not None), None)
        if closing is not None:
            ways += self._ways_to_open(closing)
        elif value.name in annotated or is_direct:
            ways.append(_annotate(value, wanted))
        origins = dict.fromkeys(side.origin for side in reversed(sides) if side.origin != value.name)
        named = [name for name in origins if name is not None and name in annotated]
        if value.name in annotated and len(named) < len(sides) and not is_direct:
            named.append(value.name)
        left_out = dict.fromkeys(annotated[name].title for name in named if annotated[name].can_be_left_out)
        ways += [f"leave out the annotation {title}" for title in left_out]
        return ", or ".join(ways) or _annotate(value, wanted)

    def _ways_to_open(self, closing: Closing) -> list[str]:
        """An annotation in place of the one that closes dims; on the value that is moved it would only be moved on."""
        said = self.module.annotated[closing.value.name]
        may_replace = not said.said or said.is_implied
        return [_annotate(closing.value, closing.instead)] if may_replace and closing.instead is not None else []

    # -- sums -----------------------------------------------------------------------------------------------------

    def _makers(self, node: Node) -> list[Node]:
        """The nodes whose partial results a node gives: itself, unless it carries those of its operands."""
        found: list[Node] = []
        waiting, seen = [node], {node}
        for step in waiting:
            carried = self.placements[step].carried
            before = [operand.node for n in carried.operands if (operand := step.operands[n]) and operand.node]
            makers = [maker for maker in before if maker in self.placements]
            if not makers:
                found.append(step)
            waiting += [maker for maker in dict.fromkeys(makers) if maker not in seen]
            seen.update(makers)
        return found

    def _cut_operands(self, node: Node) -> list[Value]:
        """The operands of which a reduced factor is sharded."""
        placement = self.placements[node]
        rule = placement.rule
        assert rule is not None
        return [
            operand
            for operand, dims in zip(node.operands, rule.operands, strict=True)
            if operand is not None
            and any(rule.kinds[f] is Kind.REDUCE and placement.factors[f] for parts in dims for f in parts)
        ]


def reason_of_program(origins: Origins, node: Node, value: Value, axes: Sequence[Axis], manner: str) -> str:
    """Why the local program of a node communicates: it works along axes that cut an operand."""
    names = ", ".join(map(str, axes))
    cut = (
        f"{names}, which {'shards' if len(axes) == 1 else 'shard'} %{value.name}{origins.because(value, axes[0].name)}"
    )
    return f"{node.title} works along {cut}{manner and f', {manner}'}"


def _is_said(node: Node, tensor: int) -> bool:
    """Whether the strategy of a node says how it reads an operand, or gives a result."""
    strategy = node.strategy
    if strategy is None:
        return False
    if tensor < len(node.operands):
        return tensor < len(strategy.operands) and strategy.operands[tensor] is not None
    return strategy.is_of_operands or any(strategy.results)


def _contested(a: Sharding, b: Sharding) -> set[str]:
    """The names of axes of several devices that are sharded otherwise in two shardings."""
    found = {axis for one, other in zip(a.axes, b.axes, strict=True) if one != other for axis in (*one, *other)}
    return {axis.name for axis in found if a.mesh.axes[axis.name] > 1}


def _annotate(value: Value, wanted: Sharding) -> str:
    return f'annotate "{value.source_name}" as {spec_text(wanted)}'


def spec_text(sharding: Sharding) -> str:
    """As a --shardings file writes it."""
    dims = ["null" if not cut else f"[{', '.join(map(str, cut))}]" for cut in sharding.axes]
    return f"[{', '.join(dims)}]"


def annotations_of_text(text: str) -> list[tuple[str, str]]:
    """The annotations that ways out name, as in `annotate "y" as [[dp], null], or ...`: tensor and its sharding."""
    return re.findall(r'annotate "([^"]+)" as (\[.*?\])(?=,? or |$)', text)


def spec_of_text(text: str) -> tuple[DimSpec, ...]:
    """What `spec_text` has written."""
    dims = re.findall(r"null|\[[^\[\]]*\]", text[1:-1])
    return tuple(None if dim == "null" else dim[1:-1].split(", ") for dim in dims)
