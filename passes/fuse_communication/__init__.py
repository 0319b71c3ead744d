"""fuse-communication: collectives that can be sent together, as one."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from irpar.analysis.communication_fusion import FusionMode, Mode, fusion_said
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.together import MOST_MB
from irpar.analysis.gathers import gathers_said
from irpar.ir import Graph, Module, Node
from irpar.ops.collectives import number_alike
from irpar.ops.facts import int_attribute
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.sharding import IrparError

from .fusion import Choice, Gain, Sent, sent_in_order
from .limit import within_limit
from .merging import Merge
from .transfers import Bucket, Transfer, free_channels, transfers_of
from .waves import waves_of


@dataclass(frozen=True)
class FuseCommunication(Pass):
    """Merge collectives that share kind, group, dtype and phase, and do not depend on each other, into one.

    Before: local view. After: the same values; the same bytes in fewer collectives, in all programs alike, where the
    network of the module says that this is faster: a launch is saved, and operands and results are copied once more.
    Under networks that know no seconds (`bytes`) mode=auto leaves all as it is. All-reduces, all-gathers,
    reduce-scatters and all-to-alls of equal blocks merge, permutes of equal pairs, broadcasts of one root, and Sends of
    equal pairs, with the Recvs that take them. The reason of the merged one names them all, and its conflict all of
    theirs.

    What the module says of a kind or a tensor (`irpar.analysis.communication_fusion`) goes before the options. A merge
    after which a rank would hold more than the memory limit of the module is not done. Gathers of parameters merge
    within a layer, and over as many as `zero` says (`irpar.analysis.gathers`).

    Options:
        mode: auto: what the network says is faster, of up to `size_mb`. size: as many as make up to `size_mb`, whatever
            it says. index: those of one kind of collective between two of `indices`, which count them in the order of
            the program. off: none. As MindSpore's comm_fusion has them.
        size_mb: MB of one merged collective, and of its result, at most; of auto and size.
        indices: of index: the numbers, from 0, at which a next one begins.
    """

    name = "fuse-communication"
    mode: Mode = "auto"
    size_mb: float = MOST_MB
    indices: tuple[int, ...] = ()

    def run(self, module: Module) -> PassResult:
        """Rewrite the programs, each of the bodies in them by itself."""
        if not module.is_local:
            raise IrparError("fuse-communication needs the local view", do="run it after localize")
        told = self._told()
        mesh = next(iter(module.meshes.values()), None)
        if mesh is None:
            return PassResult(False)
        network = network_of(module.network)
        choice = Choice(told, fusion_said(module), network.knows_seconds, gathers_said(module))
        if choice.is_none:
            return PassResult(False)
        plans, too_many = _with_channels(_plans(_alike(module), Gain(mesh, network, choice)))
        sequences = [plan.sequence for plan in plans]
        found = [plan.buckets for plan in plans]
        kept, notes = within_limit(module, found, partial(_merge, sequences=sequences))
        notes = (*too_many, *notes)
        if not any(kept):
            return PassResult(False, notes=notes)
        if kept == found:
            _write(module, plans)
        else:
            merged = _merge(module, kept, sequences)
            assert merged, "a copy of the module could be merged so"
        before, after = sum(len(bucket.ids) for each in kept for bucket in each), sum(map(len, kept))
        return PassResult(True, notes=notes, statistics={"merged collectives": before, "into": after})

    def _told(self) -> FusionMode:
        try:
            return FusionMode(self.mode, self.size_mb, self.indices)
        except IrparError as error:
            raise IrparError(error.what, where=format_pass(self), do=error.do) from None


@dataclass(frozen=True)
class _Plan:
    """What to merge in one graph of all programs.

    Attributes:
        programs: the graph in each.
        buckets: what is merged.
        sequence: the order of communication there; none: as it is.
        orders: the nodes of each program, those of a bucket together.
    """

    programs: Sequence[Sent] = ()
    buckets: Sequence[Bucket] = ()
    sequence: Sequence[int] = ()
    orders: Sequence[Sequence[Node]] = ()


def _alike(module: Module) -> list[tuple[Graph, ...]]:
    """The graphs that all programs have: the whole, and each of the bodies."""
    listed = [list(graph.graphs()) for graph in module.graphs]
    if len({len(graphs) for graphs in listed}) > 1:
        # A device that holds no elements of what a body computes has no body: only the graphs around are alike.
        listed = [graphs[:1] for graphs in listed]
    return list(zip(*listed, strict=True))


def _plans(alike: Sequence[Sequence[Graph]], gain: Gain) -> list[_Plan]:
    """What to merge in the whole and in each of the bodies: with transfers, or without where that cannot be."""
    whole, *bodies = alike
    transfers = transfers_of(whole)
    first = _plan(whole, gain, transfers) if transfers else _Plan()
    return [first if first.buckets else _plan(whole, gain), *(_plan(body, gain) for body in bodies)]


def _plan(bodies: Sequence[Graph], gain: Gain, transfers: Sequence[Transfer] = ()) -> _Plan:
    """What to merge in one graph of all programs."""
    programs = _sent(bodies, transfers, gain.choice)
    sent = {transfer.number: transfer for transfer in transfers}
    kinds: dict[int, Hashable] = {}
    """Of each what it has in common with those that it can be sent with; of others themselves."""
    for number in sorted(set().union(*(program.before for program in programs))):
        if number in sent:
            keys = [gain.key_of_transfer(sent[number])]
        else:
            keys = [program.key(number) if number in program.nodes else None for program in programs]
        kinds[number] = number if None in keys else (number in sent, *keys)
    before = {number: frozenset().union(*(p.before.get(number, ()) for p in programs)) for number in kinds}
    if any(other >= number for number, others in before.items() for other in others):
        return _Plan()  # Ids that do not follow the order: nobody knows what comes first.
    alike: defaultdict[tuple[Hashable, int], list[int]] = defaultdict(list)
    waves = waves_of(kinds, before)
    for number, wave in waves.items():
        if kinds[number] != number:
            alike[kinds[number], wave].append(number)
    buckets: list[Bucket] = []
    for numbers in alike.values():
        own = [sent[number] for number in numbers if number in sent]
        buckets += gain.buckets_of_transfers(own) if own else gain.buckets(numbers, programs)
    sequence = tuple(sorted(waves, key=lambda number: (waves[number], number))) if transfers else ()
    return _ordered(programs, buckets, sequence) or _Plan()


def _with_channels(plans: Sequence[_Plan]) -> tuple[list[_Plan], tuple[str, ...]]:
    """The plans without the transfers for which no channel is left; a note where there are some."""
    found, left = [], 0
    for plan in plans:
        transfers = [bucket for bucket in plan.buckets if not plan.programs[0].has_collectives(bucket)]
        some = free_channels([program.graph for program in plan.programs], transfers)
        without = [bucket for bucket in transfers if bucket not in some]
        if without:
            left += sum(len(bucket.ids) - 1 for bucket in without)
            kept = [bucket for bucket in plan.buckets if bucket not in without]
            found.append(_ordered(plan.programs, kept, plan.sequence) or _Plan() if kept else _Plan())
        else:
            found.append(plan)
    note = f"{left:,} more Sends and their Recvs would be merged, but no channel is left that nothing is sent on"
    return found, (note,) if left else ()


def _sent(bodies: Sequence[Graph], transfers: Sequence[Transfer], choice: Choice | None = None) -> list[Sent]:
    numbers = {node: each.number for each in transfers for end in (each.sends, each.takes) for node in end.values()}
    return [Sent(body, choice, numbers) for body in bodies]


def _ordered(programs: Sequence[Sent], buckets: Sequence[Bucket], sequence: Sequence[int]) -> _Plan | None:
    """The merges with the order for them; None where ranks would then come to collectives in different orders."""
    orders = [program.order(buckets, sequence) for program in programs]
    sequences = {tuple(int_attribute(node, "id") for node in sent_in_order(order)) for order in orders}
    return _Plan(programs, buckets, sequence, orders) if len(sequences) == 1 else None


def _merge(module: Module, buckets: Sequence[Sequence[Bucket]], sequences: Sequence[Sequence[int]]) -> bool:
    """Do merges that were planned, or a part of them, in a module or a copy of it; False where that cannot be."""
    plans = []
    for bodies, found, sequence in zip(_alike(module), buckets, sequences, strict=True):
        if found:
            transfers = (transfers_of(bodies) or ()) if sequence else ()
            plans.append(_ordered(_sent(bodies, transfers), found, sequence))
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans):
        return False
    _write(module, known)
    return True


def _write(module: Module, plans: Sequence[_Plan]) -> None:
    """Do what is planned, with transfers on channels of their own, of which there are enough (`_with_channels`)."""
    for plan in (plan for plan in plans if plan.buckets):
        sent = [bucket for bucket in plan.buckets if not plan.programs[0].has_collectives(bucket)]
        channels = free_channels([program.graph for program in plan.programs], sent)
        for program, order in zip(plan.programs, plan.orders, strict=True):
            for node in order:
                program.graph.append(node.detach())
            for bucket in plan.buckets:
                for nodes in program.ends(bucket):
                    Merge(module, program.graph, nodes).write(channels.get(bucket, 0))
    number_alike(module.graphs)
