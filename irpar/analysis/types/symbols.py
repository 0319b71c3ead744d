"""Symbols of a model: the names of sizes that its inputs leave open."""

from collections.abc import Iterator

from irpar.ir import Expr, InflightType, Module, OptionalType, SequenceType, Shape, TensorType, Type, Value, symbol
from irpar.sharding import IrparError, option


class UnboundSymbolError(IrparError):
    """Sizes of the inputs are not known."""


def free_symbols(module: Module) -> dict[str, list[Value]]:
    """Each symbol in the types of the inputs, in order, with the inputs that have it."""
    found: dict[str, list[Value]] = {}
    for value in _inputs(module):
        for name in _symbols(value.type):
            found.setdefault(name, []).append(value)
    return found


def unnamed_dims(module: Module) -> list[tuple[Value, int]]:
    """The dims of inputs that have neither a size nor a name, as (input, dim)."""
    return [
        (value, index) for value in _inputs(module) for index, dim in enumerate(_shape(value.type) or ()) if dim is None
    ]


def dim_names(value: Value) -> tuple[str | None, ...]:
    """The symbols that are dims of a tensor by themselves; None for dims that are sizes, or more than a symbol."""
    found: list[str | None] = []
    for dim in _shape(value.type) or ():
        names = dim.symbols() if isinstance(dim, Expr) else set()
        found.append(next((name for name in names if dim == symbol(name)), None))
    return tuple(found)


def require_static(module: Module) -> None:
    """Refuse a module whose inputs leave a size open.

    Raises:
        UnboundSymbolError: it lists the symbols and the inputs that have them.
    """
    for value in _inputs(module):
        if _is_unknown(value.type):
            raise UnboundSymbolError(
                f"the type of input {value.name} is not known",
                where=describe(value),
                do="export the model with the element type and the number of dims of every input",
            )
    symbols, unnamed = free_symbols(module), unnamed_dims(module)
    if not symbols and not unnamed:
        return
    lines = [f"{symbol}: {', '.join(describe(value) for value in values)}" for symbol, values in symbols.items()]
    lines += [f"{value.name}.{index}: a dim without name of {describe(value)}" for value, index in unnamed]
    names = [*symbols, *(f"{value.name}.{index}" for value, index in unnamed)]
    raise UnboundSymbolError(
        f"{len(names)} {'size is' if len(names) == 1 else 'sizes are'} not known: {', '.join(names)}",
        notes=tuple(lines),
        do=f"give each a size: {option('bind', dict.fromkeys(names, '...'))}",
    )


def describe(value: Value) -> str:
    """An input with its type, as messages name it."""
    return f"{value.name} {value.type}"


def _inputs(module: Module) -> Iterator[Value]:
    for graph in module.graphs:
        yield from graph.inputs


def _is_unknown(type_: Type) -> bool:
    """True where the dtype is not known, or the number of a tensor's dims."""
    while isinstance(type_, (SequenceType, OptionalType, InflightType)):
        type_ = type_.elem
        if isinstance(type_, TensorType):
            return False  # The tensors of a sequence may differ in their dims.
    return not isinstance(type_, TensorType) or type_.shape is None


def _shape(type_: Type) -> Shape | None:
    return type_.shape if isinstance(type_, TensorType) else None


def _symbols(type_: Type) -> list[str]:
    if isinstance(type_, (SequenceType, OptionalType, InflightType)):
        return _symbols(type_.elem)
    # In the order of the dims; several symbols of one dim by name, since a set has no order.
    dims = [sorted(dim.symbols()) for dim in _shape(type_) or () if isinstance(dim, Expr)]
    return list(dict.fromkeys(symbol for names in dims for symbol in names))
