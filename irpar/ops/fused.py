"""com.microsoft's elementwise operators, and what normalises the last dim or groups of channels."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Builder, DType, Node, TensorType, Type

from .elementwise import infer_broadcast, per_element, rule_broadcast
from .facts import (
    CannotTellError,
    axis_attribute,
    axis_of,
    dims_of,
    int_attribute,
    ints_operand,
    needed_ints,
    operand,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.fused import (
    decompose_attention_gate,
    decompose_bias_add,
    decompose_complex_product,
    decompose_expand_dims,
    decompose_fast_gelu,
    decompose_gated_add,
    decompose_gather_nd,
    decompose_gelu,
    decompose_pad,
    decompose_quick_gelu,
    decompose_scaled_silu,
    decompose_split_gelu,
    decompose_unfold,
)
from .gradients.fused_normalization import (
    decompose_branch_rms_norm,
    decompose_embed,
    decompose_gated_rms_norm,
    decompose_group_norm,
    decompose_rms_norm,
    decompose_skip_layer_norm,
    decompose_skip_rms_norm,
)
from .gradients.zero import zero
from .indexing import infer_gather_nd, localize_gather_nd, rule_gather_nd
from .local_programs.normalization import LOCAL_PROGRAMS
from .microsoft import microsoft
from .op_def import Decompose, OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, reshape_factors, whole

# -- elementwise ----------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "BiasAdd": 2,
    "BiasGelu": 2,
    "ComplexMul": 6,
    "ComplexMulConj": 6,
    "FastGelu": 2,
    "Gelu": 1,
    "GatedAdd": 2,
    "QuickGelu": 1,
    "ScaledSiLU": 2,
}
"""Operators whose operands broadcast to the first, and what an element counts."""
_UNARY = frozenset({"Gelu", "QuickGelu"})


def _infer_hash(node: Node) -> Sequence[Type]:
    dtype = DType.U32 if int_attribute(node, "positive", 1) else DType.I32
    return [TensorType(dtype, tensor_of(node, 0).shape)]


def _rule_complex(node: Node) -> FactorRule:
    """As elementwise; the last dim holds the two parts of a number."""
    shape = result_shape(node)
    rule = RuleBuilder()
    dims = [*rule.dims(shape[:-1]), *rule.dims(shape[-1:], Kind.REPLICATE)]
    operands: list[Sequence[DimFactors]] = []
    for found in shapes_of(node):
        sizes = found or ()
        aligned = zip(sizes, shape[len(shape) - len(sizes) :], dims[len(shape) - len(sizes) :], strict=True)
        operands.append([factors if size == full else () for size, full, factors in aligned])
    return rule.done(operands, [dims])


_DECOMPOSITIONS: dict[str, Decompose] = {
    "BiasAdd": decompose_bias_add,
    "BiasGelu": decompose_gelu,
    "ComplexMul": decompose_complex_product,
    "ComplexMulConj": decompose_complex_product,
    "FastGelu": decompose_fast_gelu,
    "Gelu": decompose_gelu,
    "GatedAdd": decompose_gated_add,
    "QuickGelu": decompose_quick_gelu,
    "ScaledSiLU": decompose_scaled_silu,
}

for _name, _flops in ELEMENTWISE.items():
    _rule = _rule_complex if _name.startswith("Complex") else rule_broadcast
    microsoft(
        _name,
        infer_broadcast if _name.startswith("Complex") else same_type,
        _rule,
        per_element(_flops),
        is_elementwise=_name in _UNARY,
        decompose=_DECOMPOSITIONS[_name],
    )
microsoft("MurmurHash3", _infer_hash, rule_broadcast, gradient=zero)


def _infer_split_gelu(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    size = dims[-1]
    if not isinstance(size, int) or size % 2:
        raise CannotTellError("the halves")
    return [tensor_of(node, 0).with_shape((*dims[:-1], size // 2))]


def _rule_split_gelu(node: Node) -> FactorRule:
    """`([b,s,(2d)],[(2d)])->([b,s,d])`: b and s pass; the last dim is two halves side by side, and whole."""
    rule = RuleBuilder()
    *batch, size = shape_of(node, 0)
    dims, (last,) = rule.dims(batch), rule.dims([size], Kind.REPLICATE)
    return rule.done([[*dims, last], [last]], [[*dims, ()]])


microsoft("BiasSplitGelu", _infer_split_gelu, _rule_split_gelu, per_element(4), decompose=decompose_split_gelu)


def _infer_gate(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0)] * len(node.results)


def _rule_gate(node: Node) -> FactorRule:
    """`([b,t,h],[h],[h],[b,t,h])->([b,t,h],[b,t,h])`: every dim passes."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    given: list[list[DimFactors]] = [dims, dims[-1:], dims[-1:], dims]
    operands = [[] if value is None else factors for value, factors in zip(node.operands, given, strict=False)]
    return rule.done(operands, [dims] * len(node.results))


