"""insert-redistribution: collectives where a value is not sharded as its reader needs it."""

import math
from dataclasses import dataclass, replace

from irpar.analysis.completion.flow import Flow, completed_flow
from irpar.analysis.completion.fused_refinement import refine_for_program
from irpar.analysis.completion.moves import captured_whole, first_target, leaving, placements_of, wanted_shardings
from irpar.analysis.completion.node_placement import why_whole
from irpar.analysis.completion.refinement import refine
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.explanation.origins import explain_values
from irpar.analysis.explanation.reasons import REDUCTIONS, Reasons
from irpar.analysis.explanation.redistribution_log import LoggedRedistribution, RedistributionLog
from irpar.analysis.redistribution import CHUNK_BYTES, Planner, Redistribution, Step, redistribution
from irpar.analysis.redistribution.trees import behind_parts, insert_step, mark_rematerialized, standing_in
from irpar.ir import Builder, Module, Node, Value
from irpar.ops.collectives import FREE, number_collectives
from irpar.ops.effects import draws_random_numbers, is_compute
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError, Sharding


@dataclass(frozen=True)
class InsertRedistribution(Pass):
    """Decide how each node runs, and put collectives wherever a value is sharded otherwise than its reader needs it.

    Before: global view, every tensor value of the main graph, and of the bodies of If, Loop and Scan in it, has a
    sharding (complete-sharding).
    After: global view; each node's operands lie as its factor rule needs them, its results are what the rule gives;
    the collectives in between (irpar.AllReduce, AllGather, ReduceScatter, AllToAll, CollectivePermute, and AllSlice and
    MakePartial, which send nothing) have ids in program order and say in their doc why they are there. Each value is
    redistributed once for each sharding that its readers need, in the graph where it is made: what a loop reads from
    outside is moved before the loop. What comes out of a body is brought to how it lies outside, or goes into the next
    trip. The paths are the cheapest by the network of the module, over blocks that are not larger than those of both
    ends and a chunk: see irpar.analysis.redistribution.

    Options:
        planner: optimal, or fast: paths of up to 1.1 times the cost, for graphs with very many different ones.
        chunk_kb: kB that a block on the way may be above the larger of both ends.
        refine: choose again how nodes run around values that are moved, with all readers of each value in view, and
            runs of nodes at a time; else each node runs as its own values want it.
        together: price collectives as fuse-communication then leaves them; false where it does not follow.
        memory_mb: MB (10^6 bytes) that what one node reads and gives may take on a device. A way to run it that takes
            more is chosen only where there is none that takes less. None: what the devices of the network have, if it
            knows them.
    """

    name = "insert-redistribution"
    planner: Planner = "optimal"
    chunk_kb: float = CHUNK_BYTES / 1024
    refine: bool = True
    together: bool = True
    memory_mb: float | None = None

    def run(self, module: Module) -> PassResult:
        """Insert into the main graph and the bodies in it."""
        if not 0 <= self.chunk_kb < math.inf:
            raise IrparError(f"a chunk cannot be {self.chunk_kb} kB", do="give chunk-kb a number of kB, 0 or more")
        flow = completed_flow(module, self.name)
        insertion = _Insertion(module, flow, self)
        count = insertion.run()
        return PassResult(count > 0, statistics={"collectives": insertion.collectives, "slices": insertion.slices})

    def network_with_room(self, network: Network) -> Network:
        """The network, whose devices have no more room for one node than the option says."""
        if self.memory_mb is None:
            return network
        if not self.memory_mb >= 0:
            raise IrparError(f"a node cannot hold {self.memory_mb} MB", do="give memory-mb a number of MB, 0 or more")
        if math.isinf(self.memory_mb):
            return network
        return replace(network, room=int(self.memory_mb * 10**6))

    @property
    def chunk_bytes(self) -> int:
        """How far a block on the way may be above the larger of both ends."""
        return int(self.chunk_kb * 1024)


