"""insert-redistribution: collectives where a value does not lie as its reader needs it."""

from dataclasses import dataclass

from irpar.analysis.effects import draws_random_numbers
from irpar.analysis.network import network_of
from irpar.analysis.placement import Placement, has_rank, place, why_whole
from irpar.analysis.redistribution import Step, plan
from irpar.ir import Builder, Decision, Graph, Module, Node, Use, Value
from irpar.ops import Kind
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError, Mesh, Reduction, Sharding, block_sizes


@dataclass(frozen=True)
class InsertRedistribution(Pass):
    """Decide how each node runs, and put collectives wherever a value lies otherwise than its reader needs it.

    Before: global view, every tensor value of the main graph has a sharding (complete-sharding).
    After: global view; each node's operands lie as its factor rule needs them, its results are what the rule gives;
    the collectives in between (irpar.AllReduce, AllGather, ReduceScatter, AllToAll, and AllSlice, which sends
    nothing) have ids in program order and say in their doc why they are there. Each value is redistributed once for
    each sharding that its readers need. The paths are the cheapest by the network of the module: see
    irpar.analysis.redistribution.
    """

    name = "insert-redistribution"

    def run(self, module: Module) -> PassResult:
        """Insert into the main graph."""
        if module.is_local:
            raise IrparError("insert-redistribution needs the global view", do="run it before localize")
        for value in module.graph.values():
            if value.sharding is None and value.has_uses and has_rank(value):
                raise IrparError(
                    f"%{value.name} has no sharding yet", do="run complete-sharding before insert-redistribution"
                )
        insertion = _Insertion(module, module.graph, module.mesh)
        count = insertion.run()
        return PassResult(count > 0, statistics={"collectives": insertion.collectives, "slices": insertion.slices})


_VERBS: dict[Reduction, str] = {
    "sum": "sums",
    "prod": "multiplies",
    "max": "takes the maximum",
    "min": "takes the minimum",
    "and": "takes all",
    "or": "takes any",
}


def _as_it_is(node: Node) -> Placement | None:
    """Collectives that are there already stay as they are."""
    if node.domain != "irpar":
        return None
    lies = [tuple(value.sharding if value else None for value in values) for values in (node.operands, node.results)]
    return Placement(lies[0], lies[1], None, ())


