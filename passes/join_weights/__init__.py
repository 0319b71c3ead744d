"""join-weights: blocks of one weight become one again, device by device."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from irpar.analysis.explanation.gone_values import follow_instead, last_name, move_conflicts
from irpar.analysis.explanation.joined_reasons import joined_texts
from irpar.analysis.weights.fused_weights import with_columns
from irpar.ir import Builder, Module, Node, TensorType, Value, joined_tensor, with_dim
from irpar.ops.collectives import number_alike
from irpar.pass_manager import Pass, PassResult

from .heads import write_matrices
from .weight_joins import Join, Step, joins, parts_along


@dataclass(frozen=True)
class JoinWeights(Pass):
    """Do with one product what products of one operand with several blocks of one tensor do, and split its result.

    Before: local view. After: the blocks that a device holds of q, of k and of v stand side by side in one constant,
    in the order of the tensor that they are blocks of, and are written so; biases, elementwise operators and
    reductions behind the product run once, and a Split without communication gives what each of them gave. Where no
    device cuts the tensor, that is the tensor as it was.

    Products with weights that have a dim of heads are written as products of matrices (`heads`).

    Blocks stay apart where their sizes differ between devices, and where their products are sharded differently.
    """

    name = "join-weights"
    takes_out = "it is computed beside others of the same weight, and is sharded so"

    def run(self, module: Module) -> PassResult:
        """Join in all programs alike."""
        if not module.is_local:
            return PassResult(False)
        matrices = write_matrices(module)
        found = [{join.name: join for join in joins(graph)} for graph in module.graphs]
        common = set.intersection(*(set(each) for each in found))
        log = _Log(module)
        for graph, each in zip(module.graphs, found, strict=True):
            # Communication must be the same in all programs; the rest is as well.
            chosen = [join for name, join in each.items() if name in common]
            order = {node: number for number, node in enumerate(graph.walk())} if chosen else {}
            made: dict[tuple[Value, ...], Value] = {}
            for join in chosen:
                _Writer(module, join, order, log, made).run()
        if common:
            number_alike(module.graphs)
        log.finish()
        return PassResult(bool(common) or matrices > 0, statistics={"weights": len(common)})


class _Log:
    """What changes in the log, and in what nodes tell.

    Attributes:
        names: of values that are gone, each with the one that is there instead.
        joined: names of values that a Split gives now, each with what it takes apart.
        docs: of joined nodes, all that the nodes told that they stand for.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.names: dict[str, str] = {}
        self.joined: dict[str, str] = {}
        self.docs: dict[Node, list[str]] = {}

    def explain(self, new: str, old: str) -> None:
        """Let a new value be sharded so for the reasons of an old one."""
        if old in self.module.decisions:
            self.module.decisions.setdefault(new, list(self.module.decisions[old]))
        if old in self.module.annotated:
            self.module.annotated.setdefault(new, self.module.annotated[old])

    def finish(self) -> None:
        """Write the new names into everything that is reported."""
        if not self.names:
            return
        move_conflicts(self.module, self.joined)
        follow_instead(self.module, self.names)
        for name in self.names:
            # No value of the model, but a section: what it stands for is there again.
            self.module.annotated.pop(name, None)
        for known in self.module.decisions.values():
            known[:] = [replace(decision, why=self._renamed(decision.why)) for decision in known]
        for graph in self.module.graphs:
            for node in graph.walk():
                node.doc = joined_texts(map(self._renamed, self.docs.get(node, (node.doc,))))

    def _renamed(self, text: str) -> str:
        return _NAME.sub(self._new, text) if "%" in text else text

    def _new(self, found: "re.Match[str]") -> str:
        return f"%{last_name(self.names, found[1])}"


_NAME = re.compile(r"%([^\s(),;]*[^\s(),;:.])")


