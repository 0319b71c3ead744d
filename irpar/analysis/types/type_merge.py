"""Two types of one value in one: what an operator says, what a model declares, what several branches give."""

from collections.abc import Sequence

from irpar.ir import UNKNOWN, Dim, InflightType, OptionalType, SequenceType, TensorType, Type
from irpar.sharding import IrparError


class TypeInferenceError(IrparError):
    """Types that cannot be: operands that do not fit, or a declared dtype that is not the inferred one."""


def is_complete(type_: Type) -> bool:
    """True where nothing of a tensor type is unknown (symbols are known)."""
    return type(type_) is TensorType and type_.shape is not None and None not in type_.shape


def without_dims(type_: Type) -> str:
    """The type without its dims."""
    if isinstance(type_, TensorType):
        return str(type_.dtype)
    if isinstance(type_, (SequenceType, OptionalType, InflightType)):
        inner = without_dims(type_.elem)
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
    if without_dims(a) != without_dims(b):
        raise TypeInferenceError(f"{a} in one place and {b} in another", do="let both have the same element type")
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorType(a.dtype, None)
        return TensorType(a.dtype, tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)))
    assert isinstance(a, (SequenceType, OptionalType, InflightType))
    assert isinstance(b, type(a))
    return type(a)(_common(a.elem, b.elem))
