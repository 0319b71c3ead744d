"""Why values that were moved are sharded as they are: the log of decisions, kept while collectives are put in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from irpar.ir import Decision, Module, Node, Value
from irpar.ops.effects import is_compute
from irpar.sharding import Sharding

from .origins import VERBS, cutting_names


@dataclass(frozen=True)
class LoggedRedistribution:
    """What is moved, and why.

    Attributes:
        origin: the value.
        target: how it is sharded in the end, after one collective or several.
        party: the node that gives or reads it.
        held: what comes of it, where that is how the value was annotated; None: it is brought to where a reader needs
            it.
    """

    origin: Value
    target: Sharding
    party: Node | None
    held: Value | None = None


def log_step(
    module: Module, value: Value, result: Value, op: str, target: Sharding, gained: Callable[[str], Decision | None]
) -> None:
    """Log why what one collective makes of a value is sharded so.

    Args:
        module: with the log.
        value, result: before and after it.
        op: the collective.
        target: how the value is sharded in the end, after this collective and others.
        gained: why it brings an axis that shards the value in the end; None: not known.
    """
    had, names, last = (cutting_names(lies) for lies in (value.sharding, result.sharding, target))
    start = f"{op} of %{value.name}"
    for name in names:
        if name in had:
            why: Decision | None = Decision(start, value.name, (name,))
        elif name not in last:
            told = f"{start}, on the way to {target}: devices that hold the same share the work"
            why = Decision(told, None, (name,))
        else:
            why = gained(name)
        if why is not None:
            module.decide(result.name, why)
    if not names:
        module.decide(result.name, Decision(start, value.name))


class RedistributionLog:
    """Logs the values that one pass moves.

    Args:
        module: with the log; every value that is moved is explained in it.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._instead: dict[tuple[str, str], str] = {}

    def copied(self, value: Value, copy: Value, reader: Node) -> None:
        """A reader has a copy of a constant, cut as it needs it: that is sharded so for the reasons of the constant."""
        had, names = cutting_names(value.sharding), cutting_names(copy.sharding)
        for name in names:
            known = self.module.decision(value.name, name)
            if name in had and known is not None:
                self._instead.setdefault((value.name, name), copy.name)
                self._annotate(value, copy)
                self.module.decide(copy.name, replace(known, axes=(name,)))
            else:
                self.module.decide(copy.name, self._beside("copy", value, name, reader))
        if not names:
            known = self.module.decision(value.name)
            self.module.decide(copy.name, known or Decision(f"copy of %{value.name}", value.name))

    def held(self, given: Value, held: Value) -> None:
        """What readers meet of an annotated value takes its name and annotation; what its node produces gets another.

        Why it is given so: for an axis that the annotation brought, because another value of the node has it.
        """
        name, node = given.name, given.node
        assert node is not None
        other = held.name
        held.rename("")
        given.rename(other)
        held.rename(name)
        known = self.module.decisions.get(name, [])
        had, has = cutting_names(given.sharding), cutting_names(held.sharding)
        for axis in had:
            about = next((decision for decision in known if axis in decision.axes), None)
            if about is None or axis in has:
                about = _through(node, axis, given) or Decision(f"{node.title} produces it so", name)
            self.module.decide(other, replace(about, axes=(axis,)))
            if axis not in has:
                self._instead[name, axis] = other
        if not had:
            self.module.decide(other, Decision(f"{node.title} produces it in full", None))
        self.module.decisions[name] = [decision for decision in known if not set(decision.axes) - set(has)]

    def moved(self, value: Value, result: Value, op: str, move: LoggedRedistribution) -> None:
        """One collective of a move has made `result` of `value`."""
        if result is move.held:
            return  # It is sharded as annotated.
        gained = partial(self._gained, value, result, op, move)
        log_step(self.module, value, result, op, move.target, gained)

    def finish(self) -> None:
        """Let what follows an axis of a value follow the one that now has it."""
        for name, known in self.module.decisions.items() if self._instead else ():
            for number, decision in enumerate(known):
                keys = ((decision.follows or "", axis) for axis in decision.axes)
                other = next((self._instead[key] for key in keys if key in self._instead), None)
                if other not in (None, name):
                    known[number] = replace(decision, follows=other)

    def _gained(self, value: Value, result: Value, op: str, move: LoggedRedistribution, name: str) -> Decision:
        """Why a move brings an axis: it was to shard what the node produces, or cuts what its reader reads besides."""
        if move.held is not None:
            return Decision(f"{op} of %{value.name}, to be sharded as %{move.held.name}", move.held.name, (name,))
        known = self.module.decision(move.origin.name, name)
        is_about_axis = known is not None and (name in known.axes or known.follows is None)
        if move.origin.node is not move.party or known is None or not is_about_axis:
            return self._beside(op, value, name, move.party, move.origin)
        self._instead[move.origin.name, name] = result.name
        told = known.why if known.follows is None else f"{op} of %{value.name}: {known.why}"
        return Decision(told, known.follows, (name,))

    def _annotate(self, value: Value, result: Value) -> None:
        """What was annotated is the result now."""
        if value.name in self.module.annotated:
            self.module.annotated[result.name] = self.module.annotated[value.name]

    def _beside(self, op: str, value: Value, name: str, party: Node | None, origin: Value | None = None) -> Decision:
        """As another value that the axis cuts: of the node, of readers of what it gives, of what holds the body."""
        origin = origin or value
        readers = [user for user in origin.users if is_compute(user)] if origin.node is party else []
        nodes = [] if party is None else [party, *readers]
        holders = [node.graph.parent for node in nodes if node.is_return and node.graph is not None]
        for node in (*nodes, *(holder for holder in holders if holder is not None)):
            for other in (*node.inputs, *node.results):
                if other is not origin and name in cutting_names(other.sharding):
                    return Decision(f"{op} of %{value.name}, beside %{other.name} at {node.title}", other.name, (name,))
        # What the origin has not was given up on the way, and taken again.
        having = origin if name in cutting_names(origin.sharding) else value
        return Decision(f"{op} of %{value.name}", having.name, (name,))


def _through(node: Node, axis: str, given: Value) -> Decision | None:
    """That a result has an axis because an operand of its node has it."""
    assert given.sharding is not None
    is_sum = any(axis == partial.name for partial in given.sharding.partial)
    for operand in node.inputs:
        if axis in cutting_names(operand.sharding):
            if is_sum:
                why = f"{node.title} {VERBS[given.sharding.reduce]} over {axis}, which shards %{operand.name}"
                return Decision(why, operand.name)
            return Decision(f"follows %{operand.name} through {node.title}", operand.name)
    return None
