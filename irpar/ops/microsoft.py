"""Definitions of com.microsoft's operators: ONNX has no schemas of them, so that types are irpar's own knowledge."""

from collections.abc import Callable, Sequence

from irpar.ir import DType, Node, TensorType, Type

from .facts import CannotTellError, tensor_of
from .local_programs.program import LocalProgram
from .op_def import Cost, Decompose, Gradient, Infer, Localize, OpDef, Rule
from .registry import define

DOMAIN = "com.microsoft"


def microsoft(
    name: str,
    infer: Infer,
    rule: Rule | None = None,
    flops: Cost | None = None,
    localize: Localize | None = None,
    *,
    dtypes: int | Callable[[Node], Sequence[DType]] = 0,
    local_program: LocalProgram | None = None,
    is_elementwise: bool = False,
    gradient: Gradient | None = None,
    decompose: Decompose | None = None,
    runs_decomposed: bool = True,
) -> OpDef:
    """Define an operator of com.microsoft, the dtypes of whose results are known even where `infer` cannot tell sizes.

    So it runs replicated, where one whose results have no type at all would be refused.

    Args:
        name, infer, rule, flops, localize, local_program, is_elementwise, gradient, decompose,
            runs_decomposed: see `OpDef`.
        dtypes: of all results; a number for an operand that has the dtype of each.
    """

    def answer(node: Node) -> Sequence[Type] | None:
        try:
            return infer(node)
        except CannotTellError:
            found = [tensor_of(node, dtypes).dtype] * len(node.results) if isinstance(dtypes, int) else dtypes(node)
            return [TensorType(dtype, None) for dtype in found[: len(node.results)]]

    return define(
        OpDef(
            DOMAIN,
            name,
            answer,
            rule,
            flops,
            localize,
            local_program,
            is_elementwise=is_elementwise,
            gradient=gradient,
            decompose=decompose,
            runs_decomposed=runs_decomposed,
        )
    )
