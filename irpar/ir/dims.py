"""Dims: ints, or integer expressions over named symbols such as `batch*seq` or `ceil(batch/2)`.

An expression is a sum of integer multiples of products of atoms, kept in one canonical order, so that equal polynomials
are equal objects. Atoms are symbols and the calls floordiv, ceildiv, mod, min and max, which fold where they can.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, Union

Dim = Union[int, "Expr", None]
"""A size: known, symbolic, or (None) unknown."""

T = TypeVar("T")


def with_dim(dims: Sequence[T], dim: int, new: T) -> tuple[T, ...]:
    """What is said of each dim (sizes, axes, ranges), with other words for one: `[4, 6, 8], 1, 3` gives (4, 3, 8)."""
    return (*dims[:dim], new, *dims[dim + 1 :])


class Atom:
    """A symbol (`name`, no operands) or a call of one of the functions above on two expressions."""

    __slots__ = ("_hash", "name", "operands")

    def __init__(self, name: str, operands: tuple["Expr", ...] = ()) -> None:
        self.name = name
        self.operands = operands
        self._hash = hash((name, operands))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.name == other.name and self.operands == other.operands

    def __str__(self) -> str:
        if not self.operands:
            return self.name if _PLAIN.fullmatch(self.name) else _quoted(self.name)
        if self.name == "ceildiv":
            return f"ceil({_factor(self.operands[0])}/{_factor(self.operands[1])})"
        if self.name == "floordiv":
            return f"floor({_factor(self.operands[0])}/{_factor(self.operands[1])})"
        return f"{self.name}({', '.join(map(str, self.operands))})"


_PLAIN = re.compile(r"(?!_\Z)[A-Za-z_][A-Za-z0-9_.]*")
_SPECIAL = re.compile(r"[\\'\x00-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff]")


def _quoted(name: str) -> str:
    # `_` alone means an unknown dim, so a symbol of that name is quoted as well.
    return "'" + _SPECIAL.sub(lambda match: f"\\u{ord(match.group()):04x}", name) + "'"


def _unquoted(token: str) -> str:
    return re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), token[1:-1])


Monomial = tuple[Atom, ...]


class Expr:
    """An integer expression. Build with `symbol`, `+`, `-`, `*`, `floordiv`, `ceildiv`, `modulo`, `minimum`, `maximum`.

    Arithmetic gives an int where the result is constant.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expr) and self.terms == other.terms)

    def __add__(self, other: "int | Expr") -> "int | Expr":
        terms = dict(self.terms)
        for monomial, factor in _terms(other):
            terms[monomial] = terms.get(monomial, 0) + factor
        return _build(terms)

    __radd__ = __add__

    def __neg__(self) -> "int | Expr":
        return self * -1

    def __sub__(self, other: "int | Expr") -> "int | Expr":
        return self + other * -1

    def __rsub__(self, other: "int | Expr") -> "int | Expr":
        return (self * -1) + other

    def __mul__(self, other: "int | Expr") -> "int | Expr":
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right, key=str))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _build(terms)

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for monomial, factor in self.terms:
            names = [str(atom) for atom in monomial]
            body = "*".join(names if factor in (1, -1) and names else [str(abs(factor)), *names])
            parts.append(("-" if factor < 0 else "+") + body)
        return "".join(parts).removeprefix("+")

    __repr__ = __str__

    def symbols(self) -> set[str]:
        """Names of all symbols in the expression."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                if atom.operands:
                    found.update(*(operand.symbols() for operand in atom.operands))
                else:
                    found.add(atom.name)
        return found

    def bind(self, sizes: Mapping[str, int]) -> "int | Expr":
        """The expression with symbols replaced by sizes."""
        total: int | Expr = 0
        for monomial, factor in self.terms:
            product: int | Expr = factor
            for atom in monomial:
                product = product * _bind_atom(atom, sizes)
            total = total + product
        return total


def _bind_atom(atom: Atom, sizes: Mapping[str, int]) -> int | Expr:
    if not atom.operands:
        return sizes[atom.name] if atom.name in sizes else symbol(atom.name)
    return _FUNCTIONS[atom.name](*(operand.bind(sizes) for operand in atom.operands))


def _terms(value: int | Expr) -> tuple[tuple[Monomial, int], ...]:
    return (((), value),) if isinstance(value, int) else value.terms


def _build(terms: dict[Monomial, int]) -> int | Expr:
    kept = sorted(((m, f) for m, f in terms.items() if f), key=lambda item: (-len(item[0]), [str(a) for a in item[0]]))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return Expr(tuple(kept))


def _wrap(value: int | Expr) -> Expr:
    return value if isinstance(value, Expr) else Expr((((), value),))


def _factor(value: Expr) -> str:
    text = str(value)
    return text if re.fullmatch(r"\w+", text) else f"({text})"


def symbol(name: str) -> Expr:
    """The expression that is the symbol `name`."""
    return Expr((((Atom(name),), 1),))


def _call(name: str, a: int | Expr, b: int | Expr) -> Expr:
    return Expr((((Atom(name, (_wrap(a), _wrap(b))),), 1),))


def exact_div(a: int | Expr, b: int | Expr) -> int | Expr | None:
    """a / b where it is known to be exact, else None."""
    if isinstance(b, int):
        if b == 0 or any(factor % b for _, factor in _terms(a)):
            return None
        return _build({monomial: factor // b for monomial, factor in _terms(a)})
    if len(b.terms) != 1:
        return 1 if a == b else None
    (divisor, factor) = b.terms[0]
    result: dict[Monomial, int] = {}
    for monomial, number in _terms(a):
        rest = list(monomial)
        for atom in divisor:
            if atom not in rest:
                return None
            rest.remove(atom)
        if number % factor:
            return None
        result[tuple(rest)] = number // factor
    return _build(result)


def floordiv(a: int | Expr, b: int | Expr) -> int | Expr:
    """a / b rounded down."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    exact = exact_div(a, b)
    return _call("floordiv", a, b) if exact is None else exact


