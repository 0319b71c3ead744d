"""The builder, and rewriting by patterns."""

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Value, parse_module, rewrite, verify

TEXT = """
graph @g(%x: f32[2]) -> (%c) opset 21, "com.x" 3 {
  %a = Neg(%x) {| phase=backward, stage=2, place=host} : f32[2] from "/neg" scope "model"
  %b = Neg(%a) : f32[2] from "/neg2"
  %c = Relu(%b) : f32[2] from "/relu"
}
"""


def test_new_nodes_stand_before_the_anchor_with_the_facts_of_the_origin() -> None:
    module = parse_module(TEXT)
    graph = module.graph
    neg = graph.value("a").node
    assert neg is not None
    builder = Builder(graph, module.opsets, before=graph.value("b").node, like=neg)
    value = builder.op("Abs", [neg.result], {"k": 1}, type=TensorType(DType.F32, (2,)), name="abs")
    node = value.node
    assert node is not None
    assert [other.op_type for other in graph] == ["Neg", "Abs", "Neg", "Relu"]
    assert (node.source, node.scope, node.phase, node.stage, node.place) == ("/neg", "model", "backward", 2, "host")
    assert (node.version, value.source, node.name) == (21, None, "")


def test_versions_and_constants() -> None:
    module = parse_module(TEXT)
    builder = Builder(module.graph, module.opsets)
    assert builder.node("Op", [], domain="com.x").version == 3
    assert builder.node("Op", [], domain="irpar").version == 1
    assert builder.node("Op", [], domain="unknown").version == 1
    constant = builder.constant([1, 2])
    assert (str(constant.type), constant.name) == ("i64[2]", "const")
    assert builder.constant(np.float32(1)).type == TensorType(DType.F32, ())


def double_negation(node: Node, builder: Builder) -> Value | None:
    (operand,) = node.inputs
    inner = operand.node
    return inner.inputs[0] if inner is not None and inner.op_type == "Neg" else None


def test_rewriting_replaces_and_keeps_sources() -> None:
    module = parse_module(TEXT)
    assert rewrite(module.graph, module.opsets, {"Neg": double_negation}) == 1
    relu = module.graph.last
    assert relu is not None
    assert relu.inputs == (module.graph.value("x"),)
    verify(module)


def test_readers_of_a_replaced_result_are_looked_at_again() -> None:
    module = parse_module(
        "graph @g(%x: f32[2]) -> (%d) {\n"
        + "".join(f"  %{b} = Neg(%{a}) : f32[2]\n" for a, b in zip("xabc", "abcd", strict=True))
        + "}\n"
    )
    graph = module.graph
    # -(-x) = x at %b makes -(-(b)) = x at %d; the nodes that lost their readers stay for dce.
    assert rewrite(graph, module.opsets, {"Neg": double_negation}) >= 2
    assert graph.outputs == (graph.value("x"),)
    verify(module)


def test_a_pattern_that_makes_new_matches_runs_to_the_end() -> None:
    module = parse_module("graph @g(%x: f32[2]) -> (%y) {\n  %y = Countdown(%x) {n=5} : f32[2]\n}\n")

    def countdown(node: Node, builder: Builder) -> Value | None:
        n = node.attributes["n"]
        assert isinstance(n, int)
        return builder.op("Countdown", [node.inputs[0]], {"n": n - 1}) if n else None

    assert rewrite(module.graph, module.opsets, {"Countdown": countdown}) == 5
    assert [node.attributes["n"] for node in module.graph] == [0]


def test_new_results_take_the_names_of_those_that_they_replace() -> None:
    module = parse_module(TEXT)

    def absolute(node: Node, builder: Builder) -> Value:
        return builder.op("Abs", node.inputs, type=node.result.type)

    assert rewrite(module.graph, module.opsets, {"Relu": absolute}) == 1
    result = module.graph.outputs[0]
    assert (result.name, result.source) == ("c", "c")
    verify(module)
    # A value that was there before keeps its own.
    assert rewrite(module.graph, module.opsets, {"Abs": lambda node, _: node.inputs[0]}) == 1
    assert module.graph.outputs[0].name == "b"
