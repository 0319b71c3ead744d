"""Data before weights: which annotations wait where weights or state are sharded over the axes of data.

x : [64@dp, 2048] data, w : [512@dp, 512] state      x@dp is carried on first; w is gathered where it is read
"""

from collections.abc import Set
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
    later = {value: lies for value, lies in annotated.items() if _is_later(module, value)}
    axes = {axis for value, lies in annotated.items() if value not in later for axis in lies.all_axes}
    waiting = {value: _waiting(lies, axes) for value, lies in later.items()}
    return {value: lies for value, lies in waiting.items() if lies != later[value]}


def _is_later(module: Module, value: Value) -> bool:
    said = module.annotated.get(value.name)
    return value.is_constant or value in module.graph.states or (said is not None and said.is_implied)


def _waiting(lies: Sharding, axes: Set[Axis]) -> Sharding:
    """A sharding of which the dims over any of some axes wait; these may overlap each other."""
    mesh = lies.mesh
    waits = [any(not are_disjoint(mesh, [mine, axis]) for mine in dim.axes for axis in axes) for dim in lies.dims]
    dims = (replace(dim, priority=1) if late else dim for dim, late in zip(lies.dims, waits, strict=True))
    return replace(lies, dims=tuple(dims))
