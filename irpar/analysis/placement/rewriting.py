"""Writing a placement into a program."""

from collections.abc import Sequence

from irpar.analysis.newest import uses_at
from irpar.ir import Graph, Node, Place, Value, captured_or_read
from irpar.ir.clone import clone_node, clone_value
from irpar.ops import traits
from irpar.ops.memory_copies import CopyWriter, put

from .of_program import PlaceableProgram
from .reasons import Reasons


def write(program: PlaceableProgram, on_device: Sequence[bool], reasons: Reasons | None = None) -> dict[str, str]:
    """Let a program run as placed; returns why inputs, constants and state lie where they do, by name.

        %h = Gather(%table, %ids)                      %table, %ids in host
        %y = MatMul(%h, %w)

    becomes

        %h = Gather(%table, %ids) {| place=host}       in host
        %h_1 = irpar.Copy(%h) {to="device"}            where the first node on the device reads it
        %y = MatMul(%h_1, %w)

    What is copied to the host is so as soon as it is made; inputs, weights and state just before their first reader.
    The numbers of a constant that both sides read are there on both from the start, if they are on the device.

    Args:
        program: as it stands.
        on_device: of each of its units whether it is on the device.
        reasons: what copies say of themselves; None: nothing is said.
    """
    writer = _Writer(program, on_device, reasons)
    writer.write()
    return writer.why


class _Writer:
    def __init__(self, program: PlaceableProgram, on_device: Sequence[bool], reasons: Reasons | None) -> None:
        self.program = program
        self.reasons = reasons
        self.graph: Graph = program.source
        self.where: dict[Node | Value, Place] = {
            thing: "device" if on_device[unit] else "host" for thing, unit in program.unit_of.items()
        }
        self.copies = CopyWriter(self.graph)
        self.there: dict[tuple[Value, Place], Value] = {}
        self.twins: dict[tuple[Value, Place], Value] = {}
        self.why: dict[str, str] = {}

    def write(self) -> None:
        nodes = list(self.graph)
        for value in (*self.graph.inputs, *self.graph.constants):
            if value in self.where:
                value.memory = self.where[value]
                if self.reasons is not None:
                    self.why[value.name] = self.reasons.of_unit(self.program.unit_of[value])
        for node in nodes:
            if self._place(node) == "host":
                put(node, "host")
        for node in nodes:
            if node in self.where and not traits(node).reads_sizes:
                self._read_there(node, self.where[node])
        self._mend_views(nodes)

    def _place(self, thing: Node | Value) -> Place:
        """Where something is; a view where that is of which it is one."""
        if thing in self.where:
            return self.where[thing]
        value = thing.result if isinstance(thing, Node) else thing
        root = self.program.views.get(value, value)
        return self.where[root if root.node is None else root.node]

    def _read_there(self, node: Node, place: Place) -> None:
        """Let a node, and the graphs in it, read what is where it runs."""
        for value in dict.fromkeys(captured_or_read(node)):
            now = self._value(value, place, node)
            if now is not value:
                value.replace_uses(now, only=uses_at(value, node, self.graph))

    def _value(self, value: Value, place: Place, before: Node) -> Value:
        """What stands for a value on one side, made before a node where it is not there yet."""
        if self._place(value if value.node is None else value.node) == place:
            return value
        known = self.there.get((value, place))
        if known is None:
            if value in self.program.views:
                known = self._view(value, place, before)
            elif value.is_constant and place == "host":
                known = self._twin(value, place)
            else:
                known = self._copy(value, place, before)
            self.there[value, place] = known
        return known

    def _copy(self, value: Value, place: Place, before: Node) -> Value:
        maker = value.node
        why = "" if self.reasons is None else self.reasons.of_copy(value, place, before)
        if place == "host" and maker is not None:
            return self.copies.copy(value, place, maker.next, like=maker, why=why)
        return self.copies.copy(value, place, before, why=why)

    def _twin(self, value: Value, place: Place) -> Value:
        """The same numbers in a memory from the start."""
        if value.memory == place:
            return value
        known = self.twins.get((value, place))
        if known is None:
            made = clone_value(value)
            made.memory = place
            known = self.twins[value, place] = self.graph.adopt_constant(made)
            if self.reasons is not None and place == "host":
                self.why[known.name] = "nodes there read it, and others on the device, where it lies too"
        return known

    def _view(self, value: Value, place: Place, before: Node) -> Value:
        """The same view of what stands there for what it is a view of."""
        view = value.node
        assert view is not None
        made = clone_node(view, {}, self.graph.names)
        made.phase, made.stage = before.phase, before.stage
        for new in made.results:
            new.source = None
        made.set_operand(0, self._value(view.inputs[0], place, before))
        put(made, place)
        made.place = None if place == "device" else place
        self.graph.insert_before(before, made)
        self._give_sizes(made, place)
        return made.result

    def _give_sizes(self, view: Node, place: Place) -> None:
        """Let a view read its sizes where it is: constants."""
        for index, operand in enumerate(view.operands):
            if index and operand is not None:
                view.set_operand(index, self._twin(operand, place))

    def _mend_views(self, nodes: Sequence[Node]) -> None:
        """Views that nobody reads go, the others read sizes that are where they are."""
        for node in reversed(nodes):
            if node.graph is self.graph and node.results and node.results[0] in self.program.views:
                if not any(value.has_uses for value in node.results):
                    node.erase()
                else:
                    self._give_sizes(node, self._place(node))
        for value, _ in self.twins:
            if not value.has_uses:
                self.graph.remove_constant(value)
