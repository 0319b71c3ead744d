"""Attention in plain operators: softmax(scale * q k^T + mask) v, whatever exporters write around it.

    %kt = Transpose(%k) {perm=[0, 1, 3, 2]}
    %s = MatMul(%q, %kt)
    %t = Div(%s, %c)                                 %y = Attention(%q, %k, %v) {is_causal=1, scale=1/c}
    %m = Where(%causal, %t, %low)           ->
    %p = Softmax(%m)
    %y = MatMul(%p, %v)

A query that sees no key gets zeros, where Softmax of nothing but minus infinity gives NaN; and weights by its scores,
where a finite number stood in place of all of them.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from irpar.ir import Node, Value, captured_or_read, tensor_type
from irpar.ops.facts import CannotTellError, int_attribute

from .attention_form import FLOATS, KEYS_BY_PLACES, LOW, LOWEST, Attention, Masked, View, fit, is_for_export
from .attention_values import (
    factor_of,
    guarded,
    is_causal_flags,
    is_causal_numbers,
    leads_to_product,
    number_of,
    orders_of,
    permutation,
    shows_every_query,
    transposed_by_parts,
    unexpanded,
    without_repeats,
)


def attentions(nodes: Sequence[Node], kept: Set[Value], version: int = 0) -> tuple[list[Attention], set[Node]]:
    """The attentions among nodes, and which nodes nothing reads behind them any more, as a mask of several.

    Args:
        nodes: in order.
        kept: their results that are read behind them.
        version: the least one of the operator set that nodes follow, in a graph that may be written: other runtimes
            must compute these attentions too; 0: they are for who runs them.
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
            if made is None or (version and not is_for_export(made)):
                continue
            if taken.isdisjoint(made.members):
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
    finite: list[Masked] = field(default_factory=list)
    """Masks that hide keys by a finite number."""
    scale: float = 1.0
    softcap: float = 0.0
    is_causal: bool = False

    def found(self) -> Attention | None:
        scores = self.softmax.operand(0)
        assert scores is not None
        if not scores.is_static or len(scores.shape) != 4 or scores.dtype not in FLOATS:
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
        k, v, factor = without_repeats(k, v)
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
                return node if self._takes_finite() else None
            following: Value | None
            if node.op_type in ("Cast", "Identity"):
                following = node.operand(0)
                if following is None or tensor_type(following.type) is None or following.dtype not in FLOATS:
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
            if low is None or not low <= LOW or chosen is None or number_of(chosen) is not None:
                continue
            if low == -math.inf:
                self._hide(condition, negated)
            else:
                self.finite.append(Masked(condition, negated, other))
            return chosen
        return None

    def _added(self, node: Node) -> Value | None:
        """The scores to which an Add adds something; what is added is a mask."""
        first, second = node.operands
        for scores, mask in ((first, second), (second, first)):
            if scores is None or mask is None or not leads_to_product(scores, self.inside):
                continue
            flags = self._flags(mask)
            if flags is not None and number_of(flags.low) == -math.inf:
                self._hide(flags.value, flags.negated)
            elif is_causal_numbers(mask) or (flags is not None and is_causal_flags(flags.value, flags.negated)):
                self.finite.append(Masked(mask))
            else:
                self.masks.append(Masked(mask))
            return scores
        return None

    def _takes_finite(self) -> bool:
        """Let what hides keys by a finite number be a mask; False where it cannot.

        A softmax weighs keys equally that all have one number in the place of their scores. An Attention would weigh
        them by their scores: so each query must see a key, or the number be so low that a score adds nothing to it.
        """
        is_alone = len(self.finite) == 1 and not (self.masks or self.is_causal)
        for mask in self.finite:
            low = None if mask.low is None else number_of(mask.low)
            if is_alone and (mask.low is None or is_causal_flags(mask.value, mask.negated)):
                self.is_causal = True
                continue
            is_added = mask.low is None or (low is not None and low <= LOWEST)
            if not is_added and not (is_alone and shows_every_query(mask.value, mask.negated)):
                return False
            self.masks.append(mask)
        return True

    def _flags(self, mask: Value) -> Masked | None:
        """What a Where between zero and a low number hides."""
        node = mask.node
        if node is None or node not in self.inside or node.identity != ("", "Where"):
            return None
        condition, first, second = node.operands
        for zero, low in ((first, second), (second, first)):
            number = number_of(low)
            if condition is not None and number_of(zero) == 0 and number is not None and number <= LOW:
                return Masked(condition, zero is second, low)
        return None

    def _hide(self, flags: Value, negated: bool) -> None:
        """Note that flags hide keys; those of both a causal mask and another are told apart."""
        flags = unexpanded(flags, self.inside)
        node = flags.node
        parts = [flags]
        if not negated and node is not None and node in self.inside and node.identity == ("", "And"):
            parts = list(node.inputs)
        rest = [part for part in parts if not is_causal_flags(part, negated)]
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
            self.softcap, self.scale = abs(cap), factor * cap  # Tanh is odd: a sign of the cap goes to the scale.
            self.path += [tanh, inner.node]
            return value
        return None

    def _operands_of_scores(self, node: Node) -> tuple[View, View] | None:
        """q and k as (batch, heads, places, size)."""
        first, second = node.operands
        if first is None or second is None:
            return None
        if node.op_type == "Einsum":
            orders = orders_of(node, ("bhqd", "bhkd", "bhqk"))
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
                value = transposed_by_parts(node, self.inside)
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
            guard = guarded(value, self.inside)
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
                if tensor_type(value.type) is None or value.dtype not in FLOATS:
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
        orders = orders_of(node, ("bhqk", "bhkd", "bhqd"))
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
