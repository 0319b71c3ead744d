"""Attention in plain operators: softmax(scale * q k^T + mask) v, whatever exporters write around it.

    %kt = Transpose(%k) {perm=[0, 1, 3, 2]}
    %s = MatMul(%q, %kt)
    %t = Div(%s, %c)                                 %y = Attention(%q, %k, %v) {is_causal=1, scale=1/c}
    %m = Where(%causal, %t, %low)           ->
    %p = Softmax(%m)
    %y = MatMul(%p, %v)

A query that sees no key gets zeros, where Softmax of nothing but minus infinity gives NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from irpar.ir import DType, Node, TensorType, Value, captured_or_read, tensor_type
from irpar.ops.facts import CannotTellError, int_attribute, ints_attribute

VERSION = 23
"""The first version of the operator set that has Attention."""
LOW = -1e4
"""What is added to the score of a key that is not to be seen; its weight is zero then, rounded."""
KEYS_BY_PLACES = (0, 1, 3, 2)
"""The order of dims in which keys are multiplied, as a Transpose of (batch, heads, keys, size)."""
_FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


@dataclass(frozen=True)
class View:
    """A value with its dims in another order; None: as they are."""

    value: Value
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in that order."""
        shape = self.value.shape
        return shape if self.order is None else tuple(shape[dim] for dim in self.order)

    def transposed(self, order: Sequence[int]) -> "View":
        """With its dims in another order again."""
        before = self.order or tuple(range(len(order)))
        both = tuple(before[dim] for dim in order)
        return View(self.value, None if both == tuple(range(len(both))) else both)


@dataclass(frozen=True)
class Masked:
    """A mask.

    Attributes:
        value: flags of the keys that are seen, or numbers that are added to scores.
        negated: whether the flags are those of keys that are not seen.
        low: one number that takes the place of the scores of keys that are not seen; None: minus infinity.
    """

    value: Value
    negated: bool = False
    low: Value | None = None

    @property
    def is_added(self) -> bool:
        """Whether it is numbers, once it is written."""
        return self.low is not None or self.value.dtype is not DType.BOOL


@dataclass(frozen=True)
class Attention:
    """Nodes that one Attention computes.

    Attributes:
        members: they, in order; what they alone read is among them.
        q, k, v: (batch, heads, places, size).
        masks: all of them hold.
        is_causal: whether a query sees the keys up to its own place.
        scale, softcap: of the scores; a softcap of 0 is none.
        result: what it gives, in the order of `order`.
    """

    members: tuple[Node, ...]
    q: View
    k: View
    v: View
    masks: tuple[Masked, ...]
    is_causal: bool
    scale: float
    softcap: float
    result: View

    @property
    def last(self) -> Node:
        """The last member."""
        return self.members[-1]

    def attributes(self) -> dict[str, object]:
        """Those of the node."""
        found: dict[str, object] = {"scale": self.scale}
        if self.is_causal:
            found["is_causal"] = 1
        if self.softcap:
            found["softcap"] = self.softcap
        return found

    def written(self, make: "Make") -> list[Node]:
        """Nodes that take its place, in order."""
        return written(self, make)

    def operands(self) -> tuple[Value, ...]:
        """What it reads."""
        masks = (value for mask in self.masks for value in (mask.value, mask.low) if value is not None)
        return (self.q.value, self.k.value, self.v.value, *masks)


def attentions(nodes: Sequence[Node], kept: Set[Value], version: int = 0) -> tuple[list[Attention], set[Node]]:
    """The attentions among nodes, and which nodes nothing reads behind them any more, as a mask of several.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        version: the least one of the operator set that nodes follow.
    """
    inside = {node: place for place, node in enumerate(nodes)}
    found: list[Attention] = []
    taken: set[Node] = set()
    for node in nodes:
        if node.identity == ("", "Softmax") and node.version >= version:
            try:
                made = Finder(inside, kept, node).found()
            except CannotTellError:
                continue
            if made is not None and taken.isdisjoint(made.members):
                found.append(made)
                taken.update(made.members)
    needed = {value.node for one in found for value in one.operands()}
    if not taken.isdisjoint(needed):
        return [], set()
    return found, unread_with(taken, inside, kept, needed) - taken