class _Insertion:
    """One run over one graph.

    p = MatMul(a : [8@dp, 256@tp], w2 : [256@tp, 64]) gives [8@dp, 64] partial(sum: tp), y wants [8@dp, 64]
    becomes   p = MatMul(a, w2) : [8@dp, 64] partial(sum: tp)
              y = irpar.AllReduce(p) {axes=["tp"]} : [8@dp, 64]
    """

    def __init__(self, module: Module, graph: Graph, mesh: Mesh) -> None:
        self.module = module
        self.graph = graph
        self.mesh = mesh
        self.network = network_of(module.network)
        self.placements: dict[Node, Placement] = {}
        self.moved: dict[tuple[Value, Sharding], Value] = {}
        self.collectives = 0
        self.slices = 0
        self.given = 0
        self.copied: list[Value] = []

    def run(self) -> int:
        """Returns how many nodes and constants were inserted, and results found to lie otherwise."""
        nodes = list(self.graph)
        for node in nodes:
            placement = self.placements[node] = _as_it_is(node) or place(node, self.mesh, lambda _: True, self.network)
            if self.mesh.size > 1 and draws_random_numbers(node):
                raise IrparError(
                    f"{node.title} draws random numbers, and each of the {self.mesh.size} devices would draw its own",
                    do="make the numbers an input of the model; for a Dropout, export the model in inference mode",
                )
            if placement.rule is None and node.results and node.domain != "irpar":
                self.module.whole[node.results[0].name] = why_whole(node)
        wanted = self._wanted(nodes)
        for node in nodes:
            self._feed(node)
            self._give(node, wanted)
        for value in self.copied:
            if not value.has_uses and value.graph is not None:
                self.graph.remove_constant(value)
        self._number()
        return self.collectives + self.slices + self.given + len(self.copied)

    def _wanted(self, nodes: list[Node]) -> dict[Value, set[Sharding]]:
        """The shardings that the readers of each value need."""
        wanted: dict[Value, set[Sharding]] = {}
        for node in nodes:
            for value, needed in self._needs(node):
                wanted.setdefault(value, set()).add(needed)
        for value in self.graph.outputs:
            if value.sharding is not None:
                wanted.setdefault(value, set()).add(value.sharding)
        return wanted

    def _needs(self, node: Node) -> list[tuple[Value, Sharding]]:
        needs = []
        for value, needed in zip(node.operands, self.placements[node].operands, strict=True):
            if value is not None and needed is not None:
                needs.append((value, needed))
        for value, _ in self._captured(node):
            if value.sharding is not None:
                needs.append((value, Sharding.replicated(self.mesh, value.sharding.rank)))
        return needs

    def _captured(self, node: Node) -> list[tuple[Value, Use]]:
        """What the nested graphs of a node read from this graph: they run whole on every device."""
        return [
            (value, (inner, index))
            for nested in node.nested_graphs()
            for graph in nested.graphs()
            for inner in (*graph, graph.return_node)
            for index, value in enumerate(inner.operands)
            if value is not None and value.owner is self.graph
        ]

    def _feed(self, node: Node) -> None:
        """Make a node read its operands as it needs them."""
        for index, (value, needed) in enumerate(zip(node.operands, self.placements[node].operands, strict=True)):
            if value is not None and needed is not None and value.sharding != needed:
                reason = self._reason_of_need(node, value, needed)
                node.set_operand(index, self._redistributed(value, needed, node, reason))
        for value, (inner, index) in self._captured(node):
            if value.sharding is not None and not value.sharding.is_replicated:
                whole = Sharding.replicated(self.mesh, value.sharding.rank)
                reason = f"{node.title} reads %{value.name} inside its body, which runs whole"
                inner.set_operand(index, self._redistributed(value, whole, node, reason))

    def _give(self, node: Node, wanted: dict[Value, set[Sharding]]) -> None:
        """Let the results be what the node gives, and what follows read them as completion said."""
        following = node.next or self.graph.return_node
        for value, given in zip(node.results, self.placements[node].results, strict=True):
            if given is None or value.sharding is None or given == value.sharding:
                continue
            target = value.sharding
            readers = wanted.get(value, set())
            if len(readers) == 1 and target not in readers:
                # Nobody reads it as completion left it: go to where its readers are in one step.
                (target,) = readers
            value.sharding = given
            self.given += 1
            if not readers:
                continue
            uses = value.uses
            moved = self._redistributed(value, target, following, self._reason_of_result(node, value, given, target))
            value.replace_uses(moved, only=uses)

    def _redistributed(self, value: Value, target: Sharding, before: Node, reason: str) -> Value:
        """The value under another sharding, made once and shared."""
        assert value.sharding is not None
        if value.sharding == target:
            return value
        known = self.moved.get((value, target))
        if known is not None:
            return known
        steps = plan(value.sharding, target, value.shape, value.dtype.bits, self.network)
        if value.is_constant and all(step.op == "AllSlice" for step in steps):
            result = self.graph.add_constant(value.data, value.name, value.source)  # type: ignore[arg-type]
            result.sharding = target
            self.copied.append(value)
        else:
            result = value
            for step in steps:
                result = self._step(result, step, before, value.node, reason)
            moves = " and ".join(step.op for step in steps)
            self.module.decide(result.name, Decision(f"{moves} of %{value.name}", follows=value.name))
        self.moved[value, target] = result
        return result

    def _step(self, value: Value, step: Step, before: Node, origin: Node | None, reason: str) -> Value:
        attributes: dict[str, object] = {"axes": [str(axis) for axis in step.axes]}
        match step.op:
            case "AllToAll":
                attributes |= {"split_dim": step.dims[0], "concat_dim": step.dims[1]}
            case "AllGather" | "ReduceScatter" | "AllSlice":
                attributes["dim"] = step.dims[0]
        if step.op in ("AllReduce", "ReduceScatter"):
            assert value.sharding is not None
            attributes["reduce"] = value.sharding.reduce
        like = origin if origin is not None else before
        builder = Builder(self.graph, self.module.opsets, before=before, like=None if like.is_return else like)
        result = builder.op(step.op, [value], attributes, type=value.type, domain="irpar", name=value.name)
        result.sharding = step.after
        result.source = value.source
        assert result.node is not None
        result.node.doc = reason
        if step.op == "AllSlice":
            self.slices += 1
        else:
            self.collectives += 1
        return result

    def _number(self) -> None:
        """Ids in program order, equal on all ranks since they all run programs made from this one."""
        number = 0
        for node in self.graph:
            if node.domain == "irpar" and node.op_type != "AllSlice":
                node.set_attribute("id", number)
                number += 1

    # -- reasons ------------------------------------------------------------------------------------------------

    def _reason_of_need(self, node: Node, value: Value, needed: Sharding) -> str:
        assert value.sharding is not None
        kept = set(zip(needed.axes, range(needed.rank), strict=True))
        moved = [cut[0].name for dim, cut in enumerate(value.sharding.axes) if cut and (cut, dim) not in kept]
        lies = f"%{value.name} lies as {value.sharding}{self._because(value, moved[0] if moved else None)}"
        if self.placements[node].rule is None:
            return f"{node.title} needs it whole ({why_whole(node)}); {lies}"
        for dim, (size, cut) in enumerate(zip(value.shape, value.sharding.axes, strict=True)):
            parts = self.mesh.group_size(cut)
            if cut != needed.axes[dim] and 0 in block_sizes(size, parts):
                lies += f", where {size} over {parts} leaves a rank without elements"
        return f"{node.title} needs it as {needed}; {lies}"

    def _reason_of_result(self, node: Node, value: Value, given: Sharding, target: Sharding) -> str:
        if not given.partial:
            told = f"{node.title} gives %{value.name} as {given}; its readers want {target}"
            return told + self._because_of_readers(value, given, target)
        axes = ", ".join(map(str, given.partial))
        reasons = []
        for maker in self._makers(node):
            cut = [
                f"%{operand.name}{self._because(operand, given.partial[0].name)}"
                for operand in self._cut_operands(maker)
            ]
            reasons.append(f"{maker.title} {_VERBS[given.reduce]} over {axes}, which cuts {' and '.join(cut)}")
        return "; ".join(reasons)

    def _because_of_readers(self, value: Value, given: Sharding, target: Sharding) -> str:
        """Which other operand of a reader is cut by the axes that a value has to give up."""
        lost = {axis.name for axis in given.all_axes} - {axis.name for axis in target.all_axes}
        for reader in value.users:
            if reader not in self.placements:
                continue
            for other, needed in zip(reader.operands, self.placements[reader].operands, strict=True):
                names = {axis.name for axis in needed.all_axes} & lost if needed is not None else set()
                if other is not None and other is not value and names:
                    return f": {reader.title} reads %{other.name} as {needed}{self._because(other, min(names))}"
        return ""

    def _makers(self, node: Node) -> list[Node]:
        """The nodes whose partial results a node gives: itself, unless it carries those of its operands."""
        carried = self.placements[node].carried
        found: dict[Node, None] = {}
        waiting = [node]
        while waiting:
            step = waiting.pop(0)
            carried = self.placements[step].carried if step in self.placements else carried
            before = [operand.node for n in carried.operands if (operand := step.operands[n]) and operand.node]
            if carried.axes and before:
                waiting.extend(maker for maker in before if maker in self.placements)
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

    def _because(self, value: Value, axis: str | None = None) -> str:
        """The annotation that a value's sharding, or its cut by an axis, goes back to; in brackets."""
        chain = self.module.chain(value.name, axis)
        if not chain:
            return ""
        name, decision = chain[-1]
        return f" ({decision.why})" if name == value.name else f" (as %{name}: {decision.why})"
