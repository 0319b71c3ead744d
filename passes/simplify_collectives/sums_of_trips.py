"""Sums over the trips of a loop: terms are added as they lie, and what they add up to is moved once, behind the loop.

s = Scan(0, xs) {s, x -> t = AllReduce(MatMul(x, w)), Add(s, t)}
becomes
p = Scan(0, xs) {p, x -> t = MatMul(x, w), Add(p, t)}      s = AllReduce(p)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from irpar.analysis.explanation.gone_values import follow_instead
from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.looping import LOOPS, Looping
from irpar.analysis.redistribution.held import is_held
from irpar.ir import DOMAIN, Builder, Decision, Graph, Module, Node, Value
from irpar.ops import has_open_bodies
from irpar.ops.collectives import collective_axes, sends
from irpar.ops.effects import communicates, is_collective, is_compute
from irpar.ops.facts import int_attribute
from irpar.ops.linear import carriers, scaled_operand
from irpar.ops.neutral import is_neutral, neutral
from irpar.sharding import Sharding

_REDUCTION = (DOMAIN, "AllReduce")


@dataclass(frozen=True)
class _Step:
    """A node between what a trip computes and what it adds: a move, or an elementwise operator.

    Attributes:
        node: it.
        place: which operand is passed on.
    """

    node: Node
    place: int

    @property
    def operand(self) -> Value:
        """What is passed on."""
        value = self.node.operands[self.place]
        assert value is not None
        return value


@dataclass(frozen=True)
class _Sum:
    """A carried value that trips add moved terms to.

    Attributes:
        loop: the loop.
        number: which of its carried values.
        add: the addition.
        place: which operand of it is the term.
        steps: from the first move of the term to the last node before the addition.
    """

    loop: Looping
    number: int
    add: Node
    place: int
    steps: tuple[_Step, ...]

    @property
    def holds_more(self) -> bool:
        """Whether a rank holds more of the parts than of what they are reduced to."""
        return any(sends(step.node) and step.node.identity != _REDUCTION for step in self.steps)

    @property
    def key(self) -> tuple[int, ...]:
        """The ids of the moves, which are the same in all programs."""
        return tuple(int_attribute(step.node, "id") for step in self.steps if sends(step.node))


def move_sums_once(module: Module, *, may_hold_more: bool = True) -> int:
    """Rewrite the sums of a module, in all programs alike; returns how many there were.

    Args:
        module: it.
        may_hold_more: also those of which ranks then hold parts that are larger than their shares.
    """
    total = 0
    while True:
        found = [
            {made.key: made for made in _sums(graph, module) if may_hold_more or not made.holds_more}
            for graph in module.graphs
        ]
        agreed = set.intersection(*(set(sums) for sums in found))
        if not agreed:
            return total
        names: dict[str, str] = {}
        for sums in found:
            for key, made in sums.items():
                if key in agreed:
                    names.update(_rewrite(module, made))
        follow_instead(module, names)
        total += len(agreed)


def sums_hold_more(module: Module) -> bool:
    """Whether there are sums of which a rank would hold more behind their loops."""
    return any(made.holds_more for made in _sums(module.graphs[0], module))


def _sums(graph: Graph, module: Module) -> Iterator[_Sum]:
    for node in graph.walk():
        if node.identity in LOOPS and has_open_bodies(node):
            loop = LOOPS[node.identity](node)
            for number in range(len(loop.carried)):
                made = _sum(loop, number, module)
                if made is not None:
                    yield made


def _sum(loop: Looping, number: int, module: Module) -> _Sum | None:
    """A carried value as such a sum; None where it is none, or an annotation says how what is added lies."""
    start, _, after = loop.carried[number]
    found = loop.addition(number)
    if found is None or start is None or not start.is_static or is_held(module, after):
        return None
    add, place = found
    for may_pass in (_is_elementwise, _is_reduced):
        steps = _steps(add.inputs[place], loop.body, module, may_pass)
        if steps and steps[0].operand.is_static:
            return _Sum(loop, number, add, place, steps)
    return None


def _steps(value: Value, body: Graph, module: Module, may_pass: Callable[[_Step], bool]) -> tuple[_Step, ...]:
    """What makes a term of parts, from the first move on; none where nothing is sent."""
    steps: list[_Step] = []
    while (step := _step(value, body, module)) is not None and may_pass(step):
        steps.insert(0, step)
        value = step.operand
    while steps and not is_collective(steps[0].node):
        del steps[0]
    return tuple(steps) if any(sends(step.node) for step in steps) else ()


def _step(value: Value, body: Graph, module: Module) -> _Step | None:
    """The node that gives a term, where a sum may be moved or multiplied by it just as well."""
    node = value.node
    if node is None or node.graph is not body or value.use_count != 1 or is_held(module, value):
        return None
    if is_collective(node):
        is_linear = node.attributes.get("reduce", "sum") == "sum" and node.op_type != "MakePartial"
        return _Step(node, 0) if is_linear else None
    if not is_compute(node) or not value.is_static:
        return None
    found = next((places for places in carriers(node, "sum") if len(places) == 1), None)
    return None if found is None or node.operands[found[0]] is None else _Step(node, found[0])


def _is_elementwise(step: _Step) -> bool:
    """Whether a step does the same with all elements, wherever they lie; or is a move."""
    return is_collective(step.node) or scaled_operand(step.node) == step.place


def _is_reduced(step: _Step) -> bool:
    """Whether a step leaves elements on the devices where they are: all but other moves than reductions."""
    return step.node.identity == _REDUCTION or not is_collective(step.node)


@dataclass(frozen=True)
class _Lies:
    """How a value lies: its sharding, the sizes of a device's block, and those of the whole in local view."""

    sharding: Sharding | None
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Value) -> Self:
        """How one lies."""
        return cls(value.sharding, value.shape, value.global_shape)

    def set_to(self, value: Value) -> None:
        """Let another lie so."""
        value.sharding, value.global_shape = self.sharding, self.global_shape
        value.type = value.tensor_type.with_shape(self.shape)


