"""What lists of sizes hold before anything runs: numbers and symbols, through the arithmetic that exporters write.

%s = Shape(%x : f32[batch, seq, 64])         (batch, seq, 64)
%b = Gather(%s, 0); %h = Gather(%s, 2)       (batch); (64)
%t = Concat(%b, [-1], Div(%h, 16), [16])     (batch, -1, 4, 16)
"""

from collections.abc import Callable, Sequence
from typing import Any

from irpar.ir import Dim, DType, Expr, Node, Tensor, TensorType, Value
from irpar.ir.dims import exact_div, floordiv

from .facts import data_of, int_attribute, refers_to_call

Sizes = tuple[Dim, ...]
"""A number or an expression for each element of a list, or for the one of a scalar; None where it is not known."""

LONGEST = 32
"""Elements of the longest list that is looked at."""
_DEEPEST = 24
"""Nodes of the longest chain that is followed."""
_INTS = (DType.I64, DType.I32)


def listed_sizes(value: Value) -> Sizes | None:
    """What a list of ints, or a single one, holds; None where not even its length is known."""
    return _sizes(value, _DEEPEST)


def lists_sizes(node: Node) -> bool:
    """Whether a node is of an operator that can list sizes; its operands are not looked at."""
    return node.identity in _RULES and len(node.results) == 1


def known_numbers(node: Node) -> tuple[int, ...] | None:
    """The numbers that a node lists, if all are known although not all of its operands are."""
    if not lists_sizes(node):
        return None
    found = listed_sizes(node.results[0])
    numbers = tuple(size for size in found or () if isinstance(size, int))
    return numbers if found is not None and len(numbers) == len(found) else None


def _sizes(value: Value | None, depth: int) -> Sizes | None:
    type_ = None if value is None else value.type
    if value is None or not isinstance(type_, TensorType) or type_.dtype not in (*_INTS, DType.BOOL):
        return None
    if type_.shape is None or len(type_.shape) > 1:
        return None
    data = data_of(value)
    if data is not None:
        return tuple(int(number) for number in data.numpy().ravel()) if data.size <= LONGEST else None
    node = value.node
    rule = None if node is None else _RULES.get(node.identity)
    found = None
    if node is not None and rule is not None and depth and not refers_to_call(node):
        found = rule(node, depth - 1)
    if found is not None and len(found) <= LONGEST:
        return found
    count = type_.shape[0] if type_.shape else 1
    return (None,) * count if isinstance(count, int) and count <= LONGEST else None


def _of_shape(node: Node, depth: int) -> Sizes | None:
    type_ = node.inputs[0].type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    return type_.shape[int_attribute(node, "start", 0) : int_attribute(node, "end", len(type_.shape))]


def _same(node: Node, depth: int) -> Sizes | None:
    value, result = node.inputs[0], node.result
    are_ints = all(isinstance(each.type, TensorType) and each.type.dtype in _INTS for each in (value, result))
    return _sizes(value, depth) if are_ints else None


def _numbers(node: Node, place: int, depth: int) -> tuple[int, ...] | None:
    """The numbers of an operand; none of one that is left out; None where one is not known."""
    if place >= len(node.operands) or node.operands[place] is None:
        return ()
    found = _sizes(node.operands[place], depth)
    numbers = tuple(size for size in found or () if isinstance(size, int))
    return numbers if found is not None and len(numbers) == len(found) else None


def _of_gather(node: Node, depth: int) -> Sizes | None:
    found, places = _sizes(node.operands[0], depth), _numbers(node, 1, depth)
    if found is None or places is None or not all(-len(found) <= place < len(found) for place in places):
        return None
    return tuple(found[place] for place in places)


def _of_slice(node: Node, depth: int) -> Sizes | None:
    found = _sizes(node.operands[0], depth)
    starts, ends, steps = (_numbers(node, place, depth) for place in (1, 2, 4))
    if found is None or not starts or not ends or steps is None:
        return None
    return found[starts[0] : ends[0] : steps[0] if steps else 1] if not steps or steps[0] > 0 else None


def _of_concat(node: Node, depth: int) -> Sizes | None:
    joined: list[Dim] = []
    for value in node.operands:
        found = _sizes(value, depth)
        if found is None:
            return None
        joined += found
    return tuple(joined)


def _of_filled(node: Node, depth: int) -> Sizes | None:
    count, value = _numbers(node, 0, depth), node.attributes.get("value")
    if not count or count[0] > LONGEST or not isinstance(value, Tensor):
        return None
    return (int(value.numpy().item()),) * count[0]


def _pairwise(function: Callable[[Any, Any], Dim]) -> Callable[[Node, int], Sizes | None]:
    """The rule of an operator on two lists, of which one may be a single number."""

    def rule(node: Node, depth: int) -> Sizes | None:
        left, right = (_sizes(value, depth) for value in node.operands)
        rows = None if left is None or right is None else _aligned(left, right)
        return None if rows is None else tuple(None if None in row else function(*row) for row in rows)

    return rule


def _aligned(*lists: Sizes) -> list[tuple[Dim, ...]] | None:
    """Elements that stand at one place; a single one stands at all."""
    count = max(map(len, lists))
    if any(len(each) not in (1, count) for each in lists):
        return None
    return list(zip(*(each * count if len(each) == 1 else each for each in lists), strict=True))


def _is_size(size: Dim) -> bool:
    """Whether it cannot be below 0: an expression is of sizes."""
    return size >= 0 if isinstance(size, int) else size is not None and all(factor > 0 for _, factor in size.terms)


def _quotient(left: int | Expr, right: int | Expr) -> Dim:
    # ONNX rounds towards 0.
    if right == 0:
        return None
    return floordiv(left, right) if _is_size(left) and _is_size(right) else exact_div(left, right)


def _equal(left: int | Expr, right: int | Expr) -> Dim:
    if left == right:
        return 1
    if isinstance(left, int) and isinstance(right, int):
        return 0
    expression, number = (right, left) if isinstance(left, int) else (left, right)
    return 0 if isinstance(number, int) and number < 0 and _is_size(expression) else None


def _of_where(node: Node, depth: int) -> Sizes | None:
    on, yes, no = (_sizes(value, depth) for value in node.operands)
    rows = None if on is None or yes is None or no is None else _aligned(on, yes, no)
    if rows is None:
        return None
    return tuple(a if a == b else None if take is None else a if take else b for take, a, b in rows)


_RULES: dict[tuple[str, str], Callable[[Node, int], Sizes | None]] = {
    ("", "Shape"): _of_shape,
    **{("", name): _same for name in ("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape")},
    ("", "Gather"): _of_gather,
    ("", "Slice"): _of_slice,
    ("", "Concat"): _of_concat,
    ("", "ConstantOfShape"): _of_filled,
    ("", "Add"): _pairwise(lambda left, right: left + right),
    ("", "Sub"): _pairwise(lambda left, right: left - right),
    ("", "Mul"): _pairwise(lambda left, right: left * right),
    ("", "Div"): _pairwise(_quotient),
    ("", "Equal"): _pairwise(_equal),
    ("", "Where"): _of_where,
}


def target_sizes(sizes: Sequence[Dim]) -> list[Dim]:
    """A target shape, of which an expression that may be below 0 is no size: it may stand for another one."""
    return [size if isinstance(size, int) or _is_size(size) else None for size in sizes]
