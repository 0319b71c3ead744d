"""Copies beside what else a rank does: begun as early, or waited for as late, as hides them and as memory allows."""

from collections.abc import Callable, Sequence

from irpar.analysis.cost.model import CostOf
from irpar.analysis.memory.liveness import constant_bytes, held_bytes
from irpar.ir import Graph, Node, Value, holder_in
from irpar.ops.memory_copies import CopyWriter, copied_bytes, is_copy


def overlap(graph: Graph, limit: int | None, cost_of: CostOf, copy_cost: Callable[[int], int]) -> int:
    """Let copies of a placed program begin before they are needed; returns how many do.

        %d = irpar.Copy(%h) {to="device"}       %s = irpar.CopyStart(%h) {to="device"}
        %a = Exp(%x)                            %a = Exp(%x)
        %b = MatMul(%a, %d)                     %d = irpar.Wait(%s)
                                                %b = MatMul(%a, %d)

    A copy to the device begins before as many nodes as take as long as it does, a copy to the host is waited for behind
    as many; less where the device had no room for what is copied, or the value is not made or is read before.

    Args:
        graph: the outermost graph of a program, whose copies all wait for themselves.
        limit: bytes that the device may hold; None: as many as there are.
        cost_of: what a node takes.
        copy_cost: what a copy of so many bytes takes.
    """
    return _Overlap(graph, limit, cost_of, copy_cost).run()


class _Overlap:
    def __init__(self, graph: Graph, limit: int | None, cost_of: CostOf, copy_cost: Callable[[int], int]) -> None:
        self.graph = graph
        self.limit = limit
        self.cost_of = cost_of
        self.copy_cost = copy_cost
        self.nodes = list(graph)
        self.places = {node: place for place, node in enumerate(self.nodes)}
        self.places[graph.return_node] = len(self.nodes)
        fixed = constant_bytes(graph)
        held = {node: nbytes + fixed for node, nbytes in held_bytes(graph)}
        self.held = [held[node] for node in self.nodes]
        self.hidden = [0] * len(self.nodes)
        """Of the time of each node how much copies have behind them."""
        self.writer = CopyWriter(graph)

    def run(self) -> int:
        return sum(self._begin(node) for node in self.nodes if is_copy(node))

    def _begin(self, copy: Node) -> bool:
        """Let a copy begin before it is waited for, where something hides it."""
        value, result = copy.inputs[0], copy.result
        place = self.places[copy]
        if result.memory == "device":
            first = 0 if value.node is None else self.places.get(value.node, place - 1) + 1
            between = self._taken(copy, range(place - 1, first - 1, -1))
            start, wait = (between[-1] if between else place), place
        else:
            between = self._taken(copy, range(place + 1, self._first_reader(result)))
            start, wait = place, (between[-1] + 1 if between else place + 1)
        if not between:
            return False
        for each in between:
            self.held[each] += copied_bytes(copy)
        begun = self.writer.start(value, result.memory, self._node(start), like=copy, why=copy.doc)
        before = copy if result.memory == "device" else self._node(wait)
        waited = self.writer.wait(begun, before)
        result.replace_uses(waited)
        copy.erase()
        return True

    def _taken(self, copy: Node, places: Sequence[int]) -> list[int]:
        """The nodes, from the copy on, that hide it and beside which there is room for what it copies."""
        left, nbytes = self.copy_cost(copied_bytes(copy)), copied_bytes(copy)
        found: list[int] = []
        for place in places:
            if left <= 0 or (self.limit is not None and self.held[place] + nbytes > self.limit):
                break
            free = self._cost(place) - self.hidden[place]
            used = min(left, max(0, free))
            self.hidden[place] += used
            left -= used
            found.append(place)
        while found and left > 0 and not self._cost(found[-1]):
            found.pop()
        return found

    def _cost(self, place: int) -> int:
        """What a node takes beside which a copy can run: another copy is not."""
        node = self.nodes[place]
        return 0 if is_copy(node) else self.cost_of(node)

    def _first_reader(self, value: Value) -> int:
        places = [self.places[holder_in(user, self.graph)] for user in value.users]
        return min(places, default=len(self.nodes))

    def _node(self, place: int) -> Node | None:
        """The node that stands at a place; where it was a copy that began elsewhere, the next."""
        while place < len(self.nodes) and self.nodes[place].graph is None:
            place += 1
        return self.nodes[place] if place < len(self.nodes) else None
