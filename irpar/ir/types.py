"""Types of values: tensors, sequences, optionals, and tensors in flight."""

import math
from collections.abc import Iterable
from typing import Any

from .dims import Dim, Expr, product_of
from .dtypes import DType

Shape = tuple[Dim, ...]

MOST_BYTES = 2**63 - 1
"""Of a tensor: what offsets in files and in memory can tell."""


class TensorType:
    """A dtype and a shape; `shape` is None where the number of dims is unknown. Immutable."""

    __slots__ = ("_hash", "_is_static", "_nbytes", "dtype", "shape")

    dtype: DType
    shape: Shape | None

    def __init__(self, dtype: DType, shape: Shape | None) -> None:
        self.dtype = dtype
        self.shape = shape
        self._is_static: bool | None = None
        self._hash: int | None = None
        self._nbytes: int | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, TensorType) and self.dtype is other.dtype and self.shape == other.shape
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.dtype, self.shape))
        return self._hash

    def __reduce__(self) -> tuple[type["TensorType"], tuple[DType, Shape | None]]:
        return TensorType, (self.dtype, self.shape)  # Hashes of text differ from process to process.

    @property
    def rank(self) -> int | None:
        """Number of dims, or None where unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_static(self) -> bool:
        """True where every dim is an int."""
        if self._is_static is None:
            self._is_static = self.shape is not None and all(type(dim) is int for dim in self.shape)
        return self._is_static

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape, all ints.

        Raises:
            ValueError: a dim is symbolic or unknown.
        """
        if not self.is_static:
            raise ValueError(f"{self} is not static")
        return self.shape  # type: ignore[return-value]

    @property
    def size(self) -> int | Expr | None:
        """Number of elements, or None where unknown."""
        return None if self.shape is None else product_of(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a static tensor.

        Raises:
            ValueError: a dim is symbolic or unknown.
        """
        if self._nbytes is None:
            self._nbytes = self.dtype.nbytes(math.prod(self.static_shape))
        return self._nbytes

    @property
    def known_bytes(self) -> int:
        """Bytes of a static tensor; 0 of another."""
        if self._nbytes is not None:
            return self._nbytes
        return self.nbytes if self.is_static else 0

    @property
    def is_too_large(self) -> bool:
        """True where the known sizes make more bytes than can be addressed."""
        sizes = [dim for dim in self.shape or () if type(dim) is int]
        return 0 not in sizes and self.dtype.nbytes(math.prod(sizes)) > MOST_BYTES

    def with_shape(self, shape: Iterable[Dim] | None) -> "TensorType":
        """The same dtype with another shape."""
        return TensorType(self.dtype, None if shape is None else tuple(shape))

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{', '.join('_' if dim is None else str(dim) for dim in self.shape)}]"

    __repr__ = __str__


class _Wrapper:
    """A type around another one."""

    __slots__ = ("elem",)
    keyword = ""

    def __init__(self, elem: "Type") -> None:
        self.elem = elem

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.elem == other.elem  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.elem))

    def __str__(self) -> str:
        return f"{self.keyword}<{self.elem}>"

    __repr__ = __str__


class SequenceType(_Wrapper):
    """`seq<T>`: ONNX's sequence."""

    __slots__ = ()
    keyword = "seq"


class OptionalType(_Wrapper):
    """`optional<T>`: ONNX's optional."""

    __slots__ = ()
    keyword = "optional"


class InflightType(_Wrapper):
    """`inflight<T>`: the result of a started collective, to be waited for exactly once."""

    __slots__ = ()
    keyword = "inflight"


class UnknownType:
    """`?`: a type that is not known yet (infer-types finds it)."""

    __slots__ = ()

    def __str__(self) -> str:
        return "?"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownType)

    def __hash__(self) -> int:
        return hash(UnknownType)


UNKNOWN = UnknownType()

Type = TensorType | SequenceType | OptionalType | InflightType | UnknownType


def tensor_type(type_: Any) -> TensorType | None:
    """The type if it is a tensor's, else None."""
    return type_ if type(type_) is TensorType else None
