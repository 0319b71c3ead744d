"""Cutting graphs into segments and collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.ir import DType, Graph, Node, TensorType, Value
from irpar.runtime.errors import ProgramError
from irpar.runtime.instructions import Branch, Communicate, Compute, Free, Program
from irpar.runtime.program import build_program

from .programs import MLP, STARTED, mlp_weights, module

VECTOR = TensorType(DType.F32, (4,))


def names(values: tuple[Value, ...]) -> list[str]:
    return [value.name for value in values]


def shape_of(program: Program) -> list[str | int]:
    """Segments as the names of what they compute, collectives as ids."""
    return [
        step.collective.id
        if isinstance(step, Communicate)
        else " ".join(node.results[0].name for node in step.segment.nodes)
        for step in program.instructions
        if not isinstance(step, Free)
    ]


class LocalGraph:
    """A local graph of vectors, made node by node."""

    def __init__(self) -> None:
        self.graph = Graph("g")
        self.graph.view = "local"
        self.graph.ranks = (0,)
        self.x = self.graph.add_input("x", VECTOR)

    def compute(self, name: str, *operands: Value, op_type: str = "Sum") -> Value:
        return self.graph.append(Node(op_type, operands, version=13, results=[Value(name, VECTOR)])).result

    def reduce(self, name: str, operand: Value, number: int) -> Value:
        attributes = {"axes": ["tp"], "reduce": "sum", "id": number}
        node = Node("AllReduce", [operand], attributes, domain="irpar", version=1, results=[Value(name, VECTOR)])
        return self.graph.append(node).result

    def program(self, *outputs: Value, extra: tuple[Value, ...] = ()) -> Program:
        self.graph.set_outputs(outputs)
        return build_program(self.graph, extra)


def test_mlp_is_one_segment_and_one_collective() -> None:
    program = build_program(module(MLP, **mlp_weights()).graph)
    assert shape_of(program) == ["h r p", 0]
    segment = program.segments[0]
    assert (names(segment.inputs), names(segment.constants), names(segment.outputs)) == (["x"], ["w1", "w2"], ["p"])
    assert [names(step.values) for step in program.instructions if isinstance(step, Free)] == [["x"], ["p"]]


def test_the_order_is_that_of_the_graph() -> None:
    g = LocalGraph()
    late = g.reduce("late", g.x, 5)
    side = g.compute("side", g.x)
    early = g.reduce("early", g.x, 2)
    again = g.compute("again", g.x, op_type="Exp")
    assert shape_of(g.program(g.compute("y", early, late, side, again))) == [5, "side", 2, "again y"]


def test_dead_nodes_are_left_out_and_fetched_ones_kept() -> None:
    g = LocalGraph()
    dead = g.compute("dead", g.x)
    inner = g.compute("inner", g.x)
    y = g.compute("y", inner)
    assert shape_of(g.program(y)) == ["inner y"]
    program = g.program(y, extra=(inner, dead))
    assert shape_of(program) == ["dead inner y"]
    assert names(program.segments[0].outputs) == ["dead", "inner", "y"]


def test_a_dead_collective_still_runs() -> None:
    g = LocalGraph()
    g.reduce("unused", g.x, 0)
    program = g.program(g.compute("y", g.x))
    assert [collective.id for collective in program.collectives] == [0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), max_size=30))
def test_any_program_can_run(nodes: list[tuple[bool, int, int]]) -> None:
    """Every step finds what it reads, nothing freed is read, and outputs are there at the end."""
    g = LocalGraph()
    values = [g.x]
    for number, (is_collective, first, second) in enumerate(nodes):
        a, b = values[first % len(values)], values[second % len(values)]
        made = g.reduce(f"r{number}", a, second * 100 + number) if is_collective else g.compute(f"c{number}", a, b)
        values.append(made)
    program = g.program(values[-1], values[len(values) // 2])
    held = {g.x}
    for step in program.instructions:
        if isinstance(step, Free):
            held -= set(step.values)
        elif isinstance(step, Compute):
            assert held >= set(step.segment.inputs)
            inside = set(step.segment.inputs)
            for node in step.segment.nodes:
                assert inside >= set(node.inputs)
                inside |= set(node.results)
            assert inside >= set(step.segment.outputs)
            held |= set(step.segment.outputs)
        else:
            assert step.operand in held
            held.add(step.result)
    assert held >= set(program.outputs)
    assert held <= {*program.outputs, g.x}
    count = sum(node.domain == "irpar" for node in g.graph)
    assert len(program.collectives) == count
    assert len(program.segments) <= count + 1
    ran = [
        node
        for step in program.instructions
        if not isinstance(step, Free)
        for node in (step.segment.nodes if isinstance(step, Compute) else (step.result.node,))
    ]
    place = {node: index for index, node in enumerate(g.graph)}
    assert [place[node] for node in ran] == sorted(place[node] for node in ran)


NESTED = """
    mesh @m = ["tp"=2]
    graph local @g(%c: bool[], %x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
      %y = If(%c) {
        then_branch = graph @t() -> (%a) {
          %a = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=0} : f32[4] of [4]
        },
        else_branch = graph @e() -> (%b) {
          %b = Relu(%x) : f32[4] of [4]
        }
      } : f32[4] of [4]
    }
