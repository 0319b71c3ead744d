"""Operators that no engine knows are reported when a model is inspected, partitioned and run."""

import numpy as np
import pytest
from onnx import helper

from irpar import api
from irpar.advice import inspection
from irpar.analysis.engines import unknown_nodes, unknown_notes
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.kernels import registry
from irpar.onnx_io.load import to_module
from irpar.passes.infer_types import InferTypes
from irpar.runtime.errors import EngineError


def florp(domain: str = "my.") -> Module:
    return parse_module(f"graph @g(%x: f32[4, 8]) -> (%y) opset 18 {{ %y = {domain}Florp(%x) : f32[4, 8] }}")


def test_unknown_operators_are_found_and_known_ones_are_not() -> None:
    assert list(unknown_nodes(florp().graphs)) == ["my.Florp"]
    assert list(unknown_nodes(florp("").graphs)) == ["Florp"]
    text = "graph @g(%x: f32[4, 8]) -> (%y) opset 18 { %y = com.microsoft.Gelu(%x) : f32[4, 8] }"
    assert unknown_nodes(parse_module(text).graphs) == {}


def test_bodies_and_functions_are_looked_into() -> None:
    other, my = helper.make_opsetid("other", 1), helper.make_opsetid("my", 1)
    odd = helper.make_node("Odd", ["a"], ["b"], domain="other")
    call = helper.make_node("f", ["x"], ["t"], domain="my")
    body = helper.make_graph([call], "b", [], [helper.make_empty_tensor_value_info("t")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    inputs = [helper.make_tensor_value_info(name, dtype, []) for name, dtype in (("x", 1), ("c", 9))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", 18), my, other]
    functions = [helper.make_function("my", "f", ["a"], ["b"], [odd], opsets)]
    found = unknown_nodes(to_module(helper.make_model(graph, opset_imports=opsets, functions=functions)).graphs)
    assert {operator: len(nodes) for operator, nodes in found.items()} == {"other.Odd": 1}


def test_every_operator_of_onnx_that_has_a_kernel_is_known() -> None:
    for domain, op in registry.supported():
        text = f"{domain}.{op}" if domain else op
        assert unknown_nodes(parse_module(f"graph @g() -> () opset 28 {{ {text}() }}").graphs) == {}


def test_partitioning_goes_on_and_says_so() -> None:
    made = api.partition(florp(), "tp=2")
    assert made.plan.replicated[0]["why"] == "my.Florp has no sharding rule yet, and no engine knows it"
    assert made.passes is not None
    assert any("no engine can run my.Florp" in note for note in made.passes.notes)
    assert "no engine can run my.Florp" in inspection.inspect(florp()).notes[-1]
    assert InferTypes().run(florp()).notes == unknown_notes(florp().graphs)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_running_is_refused_without_advising_another_engine(engine: api.Engine) -> None:
    with pytest.raises(EngineError, match=r"no engine can run my\.Florp") as caught:
        api.partition(florp(), "tp=2").executor(engine)
    assert "engine=" not in str(caught.value)


def test_a_registered_kernel_makes_it_known(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.supported()  # What is loaded later enters the table that it meets.
    monkeypatch.setattr(registry._TABLE, "entries", dict(registry._TABLE.entries))
    registry.register("Florp", 1, lambda xp, x: x + 1, "my")
    made = api.partition(florp(), "tp=2")
    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(made.run({"x": x}, engine="numpy")["y"], x + 1)
    with pytest.raises(EngineError) as caught:
        made.executor("ort")
    assert caught.value.do == 'use engine="numpy"'
