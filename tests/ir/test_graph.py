"""The graph: use lists, insertion and erasure, names, order; random edits keep it valid."""

import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import ArrayTensor, DType, Graph, Module, Node, TensorType, Value, captured_or_read, parse_module, verify
from tests.budget import budget
from tests.patience import patient

F32 = TensorType(DType.F32, (2,))

CHAIN = """
graph @g(%x: f32[2]) -> (%c) opset 21 {
  %a = Neg(%x) : f32[2] from "/a"
  %b = Add(%a, %a) : f32[2] from "/b"
  %c = Relu(%b) : f32[2] from "/c"
}
"""


def chain() -> tuple[Module, Graph, list[Node]]:
    module = parse_module(CHAIN)
    return module, module.graph, list(module.graph)


def kinds(graph: Graph) -> list[str]:
    return [node.op_type for node in graph]


def test_uses() -> None:
    _, graph, (neg, add, relu) = chain()
    a, c = neg.result, relu.result
    assert a.uses == ((add, 0), (add, 1))
    assert a.users == (add,)
    assert c.is_output
    assert not a.is_output
    assert c.uses == ((graph.return_node, 0),)
    assert graph.value("x").is_input
    assert graph.value("x").owner is graph is a.owner


def test_operators_are_called_by_domain_and_type() -> None:
    assert [Node("Relu").operator, Node("Gelu", domain="com.microsoft").operator] == ["Relu", "com.microsoft.Gelu"]


def test_replacing_uses() -> None:
    module, graph, (neg, add, _) = chain()
    x = graph.value("x")
    neg.result.replace_uses(x, only=[(add, 1)])
    assert add.operands == (neg.result, x)
    neg.result.replace_uses(x)
    assert not neg.result.has_uses
    neg.erase()
    assert kinds(graph) == ["Add", "Relu"]
    verify(module)


def test_replace_hands_the_source_on_and_erases() -> None:
    module, graph, (neg, add, _) = chain()
    made = graph.insert_before(add, Node("Abs", [graph.value("x")], results=[Value("new", F32)]))
    neg.replace([made.result])
    assert made.result.source == "a"
    assert add.operands == (made.result, made.result)
    assert "a" not in graph.names.table
    verify(module)


def test_what_is_still_used_cannot_go() -> None:
    _, graph, (neg, *_) = chain()
    with pytest.raises(ValueError, match="%a is still used, by %b = Add"):
        neg.erase()
    with pytest.raises(ValueError, match="%x is still used"):
        graph.remove_input(graph.value("x"))
    constant = graph.add_constant(ArrayTensor(np.zeros(2)), "k")
    neg.set_operand(0, constant)
    with pytest.raises(ValueError, match="%k is still used"):
        graph.remove_constant(constant)
    with pytest.raises(ValueError, match="is in a graph already"):
        graph.append(neg)


def test_inputs_and_constants_go() -> None:
    module, graph, (neg, *_) = chain()
    first, x = graph.add_input("first"), graph.value("x")
    constant = graph.add_constant(ArrayTensor(np.zeros(2, np.float32)), "k")
    neg.set_operand(0, constant)
    graph.remove_input(x)
    assert (first.index, graph.inputs) == (0, [first])
    neg.set_operand(0, None)
    graph.remove_constant(constant)
    assert neg.operands == (None,)
    assert neg.inputs == ()
    verify(module)


def test_insertion_and_moves() -> None:
    module, graph, (_, add, relu) = chain()
    graph.insert_before(graph.return_node, Node("Last", results=0))
    graph.insert_after(add, Node("Middle", results=0))
    graph.insert_before(graph.first or add, Node("First", results=0))
    assert kinds(graph) == ["First", "Neg", "Add", "Middle", "Relu", "Last"]
    assert [node.op_type for node in reversed(graph)] == kinds(graph)[::-1]
    relu.detach()
    graph.insert_after(add, relu)
    assert kinds(graph) == ["First", "Neg", "Add", "Relu", "Middle", "Last"]
    assert len(graph) == 6
    assert (graph.last and graph.last.op_type, relu.previous, relu.next and relu.next.op_type) == (
        "Last",
        add,
        "Middle",
    )
    verify(module)