def _rewrite(module: Module, made: _Sum) -> dict[str, str]:
    """Let the trips add up parts, and move what they add up to.

    Returns:
        For each value that is gone the one that is there instead.
    """
    loop, holder = made.loop, made.loop.node
    start, before, _ = loop.carried[made.number]
    final = loop.finals[made.number]
    assert start is not None
    assert holder.graph is not None
    moves = [step.node for step in made.steps if is_collective(step.node)]
    parts = term = made.steps[0].operand
    whole, told = _Lies.of(final), list(module.decisions.get(final.name, ()))
    passed = [step for step in made.steps if step.node not in moves]
    changed = [step.node.result for step in passed]
    lies = [_lies(value, made, parts) for value in (*changed, made.add.result)]
    for step in passed:
        step.node.set_operand(step.place, term)
        term = step.node.result
    made.add.set_operand(made.place, term)
    for value, like in zip((*changed, made.add.result, before, final), (*lies, lies[-1], lies[-1]), strict=True):
        like.set_to(value)
        _explain(module, value, module.decisions.get(value.name, ()), parts)
    builder = Builder(holder.graph, module.opsets, before=holder, like=holder)
    zeros = _zeros(module, start, lies[-1], builder, parts)
    holder.set_operand(loop.place(made.number), zeros)
    uses = final.uses
    result, behind = _moved(final, moves, holder)
    if not is_neutral(start, "sum"):
        builder.before = behind.next
        result = builder.op("Add", [start, result], type=start.type)
    whole.set_to(result)
    final.replace_uses(result, only=uses)
    gone = {result.name: parts.name} | dict.fromkeys(_remove_unread(start), zeros.name)
    conflict = module.conflicts.pop(result.name, None)
    _hand_name_on(final, result)
    if conflict is not None:
        module.conflicts[result.name] = conflict
    _explain(module, final, told, parts)
    module.decisions[result.name] = told
    return gone


