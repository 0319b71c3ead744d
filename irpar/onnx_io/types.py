"""Types and dims: ONNX's TypeProto to the IR's types and back."""

from collections.abc import Iterable

import onnx

from irpar.ir import (
    UNKNOWN,
    Dim,
    Expr,
    InflightType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_of_onnx,
    parse_dim,
    symbol,
)

from .errors import OnnxError, text_of

_MAX_TERMS = 1_000
"""A dim name whose product of sums may expand to more terms than this stays a name."""


class TypeReader:
    """Reads types; equal ones are read once.

    Args:
        symbols: the dim names of the model's inputs. An expression with a minus sign counts as one only over these:
            `batch-size` is more often a name.
    """

    def __init__(self, symbols: Iterable[str] = ()) -> None:
        self.symbols = frozenset(symbols)
        self._types: dict[bytes, Type] = {}
        self._dims: dict[str, Dim] = {}

    def read(self, proto: onnx.TypeProto) -> Type:
        """The type that a TypeProto states; UNKNOWN where it states none.

        Raises:
            OnnxError: an element type or a kind of type that irpar does not hold, or a dim below -1.
        """
        key = proto.SerializeToString()
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = self._read(proto)
        return found

    def _read(self, proto: onnx.TypeProto) -> Type:
        kind = proto.WhichOneof("value")
        if kind is None:
            return UNKNOWN
        if kind == "tensor_type":
            return self._tensor(proto.tensor_type)
        if kind == "sequence_type":
            return SequenceType(self._read(proto.sequence_type.elem_type))
        if kind == "optional_type":
            return OptionalType(self._read(proto.optional_type.elem_type))
        raise OnnxError(
            f"values of ONNX's {kind.removesuffix('_type')} type are not supported",
            do="cut the model before the operators that make them; irpar holds tensors, sequences and optionals",
        )

    def _tensor(self, proto: onnx.TypeProto.Tensor) -> Type:
        if proto.elem_type == onnx.TensorProto.UNDEFINED:
            return UNKNOWN
        dtype = dtype_of_onnx(proto.elem_type)
        if dtype is None:
            raise OnnxError(
                f"unknown element type {proto.elem_type}", do="export the model again with a type of ONNX 1.23 or older"
            )
        if not proto.HasField("shape"):
            return TensorType(dtype, None)
        return TensorType(dtype, tuple(self._dim(dim) for dim in proto.shape.dim))

    def _dim(self, proto: onnx.TensorShapeProto.Dimension) -> Dim:
        kind = proto.WhichOneof("value")
        if kind == "dim_value":
            # Some exporters write -1 for a size that they do not know.
            if proto.dim_value < -1:
                raise OnnxError(f"dim of {proto.dim_value}", do="give every dim a size of 0 or more, or a name")
            return None if proto.dim_value < 0 else proto.dim_value
        return self.dim(proto.dim_param) if kind == "dim_param" else None

    def dim(self, text: str) -> Dim:
        """What a dim_param means: a name or expression, or None where it is empty."""
        if text not in self._dims:
            self._dims[text] = self._parse(text_of(text))
        return self._dims[text]

    def _parse(self, text: str) -> Dim:
        if not text or text == "?":
            return None
        named = symbol(text)
        if _terms_at_most(text) > _MAX_TERMS:
            return named
        try:
            dim = parse_dim(text)
        except (ValueError, RecursionError):
            return named
        if isinstance(dim, int):
            return dim if dim >= 0 else None
        if _single(dim) is not None:
            return dim
        return named if "-" in text and not dim.symbols() <= self.symbols else dim


def _terms_at_most(text: str) -> int:
    """A bound on the terms of an expression once its products are multiplied out."""
    if len(text) > 500 or text.count("(") > 30:
        return _MAX_TERMS + 1
    terms = 1
    for _ in range(1 + min(text.count("*"), text.count("("))):
        terms *= 1 + text.count("+") + text.count("-")
    return terms


def input_symbols(graph: onnx.GraphProto) -> set[str]:
    """The dim names of a graph's inputs."""
    return {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}


def write_type(type_: Type, proto: onnx.TypeProto) -> None:
    """State a type in a TypeProto; one in flight is stated as what arrives, an unknown one not at all."""
    if isinstance(type_, TensorType):
        tensor = proto.tensor_type
        tensor.elem_type = type_.dtype.value
        if type_.shape is not None:
            tensor.shape.SetInParent()
            for dim in type_.shape:
                _write_dim(dim, tensor.shape.dim.add())
    elif isinstance(type_, SequenceType):
        proto.sequence_type.SetInParent()
        write_type(type_.elem, proto.sequence_type.elem_type)
    elif isinstance(type_, OptionalType):
        proto.optional_type.SetInParent()
        write_type(type_.elem, proto.optional_type.elem_type)
    elif isinstance(type_, InflightType):
        write_type(type_.elem, proto)


def _write_dim(dim: Dim, proto: onnx.TensorShapeProto.Dimension) -> None:
    if isinstance(dim, int):
        proto.dim_value = dim
    elif isinstance(dim, Expr):
        proto.dim_param = dim_text(dim)


def dim_text(dim: Expr) -> str:
    """A symbolic dim as a dim_param: a single name as it is, unless it would be read as an expression."""
    name = _single(dim)
    return name if name is not None and TypeReader().dim(name) == dim else str(dim)


def _single(dim: Expr) -> str | None:
    """The name that an expression consists of, or None."""
    names = dim.symbols()
    name = next(iter(names)) if len(names) == 1 else None
    return name if name is not None and dim == symbol(name) else None
