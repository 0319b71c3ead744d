"""Data before weights: which annotations wait where weights or state are sharded over the axes of data.

x : [64@dp, 2048] data, w : [512@dp, 512] state      x@dp is carried on first; w is gathered where it is read
"""

from dataclasses import replace

from irpar.analysis.completion.flow import Flow
from irpar.ir import Module, Value
from irpar.sharding import Axis, Sharding, are_disjoint


def with_data_first(module: Module, flow: Flow) -> dict[Value, Sharding]:
    """Annotated weights, state and what passes annotated, where dims over the axes of annotated data wait for these.

    Empty where none are, or where somebody has said which dims go first.
    """
    annotated = {value: value.sharding for value in flow.values() if value.sharding is not None}
    if any(dim.priority for lies in annotated.values() for dim in lies.dims):
        return {}
    data = [lies for value, lies in annotated.items() if not _is_later(module, value)]
    axes = list(dict.fromkeys(axis for lies in data for axis in lies.all_axes))
    later = {value: _waiting(lies, axes) for value, lies in annotated.items() if axes and _is_later(module, value)}
    return {value: lies for value, lies in later.items() if lies != annotated[value]}


def _is_later(module: Module, value: Value) -> bool:
    said = module.annotated.get(value.name)
    return value.is_constant or value in module.graph.states or (said is not None and said.is_implied)


def _waiting(lies: Sharding, axes: list[Axis]) -> Sharding:
    dims = (dim if are_disjoint(lies.mesh, [*dim.axes, *axes]) else replace(dim, priority=1) for dim in lies.dims)
    return replace(lies, dims=tuple(dims))
