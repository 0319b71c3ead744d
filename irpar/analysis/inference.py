"""Type inference: result types from operand types, by irpar's operator definitions, else by ONNX's own inference.

Inferred types are merged with the known ones: an inferred number stands, a declared number or symbol fills what cannot be
inferred. Exports often declare wrong shapes for inner values; there the inferred one stands too, with a note. What
cannot be is refused: another dtype than declared, and operands that do not fit each other.
"""

from collections.abc import Callable, Sequence

from irpar.ir import (
    UNKNOWN,
    Dim,
    Function,
    Graph,
    InflightType,
    Node,
    OptionalType,
    RefAttribute,
    SequenceType,
    TensorType,
    Type,
    Value,
)
from irpar.ops import definition
from irpar.sharding import IrparError

from . import control_flow
from .onnx_inference import OnnxInference

MAX_NOTES = 10
"""Contradictions that are told one by one; the rest is counted."""


class TypeInferenceError(IrparError):
    """Types that cannot be: operands that do not fit, or a declared dtype that is not the inferred one."""


class Inference:
    """One run of type inference over a module: keeps what it has worked out for calls and for equal nodes.

    Args:
        visit: what to do with a graph that a node holds, when the types of its inputs are set; by default its nodes are
            inferred in order. It must leave the types of the graph's results inferred.

    Attributes:
        inferred: number of values that got another type.
        contradictions: number of declared shapes that the inferred ones contradict.
        examples: the first of these, a line each.
    """

    def __init__(self, visit: Callable[[Graph], None] | None = None) -> None:
        self.visit = visit or self.graph
        self.inferred = 0
        self.contradictions = 0
        self.examples: list[str] = []
        self._onnx = OnnxInference()
        self._calls: dict[object, tuple[Type, ...]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """The contradictions, as lines for the user."""
        more = self.contradictions - len(self.examples)
        return (*self.examples, f"{more} more declared shapes like these") if more else tuple(self.examples)

    def graph(self, graph: Graph) -> None:
        """Infer all nodes of a graph in order, nested graphs included.

        Raises:
            TypeInferenceError: see the class.
        """
        for node in graph:
            self.node(node)

    def node(self, node: Node) -> bool:
        """Infer the result types of a node from its operands' types.

        Returns:
            Whether a result has another type now.

        Raises:
            TypeInferenceError: see the class.
        """
        types = self.result_types(node)
        changed = False
        for value, inferred in zip(node.results, types, strict=True):
            changed |= self._set(node, value, inferred)
        return changed

    def result_types(self, node: Node) -> Sequence[Type]:
        """What the operands say of the results; UNKNOWN where they say nothing. Nested graphs are visited."""
        if node.callee is not None:
            return self._call(node, node.callee)
        if not node.attributes:
            return self._operator(node)
        if any(isinstance(attribute, RefAttribute) for attribute in node.attributes.values()):
            return [UNKNOWN] * len(node.results)
        if any(True for _ in node.nested_graphs()):
            infer = control_flow.INFER.get(node.identity)
            return [UNKNOWN] * len(node.results) if infer is None else infer(self, node)
        return self._operator(node)

    def _operator(self, node: Node) -> Sequence[Type]:
        found = definition(node)
        own = found.infer(node) if found is not None and found.infer is not None else None
        if own is not None and all(map(is_complete, own)):
            return own
        other = self._onnx.result_types(node)
        if own is None:
            return other
        return [merge(mine, theirs) if fits(mine, theirs) else mine for mine, theirs in zip(own, other, strict=True)]

    def _set(self, node: Node, value: Value, inferred: Type) -> bool:
        known = value.type
        if inferred == known:
            return False
        dtypes = _dtypes(inferred), _dtypes(known)
        if dtypes[0] != dtypes[1] and "?" not in dtypes:
            raise TypeInferenceError(
                f"%{value.name} is declared {known}, but {node.op_type} gives {inferred}",
                where=f"node {node.label}: {node!r}",
                notes=_operand_lines(node),
                do="mend the declared type in the model, or the operands of the node",
            )
        if not fits(inferred, known):
            self.contradictions += 1
            if len(self.examples) < MAX_NOTES:
                self.examples.append(f"%{value.name} of {node.label} is declared {known}, but is {inferred}")
        merged = merge(inferred, known)
        if merged == known:
            return False
        value.type = merged
        self.inferred += 1
        return True

    def _call(self, node: Node, function: Function) -> Sequence[Type]:
        """Infer a copy of the function's body for these operands; equal calls share the answer."""
        from irpar.ir.instantiate import body_of_call

        key = (function, tuple(_key_of(operand) for operand in node.operands), tuple(node.attributes.items()))
        try:
            found = self._calls.get(key)
        except TypeError:
            key, found = None, None
        if found is None:
            body = body_of_call(node)
            for value, operand in zip(body.inputs, node.operands, strict=False):
                if operand is not None:
                    value.type = operand.type
                    if operand.data is not None and operand.data.size <= 16:
                        value.data = operand.data
            self.graph(body)
            found = tuple(value.type for value in body.outputs)
            if key is not None:
                self._calls[key] = found
        return found[: len(node.results)]


def _key_of(operand: Value | None) -> object:
    """What an inferred call depends on of an operand."""
    if operand is None:
        return None
    return operand.type, operand.data if operand.data is not None and operand.data.size <= 16 else None


def _operand_lines(node: Node) -> tuple[str, ...]:
    return tuple(f"operand %{value.name} : {value.type}" for value in node.inputs)


# -- merging ------------------------------------------------------------------------------------------------------


def is_complete(type_: Type) -> bool:
    """True where nothing of a tensor type is unknown (symbols are known)."""
    return type(type_) is TensorType and type_.shape is not None and None not in type_.shape


def _dtypes(type_: Type) -> str:
    """The type without its dims."""
    if isinstance(type_, TensorType):
        return str(type_.dtype)
    if isinstance(type_, (SequenceType, OptionalType, InflightType)):
        inner = _dtypes(type_.elem)
        return "?" if inner == "?" else f"{type_.keyword}<{inner}>"
    return "?"


def fits(a: Type, b: Type) -> bool:
    """True where the known dims of two types do not contradict each other."""
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        if a.dtype is not b.dtype:
            return False
        if a.shape is None or b.shape is None:
            return True
        if len(a.shape) != len(b.shape):
            return False
        return all(x == y for x, y in zip(a.shape, b.shape, strict=True) if type(x) is int and type(y) is int)
    if isinstance(a, (SequenceType, OptionalType, InflightType)) and type(a) is type(b):
        return fits(a.elem, b.elem)  # type: ignore[union-attr]
    return a == UNKNOWN or b == UNKNOWN


def merge(inferred: Type, known: Type) -> Type:
    """Both types in one; where they contradict each other, the inferred one.

    inferred f32[8, ?, seq], known f32[batch, 64, 16]  ->  f32[8, 64, 16]
    """
    if inferred == UNKNOWN:
        return known
    if known == UNKNOWN or not fits(inferred, known):
        return inferred
    if isinstance(inferred, TensorType) and isinstance(known, TensorType):
        if inferred.shape is None or known.shape is None:
            return known if inferred.shape is None else inferred
        dims = tuple(map(_merge_dim, inferred.shape, known.shape))
        return inferred if dims == inferred.shape else TensorType(inferred.dtype, dims)
    if isinstance(inferred, (SequenceType, OptionalType, InflightType)):
        return type(inferred)(merge(inferred.elem, known.elem))  # type: ignore[union-attr]
    return inferred


def _merge_dim(inferred: Dim, known: Dim) -> Dim:
    if inferred is None or type(known) is int:
        return known
    return inferred


def common(types: Sequence[Type]) -> Type:
    """What holds for all of several types: dims that differ become unknown.

    Raises:
        TypeInferenceError: they differ in more than dims.
    """
    first, *others = types
    for other in others:
        first = _common(first, other)
    return first


def _common(a: Type, b: Type) -> Type:
    if a == b:
        return a
    if UNKNOWN in (a, b):
        return UNKNOWN
    if _dtypes(a) != _dtypes(b):
        raise TypeInferenceError(f"{a} in one place and {b} in another", do="let both have the same element type")
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorType(a.dtype, None)
        return TensorType(a.dtype, tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)))
    return type(a)(_common(a.elem, b.elem))  # type: ignore[union-attr,call-arg]
