"""fuse-communication: collectives that can be sent together, as one."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.communication_fusion import FusionMode, Mode, fusion_said
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.together import MOST_MB
from irpar.analysis.explanation.joined_reasons import joined_conflict, joined_texts
from irpar.ir import DOMAIN, Builder, Graph, Module, Node, TensorType, Value
from irpar.ops.collectives import COLLECTIVES, collective_axes, number_alike
from irpar.ops.facts import int_attribute
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError

from .fusion import Bucket, Choice, Gain, PackedBlock, Sent, cut_and_joined, sent_in_order
from .limit import within_limit
from .waves import waves_of


@dataclass(frozen=True)
class FuseCommunication(Pass):
    """Merge collectives that share kind, group, dtype and phase, and do not depend on each other, into one.

    Before: local view. After: the same values; the same bytes in fewer collectives, in all programs alike, where the
    network of the module says that this is faster: a launch is saved, and operands and results are copied once more.
    Networks that know no seconds (`bytes`) leave all as it is. All-reduces, all-gathers, reduce-scatters and
    all-to-alls of equal blocks merge, permutes of equal pairs, and broadcasts of one root. The reason of the merged one
    names them all, and its conflict all of theirs.

    What the module says of a kind or a tensor (`irpar.analysis.communication_fusion`) goes before the options. A merge
    after which a rank would hold more than the memory limit of the module is not done.

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
        if self.indices and (self.mode != "index" or list(self.indices) != sorted({*self.indices})):
            raise IrparError(
                f"fuse-communication has indices {list(self.indices)} in mode {self.mode}",
                do="give mode=index and indices that ascend, such as fuse-communication{mode=index, indices=[20, 35]}",
            )
        mesh = next(iter(module.meshes.values()), None)
        if mesh is None:
            return PassResult(False)
        network = network_of(module.network)
        told = FusionMode(self.mode, self.size_mb, self.indices)
        choice = Choice(told, fusion_said(module), network.knows_seconds)
        if choice.is_none:
            return PassResult(False)
        found = [_buckets(bodies, Gain(mesh, network, choice)) for bodies in _alike(module)]
        kept, notes = within_limit(module, found, _merge)
        if not any(kept):
            return PassResult(False, notes=notes)
        _merge(module, kept)
        before, after = sum(len(bucket.ids) for each in kept for bucket in each), sum(map(len, kept))
        return PassResult(True, notes=notes, statistics={"merged collectives": before, "into": after})


def _alike(module: Module) -> list[tuple[Graph, ...]]:
    """The graphs that all programs have: the whole, and each of the bodies."""
    listed = [list(graph.graphs()) for graph in module.graphs]
    if len({len(graphs) for graphs in listed}) > 1:
        # A device that holds no elements of what a body computes has no body: only the graphs around are alike.
        listed = [graphs[:1] for graphs in listed]
    return list(zip(*listed, strict=True))


def _buckets(bodies: Sequence[Graph], gain: Gain) -> list[Bucket]:
    """What to merge in one graph of all programs."""
    programs = [Sent(body, gain.choice) for body in bodies]
    kinds: dict[int, Hashable] = {}
    """Of each collective what it has in common with those that it can be sent with; of others themselves."""
    for number in sorted(set().union(*(program.before for program in programs))):
        keys = [program.key(number) if number in program.nodes else None for program in programs]
        kinds[number] = number if None in keys else tuple(keys)
    before = {number: frozenset().union(*(p.before.get(number, ()) for p in programs)) for number in kinds}
    if any(other >= number for number, others in before.items() for other in others):
        return []  # Ids that do not follow the order: nobody knows what comes first.
    alike: defaultdict[tuple[Hashable, int], list[int]] = defaultdict(list)
    for number, wave in waves_of(kinds, before).items():
        if kinds[number] != number:
            alike[kinds[number], wave].append(number)
    buckets = [bucket for numbers in alike.values() for bucket in gain.buckets(numbers, programs)]
    return buckets if _common_order(programs, buckets) else []


def _common_order(programs: Sequence[Sent], buckets: Sequence[Bucket]) -> list[list[Node]] | None:
    """The nodes of each program, those of a bucket together; None where ranks would come to collectives unlike."""
    orders = [program.order(buckets) for program in programs]
    sequences = {tuple(int_attribute(node, "id") for node in sent_in_order(order)) for order in orders}
    return orders if len(sequences) == 1 else None


