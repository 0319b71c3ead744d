"""memory-order: a lower peak, the same bits, and communication in its order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak
from irpar.ir import ArrayTensor, DType, Graph, Module, Node, TensorType, Value
from irpar.passes.memory_order.program import program_of
from irpar.passes.memory_order.schedule import least_peak, peak_of
from irpar.runtime.executor import Executor
from irpar.sharding import IrparError
from irpar.verification.inputs import random_inputs

from .golden import read, run, run_pipeline


def test_what_shrinks_runs_as_soon_as_it_can(check_golden):
    check_golden(
        "memory-order",
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %n = constant : i64[2] [1000, 4]
          %m = constant : i64[1] [0]
          %p = Expand(%x, %n) : f32[1000, 4]
          %q = Exp(%p) : f32[1000, 4]
          %r = Expand(%x, %n) : f32[1000, 4]
          %s = Neg(%r) : f32[1000, 4]
          %a = ReduceSum(%q, %m) {keepdims=0} : f32[4]
          %b = ReduceSum(%s, %m) {keepdims=0} : f32[4]
          %y = Add(%a, %b) : f32[4]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %n = constant : i64[2] [1000, 4]
          %m = constant : i64[1] [0]
          %p = Expand(%x, %n) : f32[1000, 4]
          %q = Exp(%p) : f32[1000, 4]
          %a = ReduceSum(%q, %m) {keepdims=0} : f32[4]
          %r = Expand(%x, %n) : f32[1000, 4]
          %s = Neg(%r) : f32[1000, 4]
          %b = ReduceSum(%s, %m) {keepdims=0} : f32[4]
          %y = Add(%a, %b) : f32[4]
        }
        """,
    )


