"""Rows of products are cut by the axes of parameters too where these are smaller than what they are multiplied with."""

import re

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.pass_manager import PassManager
from tests.training.programs import with_weights

MLP = """
mesh @m = ["dp"=2, "tp"=4]
graph @mlp(%x: f32[ROWS@dp, 16], KIND%w1: f32[16, 32@tp], KIND%w2: f32[32@tp, 16]) -> (%y) opset 21 {
  %h = MatMul(%x, %w1) : f32[ROWS, 32]
  %a = Relu(%h) : f32[ROWS, 32]
  %y = MatMul(%a, %w2) : f32[ROWS@dp, 16]
}
"""
MANY, FEW = 512, 16
STEP = """
graph @step(%x: f64[ROWS, 16], %w1: f64[16, 32] from "w1", %w2: f64[32, 16] from "w2") -> (%y) opset 21 {
  %h = MatMul(%x, %w1) : f64[ROWS, 32]
  %a = Relu(%h) : f64[ROWS, 32]
  %y = MatMul(%a, %w2) : f64[ROWS, 16]
}
"""
CUTS = {"x": ["dp", None], "w1": ["dp", "tp"], "w2": ["tp", "dp"], "target": ["dp", None]}
WEIGHT_BYTES = 16 * 32 * 8


def completed(rows: int, kind: str = "state parameter ") -> Module:
    module = parse_module(MLP.replace("ROWS", str(rows)).replace("KIND", kind))
    PassManager.parse("complete-sharding,insert-redistribution").run(module)
    return module


def sent(module: Module) -> list[tuple[str, str]]:
    return [(node.op_type, node.inputs[0].name) for node in module.graph if node.domain == "irpar"]


def test_weights_are_brought_together_where_they_are_smaller() -> None:
    """Each device of tp has a fourth of the rows of its dp; y is wanted by dp alone."""
    module = completed(MANY)
    lies = {value.name: str(value.sharding) for value in module.graph.values()}
    assert [lies[name] for name in ("h", "a")] == ["[@(dp,tp), _]"] * 2
    assert {kind for kind in sent(module) if "w" in kind[1]} == {("AllGather", "w1"), ("AllGather", "w2")}
    assert not any(kind in ("AllReduce", "ReduceScatter") for kind, _ in sent(module))


@pytest.mark.parametrize(("rows", "kind"), [(FEW, "state parameter "), (MANY, "state cache "), (MANY, "")])
def test_other_activations_are_reduced(rows: int, kind: str) -> None:
    """Where they are smaller; and where weights are no parameters that a step trains."""
    module = completed(rows, kind)
    lies = {value.name: str(value.sharding) for value in module.graph.values()}
    assert [lies[name] for name in ("h", "a")] == ["[@dp, @tp]"] * 2
    assert [kind for kind, _ in sent(module)] == ["AllReduce"]


def test_it_is_explained() -> None:
    module = completed(MANY)
    for name in ("h", "a"):
        _, decision = module.chain(name, "tp")[-1]
        assert re.match(r"takes tp from %w[12] at MatMul of %[hy], which is gathered there", decision.why)


def partition_of(rows: int, mesh: str) -> irpar.Partition:
    random = np.random.default_rng(3)
    text = STEP.replace("ROWS", str(rows))
    model = with_weights(text, w1=random.standard_normal((16, 32)), w2=random.standard_normal((32, 16)))
    step = irpar.train_step(model, loss="mse", optimizer="adamw", learning_rate=0.1)
    for name, cut in CUTS.items() if mesh != "d=1" else ():
        step.shard(name, cut)
    return irpar.partition(step, mesh)


@pytest.mark.parametrize("rows", [pytest.param(MANY, marks=pytest.mark.slow), 510])
def test_a_step_of_training_computes_the_same(rows: int) -> None:
    """Also of rows that do not divide."""
    random = np.random.default_rng(4)
    data = [{name: random.standard_normal((rows, 16)) for name in ("x", "target")} for _ in range(2)]
    results = []
    for mesh in ("d=1", "dp=2,tp=4"):
        with partition_of(rows, mesh).trainer(engine="numpy") as trainer:
            results.append(([trainer.step(each) for each in data], trainer.read_all()))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-10)
    for name, array in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], array, rtol=1e-10, atol=1e-12, err_msg=name)


def test_a_step_sends_weights_and_their_gradients_alone() -> None:
    """Of two weights over 8 devices, gathered once and reduced once, and the loss."""
    made = partition_of(MANY, "dp=2,tp=4").plan
    assert made.totals["sent_bytes"] <= 2 * 2 * WEIGHT_BYTES * 7 / 8 + 2 * 7 / 8 * 8
    assert {entry["kind"] for entry in made.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