def test_order_is_known_after_edits() -> None:
    _, graph, (neg, add, relu) = chain()
    assert graph.is_before(neg, relu)
    made = graph.insert_before(add, Node("Op", results=0))
    assert graph.is_before(neg, made)
    assert graph.is_before(made, add)
    assert graph.is_before(relu, graph.return_node)
    assert not graph.is_before(graph.return_node, relu)


def test_a_walk_survives_erasing_and_inserting() -> None:
    _, graph, nodes = chain()
    seen = []
    for node in graph:
        seen.append(node.op_type)
        if node.op_type == "Neg":
            graph.insert_after(node, Node("Fresh", results=0))
        if node.op_type == "Fresh":
            node.erase()
    assert seen == ["Neg", "Fresh", "Add", "Relu"]
    assert list(graph) == nodes


def test_a_new_value_does_not_pass_for_one_that_is_gone() -> None:
    graph = Graph("g")
    x = graph.add_input("x", F32)
    first, second = (graph.append(Node("Neg", [x], results=[Value("split", F32)])).result for _ in range(2))
    other = graph.append(Node("Relu", [x], results=[Value("part_1", F32)])).result
    assert (first.name, second.name) == ("split", "split_1")
    assert other.node is not None
    other.node.erase()
    graph.append(Node("Abs", [x], results=[Value("part", F32)]))
    assert graph.append(Node("Abs", [x], results=[Value("part", F32)])).result.name == "part_2"
    assert graph.append(Node("Abs", [x], results=[Value("part_1", F32)])).result.name == "part_1"


def test_names_are_unique_and_freed() -> None:
    _, graph, (neg, *_) = chain()
    made = graph.append(Node("Op", [], results=[Value("a"), Value(""), Value("a")]))
    assert [value.name for value in made.results] == ["a_1", "v_1", "a_2"]
    neg.result.rename("z")
    assert "a" not in graph.names.table
    made.results[0].rename("z")
    assert made.results[0].name == "z_1"
    made.erase()
    assert set(graph.names.table) == {"x", "z", "b", "c"}


def test_results_can_be_added_and_dropped() -> None:
    module, graph, (neg, *_) = chain()
    more = neg.add_result(Value("more", F32))
    assert (more.index, more.node, graph.value("more")) == (1, neg, more)
    with pytest.raises(ValueError, match="%a is still used"):
        neg.set_results([more])
    neg.set_results([neg.results[0]])
    assert "more" not in graph.names.table
    verify(module)


def test_outputs_keep_their_names() -> None:
    module, graph, (neg, *_) = chain()
    graph.set_outputs([neg.result])
    assert (graph.outputs, graph.output_names) == ((neg.result,), ["c"])
    graph.set_outputs([neg.result, graph.value("x")])
    assert graph.output_names == ["a", "x"]
    graph.set_outputs([graph.value("x")], ["y"])
    assert graph.output_names == ["y"]
    verify(module)


NESTED = """
graph @g(%x: f32[2], %go: bool[]) -> (%y) opset 21 {
  %a = Neg(%x) : f32[2]
  %y = If(%go) {else_branch=graph @else() -> (%a) {
  }, then_branch=graph @then() -> (%t) {
    %s = If(%go) {then_branch=graph @inner() -> (%u) {
      %u = Relu(%a) : f32[2]
    }} : f32[2]
    %t = Relu(%s) : f32[2]
  }} : f32[2]
}
"""


def test_nested_graphs() -> None:
    module = parse_module(NESTED)
    graph = module.graph
    holder = graph.last
    assert holder is not None
    assert [nested.name for nested in graph.graphs()] == ["g", "else", "then", "inner"]
    assert [node.op_type for node in graph.walk()] == ["Neg", "If", "If", "Relu", "Relu"]
    assert [value.name for value in captured_or_read(holder)] == ["go", "a", "go", "a"]
    assert graph.value("u").owner is not None
    assert graph.value("u").owner.parent is graph.value("s").node  # type: ignore[union-attr]


def test_erasing_a_holder_frees_what_its_graphs_read() -> None:
    module = parse_module(NESTED)
    graph = module.graph
    holder = graph.last
    assert holder is not None
    graph.set_outputs([graph.value("a")])
    holder.erase()
    assert graph.value("a").users == (graph.return_node,)
    assert set(graph.names.table) == {"x", "go", "a"}
    verify(module)


