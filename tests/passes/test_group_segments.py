"""group-segments: few segments, an order that holds no more, ids in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak
from irpar.analysis.segments import is_segment, stretches
from irpar.ir import ArrayTensor, DType, Graph, Module, Node, TensorType, Value, parse_module, print_module
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.sharding import IrparError
from irpar.verification.inputs import random_inputs

from .golden import read, run, run_pipeline

BEFORE = DEFAULT_PIPELINE.removesuffix(",group-segments")

HEAD = """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {"""


def program(*lines: str) -> str:
    """A program of four numbers; `%a = AllReduce(%x) 3` is written for a collective."""
    written = []
    for line in lines:
        head, is_sent, number = line.partition(") #")
        if is_sent:
            head = head.replace("AllReduce", "irpar.AllReduce")
            line = f'{head}) {{axes=["tp"], reduce="sum", id={number}}}'
        written.append(f"          {line} : f32[4]")
    return "\n".join((HEAD, *written, "        }\n"))


def check(check_golden, before: tuple[str, ...], after: tuple[str, ...], pipeline: str = "group-segments") -> None:
    check_golden(pipeline, program(*before), program(*after))


def test_a_segment_that_can_be_done_without_goes_to_its_neighbour(check_golden):
    check(
        check_golden,
        ("%a = AllReduce(%x) #0", "%side = Neg(%a)", "%b = AllReduce(%x) #1", "%y = Add(%side, %b)"),
        ("%a = AllReduce(%x) #0", "%b = AllReduce(%x) #1", "%side = Neg(%a)", "%y = Add(%side, %b)"),
    )


def test_what_a_later_collective_sends_is_computed_with_the_rest(check_golden):
    check(
        check_golden,
        ("%a = Neg(%x)", "%c = AllReduce(%a) #0", "%b = Exp(%x)", "%d = AllReduce(%b) #1", "%y = Add(%c, %d)"),
        ("%a = Neg(%x)", "%b = Exp(%x)", "%c = AllReduce(%a) #0", "%d = AllReduce(%b) #1", "%y = Add(%c, %d)"),
    )


def test_ids_follow_order(check_golden):
    check(
        check_golden,
        ("%a = AllReduce(%x) #7", "%b = AllReduce(%a) #3", "%y = Neg(%b)"),
        ("%a = AllReduce(%x) #0", "%b = AllReduce(%a) #1", "%y = Neg(%b)"),
    )


def test_as_written_only_numbers(check_golden):
    lines = ("%a = AllReduce(%x) #{}", "%side = Neg(%a)", "%b = AllReduce(%x) #{}", "%y = Add(%side, %b)")
    before = tuple(line.format(4 + place) for place, line in enumerate(lines))
    after = ("%a = AllReduce(%x) #0", lines[1], "%b = AllReduce(%x) #1", lines[3])
    check(check_golden, before, after, "group-segments{order=as-written}")


STAYS = [
    # What is read late is computed late: its segment is there anyway.
    ("%a = AllReduce(%x) #0", "%b = AllReduce(%a) #1", "%c = AllReduce(%b) #2", "%again = Exp(%x)", "%y = Add(%again, %c)"),
    # Computed again, for a collective: as early as it was the first time it would be held throughout.
    (
        "%e = Exp(%x)", "%a = AllReduce(%e) #0", "%b = AllReduce(%a) #1", "%c = AllReduce(%b) #2",
        "%again = Exp(%x)", "%d = AllReduce(%again) #3", "%y = Add(%d, %c)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("lines", STAYS)
def test_deliberate_order_stays(check_golden, lines):
    check(check_golden, lines, lines)


def test_phases_stay_apart(check_golden):
    lines = ["%e = Neg(%x)", "%a = AllReduce(%e) #0", "%b = Exp(%x)", "%d = AllReduce(%b) #1", "%y = Add(%a, %d)"]
    text = program(*lines).replace("Exp(%x) : f32[4]", "Exp(%x) {| phase=backward} : f32[4]")
    check_golden("group-segments", text, text)


def test_nothing_moves_where_more_would_be_held(rewritten):
    """Moved to the other, each of two large results would be held beside the other."""
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %n = constant : i64[1] [1000]
          %m = constant : i64[1] [0]
          %p = Expand(%x, %n) : f32[1000, 4]
          %a = ReduceSum(%p, %m) {keepdims=0} : f32[4]
          %c = irpar.AllReduce(%a) {axes=["tp"], reduce="sum", id=0} : f32[4]
          %q = Expand(%x, %n) : f32[2000, 4]
          %b = ReduceSum(%q, %m) {keepdims=0} : f32[4]
          %d = irpar.AllReduce(%b) {axes=["tp"], reduce="sum", id=1} : f32[4]
          %y = Add(%c, %d) : f32[4]
        }
    """
    module = read(text)
    before = peak(module.graph).activation_bytes
    run_pipeline("group-segments", module)
    assert peak(module.graph).activation_bytes <= before


def test_what_stands_between_a_start_and_its_wait_stays_there(check_golden):
    text = """
        mesh @m = ["x"=2]
        graph local @g(%a: f32[2] of [4@x], %b: f32[2] of [4@x]) -> (%y, %z) opset 21 ranks [0, 1] {
          %s = irpar.AllReduceStart(%a) {axes=["x"], reduce="sum", id=0} : inflight<f32[2]>
          %z = Exp(%b) : f32[2]
          %w = irpar.Wait(%s) {id=0} : f32[2]
          %y = Abs(%w) : f32[2]
        }
    """
    check_golden("group-segments", text, text)


def test_what_is_made_of_constants_stands_where_it_is_read(rewritten):
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %w = constant : f32[4] [1.0, 2.0, 3.0, 4.0]
          %wide = Identity(%w) : f32[4]
          %a = Neg(%x) : f32[4]
          %r = irpar.AllReduce(%a) {axes=["tp"], reduce="sum", id=0} : f32[4]
          %y = Add(%r, %wide) : f32[4]
        }
    """
    order = [node.op_type for node in run("group-segments", text).graph]
    assert order == ["Neg", "AllReduce", "Identity", "Add"]


def test_global_view_is_refused():
    with pytest.raises(IrparError, match="needs the local view"):
        run("group-segments", 'mesh @m = ["tp"=2]\ngraph @g(%x: f32[4]) -> (%x) opset 21 {\n}')


def test_bodies_that_communicate_are_arranged_too(rewritten):
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%c: bool[], %x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %y = If(%c) {
            then_branch = graph @t() -> (%s) {
              %a = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=0} : f32[4] of [4]
              %side = Neg(%a) : f32[4]
              %b = irpar.AllReduce(%x) {axes=["tp"], reduce="sum", id=1} : f32[4] of [4]
              %s = Add(%side, %b) : f32[4]
            },
            else_branch = graph @e() -> (%d) {
              %d = Relu(%x) : f32[4] of [4]
            }
          } : f32[4] of [4]
        }
    """
    body = next(run("group-segments", text).graph.first.nested_graphs())
    assert [node.op_type for node in body] == ["AllReduce", "AllReduce", "Neg", "Add"]


