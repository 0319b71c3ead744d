"""Whether layers that were planned came out alike, but for their names and the numbers of their weights."""

import itertools

from irpar.analysis.equal_nodes import attribute_key
from irpar.ir import Node, Value
from irpar.ir.value import NUMBERED

from .chain import MODEL, is_over_any_number, runs_of_layers
from .layer_data import LayerData
from .planned_program import PlannedProgram, places_of
from .units import NotAlike

_NODE_FACTS = ("domain", "op_type", "version", "callee", "phase", "stage", "place", "strategy")
_VALUE_FACTS = ("type", "sharding", "global_shape", "memory", "metadata")


def compare(program: PlannedProgram) -> None:
    """Compare the layer that stands for others with those beside it, and look who reads what it gives.

    Raises:
        NotAlike: see there.
    """
    for number in (MODEL - 1, MODEL + 1):
        _Comparison(program, number).run()
    _check_readers(program)
    _check_results(program)


def _check_readers(program: PlannedProgram) -> None:
    """What a layer gives is read in it and beside it, by the graph where it replaces state, or by what reads of all."""
    before, inside, behind = (
        {node for nodes in part for node in nodes} for part in program.parts[MODEL - 1 : MODEL + 2]
    )
    near = inside.union(behind, before if any(program.backward) else ())
    replacing = set(program.results_of(MODEL))
    for value in (*program.inner, *program.own):
        allowed = near if value in program.inner else inside
        for user in value.users:
            if user in allowed or (user.is_return and value in replacing):
                continue
            if value in program.own or not _reads_of_all(program, user):
                raise NotAlike(f"{user.title} reads %{value.name} from afar, and not the same of each layer")
            program.over_all[user] = None


def _reads_of_all(program: PlannedProgram, node: Node) -> bool:
    """Whether a node reads the same of each layer, one behind another."""
    if node in program.over_all:
        return True
    if node.is_return or not is_over_any_number(node):
        return False
    runs = runs_of_layers(node.inputs, program.given)
    near = [read for number, read in runs if number in range(MODEL - 1, MODEL + 2)]
    numbers = [number for number, _ in runs if number is not None]
    is_in_order = all(after == before + 1 for before, after in itertools.pairwise(numbers))
    return is_in_order and len(near) == 3 and len(set(near)) == 1


def _check_results(program: PlannedProgram) -> None:
    """What replaces state is computed at one place in all layers, and for each state anew."""
    told = []
    for number in (MODEL - 1, MODEL, MODEL + 1):
        places = places_of(program.parts[number])
        told.append([places.get(value) for value in program.results_of(number)])
    if any(None in places or len(set(places)) < len(places) or places != told[0] for places in told):
        raise NotAlike("states are replaced otherwise than in another layer")


