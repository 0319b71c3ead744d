"""Cross-entropy with its gradient, which reads the scores again instead of the logarithms of all probabilities.

    %t = Transpose(%x) {perm=[0, 2, 1]}; %s = Cast(%t)
    %loss, %logs = SoftmaxCrossEntropyLoss(%s, %labels)    %loss, %norms = CrossEntropyForward(%x, %labels)
    ...                                              ->    ...
    %d = Mul(Sub(Exp(%logs), OneHot(%labels)), %each)      %long = CrossEntropyGradient(%x, %labels, %norms, %each)
    %dx = Transpose(Cast(%d)) {perm=[0, 2, 1]}             %dx = Slice(%long)

Nothing of the size of the scores lies between the two then. Products read scores and their gradient, and of 16-bit
numbers they are fast where rows begin at whole 16 bytes: `%long` has rows of such lengths, and so do scores whose
product is found.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from irpar.ir import DOMAIN, DType, Node, TensorType, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.kernels.cuda.padding import even_length
from irpar.ops.facts import CannotTellError, axis_attribute, ints_operand, replicated_data

from .attention import unread_with
from .attention_values import permutation
from .attention_writing import Make

_SMALL = (DType.F16, DType.BF16)
_FEWEST_CLASSES = 256
"""Rows that are shorter stay as they are."""


@dataclass(frozen=True, eq=False)
class LossForward:
    """The nodes of the forward direction.

    Attributes:
        members: they, in order.
        loss: the node SoftmaxCrossEntropyLoss.
        scores: with the classes in the last dim.
        norms: what the gradient needs beside them.
    """

    members: tuple[Node, ...]
    loss: Node
    scores: Value
    norms: Value

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return (self.scores, *(value for value in self.loss.operands[1:] if value is not None))

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        names = ("ignore_index", "reduction")
        attributes = {name: self.loss.attributes[name] for name in names if name in self.loss.attributes}
        operands = [self.scores, *self.loss.operands[1:]]
        results = [self.loss.results[0], self.norms]
        return [make("CrossEntropyForward", operands, attributes, results=results, domain=DOMAIN, version=IRPAR_OPSET)]


@dataclass(frozen=True, eq=False)
class LossGradient:
    """The nodes of the backward direction.

    Attributes:
        members: they, in order.
        forward: whose gradient.
        labels, factors: of the rows.
        result: what it gives, in the order of the scores.
        is_free: whether it may lie in rows that are longer.
    """

    members: tuple[Node, ...]
    forward: LossForward
    labels: Value
    factors: Value
    result: Value
    is_free: bool

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return (self.forward.scores, self.labels, self.forward.norms, self.factors)

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""

        def rows(result: Value, length: int) -> Node:
            attributes = {"length": length} if length else {}
            results, operands = [result], self.operands()
            return make(
                "CrossEntropyGradient", operands, attributes, results=results, domain=DOMAIN, version=IRPAR_OPSET
            )

        return in_longer_rows(self.result, make, rows) if self.is_free else [rows(self.result, 0)]


@dataclass(frozen=True, eq=False)
class ScoresProduct:
    """A product whose result only losses read, in rows that may be longer.

    Attributes:
        members: the MatMul.
    """

    members: tuple[Node, ...]

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return self.last.inputs

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        operands, result = self.last.inputs, self.last.result

        def rows(result: Value, length: int) -> Node:
            attributes = {"length": length} if length else {}
            return make("FusedMatMul", operands, attributes, results=[result], domain=DOMAIN, version=IRPAR_OPSET)

        return in_longer_rows(result, make, rows)


def longer_row(value: Value) -> int:
    """How long rows of a value should be so that each begins at an even place; 0: as they are."""
    length = value.shape[-1]
    even = even_length(length, value.dtype.numpy.itemsize)
    return even if value.dtype in _SMALL and length >= _FEWEST_CLASSES and even > length else 0


def in_longer_rows(result: Value, make: Make, rows: Callable[[Value, int], Node]) -> list[Node]:
    """What gives a value, made by `rows` in rows of a length, of which a Slice is a view."""
    length = longer_row(result)
    if not length:
        return [rows(result, 0)]
    shape = (*result.shape[:-1], length)
    made = Value(f"{result.name}_long", result.tensor_type.with_shape(shape))
    bounds = {"axes": (len(shape) - 1,), "starts": (0,), "ends": (result.shape[-1],)}
    return [rows(made, length), make("Slice", [made], bounds, results=[result], version=1)]


LossUnit = LossForward | LossGradient | ScoresProduct


def losses(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[LossUnit]:
    """Both directions of the cross-entropies among nodes, for each that has them.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = {node: place for place, node in enumerate(nodes)}
    found: list[LossUnit] = []
    for node in nodes:
        if node.identity == ("", "SoftmaxCrossEntropyLoss") and len(node.results) == 2:
            try:
                units = _Pair(node, inside, kept).found()
            except (_MissingError, CannotTellError):
                continue
            if all(taken.isdisjoint(unit.members) for unit in units):
                found += units
    return found


class _MissingError(Exception):
    """A node is not what it would have to be."""


def _needed(is_so: bool) -> None:
    if not is_so:
        raise _MissingError


