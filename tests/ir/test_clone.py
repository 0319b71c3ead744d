"""Copies are equal, share tensors, and share nothing that can be changed."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings

from irpar.ir import (
    Module,
    clone_graph,
    clone_module,
    clone_node,
    parse_module,
    print_module,
    read_text,
    same_module,
    without_metadata,
)
from irpar.ir.verifier import verify
from tests.budget import budget

from .random_modules import modules

GOLDEN = Path(__file__).parent / "text" / "golden"


@settings(
    max_examples=budget(40), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(modules())
def test_a_copy_of_a_module_is_the_same(module: Module) -> None:
    before = print_module(module).text
    copy = clone_module(module)
    assert same_module(module, copy) is None
    for graph in copy.all_graphs():
        for node in tuple(graph):
            node.attributes.clear()
        graph.doc = "changed"
    assert print_module(module).text == before


def test_copies_are_valid() -> None:
    for path in sorted(GOLDEN.glob("*.irpar")):
        verify(clone_module(read_text(path)))


def test_calls_go_to_the_copies_of_the_functions() -> None:
    module = read_text(GOLDEN / "functions.irpar")
    copy = clone_module(module)
    for node in copy.graph:
        assert node.callee is not None
        assert copy.functions[node.callee.key] is node.callee
        assert module.functions[node.callee.key] is not node.callee


def test_constants_share_their_tensors() -> None:
    module = read_text(GOLDEN / "constants.irpar")
    copy = clone_module(module)
    assert [value.data for value in copy.graph.constants] == [value.data for value in module.graph.constants]


def test_a_node_is_copied_with_other_operands() -> None:
    module = parse_module('graph @g(%x: f32[2], %y: f32[2]) -> () {\n  %z = Neg(%x) {k=1} : f32[2] from "n"\n}\n')
    graph = module.graph
    (node,) = graph
    values = {graph.value("x"): graph.value("y")}
    copy = graph.append(clone_node(node, values))
    assert copy.inputs == (graph.value("y"),)
    assert values[node.result] is copy.result
    assert (copy.result.name, copy.source) == ("z_1", "n")
    verify(module)


def test_a_nested_graph_reads_the_copies_of_outer_values() -> None:
    module = read_text(GOLDEN / "control_flow.irpar")
    values: dict = {}
    copy = clone_graph(module.graph, values)
    inside = set(copy.graphs())
    for graph in inside:
        for node in (*graph, graph.return_node):
            assert all(value.owner in inside for value in node.inputs)
        assert graph.names is copy.names
        assert all(nested.parent is node for node in graph for nested in node.nested_graphs())


def test_metadata_is_left_out_of_what_is_read_only() -> None:
    text = (
        'graph @g(%x: f32[4] {meta={"a": "1"}}) -> (%y) opset 21 meta {"b": "2"} { %y = Relu(%x) : f32[4] doc "why" }'
    )
    module = parse_module(text)
    read = str(without_metadata(module))
    assert "meta" not in read
    assert 'doc "why"' in read
    assert str(module).count("meta") == 2