class _Writer:
    """Writes one join into one program.

    Attributes:
        order: of the nodes of the program before anything was joined.
        made: joined constants, by what they are made of; layers that share weights share these.
    """

    def __init__(
        self, module: Module, join: Join, order: dict[Node, int], log: _Log, made: dict[tuple[Value, ...], Value]
    ) -> None:
        self.module = module
        self.join = join
        self.order = order
        self.log = log
        self.made = made

    def run(self) -> None:
        """Make the joined steps and the Split, and take out what they stand for."""
        read = [value for step in self.join.steps for node in step.nodes for value in node.inputs]
        made = [self._constant(self.join.weights, self.join.dim)]
        for step in self.join.steps:
            made.append(self._write(step, made[-1]))
        self._split(self.join.steps[-1], made[-1])
        for step in reversed(self.join.steps):
            for node in reversed(step.nodes):
                node.erase()
        for step, value in zip(self.join.steps[:-1], made[1:], strict=False):
            results = [node.result for node in step.nodes]
            # A name of the model is that of a tensor of it, which the joined one is not.
            if results[0].source is None:
                value.rename(results[0].name)
            self.log.names.update({each.name: value.name for each in results if each.name != value.name})
        for value in dict.fromkeys(read):
            if value.is_constant and not value.has_uses and value.graph is not None:
                value.graph.remove_constant(value)

    def _first(self, step: Step) -> Node:
        """The node of a step that stands before the others."""
        return min(step.nodes, key=self.order.__getitem__)

    def _constant(self, values: Sequence[Value], dim: int) -> Value:
        """Constants of sections as one, part by part."""
        known = self.made.get(tuple(values))
        if known is not None:
            return known
        first = values[0]
        assert first.graph is not None
        tensors = [value.data for value in values if value.data is not None]
        data = joined_tensor(tensors, dim, parts_along(first, dim))
        made = first.graph.add_constant(data, first.source_name, first.source)
        _lie_side_by_side(made, values, dim)
        self.log.explain(made.name, first.name)
        self.log.names.update({value.name: made.name for value in values})
        self.made[tuple(values)] = made
        return made

    def _write(self, step: Step, before: Value) -> Value:
        """A step for all sections at once."""
        first = self._first(step)
        like = step.nodes[0]
        operands: list[Value | None] = []
        for index, value in enumerate(like.operands):
            if index == step.own:
                operands.append(before)
            elif index in step.operands:
                constants = [node.operands[index] for node in step.nodes]
                operands.append(self._constant([one for one in constants if one is not None], step.operands[index]))
            else:
                operands.append(value)
        assert first.graph is not None
        builder = Builder(first.graph, {like.domain: like.version}, before=first, like=like)
        name = f"{like.result.name}_joined"
        attributes = with_columns(like, sum(node.result.shape[step.dim] for node in step.nodes))
        made = builder.op(like.op_type, operands, attributes, domain=like.domain, name=name)
        assert made.node is not None
        self.log.docs[made.node] = [node.doc for node in step.nodes]
        _lie_side_by_side(made, [node.result for node in step.nodes], step.dim)
        return made

    def _split(self, step: Step, value: Value) -> None:
        """Give the readers of each section what it has of what was made of all."""
        first = self._first(step)
        assert first.graph is not None
        results = [node.result for node in step.nodes]
        builder = Builder(first.graph, self.module.opsets, before=first, like=step.nodes[0])
        sizes = builder.constant([result.shape[step.dim] for result in results], "sizes")
        sizes.type = sizes.data.type if sizes.data is not None else sizes.type
        node = builder.node("Split", [value, sizes], {"axis": step.dim}, results=len(results))
        self.log.explain(value.name, results[0].name)
        for old, new in zip(results, node.results, strict=True):
            new.type, new.sharding, new.global_shape, new.memory = old.type, old.sharding, old.global_shape, old.memory
            new.source = old.source
            old.replace_uses(new)
            name = old.name
            old.rename("")
            new.rename(name)
            self.log.joined[name] = value.name


def _lie_side_by_side(made: Value, values: Sequence[Value], dim: int) -> None:
    """Let a value be what values side by side along a dim are."""
    first = values[0]
    made.type = TensorType(first.dtype, _with_sizes(first.shape, dim, [value.shape for value in values]))
    if first.global_shape is not None:
        wholes = [value.whole_shape for value in values]
        made.global_shape = _with_sizes(first.global_shape, dim, wholes)
    made.sharding, made.memory, made.doc = first.sharding, first.memory, first.doc


def _with_sizes(shape: Sequence[int], dim: int, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return with_dim(shape, dim, sum(each[dim] for each in shapes))
