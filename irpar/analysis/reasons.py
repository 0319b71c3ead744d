"""Why a collective is there, in words, and which annotations it stands between."""

from collections.abc import Mapping, Sequence

from irpar.ir import Conflict, Module, Node, Value
from irpar.ops import Kind
from irpar.sharding import Reduction, Sharding, filled_blocks

from .flow import Flow
from .placement import Placement, why_whole
from .redistribution import Step

_VERBS: dict[Reduction, str] = {
    "sum": "sums",
    "prod": "multiplies",
    "max": "takes the maximum",
    "min": "takes the minimum",
    "and": "takes all",
    "or": "takes any",
}


_DECIDING = {"If": 1, "Loop": 2}
"""How many operands, the first, say whether and how often a body runs."""


class Reasons:
    """Words for the collectives of one graph.

    Args:
        module: its log of decisions tells where a sharding comes from.
        flow: the graph and the bodies in it.
        placements: how each node runs.
    """

    def __init__(self, module: Module, flow: Flow, placements: Mapping[Node, Placement]) -> None:
        self.module = module
        self.flow = flow
        self.placements = placements
        self.outputs = set(module.graph.outputs)

    # -- why ------------------------------------------------------------------------------------------------------

    def of_need(self, node: Node, value: Value, needed: Sharding) -> str:
        """Why an operand is brought to where its reader needs it."""
        lies = f"%{value.name} lies as {value.sharding}{self._because_of_move(value, needed)}"
        if self.placements[node].is_boundary:
            return f"{self._boundary(node, value, needed)}; {lies}"
        if self.placements[node].rule is None:
            return f"{node.title} needs it whole ({why_whole(node)}); {lies}"
        lies += self._of_empty_blocks(node, value, needed)
        return f"{node.title} needs it as {needed}{_introduced(self._other_side(node, value, needed))}; {lies}"

    def _boundary(self, node: Node, value: Value, needed: Sharding) -> str:
        """Why what passes the boundary of a body must lie in one way."""
        holder = self.flow.holder(node)
        if holder is not None:
            return f"{holder.title} takes it out of its body as {needed}, as it lies on the other side"
        if needed.is_replicated and value in node.operands[: _DECIDING.get(node.op_type, 0)]:
            return f"{node.title} needs it whole: all devices must decide alike"
        return f"{node.title} takes it into its body as {needed}"

    def _of_empty_blocks(self, node: Node, value: Value, needed: Sharding) -> str:
        """Where an operand is gathered because the operator does not run on blocks without elements."""
        rule, lies = self.placements[node].rule, value.sharding
        assert rule is not None
        assert lies is not None
        told = ""
        for dim, parts_of_dim in enumerate(rule.operands[node.operands.index(value)]):
            size, parts = value.shape[dim], lies.dim_parts(dim)
            refused = [f for f in parts_of_dim if rule.kinds[f] is Kind.PASS and not rule.accepts_empty[f]]
            if refused and lies.axes[dim] != needed.axes[dim] and filled_blocks(size, parts) < parts:
                told += (
                    f", where {size} over {parts} leaves a rank without elements, on which {node.op_type} cannot run"
                )
        return told

    def of_result(self, node: Node, value: Value, given: Sharding, target: Sharding) -> str:
        """Why a result is brought to where its readers want it."""
        if given.partial:
            return self._of_partial(node, given)
        told = f"{node.title} gives %{value.name} as {given}; its readers want {target}"
        return told + _introduced(self._side_of_readers(value, given, target))

    def _of_partial(self, node: Node, given: Sharding) -> str:
        axes = ", ".join(map(str, given.partial))
        reasons = []
        for maker in self._makers(node):
            cut = [
                f"%{operand.name}{self.because(operand, given.partial[0].name)}"
                for operand in self._cut_operands(maker)
            ]
            reasons.append(f"{maker.title} {_VERBS[given.reduce]} over {axes}, which cuts {' and '.join(cut)}")
        return "; ".join(reasons)

    def because(self, value: Value, axis: str | None = None) -> str:
        """The annotation that a value's sharding, or its cut by an axis, goes back to; in brackets."""
        chain = self.module.chain(value.name, axis)
        if not chain:
            return ""
        name, decision = chain[-1]
        return f" ({decision.why})" if name == value.name else f" (as %{name}: {decision.why})"

    # -- conflicts ------------------------------------------------------------------------------------------------

    def conflict(
        self, node: Node, value: Value, lies: Sharding, needed: Sharding, steps: Sequence[Step]
    ) -> Conflict | None:
        """The two sides between which a value is moved; None where a sum is reduced, or an operator has no rule.

        Args:
            node: its reader, or what gives it.
            value: what is moved.
            lies, needed: from where and to where.
            steps: how.
        """
        placement = self.placements[node]
        if lies.partial or (placement.rule is None and not placement.is_boundary):
            return None
        is_read = value in node.inputs
        side = self._other_side(node, value, needed) if is_read else self._side_of_readers(value, lies, needed)
        ops = [step.op for step in steps]
        name = value.source_name
        return Conflict(
            value=name,
            lies=str(lies),
            because=self._because_of_move(value, needed, lies).strip(" ()"),
            node=node.title,
            needed=str(needed),
            needed_because=side,
            rematerialized="AllGather" in ops and "AllSlice" in ops[ops.index("AllGather") :],
            avoid=f'annotate "{name}" as {_spec_text(needed)}',
        )

    # -- the two sides --------------------------------------------------------------------------------------------

    def _because_of_move(self, value: Value, needed: Sharding, lies: Sharding | None = None) -> str:
        lies = lies or value.sharding
        assert lies is not None
        kept = set(zip(needed.axes, range(needed.rank), strict=True))
        moved = [cut[0].name for dim, cut in enumerate(lies.axes) if cut and (cut, dim) not in kept]
        return self.because(value, moved[0] if moved else None)

    def _other_side(self, node: Node, value: Value, needed: Sharding) -> str:
        """Which other value of a node is cut by the axes that an operand gives up or takes."""
        assert value.sharding is not None
        placement = self.placements[node]
        contested = _contested(value.sharding, needed)
        pairs = zip((*node.operands, *node.results), (*placement.operands, *placement.results), strict=True)
        for other, needs in pairs:
            if other is None or needs is None or other is value:
                continue
            names = {axis.name for cut in needs.axes for axis in cut} & contested
            if names:
                return f"it reads %{other.name} as {needs}{self.because(other, min(names))}"
        return ""

    def _side_of_readers(self, value: Value, given: Sharding, target: Sharding) -> str:
        contested = _contested(given, target)
        for reader in value.users:
            if reader not in self.placements:
                continue
            for other, needs in zip(reader.operands, self.placements[reader].operands, strict=True):
                names = {axis.name for axis in needs.all_axes} & contested if needs is not None else set()
                if other is not None and other is not value and names:
                    return f"{reader.title} reads %{other.name} as {needs}{self.because(other, min(names))}"
        if value in self.outputs:
            return f"it is an output{self.because(value)}"
        return ""

    # -- sums -----------------------------------------------------------------------------------------------------

    def _makers(self, node: Node) -> list[Node]:
        """The nodes whose partial results a node gives: itself, unless it carries those of its operands."""
        found: dict[Node, None] = {}
        waiting = [node]
        while waiting:
            step = waiting.pop(0)
            carried = self.placements[step].carried
            before = [operand.node for n in carried.operands if (operand := step.operands[n]) and operand.node]
            makers = [maker for maker in before if maker in self.placements]
            if makers:
                waiting.extend(makers)
            else:
                found[step] = None
        return list(found)

    def _cut_operands(self, node: Node) -> list[Value]:
        """The operands of which a reduced factor is cut."""
        placement = self.placements[node]
        rule = placement.rule
        assert rule is not None
        return [
            operand
            for operand, dims in zip(node.operands, rule.operands, strict=True)
            if operand is not None
            and any(rule.kinds[f] is Kind.REDUCE and placement.factors[f] for parts in dims for f in parts)
        ]


def _contested(a: Sharding, b: Sharding) -> set[str]:
    """The names of axes that lie otherwise in two shardings."""
    return {axis.name for one, other in zip(a.axes, b.axes, strict=True) if one != other for axis in (*one, *other)}


def _introduced(side: str) -> str:
    return f": {side}" if side else ""


def _spec_text(sharding: Sharding) -> str:
    """As a --shardings file writes it."""
    dims = ["null" if not cut else f"[{', '.join(map(str, cut))}]" for cut in sharding.axes]
    return f"[{', '.join(dims)}]"
