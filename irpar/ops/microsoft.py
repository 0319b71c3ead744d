"""Definitions of com.microsoft's operators: ONNX has no schemas of them, so that types are irpar's own knowledge."""

from collections.abc import Sequence

from irpar.ir import Node, TensorType, Type

from .facts import CannotTellError, tensor_of
from .registry import Cost, Infer, Localize, OpDef, Rule, define

DOMAIN = "com.microsoft"


def microsoft(
    name: str,
    infer: Infer,
    rule: Rule | None = None,
    flops: Cost | None = None,
    localize: Localize | None = None,
    *,
    dtype_of: int = 0,
) -> OpDef:
    """Define an operator; where `infer` cannot tell, its results have the dtype of operand `dtype_of` at least."""

    def answer(node: Node) -> Sequence[Type]:
        try:
            found = infer(node)
        except CannotTellError:
            found = None
        return found or [TensorType(tensor_of(node, dtype_of).dtype, None)] * len(node.results)

    return define(OpDef(DOMAIN, name, answer, rule, flops, localize))