class _Pair:
    """Looks for both directions around a loss.

    Args:
        loss: SoftmaxCrossEntropyLoss.
        inside, kept: see `losses`.
    """

    def __init__(self, loss: Node, inside: dict[Node, int], kept: Set[Value]) -> None:
        self.loss, self.inside, self.kept = loss, inside, kept
        self.order: tuple[int, ...] | None = None
        self.backward: list[Node] = []

    def found(self) -> list[LossUnit]:
        """See `losses`."""
        scores = self._scores()
        labels, factors, result = self._gradient(scores)
        norms = Value(f"{self.loss.results[0].name}_norms", TensorType(DType.F32, (2, *scores.shape[:-1])))
        members, others = self._members(scores, (self.loss.results[0], result), (labels, factors))
        forward = LossForward(members, self.loss, scores, norms)
        is_free = result not in self.kept
        units: list[LossUnit] = [forward, LossGradient(others, forward, labels, factors, result, is_free)]
        product = scores.node
        if product is not None and self._is_for_losses(product, {*members, *others}):
            units.append(ScoresProduct((product,)))
        return units

    def _scores(self) -> Value:
        """What the loss reads, before its classes became dim 1 and, of 16-bit numbers, before they were widened."""
        value = self.loss.operand(0)
        _needed(value is not None and value.is_static and value.dtype is DType.F32 and math.prod(value.shape) > 0)
        assert value is not None
        rank = len(value.shape)
        order = (0, rank - 1, *range(1, rank - 1))
        kinds: set[str] = set()
        while (node := value.node) is not None and node in self.inside and node.op_type not in kinds:
            source = node.operand(0)
            if source is None or node.domain or not self._is_passed(node, source, order):
                break
            kinds.add(node.op_type)
            value = source
        _needed(rank == 2 or "Transpose" in kinds)
        self.order = order if rank > 2 else None
        return value

    def _is_passed(self, node: Node, source: Value, order: tuple[int, ...]) -> bool:
        if node.op_type == "Cast":
            return source.dtype in _SMALL and node.result.dtype is DType.F32
        return node.op_type == "Transpose" and len(order) > 2 and permutation(node) == order

    def _gradient(self, scores: Value) -> tuple[Value, Value, Value]:
        """Labels, factors of rows, and the gradient of the scores."""
        exponential = self._user(self.loss.results[1], "Exp")
        difference = self._user(exponential.result, "Sub")
        _needed(difference.operand(0) is exponential.result)
        labels = self._labels(difference.operand(1))
        product = self._user(difference.result, "Mul")
        factors = next(value for value in product.inputs if value is not difference.result)
        shape = self.loss.operands[0].shape  # type: ignore[union-attr]
        _needed(factors.dtype is DType.F32 and factors.is_static and len(factors.shape) <= len(shape))
        full = (1,) * (len(shape) - len(factors.shape)) + factors.shape
        _needed(full[1] == 1 and product.result.shape == shape)
        value = product.result
        back = None if self.order is None else tuple(map(self.order.index, range(len(self.order))))
        while (value.dtype, value.shape) != (scores.dtype, scores.shape) or back is not None:
            _needed(len(value.users) == 1 and value not in self.kept)
            node = value.users[0]
            if node.identity == ("", "Transpose") and back is not None and permutation(node) == back:
                back = None
            else:
                _needed(node.identity == ("", "Cast") and node.result.dtype is scores.dtype)
                _needed(value.dtype is DType.F32)
            self.backward.append(node)
            value = node.result
        return labels, factors, value

    def _user(self, value: Value, op_type: str) -> Node:
        """The only node that reads a value."""
        _needed(len(value.users) == 1 and value not in self.kept)
        (node,) = value.users
        _needed(node.identity == ("", op_type) and node in self.inside)
        self.backward.append(node)
        return node

    def _labels(self, hot: Value | None) -> Value:
        """The places of ones in a one-hot value with the classes in dim 1."""
        node = None if hot is None else hot.node
        if node is not None and node.identity == ("", "Cast"):
            self.backward.append(node)
            value = node.operand(0)
            node = None if value is None else value.node
        _needed(node is not None and node.identity == ("", "OneHot"))
        assert node is not None
        self.backward.append(node)
        labels, _, ends = node.operands
        assert labels is not None
        assert ends is not None
        shape = self.loss.operands[0].shape  # type: ignore[union-attr]
        data = replicated_data(ends)
        _needed(data is not None and [float(end) for end in data.numpy()] == [0, 1])
        _needed(ints_operand(node, 1) == (shape[1],))
        _needed(axis_attribute(node, len(shape), -1) == 1 and labels.dtype in (DType.I32, DType.I64))
        return labels

    def _members(
        self, scores: Value, results: tuple[Value, Value], others: tuple[Value, Value]
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes of both directions, and those that nothing else reads."""
        known = {self.loss, *self.backward}
        _needed(all(node in self.inside for node in known))
        for node in known:
            for value in node.results:
                _needed(value in results or (value not in self.kept and known.issuperset(value.users)))
        given = (scores, *others, *(value for value in self.loss.operands[1:] if value is not None))
        needed = {value.node for value in given}
        _needed(known.isdisjoint(node for node in needed if node is not None))
        gone = sorted(unread_with(known, self.inside, self.kept, needed), key=self.inside.__getitem__)
        end = self.inside[self.loss]
        first, second = [node for node in gone if self.inside[node] <= end], [n for n in gone if self.inside[n] > end]
        for nodes in (first, second):
            _needed(len({(node.phase, node.stage, node.place) for node in nodes}) == 1)
        return tuple(first), tuple(second)

    def _is_for_losses(self, product: Node, members: Set[Node]) -> bool:
        """Whether only losses read the scores, which are a product."""
        if product.identity != ("", "MatMul") or product not in self.inside or product.result in self.kept:
            return False
        value = product.result
        is_matrix = all(operand.is_static and len(operand.shape) > 1 for operand in product.inputs)
        return is_matrix and bool(longer_row(value)) and all(user in members for user in value.users)