def ceildiv(a: int | Expr, b: int | Expr) -> int | Expr:
    """a / b rounded up."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    exact = exact_div(a, b)
    return _call("ceildiv", a, b) if exact is None else exact


def modulo(a: int | Expr, b: int | Expr) -> int | Expr:
    """a modulo b, of the sign of b."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return _call("mod", a, b) if exact_div(a, b) is None else 0


def minimum(a: int | Expr, b: int | Expr) -> int | Expr:
    """The smaller of two."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else _call("min", a, b)


def maximum(a: int | Expr, b: int | Expr) -> int | Expr:
    """The larger of two."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else _call("max", a, b)


_FUNCTIONS: dict[str, Callable[[int | Expr, int | Expr], int | Expr]] = {
    "floordiv": floordiv,
    "ceildiv": ceildiv,
    "mod": modulo,
    "min": minimum,
    "max": maximum,
}


class DimSyntaxError(ValueError):
    """A dim expression that cannot be read; `position` is the offset in the text."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


_TOKEN = re.compile(r"\s*(?:([0-9]{1,1000})|([A-Za-z_][A-Za-z0-9_.]*|'[^'\n]*')|([-+*/(),]))")
_MAX_DEPTH = 50
"""How deep calls and brackets nest."""
_MAX_TERMS = 10_000
"""Of a product, when it is multiplied out."""


def parse_dim(text: str) -> int | Expr:
    """Read an expression as `str` prints it: `batch*seq`, `2*batch+1`, `ceil(batch/2)`, `floor((a+1)/2)`, `max(a, b)`.

    Raises:
        DimSyntaxError: the text is no such expression.
    """
    parser = _Parser(text)
    value = parser.sum()
    parser.end()
    return value


def parse_dim_at(text: str, position: int) -> tuple[int | Expr, int]:
    """Read the expression that starts at `position`; returns it and where it ends.

    Raises:
        DimSyntaxError: no expression starts there.
    """
    parser = _Parser(text, position)
    return parser.sum(), parser.position


class _Parser:
    """Recursive descent over sums, products and calls."""

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self.depth = 0

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.position)
        return match.group().strip() if match else ""

    def take(self, expected: str | None = None) -> str:
        match = _TOKEN.match(self.text, self.position)
        token = match.group().strip() if match else ""
        if not match or (expected is not None and token != expected):
            wanted = f'"{expected}"' if expected else "a number or a name"
            raise DimSyntaxError(f"expected {wanted} in a dim", self.position)
        self.position = match.end()
        return token

    def end(self) -> None:
        if self.text[self.position :].strip():
            raise DimSyntaxError("unexpected text after a dim", self.position)

    def sum(self) -> int | Expr:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise DimSyntaxError(f"a dim nests deeper than {_MAX_DEPTH} levels", self.position)
        total: int | Expr = 0
        sign = 1
        if self.peek() == "-":
            self.take()
            sign = -1
        while True:
            total = total + self.product() * sign
            if self.peek() not in ("+", "-"):
                self.depth -= 1
                return total
            sign = 1 if self.take() == "+" else -1

    def product(self) -> int | Expr:
        value = self.atom()
        while self.peek() == "*":
            start = self.position
            self.take()
            factor = self.atom()
            if _count(value) * _count(factor) > _MAX_TERMS:
                raise DimSyntaxError(f"a dim has more than {_MAX_TERMS} terms", start)
            value = value * factor
        return value

    def atom(self) -> int | Expr:
        token = self.take()
        if token[0] in "0123456789":
            if len(token) > 19 or int(token) >= 2**63:
                raise DimSyntaxError("a number in a dim does not fit 64 bits", self.position - len(token))
            return int(token)
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token[0] == "'":
            return symbol(_unquoted(token))
        if not re.match(r"[A-Za-z_]", token):
            raise DimSyntaxError("expected a number or a name in a dim", self.position - len(token))
        if self.peek() != "(":
            return symbol(token)
        return self.call(token)

    def call(self, name: str) -> int | Expr:
        start = self.position - len(name)
        self.take("(")
        a = self.sum()
        separator = {"ceil": "/", "floor": "/"}.get(name, ",")
        self.take(separator)
        b = self.sum()
        self.take(")")
        function = _FUNCTIONS.get({"ceil": "ceildiv", "floor": "floordiv"}.get(name, name))
        if function is None or name in ("ceildiv", "floordiv"):
            raise DimSyntaxError(f'no function "{name}" in dims', start)
        if b == 0 and name in ("ceil", "floor", "mod"):
            raise DimSyntaxError("division by zero in a dim", start)
        return function(a, b)


def _count(value: int | Expr) -> int:
    return len(value.terms) if isinstance(value, Expr) else 1


def product_of(dims: tuple[Dim, ...]) -> int | Expr | None:
    """The product of dims, or None where one is unknown."""
    if all(type(dim) is int for dim in dims):
        return math.prod(dims)  # type: ignore[arg-type]
    total: int | Expr = 1
    for dim in dims:
        if dim is None:
            return None
        total = total * dim
    return total
