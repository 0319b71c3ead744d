"""Writing a schedule into a program."""

from collections.abc import Iterator, Sequence
from itertools import count

from irpar.analysis.newest import Newest
from irpar.ir import Graph, Node, captured_or_read
from irpar.ir.clone import clone_node
from irpar.ops.bodies import is_numbered
from irpar.ops.recomputed import AGAIN, FIRST, is_recomputed, mark_recomputed

from .of_program import Program


def write(program: Program, schedules: Sequence[Sequence[int]], first_id: int) -> int:
    """Let a program run as schedules say; a node that runs again stands just before the new node that comes next.

        a = f(x); b = g(a); d = h(b, a)     f g f h     a = f(x); b = g(a); a.again = f(x); d = h(b, a.again)

    Args:
        program: as it stands.
        schedules: of it and of the bodies in it, in the order of `parts`.
        first_id: the first id that no communication has.

    Returns:
        How many nodes run again.
    """
    ids = count(first_id)
    # Bodies first: copies of what holds them run as they do.
    planned = list(zip(program.parts, schedules, strict=True))[::-1]
    return sum(_Writer(part.source, ids).write(part, schedule) for part, schedule in planned)


class _Writer:
    def __init__(self, graph: Graph, ids: Iterator[int]) -> None:
        self.graph = graph
        self.ids = ids
        self.count = 0
        self.newest = Newest(graph)

    def write(self, program: Program, schedule: Sequence[int]) -> int:
        waiting: list[int] = []
        seen: set[int] = set()
        written: Node | None = None
        for place in schedule:
            if place in seen:
                waiting.append(place)
                continue
            seen.add(place)
            node = program.nodes[place]
            # Inputs come first; the further results of a node come with its first.
            if node is not None and node is not written:
                self._repeat(program, waiting, node)
                waiting.clear()
                self.newest.let_read(node)
                written = node
        self.newest.erase_unread_views()
        return self.count

    def _repeat(self, program: Program, places: Sequence[int], before: Node) -> None:
        """Put copies of nodes there, which read the newest of what they read; one for all results of a node."""
        copies: dict[Node, Node] = {}
        for place in places:
            node = program.nodes[place]
            assert node is not None
            if node not in copies:
                copies[node] = self._copy(node, before)
            for value in program.results[place]:
                self.newest.of[value] = copies[node].results[value.index]

    def _copy(self, node: Node, before: Node) -> Node:
        values = {value: self.newest.now(value, before) for value in captured_or_read(node)}
        made = clone_node(node, values, self.graph.names)
        made.phase, made.stage = before.phase, before.stage
        made.name = f"{node.name}.{AGAIN}" if node.name else ""
        for old, new in zip(node.results, made.results, strict=True):
            new.name, new.source = f"{old.name}.{AGAIN}", None
        if is_numbered(made):
            made.set_attribute("id", next(self.ids))
        if not is_recomputed(node):
            mark_recomputed(node, FIRST)
        mark_recomputed(made, AGAIN)
        self.graph.insert_before(before, made)
        self.count += 1
        return made
