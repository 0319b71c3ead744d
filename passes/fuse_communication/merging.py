"""Nodes of communication that stand behind each other become one."""

from collections.abc import Mapping, Sequence

from irpar.analysis.explanation.joined_reasons import joined_conflict, joined_texts
from irpar.ir import DOMAIN, Builder, Graph, Module, Node, TensorType, Value
from irpar.ops.collectives import COLLECTIVES, collective_axes

from .fusion import PackedBlock, cut_and_joined


class Merge:
    """Collectives of one program that stand behind each other, to be one."""

    def __init__(self, module: Module, graph: Graph, nodes: Sequence[Node]) -> None:
        first = nodes[0]
        self.nodes = nodes
        self.conflicts = module.conflicts
        self.builder = Builder(graph, module.opsets, before=first, like=first)
        self.blocks = [_block(module, node) for node in nodes]
        self.dtype = (*first.inputs, *first.results)[0].dtype

    def write(self, channel: int) -> None:
        """Make them one; of what goes from rank to rank on a channel on which nothing else does."""
        first = self.nodes[0]
        if COLLECTIVES[first.op_type].over_axes:
            self._collective()
        elif first.inputs:
            self._send(channel)
        else:
            self._take(channel)

    def _collective(self) -> None:
        """Put the operands side by side, send them, and make each collective what takes its result apart."""
        first, block = self.nodes[0], self.blocks[0]
        attributes = {**first.attributes} | dict.fromkeys(COLLECTIVES[first.op_type].dims, 0)
        shape = block.rows_after, sum(block.width for block in self.blocks)
        sent = self._op(first.op_type, [self._side_by_side()], attributes, shape, DOMAIN)
        self._take_apart(sent)

    def _send(self, channel: int) -> None:
        """Put the operands of Sends side by side, and send them on a channel."""
        first = self.nodes[0]
        sent = self.builder.node(
            first.op_type, [self._side_by_side()], {**first.attributes, "channel": channel}, domain=DOMAIN, results=0
        )
        sent.doc = joined_texts(node.doc for node in self.nodes)
        for node in self.nodes:
            node.erase()

    def _take(self, channel: int) -> None:
        """Take what comes on a channel, and make each Recv what takes that apart."""
        first = self.nodes[0]
        shape = 1, sum(block.width for block in self.blocks)
        attributes = {**first.attributes, "channel": channel, "shape": list(shape)}
        self._take_apart(self._op(first.op_type, [], attributes, shape, DOMAIN))

    def _side_by_side(self) -> Value:
        rows = [self._row(node.inputs[0], block) for node, block in zip(self.nodes, self.blocks, strict=True)]
        width = sum(block.width for block in self.blocks)
        return self._op("Concat", rows, {"axis": 1}, (self.blocks[0].rows, width))

    def _take_apart(self, sent: Value) -> None:
        assert sent.node is not None
        sent.node.doc = joined_texts(node.doc for node in self.nodes)
        widths = [block.width for block in self.blocks]
        told = [conflict for node in self.nodes if (conflict := self.conflicts.pop(node.results[0].name, None))]
        if told:
            self.conflicts[sent.name] = joined_conflict(told)
        pieces = [Value("piece", TensorType(self.dtype, (self.blocks[0].rows_after, width))) for width in widths]
        sizes = self.builder.constant(widths, "widths")
        self.builder.node("Split", [sent, sizes], {"axis": 1}, results=pieces)
        for node, piece, block in zip(self.nodes, pieces, self.blocks, strict=True):
            self._put(node, piece, block)

    def _row(self, value: Value, block: PackedBlock) -> Value:
        """An operand as a matrix: a row for each member that it goes to."""
        if block.rows > 1 and block.cut:
            value = self._reshape(value, block.split(block.operand, block.cut))
            order = block.to_front(block.cut)
            value = self._op("Transpose", [value], {"perm": order}, tuple(value.shape[place] for place in order))
        return self._reshape(value, (block.rows, block.width))

    def _put(self, node: Node, piece: Value, block: PackedBlock) -> None:
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


def _block(module: Module, node: Node) -> PackedBlock:
    """How one stands in a row: of what goes from rank to rank flat."""
    shapes = [value.shape for value in (*node.inputs, *node.results)]
    if not COLLECTIVES[node.op_type].over_axes:
        return PackedBlock(None, None, 1, shapes[0], shapes[0])
    members = module.mesh.group_size(collective_axes(node))
    return PackedBlock(*cut_and_joined(node), members, shapes[0], shapes[1])
