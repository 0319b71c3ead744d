"""fold-constants: compute what is known before anything runs."""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from irpar.analysis.looping import LOOPS
from irpar.analysis.types.inference import Inference
from irpar.ir import (
    AnnotationError,
    ArrayTensor,
    Builder,
    DType,
    Graph,
    Module,
    Node,
    Tensor,
    TensorType,
    Value,
    tensor_type,
)
from irpar.ir.annotate import hand_over, matches
from irpar.ops.effects import is_compute, is_deterministic
from irpar.ops.facts import refers_to_call
from irpar.ops.listed_sizes import known_numbers, lists_sizes
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import Sharding

from .evaluate import compute, compute_together
from .sequences import Lists

SMALL = 16_384
"""Bytes of operands and results up to which a node is computed at once; larger ones wait for one common session."""

# The size of their results depends on the numbers in their operands, but has a bound: a few times the operands' size.
_BOUNDED = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit"})


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute nodes whose operands are constants, and sizes of static values, in one sweep that infers types too.

    Before: inputs have types. After: no node is left whose operands are all constants, unless its operands or results
    have more than `max-bytes`, it reads a weight (a matrix of numbers that are no indices), a constant that carries an
    annotation, draws random numbers, or fills what a loop of a backward pass adds to. An If whose predicate is constant
    is replaced by the branch that it takes.

    What is taken at a known place of a list that is written out is a tensor, a piece of a Split of one, so that it may
    be sharded. A CastLike is a Cast, so that nothing is sent for a tensor of which the dtype alone is read.

    Shape arithmetic goes away step by step: a Shape becomes a constant, then what gathers and joins its parts, then the
    Reshape that reads these has a static type, and so has a Shape after it.
    """

    name: ClassVar[str] = "fold-constants"
    takes_out: ClassVar[str] = "what is known before the model runs is not computed, nor is what nothing reads then"
    max_bytes: int = 1 << 20

    def run(self, module: Module) -> PassResult:
        """Fold in all graphs and functions.

        Raises:
            TypeInferenceError: see infer-types.
        """
        folder = _Folder(module, self.max_bytes)
        for graph in module.graphs:
            folder.graph(graph)
        for function in module.functions.values():
            folder.graph(function.graph)
        statistics: dict[str, int | float] = {"folded": folder.folded, "branches": folder.branches}
        changed = bool(folder.folded or folder.branches or folder.inference.inferred)
        return PassResult(changed, folder.inference.notes, statistics)


def _begins_sums(node: Node) -> bool:
    """Whether a node fills what gradients are added to, trip by trip: as large as weights, and written over anyway."""
    if node.identity != ("", "Expand") or node.phase != "backward":
        return False
    users = node.results[0].users
    return bool(users) and all(user.identity in LOOPS for user in users)


class _Folder:
    """The sweep.

    Attributes:
        made: constants that came out of folding, which are no weights whatever their shape.
        waiting: nodes that will be computed together, and in `promised` their results.
        fresh: values that became more than the nodes after them know yet.
    """

    def __init__(self, module: Module, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.module = module
        self.inference = Inference(self.graph)
        self.folded = 0
        self.branches = 0
        self.made: set[Value] = set()
        self.waiting: dict[Node, None] = {}
        self.promised: set[Value] = set()
        self.fresh: set[Value] = set()
        self.annotated = _annotated(module)
        self.lists = Lists()

    def graph(self, graph: Graph) -> None:
        """Sweep over a graph and those nested in it."""
        node = graph.first
        while node is not None:
            node = self.visit(node)
        self.flush()

    def visit(self, node: Node) -> Node | None:
        """Fold one node if that can be.

        Returns:
            The node to look at next.
        """
        if node.holds_graphs:
            self.flush()
            if node.identity == ("", "If") and (branch := _taken(node)) is not None:
                return self.take(node, branch)
            self.infer(node)
            return node.next
        if self.needs_types(node):
            self.infer(node)
        cast = self.as_cast(node)
        if cast is not None:
            return cast
        following = node.next
        if (
            self.annotated.isdisjoint(node.results)
            and (taken := self.lists.taken(node, self.module.opsets)) is not None
        ):
            self.stand_for(node, taken)
            return following
        if (size := _size_of_static(node) or _known_list(node)) is not None:
            self.replace(node, [size])
        elif self.is_empty(node):
            self.replace(node, [_empty(value) for value in node.results])
        elif self.is_foldable(node):
            self.fold(node)
        elif self.drop_empty(node):
            return following
        elif not self.promised.isdisjoint(node.inputs) and not _is_static(node):
            # The type of this node may depend on numbers that are still to be computed.
            self.flush()
            self.fresh.update(node.inputs)
            return node
        return following

    def as_cast(self, node: Node) -> Node | None:
        """The Cast that stands for a CastLike, of whose second operand the dtype alone is read, and is known."""
        if node.identity != ("", "CastLike") or tensor_type(node.inputs[1].type) is None:
            return None
        assert node.graph is not None
        data, like = node.inputs
        builder = Builder(node.graph, {"": node.version}, before=node, like=node)
        name, attributes = node.result.name, {**node.attributes, "to": like.dtype.value}
        made = builder.op("Cast", [data], attributes, type=node.result.type, name=name)
        node.replace([made])
        made.rename(name)
        self.remove_unread([like])
        self.folded += 1
        return made.node

    def stand_for(self, node: Node, value: Value) -> None:
        """Let what a list holds stand for what a node takes of it."""
        result, operands = node.result, node.inputs
        name = result.name
        if value not in self.lists.nameless:
            hand_over(self.module, name, value.name, f"{node.title} takes %{value.name} of a list")
        node.replace([value])
        if value in self.lists.nameless:
            value.rename(name)
            self.lists.nameless.discard(value)
        self.fresh.add(value)
        self.remove_unread(operands)
        self.folded += 1

    def needs_types(self, node: Node) -> bool:
        """Whether inference can find more than is known."""
        return not _is_static(node) or not self.fresh.isdisjoint(node.inputs)

    def infer(self, node: Node) -> None:
        """Infer the types of a node's results."""
        before = [value.type for value in node.results]
        if self.inference.node(node):
            self.fresh.update(value for value, old in zip(node.results, before, strict=True) if value.type != old)

    # -- what may be folded ---------------------------------------------------------------------------------------

    def is_foldable(self, node: Node) -> bool:
        """Whether the results of a node are known now and worth keeping."""
        # Of most nodes the first operand says that they are not.
        if not all(value in self.promised or self.is_foldable_operand(value) for value in node.inputs):
            return False
        if not is_compute(node) or node.callee is not None or not is_deterministic(node) or _begins_sums(node):
            return False
        if refers_to_call(node):
            return False
        return all(map(_may_be_constant, node.results)) and self.result_bytes(node) <= self.max_bytes

    def is_foldable_operand(self, value: Value) -> bool:
        """Whether a value is a constant that may go into another one."""
        data = value.data
        if data is None or data.nbytes > self.max_bytes:
            return False
        if value.type != data.type or value.sharding is not None or value in self.annotated:
            return False
        is_weight = not data.dtype.is_index and data.dtype is not DType.STR and sum(size > 1 for size in data.shape) > 1
        return value in self.made or not is_weight

    def result_bytes(self, node: Node) -> float:
        """Bytes of all results; infinite where that is not known."""
        if not _is_static(node):
            known = all(value not in self.promised for value in node.inputs)
            return _operand_bytes(node) if known and node.op_type in _BOUNDED else math.inf
        return sum(value.tensor_type.nbytes for value in node.results)

    # -- empty tensors --------------------------------------------------------------------------------------------

    def is_empty(self, node: Node) -> bool:
        """Whether all results have no elements, so that nothing need be known to know them."""
        if not node.results or not all(map(_is_empty, node.results)):
            return False
        return is_compute(node) and all(map(_may_be_constant, node.results))

    def drop_empty(self, node: Node) -> bool:
        """Join only what has elements; exporters write the rest of a split of everything, and join it again."""
        if node.identity != ("", "Concat") or not _is_static(node) or _is_empty(node.results[0]):
            return False
        operands = node.inputs
        kept = [value for value in operands if not _is_empty(value)]
        if len(kept) == len(operands):
            return False
        node.set_operands(kept)
        self.remove_unread(operands)
        if len(kept) == 1:
            assert node.graph is not None
            builder = Builder(node.graph, {"": node.version}, before=node, like=node)
            name = node.result.name
            same = builder.op("Identity", kept, type=node.result.type, name=name)
            node.replace([same])
            same.rename(name)
        self.folded += 1
        return True

    # -- folding --------------------------------------------------------------------------------------------------

    def fold(self, node: Node) -> None:
        """Compute a node now, or let it wait for the others."""
        small = self.result_bytes(node) + _operand_bytes(node) <= SMALL
        if small and not any(value in self.promised for value in node.inputs):
            found = compute(node)
            if found is not None:
                self.replace(node, found)
                return
        self.waiting[node] = None
        self.promised.update(node.results)

    def flush(self) -> None:
        """Compute the nodes that wait, and put constants for those of their results that others read."""
        nodes, self.waiting = list(self.waiting), {}
        self.promised.clear()
        if not nodes:
            return
        inside = set(nodes)
        wanted = [value for node in nodes for value in node.results if any(user not in inside for user in value.users)]
        found = compute_together(nodes, wanted)
        for node in reversed(nodes):
            for value in node.results:
                if value in found and value.has_uses:
                    value.replace_uses(self.constant(value, found[value]))
            if not any(value.has_uses for value in node.results):
                self.erase(node)
                self.folded += 1
                continue
            for value in node.results:
                if not value.name and value.owner is not None:
                    value.owner.names.claim(value)

    def replace(self, node: Node, data: list[Tensor]) -> None:
        """Put constants for the results of a node."""
        for value, tensor in zip(node.results, data, strict=True):
            if value.has_uses:
                value.replace_uses(self.constant(value, tensor))
        self.erase(node)
        self.folded += 1

    def constant(self, value: Value, data: Tensor) -> Value:
        """A constant that stands for a result, under its name."""
        owner = value.owner
        assert owner is not None
        name = value.name
        owner.names.release(value)
        made = owner.add_constant(data, name, value.source)
        made.sharding, made.memory, made.doc = value.sharding, value.memory, value.doc
        made.metadata = value.metadata
        value.name = ""
        self.made.add(made)
        self.fresh.add(made)
        return made

    def erase(self, node: Node) -> None:
        """Delete a node, and what folding made for it alone."""
        operands = node.inputs
        node.erase()
        self.remove_unread(operands)

    def remove_unread(self, values: Iterable[Value]) -> None:
        """Delete those that folding made and nothing reads any more."""
        for value in values:
            if value in self.made and not value.has_uses and value.graph is not None:
                value.graph.remove_constant(value)

    # -- branches -------------------------------------------------------------------------------------------------

    def take(self, node: Node, branch: Graph) -> Node | None:
        """Put the nodes of a branch in the place of an If.

        Returns:
            The first of them, else the node after the If.
        """
        graph = node.graph
        assert graph is not None
        following = branch.first or node.next
        outputs = graph.absorb(branch, node)
        self.fresh.update(outputs)
        for old, new in zip(node.results, outputs, strict=True):
            hand_over(
                self.module, old.name, new.name, f"{node.title} always takes one branch, of which it is %{new.name}"
            )
        node.replace(outputs)
        self.branches += 1
        return following


