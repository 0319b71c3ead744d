"""Views of parameters, so that what is gathered of one is not kept from the forward to the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from irpar.analysis.gathers import layers_of
from irpar.analysis.looping import LOOPS
from irpar.analysis.memory.liveness import peak_bytes
from irpar.analysis.redistribution.trees import standing_in
from irpar.analysis.trips import When, memory_of, say_trips, say_when, trips_said
from irpar.ir import Builder, Graph, Module, Node, Value, clone_module
from irpar.ir.annotate import annotate_further
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, LOCAL, MOVES

_VIEW = ("", "Identity")
_PHASES = ("forward", "backward")
"""Those that read parameters which are gathered."""


def regather(module: Module, value: Value, places: Mapping[Node, int]) -> bool:
    """Let the backward pass read a parameter through a view of its own, so that what is gathered of it is not kept.

    False where the backward pass does not read it, or does so already, or one loop holds both passes: what trips read
    of it is gathered before the loop, once.
    """
    uses = [(node, index) for node, index in value.uses if node.phase == "backward" and node.identity != _VIEW]
    if not uses:
        return False
    first = min((standing_in(module.graph, node) for node, _ in uses), key=places.__getitem__)
    forward = (standing_in(module.graph, node) for node in value.users if node.phase == "forward")
    if any(places[node] >= places[first] for node in forward):
        return False
    return _view(module, value, uses, first, "again")


def loop_over(graph: Graph, parameters: Sequence[Value]) -> Node | None:
    """The loop whose trips read parameters in both passes, as one over micro-batches does; None where none does."""
    holders = {
        standing_in(graph, node): None for value in parameters for node in value.users if node.graph is not graph
    }
    for node in holders:
        if node.identity in LOOPS and {each.phase for each in LOOPS[node.identity](node).body}.issuperset(_PHASES):
            return node
    return None


def gathers_in_trips(module: Module, gather: Callable[[Module], object]) -> tuple[bool, tuple[str, ...]]:
    """Whether trips gather what they read of parameters themselves: as the module says, else where memory asks for it.

    Args:
        module: annotated, without views in loops.
        gather: lets trips of a copy of it gather.

    Returns:
        This; a line about it where memory was looked at.
    """
    said, limit = trips_said(module).gather, memory_of(module)
    if said != "auto" or limit is None:
        return said == "micro-batch", ()
    once = _peak(module, "step", lambda _: None)
    is_once = once <= limit or once <= _peak(module, "micro-batch", gather)
    return not is_once, (say_when(module, "gather", "step" if is_once else "micro-batch", once, limit),)


def _peak(module: Module, when: When, gather: Callable[[Module], object]) -> int:
    """The bytes that a rank holds at most where parameters are gathered then."""
    trial = clone_module(module)
    say_trips(trial, replace(trips_said(module), gather=when))
    gather(trial)
    PassManager.parse(f"{COMPLETE},{MOVES},{LOCAL}").run(trial)
    return peak_bytes(trial)


def let_trips_gather(module: Module, parameters: Sequence[str], *, again: bool) -> tuple[bool, dict[str, int]]:
    """Let the trips of the loop that reads parameters gather them.

    Args:
        module: it.
        parameters: their names.
        again: whether the backward pass gathers them anew.

    Returns:
        Whether that changed anything; which parameters are gathered together, as `layers_of` numbers them.
    """
    values = [module.graph.value(name) for name in parameters]
    over = loop_over(module.graph, values)
    assert over is not None
    for value in values:
        _enter(value, over)
    body = LOOPS[over.identity](over).body
    layers = layers_of(body, values)
    places = {node: place for place, node in enumerate(body)}
    changed = [_gather_in_trips(module, value, over, places, again=again) for value in values]
    return any(changed), layers


def _enter(value: Value, loop: Node) -> None:
    """Move what is computed of a parameter alone, for a loop alone, into its body: what is gathered can be there."""
    graph = loop.graph
    assert graph is not None
    for node in value.users:
        if node.graph is not graph or node.phase not in _PHASES or node is loop:
            continue
        if any(operand is not value and not operand.is_constant for operand in node.inputs):
            continue
        for result in node.results:
            _enter(result, loop)
        readers = [reader for result in node.results for reader in result.users]
        if not readers or any(standing_in(graph, reader) is not loop or reader is loop for reader in readers):
            continue
        body = LOOPS[loop.identity](loop).body
        inside = {standing_in(body, reader) for reader in readers}
        body.insert_before(next(each for each in body if each in inside), node.detach())


def _gather_in_trips(module: Module, value: Value, loop: Node, places: Mapping[Node, int], *, again: bool) -> bool:
    """Let trips of a loop read a parameter through views that stand in its body, and so gather it there.

    Args:
        module: it.
        value: the parameter.
        loop: it.
        places: of the nodes of its body.
        again: whether the backward pass has a view of its own.
    """
    graph, body = loop.graph, LOOPS[loop.identity](loop).body
    assert graph is not None
    uses = [
        (standing_in(body, node), (node, index))
        for node, index in value.uses
        if node.graph is not graph and standing_in(graph, node) is loop and node.identity != _VIEW
    ]
    backward = [each for each in uses if again and each[1][0].phase == "backward"]
    forward = [each for each in uses if each not in backward]
    changed = False
    for found, name in ((forward, "gathered"), (backward, "again")):
        if found:
            first = min((node for node, _ in found), key=places.__getitem__)
            changed = _view(module, value, [use for _, use in found], first, name) or changed
    return changed


def _view(module: Module, value: Value, uses: Sequence[tuple[Node, int]], first: Node, name: str) -> bool:
    """Let some readers read a view of a parameter, made before the first of them."""
    assert first.graph is not None
    builder = Builder(first.graph, module.opsets, before=first, like=first)
    view = builder.op("Identity", [value], type=value.type, name=f"{value.name}.{name}")
    value.replace_uses(view, only=uses)
    assert value.sharding is not None
    return annotate_further(module, view, value.sharding, f"what %{value.name} is")