def unread_with(gone: Set[Node], inside: dict[Node, int], kept: Set[Value], needed: Set[Node | None]) -> set[Node]:
    """The nodes that go, and those that they alone read."""
    found = set(gone)
    waiting = list(gone)
    while waiting:
        for value in captured_or_read(waiting.pop()):
            node = value.node
            if node is None or node in found or node in needed or node not in inside:
                continue
            if all(result not in kept and found.issuperset(result.users) for result in node.results):
                found.add(node)
                waiting.append(node)
    return found


@dataclass
class Finder:
    """Looks at what is around one Softmax."""

    inside: dict[Node, int]
    kept: Set[Value]
    softmax: Node
    path: list[Node] = field(default_factory=list)
    """Nodes whose results are scores or weights: nothing else may read these."""
    masks: list[Masked] = field(default_factory=list)
    scale: float = 1.0
    softcap: float = 0.0
    is_causal: bool = False

    def found(self) -> Attention | None:
        scores = self.softmax.operand(0)
        assert scores is not None
        if not scores.is_static or len(scores.shape) != 4 or scores.dtype not in _FLOATS:
            return None
        if int_attribute(self.softmax, "axis", -1 if self.softmax.version >= 13 else 1) not in (-1, 3):
            return None
        product = self.product_of_scores(scores)
        operands = None if product is None else self._operands_of_scores(product)
        weighted = self._weighted(self.softmax.result)
        if operands is None or weighted is None:
            return None
        q, k = operands
        v, result = weighted
        k, v, factor = _without_repeats(k, v)
        self.scale *= factor
        k = self._plain(k)
        made = Attention((), q, k, v, tuple(self.masks), self.is_causal, self.scale, self.softcap, result)
        if not fit(made):
            return None
        members = self._members(made)
        return None if members is None else replace(made, members=members)

    # -- from the softmax up ------------------------------------------------------------------------------------------

    def product_of_scores(self, scores: Value) -> Node | None:
        """The product that scores are made of; notes what is done to it."""
        before_mask = False  # whether masks are all behind: what scales scores and masks is none
        value = scores
        while True:
            node = value.node
            if node is None or node not in self.inside or node.domain or len(node.results) != 1:
                return None
            self.path.append(node)
            if node.op_type in ("MatMul", "Einsum"):
                return node
            following: Value | None
            if node.op_type in ("Cast", "Identity"):
                following = node.operand(0)
                if following is None or tensor_type(following.type) is None or following.dtype not in _FLOATS:
                    return None
            elif node.op_type == "Where" and not before_mask:
                following = self._chosen(node)
            elif node.op_type == "Add" and not before_mask:
                following = self._added(node)
            else:
                following = self._scaled(node)
                before_mask = True
            if following is None or not following.is_static or following.shape != self.softmax.result.shape:
                return None
            value = following

    def _chosen(self, node: Node) -> Value | None:
        """The scores that a Where keeps; its condition is a mask."""
        condition, first, second = node.operands
        assert condition is not None
        for chosen, other, negated in ((first, second, False), (second, first, True)):
            low = number_of(other)
            if low is None or low > LOW or chosen is None or number_of(chosen) is not None:
                continue
            if low == -math.inf:
                self._hide(condition, negated)
            elif _is_causal_flags(condition, negated):
                self.is_causal = True
            else:
                self.masks.append(Masked(condition, negated, other))
            return chosen
        return None

    def _added(self, node: Node) -> Value | None:
        """The scores to which an Add adds something; what is added is a mask."""
        first, second = node.operands
        for scores, mask in ((first, second), (second, first)):
            if scores is None or mask is None or not _leads_to_product(scores, self.inside):
                continue
            flags = self._flags(mask)
            if flags is not None:
                self._hide(*flags)
            elif _is_causal_numbers(mask):
                self.is_causal = True
            else:
                self.masks.append(Masked(mask))
            return scores
        return None

    def _flags(self, mask: Value) -> tuple[Value, bool] | None:
        """The condition of a Where between zero and minus infinity, and whether it hides where it holds."""
        node = mask.node
        if node is None or node not in self.inside or node.identity != ("", "Where"):
            return None
        condition, first, second = node.operands
        numbers = number_of(first), number_of(second)
        if condition is None or numbers not in ((0, -math.inf), (-math.inf, 0)):
            return None
        return condition, numbers[0] != 0

    def _hide(self, flags: Value, negated: bool) -> None:
        """Note that flags hide keys; those of both a causal mask and another are told apart."""
        flags = _unexpanded(flags, self.inside)
        node = flags.node
        parts = [flags]
        if not negated and node is not None and node in self.inside and node.identity == ("", "And"):
            parts = list(node.inputs)
        rest = [part for part in parts if not _is_causal_flags(part, negated)]
        if len(rest) == len(parts):
            rest = [flags]
        else:
            self.is_causal = True
        self.masks.extend(Masked(part, negated) for part in rest)

    def _scaled(self, node: Node) -> Value | None:
        """What a node multiplies or divides by one number, or caps."""
        if node.op_type == "Mul":
            return self._capped(node) or self._multiplied(node)
        if node.op_type == "Div":
            return self._multiplied(node)
        return None

    def _multiplied(self, node: Node) -> Value | None:
        value, factor = factor_of(node)
        self.scale *= factor
        return value

    def _capped(self, node: Node) -> Value | None:
        """x of c * tanh(x / c), where nothing scales the result."""
        first, second = node.operands
        for limited, number in ((first, second), (second, first)):
            cap = number_of(number)
            tanh = limited.node if limited is not None else None
            if cap is None or tanh is None or tanh.identity != ("", "Tanh") or tanh not in self.inside:
                continue
            inner = tanh.operand(0)
            if inner is None or inner.node is None or inner.node not in self.inside:
                continue
            value, factor = factor_of(inner.node)
            if value is None or self.scale != 1.0 or self.softcap or cap == 0:
                return None
            self.softcap, self.scale = cap, factor * cap
            self.path += [tanh, inner.node]
            return value
        return None

    def _operands_of_scores(self, node: Node) -> tuple[View, View] | None:
        """q and k as (batch, heads, places, size)."""
        first, second = node.operands
        if first is None or second is None:
            return None
        if node.op_type == "Einsum":
            orders = _orders(node, ("bhqd", "bhkd", "bhqk"))
            if orders is None or orders[2] != (0, 1, 2, 3):
                return None
            return self._plain(View(first).transposed(orders[0])), self._plain(View(second).transposed(orders[1]))
        if any(not value.is_static or len(value.shape) != 4 for value in (first, second)):
            return None
        return self._plain(View(first)), self._plain(View(second).transposed(KEYS_BY_PLACES))

    def _plain(self, view: View) -> View:
        """What a view is of, without factors and moves of elements that undo each other."""
        while True:
            node = view.value.node
            if node is None or node not in self.inside or node.domain:
                return view
            if node.op_type in ("Mul", "Div"):
                value, factor = factor_of(node)
                if value is None or not value.is_static or value.shape != view.value.shape:
                    return view
                self.scale *= factor
                view = View(value, view.order)
            elif node.op_type == "Transpose" and view.order is not None:
                value = node.operand(0)
                order = permutation(node)
                if value is None or order is None:
                    return view
                view = View(value, order).transposed(view.order)
            elif node.op_type == "Reshape" and view.order == KEYS_BY_PLACES:
                value = _transposed_by_parts(node, self.inside)
                if value is None:
                    return view
                view = View(value)
            else:
                return view

    # -- from the softmax down ----------------------------------------------------------------------------------------

    def _weighted(self, weights: Value) -> tuple[View, View] | None:
        """v, and the result with the order of its dims."""
        value = weights
        while True:
            users = value.users
            guard = _guarded(value, self.inside)
            if guard is not None:
                self.path += [guard[0], guard[1]]
                value = guard[1].result
                continue
            if len(users) != 1 or value in self.kept or users[0] not in self.inside or users[0].domain:
                return None
            node = users[0]
            self.path.append(node)
            if node.op_type in ("Cast", "Identity"):
                value = node.result
                if tensor_type(value.type) is None or value.dtype not in _FLOATS:
                    return None
                continue
            return self._values(node, value)

    def _values(self, node: Node, weights: Value) -> tuple[View, View] | None:
        if node.op_type not in ("MatMul", "Einsum") or node.operand(0) is not weights:
            return None
        v = node.operand(1)
        if v is None or v is weights or not v.is_static or not node.result.is_static:
            return None
        if node.op_type == "MatMul":
            return (self._moved(View(v)), View(node.result)) if len(v.shape) == 4 else None
        orders = _orders(node, ("bhqk", "bhkd", "bhqd"))
        if orders is None or orders[0] != (0, 1, 2, 3):
            return None
        return self._moved(View(v).transposed(orders[1])), View(node.result).transposed(orders[2])

    def _moved(self, view: View) -> View:
        """A view without a Transpose that it undoes."""
        node = view.value.node
        if view.order is not None and node is not None and node in self.inside and node.identity == ("", "Transpose"):
            value, order = node.operand(0), permutation(node)
            if value is not None and order is not None:
                return View(value, order).transposed(view.order)
        return view

    # -- what goes ----------------------------------------------------------------------------------------------------

    def _members(self, made: Attention) -> tuple[Node, ...] | None:
        """The nodes that are not needed any more; None where scores or weights are read elsewhere."""
        last = made.result.value.node
        assert last is not None
        members = {*self.path, self.softmax}
        facts = {(node.phase, node.stage, node.place) for node in members}
        if len(facts) > 1 or any(node not in self.inside for node in members):
            return None
        for node in members - {last}:
            if any(value in self.kept or not members.issuperset(value.users) for value in node.results):
                return None
        needed = {value.node for value in made.operands()}
        if not members.isdisjoint(needed):
            return None
        found = unread_with(members, self.inside, self.kept, needed)
        return tuple(sorted(found, key=self.inside.__getitem__))


