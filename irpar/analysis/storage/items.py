"""What of a program may lie elsewhere than on the device while nothing reads it, and when it is read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.memory.replaced import held_for
from irpar.analysis.memory.sums import sums_of
from irpar.analysis.newest import view_roots
from irpar.ir import Graph, Node, State, Value
from irpar.ops import traits
from irpar.ops.memory_copies import can_be_copied, node_place

Kind = Literal["weights", "state", "activations"]


@dataclass(frozen=True, eq=False)
class MovableValue:
    """A value that is needed at some places of a program, and between them may lie elsewhere.

    Attributes:
        value: it; no view of another one.
        kind: weights: constants and the parameters of a step of training; state: all other state; activations: what
            nodes make.
        nbytes: its size.
        reads: the places of the nodes that read it, or a view of it, in order.
        made: the place of the node that makes it; None: it is there when a run begins.
        replaced: what replaces it, if it is state; None: it stays as it is.
        replaced_at: the place of the node that makes that.
        replaced_until: the place of the last node that reads that; of the one that makes it where none does.
        is_brought: whether bodies of loops bring it by themselves, so that it has to lie elsewhere.
    """

    value: Value
    kind: Kind
    nbytes: int
    reads: tuple[int, ...]
    made: int | None = None
    replaced: Value | None = None
    replaced_at: int = -1
    replaced_until: int = -1
    is_brought: bool = False

    @property
    def touched(self) -> tuple[int, ...]:
        """All places where it is needed."""
        return self.reads if self.made is None else (self.made, *self.reads)


def item_in(graph: Graph, item: MovableValue) -> MovableValue:
    """An item of a copy of its program."""
    replaced = None if item.replaced is None else graph.value(item.replaced.name)
    return replace(item, value=graph.value(item.value.name), replaced=replaced)


def items_of(graph: Graph, least: int) -> list[MovableValue]:
    """The items of a program that hold so many bytes, weights and state first, then what nodes make, in order.

    What a run gives is none of them, but for what replaces state; nor is what says where a rank is, or sizes. Neither
    is what the sum of a loop begins as, which takes no memory, nor what nodes make or replace and a started collective
    or copy takes: it stays until the wait.
    """
    roots = view_roots(graph)
    reads = reads_of(graph, roots)
    places = {node: place for place, node in enumerate(graph)}
    given = {roots.get(value, value) for value in graph.outputs}
    starts = {each.start for node in graph if node.attributes for each in sums_of(node)}
    taken = {roots.get(value, value) for node in graph if traits(node).starts for value in node.inputs}
    found = [*_weights(graph, given, reads), *_states(graph, given, reads, places)]
    new = {graph.output(state.output) for state in graph.states.values() if state.output is not None}
    for node, place in places.items():
        if node_place(node) != "device":
            continue
        found.extend(
            MovableValue(value, "activations", value_bytes(value), tuple(reads[value]), place)
            for value in node.results
            if value not in roots and value not in given and value not in new and value in reads and _is_stored(value)
        )
    return [
        item
        for item in found
        if item.nbytes >= max(least, 1)
        and item.reads
        and item.value not in starts
        and (item.kind == "weights" or item.value not in taken)
    ]


def _is_stored(value: Value) -> bool:
    """Whether copies can bring a value elsewhere."""
    return value.memory == "device" and value.is_static and can_be_copied(value.type)


def _weights(graph: Graph, given: Collection[Value], reads: Mapping[Value, Sequence[int]]) -> Iterator[MovableValue]:
    for value in graph.constants:
        if value in reads and value not in given and _is_stored(value) and not value.dtype.is_index:
            yield MovableValue(value, "weights", value_bytes(value), tuple(reads[value]))


def _states(
    graph: Graph, given: Collection[Value], reads: Mapping[Value, Sequence[int]], places: Mapping[Node, int]
) -> Iterator[MovableValue]:
    for value, state in graph.states.items():
        if not _is_stored(value) or value in given or value not in reads:
            continue
        kind: Kind = "weights" if state.kind == "parameter" else "state"
        item = MovableValue(value, kind, value_bytes(value), tuple(reads[value]))
        if state.output is None:
            yield item
        elif (place := _new_at(graph, state, places)) is not None:
            new = graph.output(state.output)
            until = max(reads.get(new, (place,)))
            yield replace(item, replaced=new, replaced_at=place, replaced_until=until)


def _new_at(graph: Graph, state: State, places: Mapping[Node, int]) -> int | None:
    """Where what replaces a state is made; None where that is not made on the device for this alone."""
    assert state.output is not None
    new = graph.output(state.output)
    is_alone = sum(user.is_return for user, _ in new.uses) == 1
    return places.get(new.node) if new.node is not None and is_alone and _is_stored(new) else None


def reads_of(graph: Graph, roots: Mapping[Value, Value]) -> dict[Value, list[int]]:
    """The places where each value, or a view of it, is read; what a started collective takes is until the wait."""
    found: dict[Value, list[int]] = {}
    for place, node in enumerate(graph):
        for value in dict.fromkeys(roots.get(each, each) for each in held_for(node)):
            found.setdefault(value, []).append(place)
    return found
