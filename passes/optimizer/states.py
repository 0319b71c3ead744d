"""What an update keeps from step to step: parameters, masters, moments, counters."""

from irpar.ir import Graph, Tensor, TensorType, Value
from irpar.ir.added_input import add_named_input
from irpar.ir.state import StateKind


class States:
    """The states that the pass makes of values of a graph, and what replaces them.

    Attributes:
        graph: it.
        kinds: state to its kind, what it begins with (None: zeros) and the parameter that it belongs to, if one.
        after: state to what is there after a run.
        taken: names that no new state can have.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds: dict[Value, tuple[StateKind, Tensor | None, str | None]] = {}
        self.after: dict[Value, Value] = {}
        self.taken = {value.source_name for value in (*graph.inputs, *graph.constants)}

    def add(
        self, name: str, kind: StateKind, type_: TensorType, data: Tensor | None, *, parameter: str | None = None
    ) -> Value:
        """A new input that is state.

        Raises:
            TakenNameError: the graph has a tensor of that name.
        """
        value = add_named_input(self.graph, name, type_, self.taken)
        self.taken.add(name)
        self.kinds[value] = (kind, data, parameter)
        return value

    def adopt(self, value: Value, kind: StateKind) -> None:
        """Let an initializer or input be state."""
        data = value.data
        if value.is_constant:
            self.graph.constant_to_input(value)
        elif value in self.graph.states:
            data = self.graph.states.pop(value).data
        self.kinds[value] = (kind, data, None)

    def data(self, value: Value) -> Tensor | None:
        """What a state begins with."""
        return self.kinds[value][1]

    def replace(self, state: Value, value: Value) -> None:
        """Say what is there after a run."""
        self.after[state] = value
