"""What constants are for: which operand of which node each one is, and what its dims mean there.

Exporters rename weights (`onnx::MatMul_298`) and transpose them; where a weight is used, it can still be found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from onnx import defs

from irpar.ir import Ints, Node, Value, tensor_type
from irpar.ir.annotate import glob_of
from irpar.ops import traits

Words = tuple[str, ...]
"""What each dim of an operand is called; empty where it has no name."""

_CONVERTS = frozenset({"Cast", "CastLike", "DequantizeLinear"})
_MOST_STEPS = 8


@dataclass(frozen=True)
class Use:
    """One use of a constant.

    Attributes:
        node: what computes with it.
        operand: what the operator calls that operand: `B` of MatMul, `W` of Conv, `data` of Gather.
        words: what the dims of the constant are there, such as `in` and `out`.
        through: operators on the way, first to last, such as Transpose.
    """

    node: Node
    operand: str
    words: Words
    through: tuple[str, ...]

    def text(self, shape: tuple[object, ...]) -> str:
        """`B of MatMul /h.*/attn/q/MatMul: [in 64, out 64]`, with `*` for the numbers of layers.

        Args:
            shape: of the constant.
        """
        return f"{self.operand} of {glob_of(where(self.node))}{self._details(shape)}"

    def exact_text(self, shape: tuple[object, ...]) -> str:
        """The same with the numbers."""
        return f"{self.operand} of {where(self.node)}{self._details(shape)}"

    def _details(self, shape: tuple[object, ...]) -> str:
        dims = ""
        if len(self.words) == len(shape) and any(self.words):
            dims = f": [{', '.join(f'{word} {size}'.strip() for word, size in zip(self.words, shape, strict=True))}]"
        return dims + "".join(f", {_WAYS.get(op, f'through {op}')}" for op in dict.fromkeys(self.through))


_WAYS = {"Transpose": "transposed", "Cast": "cast", "CastLike": "cast", "Split": "split", "Slice": "sliced"}


def where(node: Node) -> str:
    """A node with the place in the source program that it comes from: by its name if that tells, else by its scope."""
    scope = node.scope
    if not scope or scope in node.label:
        return node.title
    return f"{node.operator} in {scope}"


def uses_of(value: Value) -> list[Use]:
    """The nodes that compute with a constant, past those that only move its elements."""
    type_ = tensor_type(value.type)
    rank = len(type_.shape) if type_ is not None and type_.shape is not None else 0
    found: list[Use] = []
    waiting: list[tuple[Value, tuple[int, ...] | None, tuple[str, ...]]] = [(value, tuple(range(rank)), ())]
    while waiting:
        at, dims, through = waiting.pop(0)
        for node, index in at.uses:
            if node.is_return:
                continue
            if index == 0 and len(through) < _MOST_STEPS and _brings(node):
                step = (*through, node.op_type) if node.op_type not in ("Identity", "Unsqueeze", "Squeeze") else through
                waiting.extend((result, _moved(node, dims), step) for result in node.results)
            else:
                found.append(Use(node, _operand(node, index), _words(node, index, dims, rank), through))
    return found


def _brings(node: Node) -> bool:
    """Whether a node brings a weight, its first operand, to its use; a look-up is one."""
    known = traits(node)
    is_moved = known.moves_elements and not known.looks_up
    return is_moved or (not node.domain and (node.op_type == "Concat" or node.op_type in _CONVERTS))


def _moved(node: Node, dims: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Which dim of the constant each dim of the result is; None where that cannot be said."""
    if dims is None or node.op_type == "Identity" or node.op_type in _CONVERTS:
        return dims
    if node.op_type != "Transpose":
        return None
    perm = node.attributes.get("perm")
    order = tuple(perm) if isinstance(perm, Ints) else tuple(reversed(range(len(dims))))
    return tuple(dims[place] for place in order) if sorted(order) == list(range(len(dims))) else None


def _words(node: Node, index: int, dims: tuple[int, ...] | None, rank: int) -> Words:
    """The words of the operand's dims, in the order of the constant's."""
    namer = None if node.domain else _NAMERS.get(node.op_type)
    if dims is None or namer is None:
        return ()
    words = namer(node, index, len(dims))
    if len(words) != len(dims):
        return ()
    placed = [""] * rank
    for place, dim in enumerate(dims):
        placed[dim] = words[place]
    return tuple(placed)


def _matmul(node: Node, index: int, rank: int) -> Words:
    if rank == 1:
        return ("in",)
    return ("",) * (rank - 2) + (("in", "out") if index == 1 else ("out", "in"))


def _gemm(node: Node, index: int, rank: int) -> Words:
    if index == 2:
        return ("",) * (rank - 1) + ("out",)
    plain = ("in", "out") if index == 1 else ("out", "in")
    return plain[::-1] if node.attributes.get("transB" if index == 1 else "transA", 0) else plain


def _conv(node: Node, index: int, rank: int) -> Words:
    if index == 2:
        return ("out",)
    return ("out", "in", *("",) * (rank - 2)) if index == 1 else ()


def _conv_transpose(node: Node, index: int, rank: int) -> Words:
    if index == 2:
        return ("out",)
    return ("in", "out", *("",) * (rank - 2)) if index == 1 else ()


def _gather(node: Node, index: int, rank: int) -> Words:
    axis = node.attributes.get("axis", 0)
    if index != 0 or not isinstance(axis, int) or not -rank <= axis < rank:
        return ()
    return tuple("rows" if dim == axis % rank else "" for dim in range(rank))


_NAMERS: dict[str, Callable[[Node, int, int], Words]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gather": _gather,
}


def _operand(node: Node, index: int) -> str:
    names = _formal(node.op_type) if not node.domain and node.callee is None else ()
    return names[index] if index < len(names) else f"operand {index}"


@cache
def _formal(op_type: str) -> tuple[str, ...]:
    """What ONNX calls the operands of an operator."""
    if not defs.has(op_type):
        return ()
    formal = defs.get_schema(op_type).inputs
    if formal and formal[-1].option == defs.OpSchema.FormalParameterOption.Variadic:
        return ()
    return tuple(parameter.name for parameter in formal)
