"""The clause after a value in the text form: type, sharding, mesh and memory, printed and read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

from irpar.ir.dims import Dim, DimSyntaxError, parse_dim_at
from irpar.ir.dtypes import dtype_of_text
from irpar.ir.types import UNKNOWN, InflightType, OptionalType, SequenceType, TensorType, Type
from irpar.ir.value import Memory, Value
from irpar.sharding import REDUCTIONS, Axis, DimSharding, IrparError, Mesh, Reduction, Sharding

from .lexer import Lexer, symbol_reference

_WRAPPERS: dict[str, type[SequenceType] | type[OptionalType] | type[InflightType]] = {
    kind.keyword: kind for kind in (SequenceType, OptionalType, InflightType)
}
_MEMORIES: tuple[str, ...] = get_args(Memory)
_MAX_NESTING = 32
_MAX_RANK = 64
_CLOSED = DimSharding()

_AXIS = r"[A-Za-z_][A-Za-z0-9_]*+(?::\([0-9]{1,9}\)[0-9]{1,9})?"
_AXES = rf"{_AXIS}(?:\s*,\s*{_AXIS})*"
_UNKNOWN_DIM = re.compile(r"_(?![A-Za-z0-9_.])")
_MARK = re.compile(rf"\s*@(?:({_AXIS})|\(\s*({_AXES})\s*\))")
_PRIORITY = re.compile(r"!\s*([0-9]{1,9})(?![0-9])")
_PARTIAL = re.compile(rf"\(\s*([a-z]+)\s*:\s*({_AXES})\s*\)")
# The usual clause, cut out whole so that a text with 100,000 of them reads each distinct one once.
_USUAL = re.compile(
    r"[a-z0-9]++\[[^\[\]'\"]*+\](?: of \[[^\[\]'\"]*+\])?(?: replicated| partial\([^()]*(?:\([0-9]+\)[^()]*)*\))?"
    r"(?: on @[A-Za-z_][A-Za-z0-9_.]*+)?(?: in [a-z]++)?"
)
_CONTINUED = frozenset({"of", "replicated", "partial", "sharded", "on", "in"})


class Clause(NamedTuple):
    """What the text says of a value after its name."""

    type: Type = UNKNOWN
    global_shape: tuple[int, ...] | None = None
    sharding: Sharding | None = None
    memory: Memory = "device"

    def give(self, value: Value) -> None:
        """Set these facts on a value."""
        value.type, value.global_shape, value.sharding, value.memory = self


# -- printing -----------------------------------------------------------------------------------------------------


def clause_text(value: Value, only_mesh: Mesh | None) -> str:
    """The clause of a value; `only_mesh` is the mesh that need not be named."""
    sharding, shape = value.sharding, value.global_shape
    text = str(value.type)
    if shape is not None:
        marks = sharding.dims if sharding is not None and sharding.rank == len(shape) else None
        text += f" of [{_dims_text(shape, marks)}]"
    if sharding is not None:
        text = _sharded_text(text, value, sharding)
        if sharding.mesh is not only_mesh and sharding.mesh != only_mesh:
            text += f" on {symbol_reference(sharding.mesh.name)}"
    return text if value.memory == "device" else f"{text} in {value.memory}"


def _sharded_text(text: str, value: Value, sharding: Sharding) -> str:
    if value.global_shape is not None:
        placed = sharding.rank == len(value.global_shape)
    else:
        placed = _innermost_rank(value.type) == sharding.rank
        if placed:
            text = _marked_type(value.type, sharding.dims)
    if not placed:
        text += f" sharded [{_dims_text((None,) * sharding.rank, sharding.dims)}]"
    return text + sharding.suffix()


def _innermost_rank(type_: Type) -> int | None:
    while isinstance(type_, (SequenceType, OptionalType, InflightType)):
        type_ = type_.elem
    return type_.rank if isinstance(type_, TensorType) else None


def _marked_type(type_: Type, marks: Sequence[DimSharding]) -> str:
    if isinstance(type_, (SequenceType, OptionalType, InflightType)):
        return f"{type_.keyword}<{_marked_type(type_.elem, marks)}>"
    assert isinstance(type_, TensorType)
    assert type_.shape is not None
    return f"{type_.dtype}[{_dims_text(type_.shape, marks)}]"


def _dims_text(dims: Iterable[Dim], marks: Sequence[DimSharding] | None) -> str:
    texts = ["_" if dim is None else str(dim) for dim in dims]
    if marks is not None:
        texts = [text if mark is _CLOSED else f"{text}{mark}" for text, mark in zip(texts, marks, strict=True)]
    return ", ".join(texts)


# -- reading ------------------------------------------------------------------------------------------------------


class ClauseReader:
    """Reads clauses out of a lexer; knows the meshes that were declared so far."""

    def __init__(self, lexer: Lexer, meshes: Mapping[str, Mesh]) -> None:
        self.lexer = lexer
        self.meshes = meshes
        self._known: dict[str, Clause] = {}
        self._shardings: dict[Sharding, Sharding] = {}

    def read(self) -> Clause:
        """Read the clause that the token in hand starts."""
        lexer = self.lexer
        start = lexer.start
        match = _USUAL.match(lexer.text, start)
        known = self._known.get(match.group()) if match else None
        if known is not None and match is not None:
            lexer.seek(match.end())
            if lexer.token not in _CONTINUED:
                return known
            lexer.seek(start)
        clause = self._read_afresh()
        self._known[lexer.text[start : lexer.last]] = clause
        return clause

    def _read_afresh(self) -> Clause:
        lexer = self.lexer
        start = lexer.start
        type_, marks = self.type_and_marks()
        global_shape = None
        if lexer.accept("of"):
            if marks is not None and any(mark != _CLOSED for mark in marks):
                raise lexer.error("the sharding of a local value stands in its `of [...]`", start)
            global_shape, marks = self._global_shape()
        if lexer.accept("sharded"):
            _, marks = self._dims()
            explicit = True
        else:
            explicit = marks is not None and any(mark != _CLOSED for mark in marks)
        sharding = self._sharding(start, marks, explicit)
        return Clause(type_, global_shape, sharding, self._memory())

    def type(self) -> Type:
        """Read a type without sharding."""
        start = self.lexer.start
        type_, marks = self.type_and_marks()
        if marks is not None and any(mark != _CLOSED for mark in marks):
            raise self.lexer.error("no sharding can stand here", start)
        return type_

    def type_and_marks(self, depth: int = 0) -> tuple[Type, Sequence[DimSharding] | None]:
        """Read a type and the sharding of each of its dims (None where the rank is not known)."""
        lexer = self.lexer
        if lexer.accept("?"):
            return UNKNOWN, None
        start = lexer.start
        word = lexer.take("name", "a type such as f32[2, 3]")
        wrapper = _WRAPPERS.get(word)
        if wrapper is not None:
            if depth == _MAX_NESTING:
                raise lexer.error(f"types nest deeper than {_MAX_NESTING} levels", start)
            lexer.expect("<")
            inner, marks = self.type_and_marks(depth + 1)
            lexer.expect(">")
            return wrapper(inner), marks
        dtype = dtype_of_text(word)
        if dtype is None:
            raise lexer.error(f"no type `{word}`", start, do="write f32[2, 3], seq<...>, optional<...> or ?")
        shape, marks = self._dims()
        return TensorType(dtype, shape), marks

    def _dims(self) -> tuple[tuple[Dim, ...] | None, Sequence[DimSharding] | None]:
        """Read `[8@dp, batch, _, 64?, 8@tp!1]` or `[*]`."""
        lexer, text = self.lexer, self.lexer.text
        if lexer.token != "[":
            raise lexer.expected("`[`")
        position = lexer.skip(lexer.position)
        if text.startswith("*", position):
            lexer.seek(position + 1)
            lexer.expect("]")
            return None, None
        dims: list[Dim] = []
        marks: list[DimSharding] = []
        while not text.startswith("]", position):
            if dims:
                if not text.startswith(",", position):
                    raise lexer.error("expected `,` or `]` after a dim", position)
                position = lexer.skip(position + 1)
            if len(dims) == _MAX_RANK:
                raise lexer.error(f"more than {_MAX_RANK} dims", position)
            dim, position = self._dim(position)
            mark, position = self._mark(position)
            dims.append(dim)
            marks.append(mark)
            position = lexer.skip(position)
        lexer.seek(position + 1)
        return tuple(dims), marks

    def _dim(self, position: int) -> tuple[Dim, int]:
        unknown = _UNKNOWN_DIM.match(self.lexer.text, position)
        if unknown is not None:
            return None, unknown.end()
        try:
            return parse_dim_at(self.lexer.text, position)
        except DimSyntaxError as error:
            raise self.lexer.error(str(error), error.position) from None

    def _mark(self, position: int) -> tuple[DimSharding, int]:
        lexer = self.lexer
        position = lexer.skip(position)
        match = _MARK.match(lexer.text, position)
        if match is None and lexer.text.startswith("@", position):
            raise lexer.error("expected a mesh axis such as @tp, @(dp,tp) or @tp:(2)4", position)
        axes = _axes(match[1] or match[2]) if match else ()
        position = lexer.skip(match.end()) if match else position
        is_open = lexer.text.startswith("?", position)
        priority, position = self._priority(position + is_open)
        mark = DimSharding(axes, is_open, priority) if axes or is_open or priority else _CLOSED
        return mark, position

    def _priority(self, position: int) -> tuple[int, int]:
        """Read `!1`, or nothing; gives the priority and where it ends."""
        lexer = self.lexer
        at = lexer.skip(position)
        if not lexer.text.startswith("!", at):
            return 0, position
        match = _PRIORITY.match(lexer.text, at)
        if match is None:
            raise lexer.error("expected a priority such as 64@tp!1: a number from 0 to 999999999", at)
        return int(match[1]), match.end()

    def _global_shape(self) -> tuple[tuple[int, ...], Sequence[DimSharding]]:
        start = self.lexer.start
        dims, marks = self._dims()
        whole = tuple(dim for dim in dims or () if isinstance(dim, int))
        if dims is None or marks is None or len(whole) != len(dims):
            raise self.lexer.error("the global shape of a local value is made of ints", start)
        return whole, marks

    def _sharding(self, start: int, marks: Sequence[DimSharding] | None, explicit: bool) -> Sharding | None:
        lexer = self.lexer
        at = lexer.start
        partial: tuple[Axis, ...] = ()
        reduce: Reduction = "sum"
        if lexer.accept("replicated"):
            if marks is not None and any(mark != _CLOSED for mark in marks):
                raise lexer.error("`replicated` stands after a tensor whose dims are not sharded", at)
            explicit = True
        elif lexer.token == "partial":
            reduce, partial = self._partial()
            explicit = True
        mesh = self._mesh(explicit)
        if not explicit or mesh is None:
            return None
        if marks is None:
            raise lexer.error("only a tensor of known rank has a sharding", start)
        try:
            sharding = Sharding(mesh, tuple(marks), partial, reduce)
        except IrparError as error:
            raise lexer.error(error.what, start, do=error.do) from None
        return self._shardings.setdefault(sharding, sharding)

    def _partial(self) -> tuple[Reduction, tuple[Axis, ...]]:
        lexer = self.lexer
        at = lexer.skip(lexer.position)
        match = _PARTIAL.match(lexer.text, at)
        if match is None or match[1] not in REDUCTIONS:
            raise lexer.error(f"expected (REDUCTION: AXIS, ...) with one of {', '.join(REDUCTIONS)}", at)
        lexer.seek(match.end())
        return match[1], _axes(match[2])  # type: ignore[return-value]

    def _mesh(self, is_needed: bool) -> Mesh | None:
        lexer = self.lexer
        at = lexer.start
        if lexer.accept("on"):
            if not is_needed:
                raise lexer.error("`on @mesh` stands after a sharding", at)
            name_at = lexer.start
            mesh = self.meshes.get(lexer.symbol("the name of a mesh such as @m"))
            if mesh is None:
                raise lexer.error("no such mesh", name_at, do='declare it above: mesh @m = ["dp"=2, "tp"=4]')
            return mesh
        if is_needed and len(self.meshes) != 1:
            remedy = "say which: on @mesh" if self.meshes else 'declare one above: mesh @m = ["dp"=2, "tp"=4]'
            raise lexer.error(f"a sharding needs a mesh, and there are {len(self.meshes)}", lexer.last, do=remedy)
        return next(iter(self.meshes.values())) if is_needed else None

    def _memory(self) -> Memory:
        lexer = self.lexer
        if not lexer.accept("in"):
            return "device"
        if lexer.token not in _MEMORIES:
            raise lexer.expected(f"one of {', '.join(_MEMORIES)}")
        return lexer.take("name", "a memory")  # type: ignore[return-value]


def _axes(text: str) -> tuple[Axis, ...]:
    return tuple(Axis.parse(name) for name in text.split(","))