def test_what_grows_waits_until_it_is_read(rewritten):
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[4000] of [4000]) -> (%y) opset 21 ranks [0, 1] {
          %m = constant : i64[1] [0]
          %n = constant : i64[1] [4000]
          %e = Exp(%x) : f32[4000]
          %s = ReduceSum(%e, %m) : f32[1]
          %wide = Expand(%s, %n) : f32[4000]
          %t = Neg(%x) : f32[4000]
          %u = Exp(%t) : f32[4000]
          %v = ReduceSum(%u, %m) : f32[1]
          %y = Add(%wide, %v) : f32[4000]
        }
    """
    order = [node.result.name for node in run("memory-order", text).graph]
    assert order.index("wide") > order.index("u")


STAYS = [
    # Communication keeps its order, though the large operand of the second could go first.
    """
          %p = Exp(%x) : f32[4]
          %a = irpar.AllReduce(%p) {axes=["tp"], reduce="sum", id=0} : f32[4]
          %q = Neg(%x) : f32[4]
          %b = irpar.AllReduce(%q) {axes=["tp"], reduce="sum", id=1} : f32[4]
          %y = Add(%a, %b) : f32[4]""",
    # Between a start and its wait stands what runs meanwhile; here it grows what is held, and could wait.
    """
          %n = constant : i64[2] [1000, 4]
          %m = constant : i64[1] [0]
          %s = irpar.AllReduceStart(%x) {axes=["tp"], reduce="sum", id=0} : inflight<f32[4]>
          %p = Expand(%x, %n) : f32[1000, 4]
          %w = irpar.Wait(%s) {id=0} : f32[4]
          %q = Expand(%w, %n) : f32[1000, 4]
          %u = ReduceSum(%q, %m) {keepdims=0} : f32[4]
          %v = ReduceSum(%p, %m) {keepdims=0} : f32[4]
          %y = Add(%u, %v) : f32[4]""",
]


@pytest.mark.parametrize("lines", STAYS, ids=["order", "overlap"])
def test_communication_stays(lines):
    text = 'mesh @m = ["tp"=2]\ngraph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {' + lines + "\n}"
    before = [node.result.name for node in read(text).graph]
    after = [node.result.name for node in run("memory-order", text).graph]
    around = [name for name in before if name in "apsbw"]
    assert [name for name in after if name in around] == around


def test_a_body_is_ordered_too():
    text = """
        mesh @m = ["tp"=2]
        graph local @g(%c: bool[], %x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
          %y = If(%c) {
            then_branch = graph @t() -> (%z) {
              %n = constant : i64[2] [1000, 4]
              %m = constant : i64[1] [0]
              %p = Expand(%x, %n) : f32[1000, 4]
              %q = Expand(%x, %n) : f32[1000, 4]
              %a = ReduceSum(%p, %m) {keepdims=0} : f32[4]
              %b = ReduceSum(%q, %m) {keepdims=0} : f32[4]
              %z = Add(%a, %b) : f32[4]
            },
            else_branch = graph @e() -> (%d) {
              %d = Relu(%x) : f32[4]
            }
          } : f32[4]
        }
    """
    body = next(run("memory-order", text).graph.first.nested_graphs())
    assert [node.op_type for node in body] == ["Expand", "ReduceSum", "Expand", "ReduceSum", "Add"]


def test_global_view_is_refused():
    with pytest.raises(IrparError, match="memory-order needs the local view"):
        run("memory-order", 'mesh @m = ["tp"=2]\ngraph @g(%x: f32[4]) -> (%x) opset 21 {\n}')


NODES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99), st.integers(1, 6)), max_size=30)


def drawn_graph(nodes: list[tuple[int, int, int, int]]) -> Graph:
    """A program of sums, views and collectives, of sizes at random."""
    graph = Graph("g")
    graph.view = "local"
    graph.ranks = (0,)
    values = [graph.add_input("x", TensorType(DType.F32, (4,)))]
    values.append(graph.add_constant(ArrayTensor(np.zeros(4, np.float32)), "w"))
    for number, (kind, first, second, size) in enumerate(nodes):
        operands = [values[first % len(values)], values[second % len(values)]]
        made = Value(f"v{number}", TensorType(DType.F32, (4 * size,)))
        if kind == 0:
            attributes = {"axes": ["tp"], "reduce": "sum", "id": number}
            node = Node("AllReduce", operands[:1], attributes, domain="irpar", version=1, results=[made])
        elif kind == 1:
            node = Node("Identity", operands[:1], version=21, results=[made])
        else:
            node = Node("Sum", operands, version=13, results=[made])
        values.append(graph.append(node).result)
    graph.set_outputs([values[-1]])
    return graph


@given(NODES)
def test_any_program(nodes):
    """The order can run, holds no more, and communication keeps its order."""
    graph = drawn_graph(nodes)
    sent = [node for node in graph if node.domain]
    before, order = peak(graph).activation_bytes, list(graph)
    (record,) = run_pipeline("memory-order", module := Module(graph))
    assert module.graph is graph
    met = set(graph.inputs) | set(graph.constants)
    for node in graph:
        assert met >= set(node.inputs)
        met.update(node.results)
    assert [node for node in graph if node.domain] == sent
    assert sorted(node.result.name for node in graph) == sorted(node.result.name for node in order)
    after = peak(graph).activation_bytes
    assert after < before if record.changed else list(graph) == order


@given(NODES)
def test_a_schedule_knows_what_is_held(nodes):
    """In the order of the program as liveness counts it, inputs that nothing reads left out."""
    graph = drawn_graph(nodes)
    program = program_of(graph)
    unread = 0 if graph.inputs[0].uses else 16
    counted = peak(graph)
    if counted.node is not None:
        assert peak_of(program, range(len(program.touches))) == counted.activation_bytes
    assert peak_of(program.reversed(), range(len(program.touches))[::-1]) <= counted.activation_bytes + unread
    assert sorted(least_peak(program)) == list(range(len(program.touches)))


QUICK = ("mlp", "gpt")


EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in models.FAMILIES]


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("is_step", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_programs_hold_no_more_and_compute_the_same(is_step, family):
    model = models.build(family)
    partition = irpar.partition(irpar.train_step(model, optimizer="adamw") if is_step else irpar.load(model), "dp=2")
    module = partition.module
    before = [peak(graph).activation_bytes for graph in module.graphs]
    with Executor(module, irpar.Mesh({"dp": 2}), engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, module.graph)
        expected = executor.run(inputs)
    sent = [[node.attributes["id"] for node in graph if node.domain == "irpar"] for graph in module.graphs]
    run_pipeline("memory-order", module)
    assert sent == [[node.attributes["id"] for node in graph if node.domain == "irpar"] for graph in module.graphs]
    assert all(peak(graph).activation_bytes <= most for graph, most in zip(module.graphs, before, strict=True))
    with Executor(module, irpar.Mesh({"dp": 2}), engine="numpy") as executor:
        found = executor.run(inputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_a_unet_holds_less():
    module = irpar.partition(irpar.load(models.build("unet")), "dp=2").module
    before = peak(module.graph).activation_bytes
    (record,) = run_pipeline("memory-order", module)
    assert peak(module.graph).activation_bytes < 0.9 * before
    assert record.notes[0].startswith("a rank holds ")