def _merge(module: Module, buckets: Sequence[Sequence[Bucket]]) -> bool:
    """Merge, in each of the graphs that all programs have; False where there is no common order for that in one."""
    for bodies, found in zip(_alike(module), buckets, strict=True):
        programs = [Sent(body) for body in bodies] if found else []
        orders = _common_order(programs, found) if found else []
        if orders is None:
            return False
        for program, order in zip(programs, orders, strict=True):
            for node in order:
                program.graph.append(node.detach())
            for bucket in found:
                _Merge(module, program.graph, [program.nodes[number] for number in bucket.ids]).write()
    number_alike(module.graphs)
    return True


class _Merge:
    """Collectives of one program that stand behind each other, to be one."""

    def __init__(self, module: Module, graph: Graph, nodes: Sequence[Node]) -> None:
        first = nodes[0]
        self.nodes = nodes
        self.conflicts = module.conflicts
        self.builder = Builder(graph, module.opsets, before=first, like=first)
        members = module.mesh.group_size(collective_axes(first))
        self.blocks = [
            PackedBlock(*cut_and_joined(node), members, node.inputs[0].shape, node.results[0].shape) for node in nodes
        ]
        self.dtype = first.inputs[0].dtype

    def write(self) -> None:
        """Put the operands side by side, send them, and make each collective what takes its result apart."""
        first, block = self.nodes[0], self.blocks[0]
        rows = [self._row(node.inputs[0], block) for node, block in zip(self.nodes, self.blocks, strict=True)]
        widths = [block.width for block in self.blocks]
        row = self._op("Concat", rows, {"axis": 1}, (block.rows, sum(widths)))
        attributes = {**first.attributes} | dict.fromkeys(COLLECTIVES[first.op_type].dims, 0)
        shape = block.rows_after, sum(widths)
        sent = self._op(first.op_type, [row], attributes, shape, DOMAIN)
        assert sent.node is not None
        sent.node.doc = joined_texts(node.doc for node in self.nodes)
        told = [conflict for node in self.nodes if (conflict := self.conflicts.pop(node.results[0].name, None))]
        if told:
            self.conflicts[sent.name] = joined_conflict(told)
        pieces = [Value("piece", TensorType(self.dtype, (block.rows_after, width))) for width in widths]
        sizes = self.builder.constant(widths, "widths")
        self.builder.node("Split", [sent, sizes], {"axis": 1}, results=pieces)
        for node, piece, block in zip(self.nodes, pieces, self.blocks, strict=True):
            self._take(node, piece, block)

    def _row(self, value: Value, block: PackedBlock) -> Value:
        """An operand as a matrix: a row for each member that it goes to."""
        if block.rows > 1 and block.cut:
            value = self._reshape(value, block.split(block.operand, block.cut))
            order = block.to_front(block.cut)
            value = self._op("Transpose", [value], {"perm": order}, tuple(value.shape[place] for place in order))
        return self._reshape(value, (block.rows, block.width))

    def _take(self, node: Node, piece: Value, block: PackedBlock) -> None:
        """Make a collective the Reshape of its piece of the result: a row for each member that it comes from."""
        self.builder.before = node
        if block.rows_after > 1 and block.joined:
            split = block.split(block.result, block.joined)
            piece = self._reshape(piece, tuple(split[place] for place in block.to_front(block.joined)))
            piece = self._op("Transpose", [piece], {"perm": block.from_front(block.joined)}, split)
        node.set_operands([piece, self.builder.constant(list(block.result), "shape")])
        node.op_type, node.domain, node.version = "Reshape", "", self.builder.opsets[""]
        node.attributes.clear()
        node.doc = ""

    def _reshape(self, value: Value, shape: tuple[int, ...]) -> Value:
        return self._op("Reshape", [value, self.builder.constant(list(shape), "shape")], {}, shape)

    def _op(
        self,
        op_type: str,
        values: Sequence[Value],
        attributes: Mapping[str, object],
        shape: tuple[int, ...],
        domain: str = "",
    ) -> Value:
        kind = TensorType(self.dtype, shape)
        return self.builder.op(op_type, values, attributes, type=kind, domain=domain, name="fused")