def _lies(value: Value, made: _Sum, parts: Value) -> _Lies:
    """How a value lies once it is made of parts."""
    if any(is_collective(step.node) and step.node.identity != _REDUCTION for step in made.steps):
        return _Lies.of(parts)
    axes = [axis for step in made.steps if is_collective(step.node) for axis in collective_axes(step.node)]
    found = _Lies.of(value)
    if found.sharding is None:
        return found
    return replace(found, sharding=found.sharding.with_partial([*found.sharding.partial, *axes]))


def _hand_name_on(final: Value, result: Value) -> None:
    """Let what readers meet behind the loop have the name that it had, under which annotations and reasons are kept."""
    name = final.name
    final.rename(f"{name}.parts")
    result.rename(name)
    final.source, result.source = None, final.source


def _explain(module: Module, value: Value, known: Sequence[Decision], parts: Value) -> None:
    """Log why a value lies as it does now: as others that are added up, where no axis has another reason."""
    names = cutting_names(value.sharding)
    told = [decision for decision in known if set(decision.axes) & set(names)]
    about = {axis for decision in told for axis in decision.axes}
    why = f"%{parts.name} is added up as it lies: the sum is moved once, behind the loop"
    told += [Decision(why, parts.name, (name,)) for name in names if name not in about]
    module.decisions[value.name] = told if names else [Decision(why, parts.name)]


def _zeros(module: Module, start: Value, lies: _Lies, builder: Builder, parts: Value) -> Value:
    """What a sum of parts begins as: on every device what changes nothing."""
    nothing = builder.constant(neutral("sum", start.dtype), "nothing")
    sizes = builder.constant(np.asarray(lies.shape, np.int64), "sizes")
    made = builder.op("Expand", [nothing, sizes], type=start.type, name="zeros")
    lies.set_to(made)
    known = module.decisions.get(start.name, ())
    _explain(module, made, known, parts)
    if module.is_local or lies.sharding is None:
        return made
    for value in (nothing, sizes):
        value.sharding = Sharding.replicated(lies.sharding.mesh, len(value.shape))
        module.decide(value.name, Decision(f"%{made.name}, which a sum begins as, is filled with it", None))
    if not lies.sharding.partial:
        return made
    made.sharding = lies.sharding.with_partial(())
    attributes = {"axes": [str(axis) for axis in lies.sharding.partial], "reduce": "sum"}
    result = builder.op("MakePartial", [made], attributes, type=made.type, domain=DOMAIN)
    lies.set_to(result)
    _explain(module, made, known, parts)
    _explain(module, result, known, parts)
    return result


def _remove_unread(value: Value) -> Iterator[str]:
    """Take out what nothing reads any more, with what was there for it alone, and say its names; nothing that sends."""
    if value.has_uses or value.is_input:
        return
    if value.node is None:
        assert value.graph is not None
        value.graph.remove_constant(value)
        yield value.name
    elif not communicates(value.node) and not any(result.has_uses for result in value.node.results):
        operands = value.node.inputs
        yield from (result.name for result in value.node.results)
        value.node.erase()
        for operand in dict.fromkeys(operands):
            yield from _remove_unread(operand)


def _moved(value: Value, moves: Sequence[Node], behind: Node) -> tuple[Value, Node]:
    """Put moves behind a node, the first of them of a value of it; the last result, and the last of the nodes."""
    for move in moves:
        graph = behind.graph
        assert graph is not None
        move.detach()
        move.set_operand(0, value)
        graph.insert_after(behind, move)
        _set_type(value, move)
        value, behind = move.result, move
    return value, behind


def _set_type(value: Value, move: Node) -> None:
    """Give what a move makes the dtype of what it moves; of a reduction its shape, its sharding without the axes."""
    result = move.result
    shape = value.shape if move.identity == _REDUCTION else result.shape
    result.type = value.tensor_type.with_shape(shape)
    if move.identity == _REDUCTION and value.sharding is not None:
        result.sharding, result.global_shape = value.sharding.reduced(collective_axes(move)), value.global_shape
