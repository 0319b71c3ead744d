"""Constants of which each rank holds a block: where nothing else tells programs apart, each slices its own."""

from irpar.analysis.cost.network import Network
from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.redistribution import bytes_held, redistribution
from irpar.analysis.redistribution.trees import insert_step
from irpar.ir import Builder, Decision, Module, Value
from irpar.sharding import Sharding

SMALL_SHARE, SMALL_BYTES = 1 / 64, 64 << 10
"""What a device may hold more for it: this part of its state, and so many bytes."""


def share_small_constants(module: Module, network: Network) -> None:
    """Let each device hold sharded constants in full, and slice its blocks, in a graph whose parameters are state.

    k : i64[2048@dp, 1] becomes k : i64[2048, 1], k_1 = irpar.AllSlice(k) : i64[2048@dp, 1]

    Ranks whose parameters are inputs differ in their constants alone: 64 of them would be 64 programs for a table of
    positions. All constants of the graph, those of bodies included, or none where that takes too much.
    """
    graph = module.graph
    if graph.first is None or not any(state.kind == "parameter" for state in graph.states.values()):
        return
    found = [value for body in graph.graphs() for value in body.constants if _is_cut(value)]
    layers = module.repeats
    more = sum((value_bytes(each) - bytes_held(each, each.sharding)) * layers.get(each.name, 1) for each in found)
    held = sum(bytes_held(state, state.sharding) * layers.get(state.name, 1) for state in graph.states)
    if more > SMALL_BYTES + SMALL_SHARE * held:
        return
    for value in found:
        if value.graph is not graph:
            graph.lift_constant(value)
        _slice(module, value, network)


def _is_cut(value: Value) -> bool:
    lies = value.sharding
    return lies is not None and not lies.partial and any(lies.dim_parts(dim) > 1 for dim in range(lies.rank))


def _slice(module: Module, value: Value, network: Network) -> None:
    """Put slices between a constant and what reads it."""
    graph, target, uses = module.graph, value.sharding, value.uses
    assert target is not None
    whole = Sharding.replicated(target.mesh, target.rank)
    planned = redistribution(whole, target, value.shape, value.dtype.bits, network)
    assert all(step.op == "AllSlice" for step in planned.steps)
    value.sharding = whole
    builder = Builder(graph, module.opsets, before=graph.first)
    result = value
    for step in planned.steps:
        result = insert_step(builder, result, step, "each rank slices its own, so that all share one program")
    value.replace_uses(result, only=uses)
    module.decisions[result.name] = module.decisions.pop(value.name, [])
    module.decide(
        value.name, Decision("devices hold it whole and slice their blocks, so that all share one program", None)
    )
