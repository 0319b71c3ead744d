"""Tensors in the text form: small ones inline, the others by the place of their bytes."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from irpar.ir.dtypes import DType
from irpar.ir.tensor import ArrayTensor, ExternalTensor, JoinedTensor, SlicedTensor, Tensor
from irpar.ir.types import TensorType, Type

from .lexer import Lexer, quote, quote_bytes

INLINE_ELEMENTS = 16
"""Tensors in memory of up to so many elements stand in the text."""

_FLOAT = re.compile(r"[.einf]|nan")
_COMPLEX = {DType.C64: DType.F32, DType.C128: DType.F64}


class Store(Protocol):
    """Where a printer puts tensors that are too big for the text."""

    def put(self, tensor: Tensor) -> tuple[str, int]:
        """Keep a tensor; returns what the text calls its file and the offset in it."""

    def place(self, tensor: ExternalTensor) -> tuple[str, int]:
        """What the text calls the file of a tensor whose bytes lie in one, and the offset in it."""


Resolve = Callable[[str, int, int, TensorType], Tensor]
"""The tensor of a type at (file, offset, length).

Raises:
    ValueError: there is none; the message says why.
"""


# -- printing -----------------------------------------------------------------------------------------------------


def literal_text(tensor: Tensor, store: Store) -> str:
    """The numbers of a tensor, or where they are; its type is not part of it."""
    if isinstance(tensor, ExternalTensor):
        file, offset = store.place(tensor)
        return f"data({quote(file)}, {offset}, {tensor.length})"
    if isinstance(tensor, SlicedTensor):
        region = ", ".join(f"{start}:{stop}" for start, stop in tensor.region)
        return f"slice([{region}] of {tensor.base.type} {literal_text(tensor.base, store)})"
    if isinstance(tensor, JoinedTensor):
        pieces = ", ".join(f"{piece.type} {literal_text(piece, store)}" for piece in tensor.pieces)
        return f"join({tensor.dim}, {tensor.parts}, {pieces})"
    if tensor.size > INLINE_ELEMENTS and tensor.dtype is not DType.STR:
        file, offset = store.put(tensor)
        return f"data({quote(file)}, {offset}, {tensor.nbytes})"
    texts = iter([_element_text(element, tensor.dtype) for element in tensor.numpy().reshape(-1)])
    return _nested(texts, tensor.shape) if tensor.size else "[]"


def _nested(texts: Any, shape: Sequence[int]) -> str:
    if not shape:
        return str(next(texts))
    return "[" + ", ".join(_nested(texts, shape[1:]) for _ in range(shape[0])) + "]"


def _element_text(element: Any, dtype: DType) -> str:
    if dtype is DType.STR:
        return quote_bytes(element) if isinstance(element, bytes) else quote(str(element))
    if dtype is DType.BOOL:
        return "true" if element else "false"
    if dtype in _COMPLEX:
        part = _COMPLEX[dtype]
        # Through a view, since arithmetic on complex numbers loses the sign of zeros and the bits of a NaN.
        both = np.asarray(element).reshape(1).view(part.numpy)
        return f"({_float_text(both[0], part)}, {_float_text(both[1], part)})"
    return _float_text(element, dtype) if dtype.is_float else str(int(element))


def _float_text(element: Any, dtype: DType) -> str:
    """The number itself where it is short, else the shortest decimal that reads back; bits for an unusual NaN."""
    bits = _bits(element, dtype)
    number = float(element)
    if number != number:
        return "nan" if _bits(_float(math.nan, dtype), dtype) == bits else f"0x{bits:x}"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    if len(repr(number)) <= 8 or (number.is_integer() and abs(number) < 1e15):
        return float_text(number)
    for digits in range(1, 17):
        text = f"{number:.{digits}g}"
        if _bits(_float(float(text), dtype), dtype) == bits:
            return float_text(float(text))
    return float_text(number)


def float_text(number: float) -> str:
    """A Python float, always told apart from an int."""
    text = repr(float(number))
    return text if _FLOAT.search(text) else f"{text}.0"


def _float(number: float, dtype: DType) -> Any:
    with np.errstate(all="ignore"):
        return np.array([number], np.float64).astype(dtype.numpy)[0]


def _bits(element: Any, dtype: DType) -> int:
    return int(np.asarray(element, dtype.numpy).reshape(1).view(f"u{dtype.numpy.itemsize}")[0])


# -- reading ------------------------------------------------------------------------------------------------------


class LiteralReader:
    """Reads tensors out of a lexer.

    Args:
        lexer: where to read.
        read_type: reads the type at the token in hand.
        resolve: finds the tensors that are not in the text.
    """

    def __init__(self, lexer: Lexer, read_type: Callable[[], Type], resolve: Resolve) -> None:
        self.lexer = lexer
        self.read_type = read_type
        self.resolve = resolve

    def typed(self) -> Tensor:
        """Read a type and the numbers that follow it."""
        start = self.lexer.start
        type_ = self.read_type()
        return self.literal(self.static(type_, start))

    def static(self, type_: Type, position: int) -> TensorType:
        """The type, which must be a tensor's with a shape of ints."""
        if isinstance(type_, TensorType) and type_.is_static and min(type_.static_shape, default=0) >= 0:
            return type_
        raise self.lexer.error(f"a constant cannot be {type_}", position, do="give its dtype and sizes: f32[2, 3]")

    def literal(self, type_: TensorType, depth: int = 0) -> Tensor:
        """Read the numbers of a tensor of a static type, or where they are."""
        if self.lexer.token == "data":
            return self._data(type_)
        if self.lexer.token == "slice":
            return self._slice(type_, depth)
        if self.lexer.token == "join":
            return self._join(type_, depth)
        return self._inline(type_)

    def _data(self, type_: TensorType) -> Tensor:
        lexer = self.lexer
        start = lexer.start
        lexer.advance()
        lexer.expect("(")
        file = lexer.string("a file name")
        lexer.expect(",")
        offset = lexer.integer("an offset in bytes")
        lexer.expect(",")
        length = lexer.integer("a number of bytes")
        lexer.expect(")")
        if offset < 0 or length < 0 or "\0" in file:
            raise lexer.error("data needs a file name, an offset and a length of 0 or more", start)
        try:
            return self.resolve(file, offset, length, type_)
        except ValueError as error:
            raise lexer.error(str(error), start) from None

    def _slice(self, type_: TensorType, depth: int) -> Tensor:
        lexer = self.lexer
        start = lexer.start
        if depth:
            raise lexer.error("a slice of a slice: write one slice of the whole")
        lexer.advance()
        lexer.expect("(")
        lexer.expect("[")
        region: list[tuple[int, int]] = []
        while not lexer.accept("]"):
            if region:
                lexer.expect(",")
            first = lexer.integer("the start of a range")
            lexer.expect(":")
            region.append((first, lexer.integer("the end of a range")))
        lexer.expect("of")
        base_start = lexer.start
        whole = self.static(self.read_type(), base_start)
        base = self.literal(whole, depth + 1)
        lexer.expect(")")
        shape = tuple(stop - first for first, stop in region)
        inside = len(region) == len(base.shape) and all(
            0 <= first <= stop <= size for (first, stop), size in zip(region, base.shape, strict=True)
        )
        if not inside or shape != type_.shape or whole.dtype is not type_.dtype:
            raise lexer.error(f"these ranges of {whole} do not make {type_}", start)
        return SlicedTensor(base, tuple(region))

    def _join(self, type_: TensorType, depth: int) -> Tensor:
        lexer = self.lexer
        start = lexer.start
        if depth:
            raise lexer.error("a join in a slice or a join: write one join of slices")
        lexer.advance()
        lexer.expect("(")
        dim = lexer.integer("the dim along which tensors are joined")
        lexer.expect(",")
        parts = lexer.integer("a number of parts")
        pieces: list[Tensor] = []
        while not lexer.accept(")"):
            lexer.expect(",")
            place = lexer.start
            piece = self.static(self.read_type(), place)
            # A slice may stand in a join, nothing else that is made of others.
            pieces.append(self.literal(piece, int(lexer.token != "slice")))
        if not pieces or not all(0 <= dim < len(piece.shape) for piece in pieces):
            raise lexer.error(f"join needs tensors that have the dim {dim}", start)
        try:
            made = JoinedTensor(pieces, dim, parts)
        except ValueError as error:
            raise lexer.error(str(error), start) from None
        if made.type != type_:
            raise lexer.error(f"these tensors make {made.type}, not {type_}", start)
        return made

    def _inline(self, type_: TensorType) -> Tensor:
        start = self.lexer.start
        shape = type_.static_shape
        count = math.prod(shape)
        elements: list[Any] = []
        if self.lexer.token != "[":
            if shape:
                raise self.lexer.expected(f"the numbers of {type_} in brackets, data(...), slice(...) or join(...)")
            elements.append(self._element(type_.dtype))
        else:
            self._list(type_.dtype, shape, 0, elements)
        if len(elements) != count:
            raise self.lexer.error(f"{len(elements)} elements for {type_}, which has {count}", start)
        return ArrayTensor(_array(elements, type_.dtype).reshape(shape), type_.dtype)

    def _list(self, dtype: DType, shape: Sequence[int], depth: int, elements: list[Any]) -> None:
        """Read a list: elements of the innermost dim, lists of the dims outside it, or all elements in one list."""
        lexer = self.lexer
        start = lexer.start
        lexer.expect("[")
        count = 0
        lists = 0
        while not lexer.accept("]"):
            if count:
                lexer.expect(",")
            if lexer.token == "[":
                if depth + 1 >= len(shape):
                    raise lexer.error(f"more brackets than the {len(shape)} dims")
                self._list(dtype, shape, depth + 1, elements)
                lists += 1
            else:
                elements.append(self._element(dtype))
            count += 1
        is_flat = depth == 0 and not lists
        if lists not in (0, count) or not (
            is_flat or (count == shape[depth] and bool(lists) == (depth < len(shape) - 1))
        ):
            raise lexer.error(f"the brackets do not follow the shape {list(shape)}", start)

    def _element(self, dtype: DType) -> Any:
        lexer = self.lexer
        if dtype is DType.STR:
            return lexer.bytes_() if lexer.kind == "bytes" else lexer.string()
        if dtype is DType.BOOL:
            if lexer.token not in ("true", "false"):
                raise lexer.expected("`true` or `false`")
            return lexer.take("name", "a truth value") == "true"
        if dtype in _COMPLEX:
            lexer.expect("(")
            real = self._float(_COMPLEX[dtype])
            lexer.expect(",")
            imaginary = self._float(_COMPLEX[dtype])
            lexer.expect(")")
            return np.array([real, imaginary], _COMPLEX[dtype].numpy)
        return self._float(dtype) if dtype.is_float else self._int(dtype)

    def _int(self, dtype: DType) -> int:
        start = self.lexer.start
        number = self.lexer.integer()
        low = -(1 << dtype.bits - 1) if dtype.text[0] == "i" else 0
        if not low <= number < low + (1 << dtype.bits):
            raise self.lexer.error(f"{number} does not fit {dtype}", start)
        return number

    def _float(self, dtype: DType) -> Any:
        lexer = self.lexer
        start = lexer.start
        if lexer.token.startswith("0x"):
            bits = int(lexer.take("number", "bits"), 16)
            if bits >> (8 * dtype.numpy.itemsize):
                raise lexer.error(f"these bits do not fit {dtype}", start)
            return np.array([bits], f"u{dtype.numpy.itemsize}").view(dtype.numpy)[0]
        number = read_float(lexer)
        made = _float(number, dtype)
        if not _fits(number, float(made), dtype):
            raise lexer.error(f"{number} does not fit {dtype}", start)
        return made