def fit(made: Attention) -> bool:
    """Whether shapes and dtypes are an Attention's."""
    views = (made.q, made.k, made.v)
    if any(not view.value.is_static or len(view.value.shape) != 4 for view in (*views, made.result)):
        return False
    if len({view.value.dtype for view in (*views, made.result)}) > 1 or made.q.value.dtype not in _FLOATS:
        return False
    (batch, heads, queries, head), (_, key_heads, keys, _), value_head = made.q.shape, made.k.shape, made.v.shape[3]
    if not key_heads or heads % key_heads or made.k.shape != (batch, key_heads, keys, head):
        return False
    if made.is_causal and queries != keys:
        return False
    scores = (batch, heads, queries, keys)
    return (
        made.v.shape == (batch, key_heads, keys, value_head)
        and made.result.shape == (batch, heads, queries, value_head)
        and all(_broadcasts(mask.value, scores) for mask in made.masks)
        and len({mask.is_added for mask in made.masks}) < 2
    )


def _broadcasts(value: Value, shape: tuple[int, ...]) -> bool:
    if not value.is_static or not 2 <= len(value.shape) <= len(shape):
        return False
    aligned = shape[len(shape) - len(value.shape) :]
    return all(size in (1, full) for size, full in zip(value.shape, aligned, strict=True))


