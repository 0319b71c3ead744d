"""What ONNX Runtime's optimizers must not do to a model: they would compute other numbers, or hold more."""

from collections.abc import Iterable, Sequence

from irpar.ir import DType, Node, Value, tensor_type
from irpar.ops.facts import int_attribute
from irpar.ops.recomputed import is_recomputed

_MOVES_DEQUANTISATION = "QDQPropagationTransformer"
_MERGES_PAIRS = "DoubleQDQPairsRemover"
_COMPUTES_IN_INTEGERS = "QDQSelectorActionTransformer"
_MOVES = frozenset({("", "Identity"), ("", "Reshape"), ("", "Transpose")})
_TRANSPOSES_IN_PRODUCTS = "MatmulTransposeFusion"
_MERGES_EQUAL = "CommonSubexpressionElimination"
_FUSES_CHAINS = (
    *("GeluFusionL1", "GeluFusionL2", "FastGeluFusion", "QuickGeluFusion", "BiasGeluFusion", "BiasSoftmaxFusion"),
    *("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion", "SkipLayerNormFusion"),
    *("ConvActivationFusion", "ConvAddActivationFusion", "MatMulActivationFusion", "GemmActivationFusion"),
)


def wrong_optimizers(nodes: Iterable[Node]) -> list[str]:
    """Optimizers that give wrong numbers, or none, for a model of such nodes, those of bodies among them.

    ONNX Runtime (1.32) moves a DequantizeLinear behind a Slice, Reshape or Transpose, and quantises in between. Of
    integers that are not u8 that goes wrong: before opset 21 without a zero point it quantises to u8, so that what is
    negative becomes 0; from then on with one it makes a node that it refuses itself. Of two pairs of QuantizeLinear and
    DequantizeLinear one behind the other it leaves one, whose steps are those of neither. Products of what has a scale
    for each row it makes products of integers that it refuses itself. And of a transposed matrix times a vector it
    multiplies the matrix as it is.
    """
    found: dict[str, None] = {}
    for node in nodes:
        if node.op_type == "QuantizeLinear":
            found[_MERGES_PAIRS] = None
        elif node.op_type == "DequantizeLinear":
            has_point = len(node.operands) > 2 and node.operands[2] is not None
            data = tensor_type(node.inputs[0].type)
            is_other = data is None or data.dtype is not DType.U8
            if is_other and has_point == (node.version >= 21):
                found[_MOVES_DEQUANTISATION] = None
        elif node.identity == ("", "MatMul"):
            if _may_be_vector(node.operands[1]):
                found[_TRANSPOSES_IN_PRODUCTS] = None
            if any(_is_scaled_by_rows(value, index) for index, value in enumerate(node.inputs)):
                found[_COMPUTES_IN_INTEGERS] = None
    return list(found)


def unwanted_optimizers(nodes: Sequence[Node]) -> list[str]:
    """These, and for a segment in which nodes are computed again, others.

    Equal nodes are merged, so that what is computed again in order not to be held would be held. And what is computed
    again is no longer read by the backward pass, so that chains of it would become one operator, with another rounding
    than that of the program without recompute.
    """
    wrong = wrong_optimizers(nodes)
    return [*wrong, _MERGES_EQUAL, *_FUSES_CHAINS] if any(map(is_recomputed, nodes)) else wrong


def _is_scaled_by_rows(value: Value, index: int) -> bool:
    """Whether an operand of a product is dequantized by several scales that are none of the columns of a weight."""
    node, is_moved = value.node, False
    while node is not None and node.identity in _MOVES:
        node, is_moved = node.inputs[0].node, True
    if node is None or node.op_type != "DequantizeLinear" or int_attribute(node, "block_size", 0):
        return False
    data, scale = (tensor_type(each.type) for each in node.inputs[:2])
    if scale is None or data is None or data.shape is None or scale.shape in ((), (1,)):
        return False
    axis, rank = int_attribute(node, "axis", 1), len(data.shape)
    return index == 0 or is_moved or axis % max(rank, 1) != rank - 1


def _may_be_vector(value: Value | None) -> bool:
    """Whether a value has one dim, or nobody knows how many."""
    type_ = None if value is None else tensor_type(value.type)
    return type_ is None or type_.shape is None or len(type_.shape) == 1