def _array(elements: list[Any], dtype: DType) -> np.ndarray[Any, Any]:
    if dtype in _COMPLEX and elements:
        return np.concatenate(elements).view(dtype.numpy)
    array = np.empty(len(elements), dtype.numpy)
    for index, element in enumerate(elements):
        array[index] = element
    return array


def _fits(number: float, made: float, dtype: DType) -> bool:
    """Whether `made`, which is `number` rounded to the dtype, lost nothing but digits: no overflow, no sign."""
    if not math.isfinite(number) or not math.isfinite(made):
        return made == number or (made != made and number != number)
    limit = float(ml_dtypes.finfo(dtype.numpy).max)
    return abs(number) <= limit * 1.2 and (number == 0) <= (made == 0) and number * made >= 0


def read_float(lexer: Lexer) -> float:
    """Step over a number, `inf` or `nan`, with or without a minus."""
    negative = lexer.accept("-")
    if lexer.token in ("inf", "nan"):
        number = float(lexer.take("name", "a number"))
    else:
        start = lexer.start
        token = lexer.take("number", "a number")
        if token.startswith("0x"):
            raise lexer.error("expected a number in decimals", start)
        number = float(token)
        if math.isinf(number):
            raise lexer.error("this number does not fit 64 bits", start)
    return -number if negative else number
