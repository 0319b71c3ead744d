"""bind-dims: give symbols of the model their sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from irpar.analysis.types.symbols import describe, dim_names, free_symbols, unnamed_dims
from irpar.ir import (
    Dim,
    Expr,
    InflightType,
    Module,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    Value,
    with_dim,
)
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError, nearest_names

MOST = 2**63 - 1
"""The greatest size that ONNX has."""


class BindError(IrparError):
    """A size for a symbol that the model does not have, or a size that cannot be."""


@dataclass(frozen=True)
class BindDims(Pass):
    """Replace symbols by sizes in the types of all values: `bind-dims{batch=8, seq=128}`.

    Before: a graph in global view. After: none of the given symbols is left in a type outside functions, whose symbols
    are their own. Inner types that a model declares without need of a symbol are left to infer-types.

    A dim of an input without a name is called by the input and its place: `bind-dims{input_ids.0=8}`.
    """

    name: ClassVar[str] = "bind-dims"
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for symbol, size in self.sizes.items():
            if size <= 0:
                raise BindError(f"{symbol} is given the size {size}", do="give every symbol a size of 1 or more")
            if size > MOST:
                raise BindError(
                    f"{symbol} is given a size above {MOST}, the greatest there is", do="give a smaller one"
                )

    def run(self, module: Module) -> PassResult:
        """Bind in all graphs.

        Raises:
            BindError: a symbol is not in the inputs of the model, or a dim cannot be of that size.
        """
        symbols = free_symbols(module)
        unnamed = {f"{value.name}.{index}": (value, index) for value, index in unnamed_dims(module)}
        for name in self.sizes:
            if name not in symbols and name not in unnamed:
                raise _unknown(name, symbols, list(unnamed))
        changed = 0
        for name in self.sizes.keys() & unnamed.keys() - symbols.keys():
            _set_dim(*unnamed[name], self.sizes[name])
            changed += 1
        _keep_names(module)
        bind = _binder({name: size for name, size in self.sizes.items() if name in symbols})
        for graph in (inner for root in module.graphs for inner in root.graphs()):
            for value in graph.values():
                bound = bind(value.type)
                if bound is not value.type:
                    _check(value, bound)
                    value.type = bound
                    changed += 1
        return PassResult(changed > 0, statistics={"values": changed})


def _keep_names(module: Module) -> None:
    """Remember what the dims of inputs and results were called: annotations may speak of them by these names."""
    for value in (*module.graph.inputs, *module.graph.outputs):
        names = dim_names(value)
        if any(names):
            module.dim_names.setdefault(value.name, names)


def _binder(sizes: Mapping[str, int]) -> Callable[[Type], Type]:
    """A function that puts sizes into a type; it gives back the same object where nothing changes."""
    known: dict[Type, Type] = {}

    def bind(type_: Type) -> Type:
        if isinstance(type_, TensorType) and (type_.shape is None or type_.is_static):
            return type_
        if type_ not in known:
            bound = _bind(type_)
            known[type_] = type_ if bound == type_ else bound
        # Equal types are different objects; one without these symbols must come back as it is.
        return type_ if known[type_] == type_ else known[type_]

    def _bind(type_: Type) -> Type:
        if isinstance(type_, TensorType) and type_.shape is not None:
            return type_.with_shape(tuple(_bind_dim(dim, sizes) for dim in type_.shape))
        if isinstance(type_, (SequenceType, OptionalType, InflightType)):
            return type(type_)(bind(type_.elem))
        return type_

    return bind


def _bind_dim(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    if not isinstance(dim, Expr):
        return dim
    try:
        return dim.bind(sizes)
    except ZeroDivisionError:
        raise BindError(f"the dim {dim} divides by zero at these sizes", do="give other sizes") from None


def _check(value: Value, bound: Type) -> None:
    sizes = [dim for dim in bound.shape or () if isinstance(dim, int)] if isinstance(bound, TensorType) else []
    what = f"%{value.name} {value.type} becomes {bound}"
    if any(size < 0 for size in sizes):
        raise BindError(what, do="give sizes for which every dim is 0 or more")
    if any(size > MOST for size in sizes):
        raise BindError(f"{what}; the greatest size is {MOST}", do="give smaller sizes")


def _set_dim(value: Value, index: int, size: int) -> None:
    shape = value.tensor_type.shape
    assert shape is not None
    value.type = value.tensor_type.with_shape(with_dim(shape, index, size))


def _unknown(name: str, symbols: Mapping[str, list[Value]], unnamed: list[str]) -> BindError:
    names = [*symbols, *unnamed]
    lines = [f"{symbol}: {', '.join(describe(value) for value in values)}" for symbol, values in symbols.items()]
    return BindError(
        f'no symbol "{name}" in the inputs of the model',
        notes=(*lines, *nearest_names(name, names)),
        do=f"choose from: {', '.join(names)}" if names else "all sizes of the inputs are known: leave it out",
    )