"""


def test_a_node_whose_body_communicates_is_a_step_of_its_own() -> None:
    program = build_program(module(NESTED).graph)
    step, freed = program.instructions
    assert isinstance(step, Branch)
    assert isinstance(freed, Free)
    assert [shape_of(body) for body in step.bodies.values()] == [[0], ["b"]]
    assert [collective.id for collective in program.collectives] == [0]
    # What a body reads from around it is freed by its holder: the body may run again.
    inside = [inner for body in step.bodies.values() for inner in body.instructions if isinstance(inner, Free)]
    assert all("x" not in names(inner.values) for inner in inside)
    assert names(freed.values) == ["c", "x"]


def test_collectives_in_bodies_that_are_not_run_trip_by_trip_are_refused() -> None:
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%s: seq<f32[4]>) -> (%y) opset 21 ranks [0, 1] {
          %y = SequenceMap(%s) {body = graph @b(%x: f32[4] of [4]) -> (%a) {
            %a = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=0} : f32[4] of [4]
          }} : seq<f32[4]>
        }
    """
    with pytest.raises(ProgramError, match="SequenceMap holds a body with collectives"):
        build_program(module(text).graph)


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("AllSlice", {"axes": ["tp"], "dim": 0}, r"irpar.AllSlice cannot be executed"),
        ("AllReduce", {"axes": ["tp"], "id": 0}, "missing: reduce"),
        ("AllReduce", {"axes": ["tp"], "id": 0, "reduce": "mean"}, "unknown reduction 'mean'"),
        ("AllGather", {"axes": ["tp"], "dim": 0}, "missing: id"),
    ],
)
def test_malformed_collectives(op_type: str, attributes: dict, message: str) -> None:
    g = LocalGraph()
    node = Node(op_type, [g.x], attributes, domain="irpar", version=1, results=[Value("r", VECTOR)])
    with pytest.raises(ProgramError, match=message):
        g.program(g.graph.append(node).result)


def test_what_stands_between_a_start_and_its_wait_is_computed_there() -> None:
    program = build_program(module(STARTED).graph)
    assert [type(step).__name__ for step in program.instructions if not isinstance(step, Free)] == [
        "Start", "Compute", "Communicate", "Compute", "Wait", "Compute",
    ]  # fmt: skip
    assert [[node.op_type for node in segment.nodes] for segment in program.segments] == [["Neg"], ["Exp"], ["Abs"]]
    assert [collective.id for collective in program.collectives] == [0, 1]