class _Comparison:
    """Compares the layer that stands for others with another of the folded ones.

    Args:
        program: with both.
        number: of the other one.
    """

    def __init__(self, program: PlannedProgram, number: int) -> None:
        self.program = program
        self.number = number
        self.words = program.words
        self.around = program.folded_names(number)
        self.pairs: dict[Value, Value] = {}
        self.before, self.behind = (places_of(program.parts[beside]) for beside in (number - 1, number + 1))
        self.data = LayerData(program.chain, program.chain.kept[number])

    def run(self) -> None:
        program = self.program
        for mine, other in zip(program.parts[MODEL], program.parts[self.number], strict=True):
            if len(mine) != len(other):
                raise NotAlike(f"one layer has {len(mine)} nodes, the next {len(other)}")
            for node, same in zip(mine, other, strict=True):
                self._node(node, same)
        self._unread_constants()
        if self.number > MODEL:
            program.pairs = self.pairs

    def _node(self, node: Node, same: Node) -> None:
        if node.holds_graphs or same.holds_graphs:
            raise NotAlike(f"{node.title} holds a graph")
        texts = all(self._says(getattr(node, name), getattr(same, name)) for name in ("name", "source", "scope", "doc"))
        if not texts or any(getattr(node, name) != getattr(same, name) for name in (*_NODE_FACTS, "metadata")):
            raise NotAlike(f"{node.title} is not as {same.title} is")
        if not _have_equal_attributes(node, same):
            raise NotAlike(f"{node.title} has other attributes than {same.title}")
        pairs = zip(node.operands, same.operands, strict=False)
        if len(node.operands) != len(same.operands) or not all(self._operand(*pair) for pair in pairs):
            raise NotAlike(f"{node.title} reads otherwise than {same.title}")
        if len(node.results) != len(same.results):
            raise NotAlike(f"{node.title} gives otherwise than {same.title}")
        for value, other in zip(node.results, same.results, strict=True):
            self._value(value, other)

    def _says(self, text: str | None, other: str | None) -> bool:
        return self.words.optional(text, self.around) == other

    def _operand(self, value: Value | None, other: Value | None) -> bool:
        """Whether two nodes read the same there: of the layer, of the one before, or what all share."""
        if value is None or other is None:
            return value is other
        if value in self.pairs:
            return self.pairs[value] is other
        if value in self.program.before and other in self.before and self._are_given_alike(value, other):
            return True
        if value in self.program.behind and self.program.behind[value] == self.behind.get(other):
            return True
        if value is other:
            program = self.program
            return not any(value in given for given in (program.inner, program.before, program.behind))
        if value.node is not None or other.node is not None:
            return False
        self._constant(value, other)
        return True

    def _are_given_alike(self, value: Value, other: Value) -> bool:
        """Whether what the layers before two give is the same; the first of all may have other nodes besides."""
        if self.number > MODEL:
            return self.program.before[value] == self.before[other]
        return self._says(value.name, other.name) and _lie_alike(value, other)

    def _constant(self, value: Value, other: Value) -> None:
        self._value(value, other)
        if not self.data.are_alike(value, other):
            raise NotAlike(f"%{value.name} has other numbers than %{other.name}")
        self.program.own[value] = None

    def _unread_constants(self) -> None:
        """Constants of the layers that nothing reads any more are there in all of them, or in none."""
        table, chain = self.program.graph.names.table, self.program.chain
        left = [
            [table.get(value.name) for value in chain.own_of(chain.kept[number])] for number in (MODEL, self.number)
        ]
        for value, other in zip(*left, strict=True):
            unread = [each is not None and each.node is None and not each.has_uses for each in (value, other)]
            if unread[0] != unread[1]:
                raise NotAlike("a constant is read in one layer alone")
            if unread[0] and value is not None and other is not None:
                self._constant(value, other)

    def _value(self, value: Value, other: Value) -> None:
        self.pairs[value] = other
        texts = self._says(value.source, other.source) and self._says(value.doc, other.doc)
        if not texts or not _lie_alike(value, other):
            raise NotAlike(f"%{value.name} lies otherwise than %{other.name}")
        if not self._says(value.name, other.name):
            self._counts_on(value.name, other.name)

    def _counts_on(self, name: str, other: str) -> None:
        mine, its = NUMBERED.fullmatch(name), NUMBERED.fullmatch(other)
        if mine is not None and its is not None and mine[1] == its[1]:
            step, rest = divmod(int(its[2]) - int(mine[2]), self.number - MODEL)
            if step and not rest and self.program.steps.setdefault(name, step) == step:
                return
        raise NotAlike(f"%{name} is called %{other} in another layer")


def _lie_alike(value: Value, other: Value) -> bool:
    return all(getattr(value, name) == getattr(other, name) for name in _VALUE_FACTS)


def _have_equal_attributes(node: Node, same: Node) -> bool:
    if node.attributes.keys() != same.attributes.keys():
        return False
    for name, mine in node.attributes.items():
        other, key = same.attributes[name], attribute_key(mine)
        if name != "id" and mine is not other and (key is None or key != attribute_key(other)):
            return False
    return True
