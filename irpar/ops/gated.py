"""com.microsoft's gated activations, and what leads a row to its experts."""

from collections.abc import Sequence
from math import prod

from irpar.ir import DType, Node, TensorType, Type

from .elementwise import per_element
from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    operand,
    result_shape,
    shape_of,
    tensor_of,
)
from .gradients.fused import decompose_router_projection, decompose_swiglu
from .gradients.refused import EXPERTS
from .microsoft import microsoft
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

# -- SwiGLU ---------------------------------------------------------------------------------------------------------


def _halves(node: Node) -> bool:
    """Whether the last dim of the first operand holds the gate and what it multiplies, side by side."""
    return operand(node, 1) is None


def _infer_swiglu(node: Node) -> Sequence[Type]:
    if not _halves(node):
        return [tensor_of(node, 0)]
    dims = dims_of(node, 0)
    size = dims[-1]
    if not isinstance(size, int) or size % 2:
        raise CannotTellError("the halves")
    return [tensor_of(node, 0).with_shape((*dims[:-1], size // 2))]


def _rule_swiglu(node: Node) -> FactorRule:
    """`([b,s,d],[b,s,d])->([b,s,d])`: every dim passes; `([b,s,(2d)])->([b,s,d])`: halves of one tensor are whole."""
    rule = RuleBuilder()
    shape = shape_of(node, 0)
    if not _halves(node):
        dims = rule.dims(shape)
        return rule.done([dims, dims], [dims])
    rows, (both,) = rule.dims(shape[:-1]), rule.dims(shape[-1:], Kind.REPLICATE)
    return rule.done([[*rows, both], *[[] for _ in node.operands[1:]]], [[*rows, ()]])


microsoft("SwiGLU", _infer_swiglu, _rule_swiglu, per_element(5), decompose=decompose_swiglu)


# -- RouterGateUpProj -----------------------------------------------------------------------------------------------


def _infer_router_projection(node: Node) -> Sequence[Type]:
    rows, columns = dims_of(node, 0)[:-1], dims_of(node, 1)[-1]
    size = int_attribute(node, "router_size")
    if not isinstance(columns, int) or (columns - size) % 2:
        raise CannotTellError("the halves")
    data = tensor_of(node, 0)
    return [data.with_shape((*rows, count)) for count in (size, (columns - size) // 2)][: len(node.results)]


def _rule_router_projection(node: Node) -> FactorRule:
    """`([b,s,k],[k,j])->([b,s,r],[b,s,i])`: rows pass; an activation follows the sum over k, and columns are of three
    meanings side by side."""
    rule = RuleBuilder()
    rows = rule.dims(shape_of(node, 0)[:-1])
    inner, columns = rule.dims(shape_of(node, 1), Kind.REPLICATE)
    return rule.done([[*rows, inner], [inner, columns]], [[*rows, ()] for _ in node.results])


def _cost_router_projection(node: Node) -> int:
    return 2 * prod(shape_of(node, 0)) * shape_of(node, 1)[1]


microsoft(
    "RouterGateUpProj",
    _infer_router_projection,
    _rule_router_projection,
    _cost_router_projection,
    decompose=decompose_router_projection,
)


# -- MoEGroupRouter -------------------------------------------------------------------------------------------------


def _router_dtypes(node: Node) -> Sequence[DType]:
    return tensor_of(node, 0).dtype, DType.F32, DType.F32


def _infer_router(node: Node) -> Sequence[Type]:
    """A row of the results for each of the data: its logits of all experts, or what is projected to them."""
    sizes = dims_of(node, 0)[:-1]
    if not all(isinstance(size, int) for size in sizes) and len(sizes) != 1:
        raise CannotTellError("the number of rows")
    rows = sizes[0] if len(sizes) == 1 else prod(size for size in sizes if isinstance(size, int))
    shape = (rows, *dims_of(node, 1))
    return [TensorType(dtype, shape) for dtype in _router_dtypes(node)][: len(node.results)]


def _rule_router(node: Node) -> FactorRule:
    """`([b,s,e],[e])->([(bs),e])`: rows pass; a row's experts are chosen among them all.

    `([r,k],[e],[e,k])->([r,e],[r,e],[r,e])` projects rows first.
    """
    rule = RuleBuilder()
    rows = rule.dims(shape_of(node, 0)[:-1])
    (experts,) = rule.dims(shape_of(node, 1), Kind.REPLICATE)
    together: DimFactors = tuple(factor for dim in rows for factor in dim)
    inner = experts
    projection: list[list[DimFactors]] = [[] for _ in node.operands[2:]]
    if _is_projected(node):
        (inner,) = rule.dims(shape_of(node, 0)[-1:], Kind.REPLICATE)
        projection = [[experts, inner]]
    return rule.done([[*rows, inner], [experts], *projection], [[together, experts] for _ in node.results])


def _is_projected(node: Node) -> bool:
    return len(node.operands) > 2 and operand(node, 2) is not None


def _cost_router(node: Node) -> int:
    """A logit is 6 operations; projected, a product more."""
    inner = shape_of(node, 0)[-1] if _is_projected(node) else 0
    return (6 + 2 * inner) * prod(result_shape(node))


microsoft("MoEGroupRouter", _infer_router, _rule_router, _cost_router, dtypes=_router_dtypes, gradient=EXPERTS)