class _Insertion:
    """One run over one graph and the bodies in it.

    p = MatMul(a : [8@dp, 256@tp], w2 : [256@tp, 64]) gives [8@dp, 64] partial(sum: tp), y wants [8@dp, 64]
    becomes   p = MatMul(a, w2) : [8@dp, 64] partial(sum: tp)
              y = irpar.AllReduce(p) {axes=["tp"]} : [8@dp, 64]
    """

    def __init__(self, module: Module, flow: Flow, options: InsertRedistribution) -> None:
        self.module = module
        self.options = options
        self.flow = flow
        self.mesh = flow.mesh
        self.network = options.network_with_room(network_of(module.network))
        self.placements = placements_of(flow, self.network)
        self.given = 0
        if options.refine:
            self._refine()
        self._free_results()
        self.reasons = Reasons(module, flow, self.placements)
        self.wanted: dict[Value, set[Sharding]] = {}
        self.moved: dict[tuple[Value, Sharding], Value] = {}
        self.collectives = 0
        self.slices = 0
        self.copied: list[Value] = []
        self.log = RedistributionLog(module)

    def run(self) -> int:
        """Returns how many nodes and constants were inserted, and results found to be sharded otherwise."""
        explain_values(self.module, self.flow, self.placements)
        for node, placement in self.placements.items():
            if self.mesh.size > 1 and draws_random_numbers(node):
                raise IrparError(
                    f"{node.title} draws random numbers, and each of the {self.mesh.size} devices would draw its own",
                    do="make the numbers an input of the model; for a Dropout, export the model in inference mode",
                )
            is_whole = placement.rule is None and not placement.is_boundary
            if is_whole and node.results and is_compute(node):
                self.module.whole[node.results[0].name] = why_whole(node)
        self.wanted = wanted_shardings(self.flow, self.placements)
        for node in self.placements:
            self._feed(node)
            self._give(node)
        mark_rematerialized(self.module, self.flow.graph.walk())
        self._remove_copied()
        self.log.finish()
        number_collectives(self.flow.graph)
        return self.collectives + self.slices + self.given + len(self.copied)

    def _refine(self) -> None:
        """Choose again how nodes run; values that nobody needs any more as they should lie are as they are needed.

        Constants are whole then: each reader has its own block written.
        """
        before = self.placements
        choose = refine_for_program if self.options.together else refine
        self.placements = choose(self.flow, before, self.network, self.module.annotated)
        changed = [node for node, placement in self.placements.items() if placement is not before[node]]
        wanted = wanted_shardings(self.flow, self.placements) if changed else {}
        for value in dict.fromkeys(value for node in changed for value in (*node.inputs, *node.results)):
            maker, needs = value.node, wanted.get(value, set())
            if value.name in self.module.annotated or value.sharding is None:
                continue
            if value.is_constant and needs != {value.sharding}:
                self._shard(value, Sharding.replicated(self.mesh, value.sharding.rank))
            if maker is None or self.placements[maker].is_boundary:
                continue
            given = self.placements[maker].results[value.index]
            if given is not None and needs and value.sharding not in needs:
                self._shard(value, given if given in needs else min(needs, key=str))

    def _free_results(self) -> None:
        """Let results of which nobody said how they leave the graph be as their nodes produce them, but for sums."""
        for value in self.flow.free_results:
            if value.sharding is not None:
                self._shard(value, leaving(self.flow, self.placements, value, value.sharding))

    def _shard(self, value: Value, sharding: Sharding) -> None:
        self.given += sharding != value.sharding
        value.sharding = sharding

    def _remove_copied(self) -> None:
        """Remove constants of which only copies are read."""
        for value in self.copied:
            if not value.has_uses and value.graph is not None:
                value.graph.remove_constant(value)

    def _feed(self, node: Node) -> None:
        """Make a node read its operands as it needs them."""
        for index, (value, needed) in enumerate(zip(node.operands, self.placements[node].operands, strict=True)):
            if value is not None and needed is not None and value.sharding != needed:
                reason = self.reasons.of_need(node, value, needed)
                node.set_operand(index, self._redistributed(value, needed, node, reason, node))
        for value, (inner, index) in captured_whole(self.flow, node):
            if value.sharding is not None and not value.sharding.is_replicated:
                whole = Sharding.replicated(self.mesh, value.sharding.rank)
                reason = f"{node.title} reads %{value.name} inside its body, which runs replicated"
                inner.set_operand(index, self._redistributed(value, whole, node, reason))

    def _give(self, node: Node) -> None:
        """Let the results be what the node produces, and what follows read them as completion said."""
        if not node.results:
            return
        assert node.graph is not None
        following = node.next or node.graph.return_node
        for value, given in zip(node.results, self.placements[node].results, strict=True):
            if given is None or value.sharding is None or given == value.sharding:
                continue
            readers = self.wanted.get(value, set())
            if value.name in self.module.annotated:
                self._hold(value, given, following)
                continue
            target = first_target(value, readers, is_held=False)
            value.sharding = given
            self.given += 1
            if not readers:
                continue
            uses = value.uses
            reason = self.reasons.of_result(node, value, given, target)
            onward = self.reasons.of_layout(node, value, given, target)
            moved = self._redistributed(value, target, following, reason, node, onward)
            value.replace_uses(moved, only=uses)

    def _hold(self, value: Value, given: Sharding, following: Node) -> None:
        """Let an annotated result be what comes of the moves to how it was annotated; what is given has another name.

        p = MatMul(x, w) annotated [8@tp, 64]  becomes  p_1 = MatMul(x, w), p = irpar.ReduceScatter(p_1)
        """
        node, uses, target = value.node, value.uses, value.sharding
        assert node is not None
        assert target is not None
        self.given += 1
        value.sharding = given
        if given.canonical == target.canonical:
            return
        reason = self.reasons.of_result(node, value, given, target)
        planned = self._planned(value, given, target)
        conflict = self.reasons.conflict(node, value, given, target, planned.steps)
        onward = self.reasons.of_layout(node, value, given, target)
        steps = self._steps(value, planned, following, node, reason, onward)
        held = steps[-1][1]
        value.replace_uses(held, only=uses)
        self.log.held(value, held)
        move = LoggedRedistribution(value, target, node, held)
        for previous, result, op in steps:
            self.log.moved(previous, result, op, move)
            if conflict is not None and op not in FREE:
                self.module.conflicts[result.name] = conflict

    def _redistributed(
        self, value: Value, target: Sharding, before: Node, reason: str, party: Node | None = None, onward: str = ""
    ) -> Value:
        """The value under another sharding, made once and shared.

        Args:
            value: what is moved.
            target: how it is to lie.
            before: what it is moved in front of.
            reason: why.
            party: the node that gives or needs it so.
            onward: why it is moved further once it is summed, where that is not the same.
        """
        assert value.sharding is not None
        if value.sharding == target:
            return value
        known = self.moved.get((value, target.canonical))
        if known is not None:
            return known
        planned = self._planned(value, value.sharding, target)
        steps = planned.steps
        if value.is_constant and all(step.op == "AllSlice" for step in steps):
            result = self.flow.graph.add_constant(value.data, value.name, value.source)  # type: ignore[arg-type]
            result.sharding = target
            self.copied.append(value)
            self.log.copied(value, result, before)
        else:
            conflict = None
            if party is not None:
                conflict = self.reasons.conflict(party, value, value.sharding, target, steps)
            move = LoggedRedistribution(value, target, party)
            result = value
            is_for_reader = party is not value.node
            made = self._steps(value, planned, before, value.node, reason, onward, is_for_reader=is_for_reader)
            for previous, result, op in made:
                self.log.moved(previous, result, op, move)
                if conflict is not None and op not in FREE:
                    self.module.conflicts[result.name] = conflict
        self.moved[value, target.canonical] = result
        return result

    def _planned(self, value: Value, source: Sharding, target: Sharding) -> Redistribution:
        return redistribution(
            source,
            target,
            value.shape,
            value.dtype.bits,
            self.network,
            planner=self.options.planner,
            chunk_bytes=self.options.chunk_bytes,
        )

    def _steps(
        self,
        value: Value,
        planned: Redistribution,
        before: Node,
        origin: Node | None,
        reason: str,
        onward: str,
        *,
        is_for_reader: bool = False,
    ) -> list[tuple[Value, Value, str]]:
        """Insert the collectives of a move: of each its operand, its result and its operator.

        Args:
            value, before, reason, onward: as for `_redistributed`.
            planned: from `_planned`.
            origin: the node that they stand for.
            is_for_reader: `before` reads the result; steps of parts stand behind what gives these.
        """
        if planned.peak_bytes > planned.ends_bytes + self.options.chunk_bytes:
            reason += f"; uneven blocks leave no way through less than {planned.peak_bytes} bytes a device"
        made: list[tuple[Value, Value, str]] = []
        read = {each.canonical for each in self.wanted.get(value, ())}
        for step in planned.steps:
            previous = made[-1][1] if made else value
            why = onward if onward and step.op not in REDUCTIONS else reason
            place = (behind_parts(previous, read) if is_for_reader else None) or before
            made.append((previous, self._step(previous, step, place, origin, why), step.op))
        return made

    def _step(self, value: Value, step: Step, before: Node, origin: Node | None, reason: str) -> Value:
        like = origin if origin is not None else before
        assert value.owner is not None
        before = standing_in(value.owner, before)
        builder = Builder(value.owner, self.module.opsets, before=before, like=None if like.is_return else like)
        if step.op in FREE:
            self.slices += 1
        else:
            self.collectives += 1
        return insert_step(builder, value, step, reason)
