"""Attribute values in the text form, read."""

from collections.abc import Callable
from typing import Any

from irpar.ir.attributes import Attribute, Floats, Graphs, Ints, RefAttribute, Strings, Tensors, Types
from irpar.ir.graph import Graph
from irpar.ir.tensor import Tensor

from .defaults import REFERENCE_KINDS
from .lexer import Lexer
from .tensors import LiteralReader, read_float

_EMPTY: dict[str, Attribute] = {
    "ints": Ints(),
    "floats": Floats(),
    "strings": Strings(),
    "tensors": Tensors(),
    "graphs": Graphs(),
    "types": Types(),
}
_LISTS: tuple[tuple[type | tuple[type, ...], Callable[[list[Any]], Attribute]], ...] = (
    (int, Ints),
    (float, Floats),
    ((str, bytes), Strings),
    (Tensor, Tensors),
    (Graph, Graphs),
)
_KINDS = {name: number for number, name in REFERENCE_KINDS.items()}


class AttributeReader:
    """Reads attribute values out of a lexer; `graph` reads a nested graph."""

    def __init__(self, lexer: Lexer, literals: LiteralReader, graph: Callable[[], Graph]) -> None:
        self.lexer = lexer
        self.literals = literals
        self.graph = graph

    def read(self) -> Attribute:
        """Read the value that the token in hand starts."""
        if self.lexer.token == "[":
            return self._list()
        return self._scalar()

    def _scalar(self) -> Attribute:
        lexer = self.lexer
        kind, token = lexer.kind, lexer.token
        if kind == "string":
            return lexer.string()
        if kind == "bytes":
            return lexer.bytes_()
        if kind == "number" or token in ("-", "inf", "nan"):
            return self._number()
        if token == "graph":
            return self.graph()
        if token == "tensor":
            return self._tensor()
        if token == "ref":
            return self._reference()
        if token in _EMPTY:
            lexer.advance()
            lexer.expect("[")
            lexer.expect("]")
            return _EMPTY[token]
        if kind == "name" or token == "?":
            return self.literals.read_type()  # type: ignore[return-value]
        raise lexer.expected("an attribute value")

    def _number(self) -> int | float:
        lexer = self.lexer
        start = lexer.start
        is_negative = lexer.accept("-")
        if lexer.kind == "number" and lexer.token.isdigit():
            number = -lexer.integer() if is_negative else lexer.integer()
            if not -(2**63) <= number < 2**63:
                raise lexer.error(f"the attribute {number} does not fit 64 bits", start)
            return number
        lexer.seek(start)
        return read_float(lexer)

    def _tensor(self) -> Tensor:
        self.lexer.advance()
        self.lexer.expect("(")
        tensor = self.literals.typed()
        self.lexer.expect(")")
        return tensor

    def _reference(self) -> RefAttribute:
        lexer = self.lexer
        lexer.advance()
        lexer.expect("(")
        name = lexer.string("the name of the function's attribute in quotes")
        lexer.expect(",")
        if lexer.kind == "name":
            if lexer.token not in _KINDS:
                raise lexer.expected(f"one of {', '.join(_KINDS)}")
            kind = _KINDS[lexer.take("name", "a kind")]
        else:
            kind = lexer.integer("a kind of attribute")
        lexer.expect(")")
        return RefAttribute(name, kind)

    def _list(self) -> Attribute:
        lexer = self.lexer
        start = lexer.start
        lexer.advance()
        items: list[Any] = []
        while not lexer.accept("]"):
            if items:
                lexer.expect(",")
            items.append(self._scalar())
        if not items:
            raise lexer.error("an empty list has a type", start, do="write ints[], floats[], strings[] ...")
        for kind, made in _LISTS:
            if all(isinstance(item, kind) for item in items):
                return made(items)
        scalars = (int, float, str, bytes, Tensor, Graph, tuple, RefAttribute)
        if any(isinstance(item, scalars) for item in items):
            raise lexer.error("a list holds values of one kind", start)
        return Types(items)
