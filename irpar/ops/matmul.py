"""Matrix products: MatMul, Gemm and Einsum."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Dim, Node, TensorType, Type, Value

from .facts import (
    CannotTellError,
    broadcast_dims,
    dims_of,
    float_attribute,
    int_attribute,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.matmul import latin, of_einsum, of_gemm, of_matmul
from .gradients.writer import GradientWriter, Of
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

# -- MatMul: numpy's, operands of one dim included ------------------------------------------------------------------


def _infer_matmul(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 0).dtype, matmul_dims(dims_of(node, 0), dims_of(node, 1)))]


def matmul_dims(left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """The dims of a product."""
    if not left or not right:
        raise CannotTellError("a scalar")
    batch = broadcast_dims([tuple(left[:-2]), tuple(right[:-2])])
    return (*batch, *(left[-2:-1] if len(left) > 1 else ()), *(right[-1:] if len(right) > 1 else ()))


def _rule_matmul(node: Node) -> FactorRule:
    """`([b,i,k],[b,k,j])->([b,i,j])`: i, j and batch dims pass, k gives partial sums.

    Axes that cut rows or columns may cut batch dims that both operands have instead, such as the heads of attention.
    """
    rule, operands, result = matmul_factors(shape_of(node, 0), shape_of(node, 1), result_shape(node))
    batch = [factors for factors in operands[0][:-2] if factors and factors in operands[1]]
    moves = [(factors, target) for target in batch for factors in result[-2:]]
    return rule.done(operands, [result], moves=moves)


def matmul_factors(
    left: Sequence[int], right: Sequence[int], result: Sequence[int], inner_kind: Kind = Kind.REDUCE
) -> tuple[RuleBuilder, list[list[DimFactors]], list[DimFactors]]:
    """The factors of both operands and of the result of a product, and the builder that has them."""
    rule = RuleBuilder()
    batch_rank = max(len(left), len(right), 2) - 2
    batch = rule.dims(result[:batch_rank])
    rows = rule.dims(left[-2:-1]) if len(left) > 1 else []
    columns = rule.dims(right[-1:]) if len(right) > 1 else []
    inner = rule.dims(left[-1:], inner_kind)

    def batch_of(shape: Sequence[int]) -> list[DimFactors]:
        dims = shape[:-2]
        aligned = zip(dims, batch[batch_rank - len(dims) :], result[batch_rank - len(dims) :], strict=False)
        return [factor if size == whole else () for size, factor, whole in aligned]

    return rule, [[*batch_of(left), *rows, *inner], [*batch_of(right), *inner, *columns]], [*batch, *rows, *columns]


def cost_products(node: Node, summed: int) -> int:
    """A multiply and an add for each of the products that are summed to an element of the result."""
    return 2 * prod(result_shape(node)) * summed


def cost_matmul(node: Node) -> int:
    """Of all operators that sum over the last dim of their first operand."""
    return cost_products(node, shape_of(node, 0)[-1])


define(OpDef("", "MatMul", _infer_matmul, _rule_matmul, cost_matmul, gradient=of_matmul))


# -- Gemm -----------------------------------------------------------------------------------------------------------


def _infer_gemm(node: Node) -> Sequence[Type]:
    left, right = dims_of(node, 0), dims_of(node, 1)
    rows = left[1 if int_attribute(node, "transA", 0) else 0]
    columns = right[0 if int_attribute(node, "transB", 0) else 1]
    return [TensorType(tensor_of(node, 0).dtype, (rows, columns))]


def _rule_gemm(node: Node) -> FactorRule:
    """`([i,k],[k,j],[i,j])->([i,j])`. With C, partial sums over k would each add it: k is then whole.

    split-bias takes C out beforehand, so that k may be sharded.
    """
    shapes = shapes_of(node)
    bias = operand(node, 2) is not None
    rule = RuleBuilder()
    left = shape_of(node, 0)
    rows, columns = rule.dims(result_shape(node))
    transposed = bool(int_attribute(node, "transA", 0))
    (inner,) = rule.dims([left[0 if transposed else 1]], Kind.REPLICATE if bias else Kind.REDUCE)
    a = [inner, rows] if transposed else [rows, inner]
    b = [columns, inner] if int_attribute(node, "transB", 0) else [inner, columns]
    operands = [a, b]
    if len(shapes) > 2:
        c = shapes[2] or ()
        aligned = zip(c, result_shape(node)[2 - len(c) :], [rows, columns][2 - len(c) :], strict=True)
        operands.append([factor if size == whole else () for size, whole, factor in aligned])
    return rule.done(operands, [[rows, columns]])


def cost_gemm(node: Node) -> int:
    """The products of a Gemm alone, without its bias and scales."""
    return cost_products(node, shape_of(node, 0)[0 if int_attribute(node, "transA", 0) else 1])


def _cost_gemm_scaled(node: Node) -> int:
    scaled = sum(float_attribute(node, name, 1.0) != 1.0 for name in ("alpha", "beta"))
    return cost_gemm(node) + prod(result_shape(node)) * ((operand(node, 2) is not None) + scaled)


define(OpDef("", "Gemm", _infer_gemm, _rule_gemm, _cost_gemm_scaled, gradient=of_gemm))


# -- Einsum ---------------------------------------------------------------------------------------------------------

_HIDDEN = 0x3B1
"""Where the letters begin that stand for the dims of an ellipsis; equations have Latin ones."""


def _equation(node: Node) -> tuple[list[str], str]:
    """The letters of each operand and of the result, each once.

    Raises:
        CannotTellError: a letter twice in one operand, or an equation that does not fit the operands.
    """
    terms, right = _letters(node)
    if any(len(set(term)) != len(term) for term in terms):
        raise CannotTellError("a letter twice in one operand")
    return terms, right


def _letters(node: Node) -> tuple[list[str], str]:
    """The letters of each operand and of the result; the dims of an ellipsis get letters of their own.

    Raises:
        CannotTellError: an equation that does not fit the operands.
    """
    left, arrow, right = text_attribute(node, "equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(node.operands):
        raise CannotTellError("terms and operands differ")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        right = "..." * ("..." in left) + "".join(letter for letter in letters if left.count(letter) == 1)
    hidden = [len(dims_of(node, index)) - len(term.replace("...", "")) for index, term in enumerate(terms)]
    if ("..." in left) > ("..." in right):
        raise CannotTellError("an ellipsis that is not in the result")
    terms = [_without_ellipsis(term, count) for term, count in zip(terms, hidden, strict=True)]
    right = _without_ellipsis(right, max(hidden))
    if any("." in term for term in (*terms, right)) or len(set(right)) != len(right):
        raise CannotTellError("an equation that ONNX does not have")
    return terms, right


def _without_ellipsis(term: str, count: int) -> str:
    """Letters for the `count` dims of an ellipsis; aligned at the end, as they broadcast."""
    return term.replace("...", "".join(chr(_HIDDEN + place) for place in reversed(range(count))), 1)


def _letter_dims(node: Node, terms: Sequence[str]) -> dict[str, Dim]:
    found: dict[str, list[Dim]] = {}
    for index, term in enumerate(terms):
        dims = dims_of(node, index)
        if len(dims) != len(term):
            raise CannotTellError("equation and rank differ")
        for letter, dim in zip(term, dims, strict=True):
            found.setdefault(letter, []).append(dim)
    return {letter: broadcast_dims([(dim,) for dim in dims])[0] for letter, dims in found.items()}


def _infer_einsum(node: Node) -> Sequence[Type]:
    terms, result = _equation(node)
    sizes = _letter_dims(node, terms)
    return [TensorType(tensor_of(node, 0).dtype, tuple(sizes[letter] for letter in result))]


def _rule_einsum(node: Node) -> FactorRule:
    """One factor a letter: those of the result pass, the others give partial sums."""
    terms, result = _equation(node)
    sizes = _letter_dims(node, terms)
    rule = RuleBuilder()
    factors: dict[str, DimFactors] = {}
    for letter, size in sizes.items():
        assert isinstance(size, int)
        (factors[letter],) = rule.dims([size], Kind.PASS if letter in result else Kind.REDUCE)
    operands = [
        [factors[letter] if size == sizes[letter] else () for letter, size in zip(term, shape_of(node, n), strict=True)]
        for n, term in enumerate(terms)
    ]
    return rule.done(operands, [[factors[letter] for letter in result]])


def _cost_einsum(node: Node) -> int:
    """One multiply for each further operand and one add, for every combination of letters."""
    try:
        terms, result = _equation(node)
        sizes = _letter_dims(node, terms)
    except CannotTellError:
        return 0
    points = prod(size for size in sizes.values() if isinstance(size, int))
    adds = 1 if set(result) != set(sizes) else 0
    return points * (len(terms) - 1 + adds)


def _gradient_einsum(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    return of_einsum(node, of, writer, *latin(*_letters(node)))


define(OpDef("", "Einsum", _infer_einsum, _rule_einsum, _cost_einsum, gradient=_gradient_einsum))