microsoft("LinearAttentionGate", _infer_gate, _rule_gate, per_element(4), decompose=decompose_attention_gate)


# -- moving data ----------------------------------------------------------------------------------------------------


def _infer_expand_dims(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    (axis,) = needed_ints(node, 1)
    dims.insert(axis_of(axis, len(dims) + 1), 1)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _rule_expand_dims(node: Node) -> FactorRule:
    """Every dim passes."""
    rule, before, after = reshape_factors(shape_of(node, 0), result_shape(node))
    return rule.done([before, whole(len(shape_of(node, 1)))], [after])


def _infer_unfold(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    axis = axis_attribute(node, len(dims), -1, "dim")
    size, step, length = int_attribute(node, "size"), int_attribute(node, "step", 1), dims[axis]
    if not isinstance(length, int):
        raise CannotTellError("a symbolic dim")
    dims[axis] = (length - size) // step + 1
    return [tensor_of(node, 0).with_shape((*dims, size))]


def _rule_unfold(node: Node) -> FactorRule:
    """`([i,j])->([i,k,w])`: the unfolded dim is whole, since windows overlap; the others pass."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -1, "dim")
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    return rule.done([dims], [[*(() if dim == axis else factors for dim, factors in enumerate(dims)), ()]])


microsoft("ExpandDims", _infer_expand_dims, _rule_expand_dims, decompose=decompose_expand_dims)
microsoft("UnfoldTensor", _infer_unfold, _rule_unfold, decompose=decompose_unfold)
microsoft("GatherND", infer_gather_nd, rule_gather_nd, localize=localize_gather_nd, decompose=decompose_gather_nd)


def _infer_pad(node: Node) -> Sequence[Type]:
    dims, pads = dims_of(node, 0), needed_ints(node, 1)
    if len(pads) != 2 * len(dims):
        raise CannotTellError("pads of another rank")
    sums = [before + after for before, after in zip(pads[: len(dims)], pads[len(dims) :], strict=True)]
    shape = tuple(None if size is None else size + extra for size, extra in zip(dims, sums, strict=True))
    return [tensor_of(node, 0).with_shape(shape)]


def _rule_pad(node: Node) -> FactorRule:
    """Dims without padding pass."""
    shape = shape_of(node, 0)
    pads = ints_operand(node, 1) or ()
    changed = [pads[dim] != 0 or pads[dim + len(shape)] != 0 for dim in range(len(shape))]
    rule = RuleBuilder()
    dims = [
        rule.dims([size], Kind.REPLICATE if padded else Kind.PASS)[0]
        for size, padded in zip(shape, changed, strict=True)
    ]
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    result = [() if padded else factors for factors, padded in zip(dims, changed, strict=True)]
    return rule.done([dims, *others], [result])


microsoft("Pad", _infer_pad, _rule_pad, decompose=decompose_pad)


# -- normalisations of the last dim ---------------------------------------------------------------------------------


def _infer_skip_norm(node: Node) -> Sequence[Type]:
    """The sum of the operands is the last result; mean and inverse deviation have one number a row."""
    data = tensor_of(node, 0)
    dims = dims_of(node, 0)
    row = TensorType(DType.F32, (*dims[:-1], 1))
    return [data, row, row, data][: len(node.results)]


def _skip_dtypes(node: Node) -> Sequence[DType]:
    data = tensor_of(node, 0).dtype
    return data, DType.F32, DType.F32, data


def _rule_skip_norm(node: Node) -> FactorRule:
    """`([b,s,d],[b,s,d],[d],[d],[d])->([b,s,d],[b,s,1],[b,s,1],[b,s,d])`: d is whole; the skip may lack dims."""
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    dims = [*rule.dims(shape[:-1]), *rule.dims(shape[-1:], Kind.REPLICATE)]
    operands: list[Sequence[DimFactors]] = [dims]
    for found in shapes_of(node)[1:]:
        sizes = found or ()
        start = len(shape) - len(sizes)
        operands.append([dims[start + n] if size == shape[start + n] else () for n, size in enumerate(sizes)])
    row: list[DimFactors] = [*dims[:-1], ()]
    return rule.done(operands, [dims, row, row, dims][: len(node.results)])


for _name, _decompose in (
    ("SkipLayerNormalization", decompose_skip_layer_norm),
    ("SkipSimplifiedLayerNormalization", decompose_skip_rms_norm),
):
    microsoft(
        _name,
        _infer_skip_norm,
        _rule_skip_norm,
        per_element(10),
        dtypes=_skip_dtypes,
        local_program=LOCAL_PROGRAMS[_name],
        decompose=_decompose,
    )


def _infer_simplified(node: Node) -> Sequence[Type]:
    data, dims = tensor_of(node, 0), dims_of(node, 0)
    axis = axis_attribute(node, len(dims), -1)
    row = TensorType(DType.F32, (*dims[:axis], *[1] * (len(dims) - axis)))
    return [TensorType(tensor_of(node, 1).dtype, data.shape), row][: len(node.results)]


def _rule_simplified(node: Node) -> FactorRule:
    """`([b,s,d],[d])->([b,s,d],[b,s,1])`: dims from the axis on are whole."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -1)
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim >= axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    scale = shape_of(node, 1)
    row: list[DimFactors] = [*dims[:axis], *[()] * (len(shape) - axis)]
    return rule.done([dims, dims[len(shape) - len(scale) :]], [dims, row][: len(node.results)])


# ONNX Runtime has it in ONNX's domain, though ONNX has not.
_SIMPLIFIED = "SimplifiedLayerNormalization"
define(
    OpDef(
        "",
        _SIMPLIFIED,
        _infer_simplified,
        _rule_simplified,
        per_element(4),
        local_program=LOCAL_PROGRAMS[_SIMPLIFIED],
        decompose=decompose_rms_norm,
    )
)


def _rule_gated_norm(node: Node) -> FactorRule:
    """`([b,t,(hc)],[c],[b,t,(hc)])->([b,t,(hc)])`: heads h pass, c is normalised and whole."""
    *batch, size = shape_of(node, 0)
    (count,) = shape_of(node, 1)
    rule = RuleBuilder()
    heads, inside = rule.dims([size // count])[0], rule.dims([count], Kind.REPLICATE)[0]
    dims: list[DimFactors] = [*rule.dims(batch), (*heads, *inside)]
    return rule.done([dims, [inside], dims], [dims])


def _rule_branch_norm(node: Node) -> FactorRule:
    """`([b,c,h],[c,h])->([b,c,h])` or `([b,(ch)],[(ch)])`: branches c pass, h is normalised and whole."""
    shape = shape_of(node, 0)
    count = int_attribute(node, "num_branches", 0)
    rule = RuleBuilder()
    branches_size, size = (count, shape[-1] // count) if count else shape[-2:]
    batch = rule.dims(shape[: -1 if count else -2])
    (branches,) = rule.dims([branches_size])
    (inside,) = rule.dims([size], Kind.REPLICATE)
    dims = [*batch, (*branches, *inside)] if count else [*batch, branches, inside]
    operands: list[Sequence[DimFactors]] = [dims]
    if operand(node, 1) is not None:
        scale = shape_of(node, 1)
        one = [(*branches, *inside)] if scale[0] == branches_size * size and branches_size > 1 else [inside]
        operands.append([branches, inside] if len(scale) == 2 else one)
    return rule.done(operands, [dims])


def _localize_branch_norm(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the branches of the block."""
    count = int_attribute(whole_node, "num_branches", 0)
    if count:
        size = shape_of(whole_node, 0)[-1] // count
        local.set_attribute("num_branches", shape_of(local, 0)[-1] // size)


microsoft("GatedRMSNorm", same_type, _rule_gated_norm, per_element(6), decompose=decompose_gated_rms_norm)
microsoft(
    "BranchwiseRMSNorm",
    same_type,
    _rule_branch_norm,
    per_element(4),
    _localize_branch_norm,
    decompose=decompose_branch_rms_norm,
)


# -- EmbedLayerNormalization ----------------------------------------------------------------------------------------


def _infer_embed(node: Node) -> Sequence[Type]:
    table = tensor_of(node, 2)
    batch, steps = dims_of(node, 0)
    data = table.with_shape((batch, steps, dims_of(node, 2)[-1]))
    return [data, TensorType(DType.I32, (batch,)), data][: len(node.results)]


def _rule_embed(node: Node) -> FactorRule:
    """`([b,s],[b,s],[v,d],[p,d],[t,d],[d],[d],[b,s],[b,s])->([b,s,d],[b],[b,s,d])`: b passes; s where places are given.

    Without position ids a word's place is its position; a mask is counted over s.
    """
    batch_size, count = shape_of(node, 0)
    counts = operand(node, 7) is not None
    free = operand(node, 8) is not None and not counts
    rule = RuleBuilder()
    (batch,), (steps,) = rule.dims([batch_size]), rule.dims([count], Kind.PASS if free else Kind.REPLICATE)
    (size,) = rule.dims([shape_of(node, 2)[1]], Kind.REPLICATE)
    word: list[DimFactors] = [batch, steps]
    operands: list[Sequence[DimFactors]] = []
    for index, shape in enumerate(shapes_of(node)):
        if shape is None:
            operands.append([])
        elif index in (2, 3, 4):
            operands.append([*rule.dims(shape[:1], Kind.REPLICATE), size])
        elif index in (5, 6):
            operands.append([size])
        else:
            operands.append([batch if shape[0] == batch_size else (), steps])
    data: list[DimFactors] = [*word, size]
    return rule.done(operands, [data, [batch], data][: len(node.results)])


def _embed_dtypes(node: Node) -> Sequence[DType]:
    data = tensor_of(node, 2).dtype
    return data, DType.I32, data


microsoft(
    "EmbedLayerNormalization",
    _infer_embed,
    _rule_embed,
    per_element(12),
    dtypes=_embed_dtypes,
    decompose=decompose_embed,
)


# -- GroupNorm, SkipGroupNorm ---------------------------------------------------------------------------------------


def _rule_group_norm(node: Node) -> FactorRule:
    """`([b,h,w,(gc)],[(gc)],[(gc)],[b,h,w,(gc)],[(gc)])->([b,h,w,(gc)],[b,h,w,(gc)])`: batch and groups pass."""
    shape = shape_of(node, 0)
    groups = int_attribute(node, "groups")
    last = int_attribute(node, "channels_last", 1)
    count = shape[-1] if last else shape[1]
    if count % groups:
        raise CannotTellError("groups of different sizes")
    rule = RuleBuilder()
    batch, group = rule.dims([shape[0], groups])
    (inside,) = rule.dims([count // groups], Kind.REPLICATE)
    channels: DimFactors = (*group, *inside)
    places = rule.dims(shape[1:-1] if last else shape[2:], Kind.REPLICATE)
    data = [batch, *places, channels] if last else [batch, channels, *places]
    operands: list[Sequence[DimFactors]] = [data, [channels], [channels]]
    for found in shapes_of(node)[3:]:
        sizes = found or ()
        if len(sizes) == 1:
            operands.append([channels])
        elif len(sizes) == 2:
            operands.append([batch, channels])
        else:
            operands.append(
                [factors if size == full else () for size, full, factors in zip(sizes, shape, data, strict=False)]
            )
    return rule.done(operands, [data] * len(node.results))


def _localize_group_norm(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block."""
    channels = -1 if int_attribute(whole_node, "channels_last", 1) else 1
    inside = shape_of(whole_node, 0)[channels] // int_attribute(whole_node, "groups")
    local.set_attribute("groups", shape_of(local, 0)[channels] // inside)


def _cost_norm(node: Node) -> int:
    return 8 * prod(result_shape(node))


for _name in ("GroupNorm", "SkipGroupNorm"):
    microsoft(_name, same_type, _rule_group_norm, _cost_norm, _localize_group_norm, decompose=decompose_group_norm)
