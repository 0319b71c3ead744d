"""What values around an attention are: numbers, causal masks, moves of elements, heads that are repeated."""

import math

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.ops.facts import ints_attribute, replicated_data

from .attention_form import FLOATS, KEYS_BY_PLACES, LOW, View

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def unexpanded(value: Value, inside: dict[Node, int]) -> Value:
    """What an Expand repeats, where a mask does that itself."""
    node = value.node
    if node is None or node not in inside or node.identity != ("", "Expand"):
        return value
    source = node.operand(0)
    return source if source is not None and source.is_static and len(source.shape) >= 2 else value


def leads_to_product(value: Value, inside: dict[Node, int]) -> bool:
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


def guarded(weights: Value, inside: dict[Node, int]) -> tuple[Node, Node] | None:
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


def without_repeats(k: View, v: View) -> tuple[View, View, float]:
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


def transposed_by_parts(node: Node, inside: dict[Node, int]) -> Value | None:
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
    """The order in which a Transpose gives the dims of its operand; None where that is none."""
    value = node.operand(0)
    if value is None or not value.is_static:
        return None
    dims, order = range(len(value.shape)), ints_attribute(node, "perm")
    if order is None:
        return tuple(reversed(dims))
    return order if sorted(order) == list(dims) else None


def orders_of(node: Node, terms: tuple[str, str, str]) -> tuple[tuple[int, ...], ...] | None:
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
    if value is None or value.data is None or value.data.size != 1 or value.data.dtype not in FLOATS:
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


def _squared(value: Value) -> Numbers | None:
    """A constant of queries and keys, which are as many; None for another value, and where a rank has a block of it."""
    data = replicated_data(value)
    if data is None or len(data.shape) < 2:
        return None
    *leading, queries, keys = data.shape
    if queries != keys or queries < 2 or any(size != 1 for size in leading):
        return None
    return data.numpy().reshape(queries, keys)


def is_causal_flags(value: Value, negated: bool) -> bool:
    """Whether flags are set, or not set, for the keys up to each query's place."""
    if value.node is not None:
        return _compares_places(value.node, negated)
    if value.data is None or value.data.dtype is not DType.BOOL:
        return False
    flags = _squared(value)
    return flags is not None and np.array_equal(flags != negated, np.tri(len(flags), dtype=bool))


_COMPARED = {"GreaterOrEqual": (0, False), "LessOrEqual": (1, False), "Less": (0, True), "Greater": (1, True)}
"""Comparisons that make causal flags: which operand counts queries, and whether flags are set for hidden keys."""


def _compares_places(node: Node, negated: bool) -> bool:
    """Whether a comparison of the places of queries and keys makes causal flags.

    rows : [n, 1]    columns : [1, n]    GreaterOrEqual(rows, columns), both the same rising numbers
    """
    if node.identity == ("", "Not"):
        return node.inputs[0].node is not None and _compares_places(node.inputs[0].node, not negated)
    found = None if node.domain else _COMPARED.get(node.op_type)
    if found is None or found[1] != negated:
        return False
    rows, columns = _numbers(node.inputs[found[0]]), _numbers(node.inputs[1 - found[0]])
    if rows is None or columns is None:
        return False
    numbers = rows.ravel()
    count = numbers.size
    is_square = rows.shape[-2:] == (count, 1) and columns.shape[-1:] == (count,) and columns.size == count
    is_rising = count > 1 and bool((numbers[1:] > numbers[:-1]).all())
    return is_square and is_rising and np.array_equal(numbers, columns.ravel())


def _numbers(value: Value) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None":
    """Integers of a constant that all ranks have in full, perhaps in another shape."""
    source = value
    while source.node is not None and source.node.identity in (("", "Unsqueeze"), ("", "Reshape"), ("", "Identity")):
        source = source.node.inputs[0]
    data = replicated_data(source)
    if data is None or not data.dtype.is_index or not value.is_static or math.prod(value.shape) != data.size:
        return None
    return data.numpy().astype(np.int64).reshape(value.shape)


def shows_every_query(value: Value, negated: bool) -> bool:
    """Whether flags of keys are known, and each query sees one."""
    data = replicated_data(value)
    if data is None or data.dtype is not DType.BOOL or not data.shape or data.shape[-1] < 2:
        return False
    return bool((data.numpy() != negated).any(axis=-1).all())


def is_causal_numbers(value: Value) -> bool:
    """Whether numbers that are added hide the keys behind each query's place, and leave the others."""
    if value.data is None or value.data.dtype not in FLOATS:
        return False
    numbers = _squared(value)
    if numbers is None:
        return False
    seen = np.tri(len(numbers), dtype=bool)
    wide = numbers.astype(np.float64)
    return bool((wide[seen] == 0).all() and (wide[~seen] <= LOW).all())