def test_networkx_counts_what_nested_graphs_read() -> None:
    graph = parse_module(NESTED).graph
    neg, holder = graph
    made = graph.to_networkx()
    assert list(made) == [neg, holder]
    assert [value.name for value in made.edges[neg, holder]["values"]] == ["a", "a"]
    assert nx.is_directed_acyclic_graph(made)


def test_sorting_is_stable_and_names_cycles() -> None:
    module, graph, (neg, add, relu) = chain()
    graph.insert_after(relu, neg.detach())
    free = graph.insert_before(add, Node("Free", results=0))
    graph.sort()
    assert list(graph) == [free, neg, add, relu]
    assert list(reversed(graph)) == [relu, add, neg, free]
    verify(module)
    neg.set_operand(0, relu.result)
    with pytest.raises(
        ValueError, match=r"cycle of nodes: (/a -> /b -> /c -> /a|/b -> /c -> /a -> /b|/c -> /a -> /b -> /c)"
    ):
        graph.sort()


@settings(max_examples=budget(60), deadline=None)
@given(st.data())
def test_random_edits_leave_a_valid_graph(data: st.DataObject) -> None:
    graph = Graph("g")
    module = Module(graph, opsets={"": 21})
    for _ in range(2):
        graph.add_input("x", F32)
    for _ in range(data.draw(st.integers(1, 25))):
        nodes = list(graph)
        place = data.draw(st.integers(0, len(nodes)))
        visible = [*graph.inputs, *graph.constants, *(node.result for node in nodes[:place])]
        match data.draw(st.integers(0, 4)):
            case 0 | 1:
                operands = data.draw(st.lists(st.none() | st.sampled_from(visible), max_size=3))
                made = Node(
                    "Op", operands, results=[Value(data.draw(st.sampled_from(["", "x", "y"])), F32)], version=21
                )
                graph.insert_before(nodes[place] if place < len(nodes) else graph.return_node, made)
            case 2 if place < len(nodes):
                node = nodes[place]
                before = data.draw(st.sampled_from([value for value in visible if value is not node.result]))
                node.replace([before])
            case 3:
                graph.set_outputs(data.draw(st.lists(st.sampled_from(visible), max_size=2, unique=True)))
                graph.output_names = [value.name for value in graph.outputs]
            case 4 if nodes:
                data.draw(st.sampled_from(nodes)).result.rename(data.draw(st.sampled_from(["x", "z"])))
    verify(module)
    assert len(graph) == len(list(graph))


@pytest.mark.slow
def test_edits_of_a_long_graph_take_no_longer_each() -> None:
    graph = Graph("g")
    value = graph.add_input("x", F32)
    for _ in range(100_000):
        value = graph.append(Node("Op", [value], results=[Value("v", F32)])).result
    graph.set_outputs([value])
    start = time.perf_counter()
    for node in graph:
        if node.result.has_uses and node.inputs[0].node is not None:
            node.replace([node.inputs[0]])
    # Less than a second; steps that search the graph would take hours.
    assert time.perf_counter() - start < patient(30)
    assert len(graph) == 1


def test_absorbing_a_branch_moves_its_constants_and_nodes() -> None:
    module = parse_module(
        """
        graph @g(%p: bool[], %x: f32[2]) -> (%y) opset 21 {
          %y = If(%p) {
            then_branch = graph @then() -> (%a) { %one = constant : f32[] 1.0
              %s = Add(%x, %one) : f32[2]
              %a = Neg(%s) : f32[2] },
            else_branch = graph @else() -> (%b) { %b = Neg(%x) : f32[2] }
          } : f32[2]
          %z = Relu(%y) : f32[2]
        }
        """
    )
    graph = module.graph
    node = graph.first
    branch = node.attributes["then_branch"]
    (result,) = graph.absorb(branch, node)
    assert kinds(graph) == ["Add", "Neg", "If", "Relu"]
    assert (len(branch), len(branch.constants), branch.outputs) == (0, 0, ())
    assert [value.name for value in graph.constants] == ["one"]
    node.replace([result])
    assert kinds(graph) == ["Add", "Neg", "Relu"]
    verify(module)
