"""Attention with its gradients in plain operators: softmax(scale * q k^T + mask) v, with its weights read again.

    %p = Softmax(scores of %q, %kt)
    %y = MatMul(%p, %v)                              %y, %l = AttentionForward(%q, %k, %v)
    ...                                              ...
    %dp = MatMul(%dy, %vt)                  ->       %dq, %dk, %dv = AttentionGradient(%q, %k, %v, %dy, %y, %l)
    %ds = Mul(%p, Sub(%dp, ReduceSum(Mul(%p, %dp))))
    %dq = MatMul(scaled %ds, %k); %dkt = MatMul(%qt, scaled %ds); %dv = MatMul(%pt, %dy)

Nothing of the size of the scores is kept between the two then: `%l` says what each query's weights are normalised by.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from irpar.analysis.weights.atoms import Atom, Atoms, joined
from irpar.ir import DOMAIN, DType, Node, TensorType, Value
from irpar.ir.module import IRPAR_OPSET
from irpar.ops.facts import CannotTellError, int_attribute, ints_operand

from .attention import Finder, unread_with
from .attention_form import KEYS_BY_PLACES, Attention, View, fit
from .attention_values import factor_of, number_of, permutation
from .attention_writing import Make, Writer
from .joined_heads import MOVES

_SMALL = (DType.F16, DType.BF16)
_DTYPES = (*_SMALL, DType.F32)
_MULTIPLE, _LONGEST = 8, 128
"""What device kernels of gradients take: the sizes of heads."""


@dataclass(frozen=True)
class Forward:
    """The nodes of the forward direction.

    Attributes:
        attention: what they compute.
        logarithms: what the gradients need beside its result.
    """

    attention: Attention
    logarithms: Value

    @property
    def members(self) -> tuple[Node, ...]:
        """They, in order."""
        return self.attention.members

    @property
    def last(self) -> Node:
        """The last member."""
        return self.attention.last

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return self.attention.operands()

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        of = self.attention
        w = Writer(make, of.last.version, of.result.value.name)
        operands = [*(w.moved(view) for view in (of.q, of.k, of.v)), *w.masks(of)]
        results = [of.result.value, self.logarithms]
        w.node("AttentionForward", operands, of.attributes(), results, domain=DOMAIN, version=IRPAR_OPSET)
        return w.nodes


@dataclass(frozen=True)
class Gradient:
    """The nodes of the backward direction.

    Attributes:
        members: they, in order.
        forward: whose gradients.
        dy: the gradient of its result.
        dq, dv: what they give.
        dk_by_size: the same for k, as (batch, heads, size, places).
    """

    members: tuple[Node, ...]
    forward: Forward
    dy: Value
    dq: Value
    dk_by_size: Value
    dv: Value

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        return (*self.forward.operands(), self.dy, self.forward.attention.result.value, self.forward.logarithms)

    def written(self, make: Make) -> list[Node]:
        """Nodes that take its place, in order."""
        of = self.forward.attention
        w = Writer(make, self.last.version, self.dk_by_size.name)
        operands = [w.moved(view) for view in (of.q, of.k, of.v)]
        operands += [self.dy, of.result.value, self.forward.logarithms, *w.masks(of)]
        dk = Value(f"{w.name}_dk", self.dk_by_size.tensor_type.with_shape(of.k.shape))
        results = [self.dq, dk, self.dv]
        w.node("AttentionGradient", operands, of.attributes(), results, domain=DOMAIN, version=IRPAR_OPSET)
        w.node("Transpose", [dk], {"perm": KEYS_BY_PLACES}, [self.dk_by_size])
        return w.nodes


def trainings(nodes: Sequence[Node], kept: Set[Value], taken: Set[Node]) -> list[Forward | Gradient]:
    """Both directions of the attentions among nodes, for each that has them.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        taken: nodes that belong to others.
    """
    inside = {node: place for place, node in enumerate(nodes)}
    found: list[Forward | Gradient] = []
    gone = set(taken)
    for node in nodes:
        if node.identity != ("", "Softmax") or node in gone:
            continue
        pair = _trained(node, inside, kept)
        if pair is not None and all(gone.isdisjoint(unit.members) for unit in pair):
            found += pair
            gone.update(*(unit.members for unit in pair))
    return found


def _trained(softmax: Node, inside: dict[Node, int], kept: Set[Value]) -> tuple[Forward, Gradient] | None:
    """Both directions of the attention around a Softmax; None where there are not both."""
    scores, weights = softmax.operand(0), softmax.result
    if scores is None or not scores.is_static or len(scores.shape) != 4 or scores.shape != weights.shape:
        return None
    finder = Finder(inside, kept, softmax)
    product = finder.product_of_scores(scores)
    if product is None or product.op_type != "MatMul" or finder.softcap:
        return None
    return _Pair(finder, product).found()


class _MissingError(Exception):
    """A node is not what it would have to be."""


def _needed(node: Node | None, op_type: str) -> Node:
    if node is None or node.identity != ("", op_type) or len(node.results) != 1:
        raise _MissingError
    return node


class _Pair:
    """Looks for both directions around one Softmax.

    Args:
        finder: what it found of the scores.
        product: the product that they are of.
    """

    def __init__(self, finder: Finder, product: Node) -> None:
        self.finder = finder
        self.product = product
        self.weights = finder.softmax.result
        self.forward: list[Node] = [*finder.path, finder.softmax]
        self.backward: list[Node] = []

    def found(self) -> tuple[Forward, Gradient] | None:
        """See `_trained`."""
        try:
            return self._found()
        except (_MissingError, CannotTellError):
            return None

    def _found(self) -> tuple[Forward, Gradient] | None:
        finder = self.finder
        multiplied, of_weights = self._users()
        weighted, dv = self._values(multiplied)
        v, dy = weighted.operand(1), dv.operand(1)
        dp, ds = self._of_softmax(of_weights)
        self._check_of_weights(dp, dy, v)
        dq, dk = self._of_product(ds)
        q, k_by_size = self.product.operands
        if q is None or k_by_size is None or v is None or dy is None or not v.is_static or not k_by_size.is_static:
            return None
        k = View(k_by_size).transposed(KEYS_BY_PLACES)
        scale, result = finder.scale, View(weighted.result)
        made = Attention((), View(q), k, View(v), tuple(finder.masks), finder.is_causal, scale, 0.0, result)
        values = (q, k_by_size, v, dy, weighted.result, dq.result, dk.result, dv.result)
        sizes = (q.shape[-1], v.shape[-1])
        if not fit(made) or len({value.dtype for value in values}) > 1 or q.dtype not in _DTYPES:
            return None
        if any(size % _MULTIPLE or size > _LONGEST for size in sizes) or k.shape[1] != q.shape[1]:
            return None
        members = self._members(made, (weighted.result, dq.result, dk.result, dv.result), dy)
        if members is None:
            return None
        logarithms = Value(f"{weighted.result.name}_logarithms", TensorType(DType.F32, q.shape[:3]))
        forward = Forward(replace(made, members=members[0]), logarithms)
        return forward, Gradient(members[1], forward, dy, dq.result, dk.result, dv.result)

    def _users(self) -> tuple[Value, list[Node]]:
        """The weights as they are multiplied, and who else reads them: the gradient of the softmax."""
        users = list(self.weights.users)
        casts = [node for node in users if node.identity == ("", "Cast") and node.result.dtype in _SMALL]
        if len(casts) == 1:
            self.forward.append(casts[0])
            users.remove(casts[0])
            return casts[0].result, users
        return self.weights, [node for node in users if node.op_type == "Mul"]

    def _values(self, multiplied: Value) -> tuple[Node, Node]:
        """The products with values, and with the gradient of the result."""
        users = [node for node in multiplied.users if node.op_type != "Mul"]
        if len(users) != 2:
            raise _MissingError
        first, second = users if users[0].op_type == "MatMul" else users[::-1]
        weighted, turned = _needed(first, "MatMul"), _needed(second, "Transpose")
        if weighted.operand(0) is not multiplied or permutation(turned) != KEYS_BY_PLACES:
            raise _MissingError
        dv = _needed(self._only_user(turned.result), "MatMul")
        if dv.operand(0) is not turned.result:
            raise _MissingError
        self.forward.append(weighted)
        self.backward += [turned, dv]
        return weighted, dv

    def _only_user(self, value: Value) -> Node:
        if len(value.users) != 1:
            raise _MissingError
        return value.users[0]

    def _of_softmax(self, users: list[Node]) -> tuple[Value, Value]:
        """The gradient of the weights, and that of the scores: p * (dp - sum(p * dp))."""
        if len(users) != 2:
            raise _MissingError
        for weighed, whole in (users, users[::-1]):
            dp = _other(weighed, self.weights)
            difference = _other(whole, self.weights)
            if dp is None or difference is None or difference.node is None or len(weighed.result.users) != 1:
                continue
            sub, total = difference.node, weighed.result.users[0]
            if sub.identity != ("", "Sub") or total.identity != ("", "ReduceSum"):
                continue
            if sub.operands != (dp, total.result) or not int_attribute(total, "keepdims", 1):
                continue
            axes = ints_operand(total, 1) if total.version >= 13 else None
            if axes is None or [axis % 4 for axis in axes] != [3]:
                continue
            self.backward += [weighed, total, sub, whole]
            return dp, whole.result
        raise _MissingError

    def _check_of_weights(self, dp: Value, dy: Value | None, v: Value | None) -> None:
        """The gradient of the weights is dy v^T."""
        node = dp.node
        if node is not None and node.identity == ("", "Cast"):
            self.backward.append(node)
            value = node.operand(0)
            node = None if value is None else value.node
        product = _needed(node, "MatMul")
        turned = product.operand(1)
        if product.operand(0) is not dy or turned is None or not _is_transposed(turned, v):
            raise _MissingError
        self.backward.append(product)

    def _of_product(self, ds: Value) -> tuple[Node, Node]:
        """The gradients of both operands of the product that scores are made of."""
        conditions = {node.operand(0) for node in self.finder.path if node.op_type == "Where"}
        value, scale = ds, 1.0
        while len(value.users) == 1:
            node = value.users[0]
            if node.identity == ("", "Where"):
                condition, first, second = node.operands
                zero = second if first is value else first
                if condition not in conditions or number_of(zero) != 0:
                    raise _MissingError
            elif node.identity != ("", "Cast"):
                source, factor = factor_of(node)
                if source is not value:
                    raise _MissingError
                scale *= factor
            self.backward.append(node)
            value = node.result
        if len(value.users) != 2 or not math.isclose(scale, self.finder.scale, rel_tol=1e-6):
            raise _MissingError
        q, k_by_size = self.product.operands
        for dq, dk in (value.users, value.users[::-1]):
            if (dq.identity, dk.identity) != (("", "MatMul"), ("", "MatMul")):
                continue
            if dq.operand(0) is not value or dk.operand(1) is not value:
                continue
            k, q_by_size = dq.operand(1), dk.operand(0)
            if (
                k is not None
                and q_by_size is not None
                and _is_transposed(k, k_by_size)
                and _is_transposed(q_by_size, q)
            ):
                self.backward += [dq, dk]
                return dq, dk
        raise _MissingError

    def _members(
        self, made: Attention, results: tuple[Value, ...], dy: Value
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]] | None:
        """The nodes of both directions; None where what they compute is read elsewhere."""
        inside, kept = self.finder.inside, self.finder.kept
        both = {*self.forward, *self.backward}
        if any(node not in inside for node in both):
            return None
        for nodes in (self.forward, self.backward):
            if len({(node.phase, node.stage, node.place) for node in nodes}) > 1:
                return None
        for node in both:
            for value in node.results:
                if value not in results and (value in kept or not both.issuperset(value.users)):
                    return None
        needed = {value.node for value in (*made.operands(), dy)}
        if not both.isdisjoint(needed):
            return None
        end = max(inside[node] for node in self.forward)
        known = sorted(unread_with(both, inside, kept, needed), key=inside.__getitem__)
        first = set(self.forward) | {node for node in known if node not in both and inside[node] < end}
        return tuple(node for node in known if node in first), tuple(node for node in known if node not in first)


def _other(node: Node, value: Value) -> Value | None:
    """What a Mul multiplies a value with."""
    if node.identity != ("", "Mul"):
        return None
    first, second = node.operands
    return second if first is value else first


def _is_transposed(value: Value, of: Value | None) -> bool:
    """Whether a value has the elements of another with the last two dims changed, by whatever moves of one source."""
    if of is None:
        return False
    first, second = _arranged(value), _arranged(of)
    if first is None or second is None or first[0] is not second[0]:
        return False
    return first[1] == [second[1][dim] for dim in KEYS_BY_PLACES]


def _arranged(value: Value) -> tuple[Value, list[list[Atom]]] | None:
    """What the elements of four dims were moved from, and where each dim comes from there."""
    chain: list[Node] = []
    source = value
    while (node := source.node) is not None and not node.domain and node.op_type in MOVES:
        before = node.operand(0)
        if before is None or not before.is_static or not source.is_static:
            break
        chain.append(node)
        source = before
    if not source.is_static or not math.prod(source.shape):
        return None
    atoms = Atoms(source.shape)
    if not all(map(atoms.apply, reversed(chain))) or len(atoms.dims) != 4:
        return None
    return source, [joined(dim) for dim in atoms.dims]