def segments(graph: Graph) -> int:
    return sum(map(is_segment, stretches(graph)))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99), st.integers(1, 6)), max_size=30))
def test_any_program(nodes):
    """The order can run, has no more segments, holds no more, and communication keeps its order."""
    graph = Graph("g")
    graph.view = "local"
    graph.ranks = (0,)
    values = [graph.add_input("x", TensorType(DType.F32, (4,)))]
    values.append(graph.add_constant(ArrayTensor(np.zeros(4, np.float32)), "w"))
    for number, (kind, first, second, size) in enumerate(nodes):
        operands = [values[first % len(values)], values[second % len(values)]]
        made = Value(f"v{number}", TensorType(DType.F32, (4 * size,)))
        if kind == 0:
            attributes = {"axes": ["tp"], "reduce": "sum", "id": 100 - number}
            node = Node("AllReduce", operands[:1], attributes, domain="irpar", version=1, results=[made])
        else:
            node = Node("Sum", operands, version=13, results=[made])
        values.append(graph.append(node).result)
    graph.set_outputs([values[-1]])
    module = Module(graph)
    sent = [node for node in graph if node.domain]
    before = peak(graph).activation_bytes, segments(graph)
    irpar.PassManager.parse("group-segments").run(module)
    met = set(graph.inputs) | set(graph.constants)
    for node in graph:
        assert met >= set(node.inputs)
        met.update(node.results)
    assert peak(graph).activation_bytes <= before[0]
    assert segments(graph) <= before[1]
    assert [node for node in graph if node.domain] == sent
    assert [node.attributes["id"] for node in sent] == list(range(len(sent)))


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_the_values_are_the_same(engine):
    """A decoder that reads what an encoder made: two segments come together with others."""
    model = models.build("t5")
    original = irpar.load(model)
    results = []
    for pipeline in (BEFORE, f"{BEFORE},group-segments"):
        partition = irpar.partition(original, irpar.Mesh({"tp": 2}), pipeline=pipeline)
        count = sum(map(is_segment, stretches(partition.module.graph)))
        with partition.executor(engine=engine) as executor:
            inputs = random_inputs(executor.inputs, partition.module.graph)
            results.append((count, executor.run(inputs)))
    (before, expected), (after, found) = results
    assert after <= before
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want)


def test_what_the_host_computes_stands_together_between_two_copies() -> None:
    text = """\
mesh @m = ["x"=1]

graph local @g(%x: f32[4], %h: f32[4] in host) -> (%y, %z) opset 21 ranks [0] {
  %a = Neg(%h) {| place=host} : f32[4] in host
  %b = Neg(%x) : f32[4]
  %c = Abs(%a) {| place=host} : f32[4] in host
  %d = irpar.Copy(%c) {to="device"} : f32[4]
  %y = Add(%b, %d) : f32[4]
  %z = irpar.Copy(%y) {id=9, to="host"} : f32[4] in host
}
"""
    module = parse_module(text)
    run_pipeline("group-segments", module)
    lines = print_module(module).text.splitlines()[2:8]
    assert lines == [
        "  %b = Neg(%x) : f32[4]",
        "  %a = Neg(%h) {| place=host} : f32[4] in host",
        "  %c = Abs(%a) {| place=host} : f32[4] in host",
        '  %d = irpar.Copy(%c) {to="device", id=0} : f32[4]',
        "  %y = Add(%b, %d) : f32[4]",
        '  %z = irpar.Copy(%y) {to="host", id=1} : f32[4] in host',
    ]
    (again,) = run_pipeline("group-segments", module)
    assert not again.changed