def _unexpanded(value: Value, inside: dict[Node, int]) -> Value:
    """What an Expand repeats, where a mask does that itself."""
    node = value.node
    if node is None or node not in inside or node.identity != ("", "Expand"):
        return value
    source = node.operand(0)
    return source if source is not None and source.is_static and len(source.shape) >= 2 else value


def _leads_to_product(value: Value, inside: dict[Node, int]) -> bool:
    """Whether scores come of it: a product of matrices behind nodes that scale and mask."""
    waiting, seen = [value], set()
    while waiting:
        node = waiting.pop().node
        if node is None or node in seen or node not in inside or node.domain:
            continue
        seen.add(node)
        if node.op_type in ("MatMul", "Einsum"):
            return True
        if node.op_type in ("Add", "Mul", "Div", "Cast", "Identity", "Tanh"):
            waiting.extend(node.inputs)
        elif node.op_type == "Where":
            waiting.extend(node.inputs[1:])
    return False


def _guarded(weights: Value, inside: dict[Node, int]) -> tuple[Node, Node] | None:
    """IsNaN of weights, and the Where that gives zeros in their place."""
    users = weights.users
    if len(users) != 2:
        return None
    for test, where in (users, users[::-1]):
        if (test.identity, where.identity) != (("", "IsNaN"), ("", "Where")) or where not in inside:
            continue
        condition, zero, other = where.operands
        if condition is test.result and other is weights and number_of(zero) == 0 and len(test.result.users) == 1:
            return test, where
    return None


def _without_repeats(k: View, v: View) -> tuple[View, View, float]:
    """Keys and values before their heads were repeated for groups of heads of queries, and a factor of the keys."""
    keys, values = _unrepeated(k), _unrepeated(v)
    if keys is None or values is None or keys[0].shape[1] != values[0].shape[1] or values[1] != 1:
        return k, v, 1.0
    return keys[0], values[0], keys[1]