def _annotated(module: Module) -> set[Value]:
    """What annotations name that wait for a mesh."""
    found: set[Value] = set()
    for annotation in module.annotations:
        # One that matches nothing any more is reported when it is applied.
        with suppress(AnnotationError):
            found.update(matches(module, annotation))
    return found


def _taken(node: Node) -> Graph | None:
    """The branch that an If with a constant predicate takes."""
    predicate = node.inputs[0]
    if predicate.data is None:
        return None
    branch = node.attributes.get("then_branch" if predicate.data.numpy().all() else "else_branch")
    if not isinstance(branch, Graph):
        return None
    # One value cannot stand for several that are annotated differently.
    said: dict[Value, set[Sharding]] = {}
    for result, output in zip(node.results, branch.outputs, strict=True):
        said.setdefault(output, set()).update(lies for lies in (result.sharding, output.sharding) if lies is not None)
    return branch if all(len(each) <= 1 for each in said.values()) else None


def _size_of_static(node: Node) -> Tensor | None:
    """What a Shape or Size of a value with static type gives, whether or not the value is constant."""
    if node.identity not in (("", "Shape"), ("", "Size")) or not isinstance(node.inputs[0].type, TensorType):
        return None
    type_ = node.inputs[0].type
    if not type_.is_static or refers_to_call(node):
        return None
    if node.op_type == "Size":
        return ArrayTensor(np.array(math.prod(type_.static_shape), np.int64))
    start, end = node.attributes.get("start", 0), node.attributes.get("end", len(type_.static_shape))
    assert isinstance(start, int)
    assert isinstance(end, int)
    # ONNX clamps start and end as Python's slices do.
    return ArrayTensor(np.array(type_.static_shape[start:end], np.int64))