def _unrepeated(view: View) -> tuple[View, float] | None:
    """[b, h, s, d] of Reshape(Expand([b, h, 1, s, d] to [b, h, g, s, d])) as [b, h * g, s, d], and a factor of it.

    Or of the Expand itself. Between the two the last two dims may change places, and a number multiply all.
    """
    value: Value | None = view.value
    reshape = view.value.node
    if len(view.shape) == 4 and reshape is not None and reshape.identity == ("", "Reshape"):
        value = reshape.operand(0)
    if value is None or not value.is_static or len(value.shape) != 5:
        return None
    batch, heads, group, *rest = value.shape
    if view.value.shape not in (value.shape, (batch, heads * group, *rest)):
        return None
    factor, is_turned = 1.0, False
    while (node := value.node) is not None and node.identity != ("", "Expand"):
        following, own = factor_of(node)
        if node.identity == ("", "Transpose") and permutation(node) == (0, 1, 2, 4, 3):
            following, is_turned = node.operand(0), not is_turned
        if following is None or not following.is_static or len(following.shape) != 5:
            return None
        value, factor = following, factor * own
    one = None if node is None else node.operand(0)
    if one is None or not one.is_static or one.shape != (*value.shape[:2], 1, *value.shape[3:]) or one.node is None:
        return None
    source = one.node.operand(0) if one.node.identity in (("", "Unsqueeze"), ("", "Reshape")) else None
    if source is None or not source.is_static or source.shape != (*value.shape[:2], *value.shape[3:]):
        return None
    found = View(source).transposed(KEYS_BY_PLACES) if is_turned else View(source)
    return (found if view.order is None else found.transposed(view.order)), factor


def _transposed_by_parts(node: Node, inside: dict[Node, int]) -> Value | None:
    """x [b, h, s, d], or [b, h, g, s, d], of a Reshape of its Transpose as [n, d, s]."""
    turned = node.operand(0)
    transpose = None if turned is None else turned.node
    if transpose is None or transpose not in inside or transpose.identity != ("", "Transpose"):
        return None
    merged = transpose.operand(0)
    if merged is None or permutation(transpose) != (0, 2, 1) or not merged.is_static or merged.node is None:
        return None
    reshape = merged.node
    source = reshape.operand(0)
    if reshape not in inside or reshape.identity != ("", "Reshape") or source is None or not source.is_static:
        return None
    batch, heads, size, keys = node.result.shape
    if merged.shape != (batch * heads, keys, size) or source.shape[-2:] != (keys, size):
        return None
    return source if source.shape[0] == batch and math.prod(source.shape[1:-2]) == heads else None


def permutation(node: Node) -> tuple[int, ...] | None:
    value = node.operand(0)
    if value is None or not value.is_static:
        return None
    order = ints_attribute(node, "perm")
    return tuple(reversed(range(len(value.shape)))) if order is None else order


def _orders(node: Node, terms: tuple[str, str, str]) -> tuple[tuple[int, ...], ...] | None:
    """For two operands and the result of an Einsum the dims in the order of terms; None where it is another product."""
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    given = [*left.split(","), right]
    if not arrow or len(given) != 3 or any(len(set(term)) != 4 or len(term) != 4 or "." in term for term in given):
        return None
    letters: dict[str, str] = {}
    shared = {letter for letter in given[0] if all(letter in term for term in given)}
    if len(shared) != 2:
        return None
    names = {}
    batch, heads = (letter for letter in given[0] if letter in shared)
    names["b"], names["h"] = batch, heads
    wanted = [set(term) for term in terms]
    for letter in "qkd":
        places = [letter in term for term in wanted]
        found = [other for other in set("".join(given)) - shared if [other in term for term in given] == places]
        if len(found) != 1:
            return None
        names[letter] = found[0]
    letters.update(names)
    return tuple(tuple(term.index(letters[letter]) for letter in want) for term, want in zip(given, terms, strict=True))


def number_of(value: Value | None) -> float | None:
    """The number of a constant with one element."""
    if value is None or value.data is None or value.data.size != 1 or value.data.dtype not in _FLOATS:
        return None
    return float(value.data.numpy().reshape(()).astype(np.float64))


def factor_of(node: Node) -> tuple[Value | None, float]:
    """What a Mul or a Div by one number multiplies, and by how much."""
    if node.identity not in (("", "Mul"), ("", "Div")):
        return None, 1.0
    first, second = node.operands
    number = number_of(second)
    if number is not None and number != 0:
        return first, number if node.op_type == "Mul" else 1 / number
    number = number_of(first)
    if number is not None and node.op_type == "Mul":
        return second, number
    return None, 1.0