def _known_list(node: Node) -> Tensor | None:
    """A list of sizes of which all are known, although what they are taken from has others: seq of [batch, seq]."""
    if not lists_sizes(node) or all(value.data is not None for value in node.inputs) or not _is_static(node):
        return None
    numbers = known_numbers(node) if all(map(_may_be_constant, node.results)) else None
    if numbers is None:
        return None
    type_ = node.result.tensor_type
    return ArrayTensor(np.array(numbers, type_.dtype.numpy).reshape(type_.static_shape), type_.dtype)


def _is_empty(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.is_static and 0 in value.type.static_shape


def _empty(value: Value) -> Tensor:
    type_ = value.tensor_type
    return ArrayTensor(np.zeros(type_.static_shape, type_.dtype.numpy), type_.dtype)


def _is_static(node: Node) -> bool:
    return all(isinstance(value.type, TensorType) and value.type.is_static for value in node.results)


def _may_be_constant(value: Value) -> bool:
    """Tensors only; what is decided to be partial sums, or lies in parts, is no longer a plain constant."""
    if not isinstance(value.type, TensorType) or value.global_shape is not None:
        return False
    return value.sharding is None


def _operand_bytes(node: Node) -> int:
    return sum(value.tensor_type.nbytes for value in node.inputs if isinstance(value.type, TensorType))