def _squared(value: Value) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None":
    """A constant of queries and keys, which are as many; None for another value."""
    if value.data is None or len(value.data.shape) < 2:
        return None
    *leading, queries, keys = value.data.shape
    if queries != keys or queries < 2 or any(size != 1 for size in leading):
        return None
    return value.data.numpy().reshape(queries, keys)


def _is_causal_flags(value: Value, negated: bool) -> bool:
    """Whether flags are set, or not set, for the keys up to each query's place."""
    if value.data is None or value.data.dtype is not DType.BOOL:
        return False
    flags = _squared(value)
    return flags is not None and np.array_equal(flags != negated, np.tri(len(flags), dtype=bool))


def _is_causal_numbers(value: Value) -> bool:
    """Whether numbers that are added hide the keys behind each query's place, and leave the others."""
    if value.data is None or value.data.dtype not in _FLOATS:
        return False
    numbers = _squared(value)
    if numbers is None:
        return False
    seen = np.tri(len(numbers), dtype=bool)
    wide = numbers.astype(np.float64)
    return bool((wide[seen] == 0).all() and (wide[~seen] <= LOW).all())


# -- nodes that take their place --------------------------------------------------------------------------------------

Make = Callable[..., Node]
"""`make(op_type, operands, attributes, results=..., version=...)`: a node of ONNX's."""


@dataclass
class Writer:
    """Makes the nodes of a unit, in order.

    Attributes:
        make: a node.
        version: that they follow.
        name: what the names of new values begin with.
        nodes: those that were made.
    """

    make: Make
    version: int
    name: str
    nodes: list[Node] = field(default_factory=list)

    def op(self, op_type: str, operands: Sequence[Value], type_: TensorType, **attributes: object) -> Value:
        """Make a node with one result, which is new."""
        value = Value(f"{self.name}_{op_type.lower()}", type_)
        self.node(op_type, operands, attributes, [value])
        return value

    def node(
        self,
        op_type: str,
        operands: Sequence[Value],
        attributes: Mapping[str, object],
        results: Sequence[Value],
        **facts: object,
    ) -> None:
        """Make a node with given results."""
        self.nodes.append(
            self.make(op_type, operands, attributes, results=results, **{"version": self.version, **facts})
        )

    def moved(self, view: View) -> Value:
        """A view as a value."""
        if view.order is None:
            return view.value
        type_ = view.value.tensor_type.with_shape(view.shape)
        return self.op("Transpose", [view.value], type_, perm=view.order)

    def masks(self, attention: Attention) -> list[Value]:
        """One mask of all, or none."""
        return [_joined([_mask(mask, self.op) for mask in attention.masks], self.op)] if attention.masks else []


def written(attention: Attention, make: Make) -> list[Node]:
    """Nodes that take the place of an attention's, in order; the last gives the result."""
    view = attention.result
    w = Writer(make, attention.last.version, view.value.name)
    operands = [w.moved(one) for one in (attention.q, attention.k, attention.v)]
    operands += w.masks(attention)
    attributes = attention.attributes()
    y = view.value
    if view.order is not None:
        y = Value(f"{view.value.name}_heads", view.value.tensor_type.with_shape(view.shape))
    w.node("Attention", operands, attributes, [y], version=max(w.version, VERSION))
    if view.order is not None:
        back = tuple(view.order.index(dim) for dim in range(len(view.order)))
        w.node("Transpose", [y], {"perm": back}, [view.value])
    return w.nodes


def _mask(mask: Masked, op: Callable[..., Value]) -> Value:
    value = mask.value
    if value.dtype is not DType.BOOL or (mask.low is None and not mask.negated):
        return value
    if mask.negated == (mask.low is None):
        value = op("Not", [value], value.tensor_type)
    if mask.low is None:
        return value
    low = mask.low
    number = op("Cast", [value], TensorType(low.dtype, value.shape), to=low.dtype.value)
    return op("Mul", [number, low], number.tensor_type)


def _joined(masks: list[Value], op: Callable[..., Value]) -> Value:
    """One mask of all: flags that all hold, or the sum of numbers."""
    whole = masks[0]
    for mask in masks[1:]:
        shape = tuple(np.broadcast_shapes(whole.shape, mask.shape))
        whole = op("And" if whole.dtype is DType.BOOL else "Add", [whole, mask], TensorType(whole.dtype, shape))
    return whole
