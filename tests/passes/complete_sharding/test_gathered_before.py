"""What a normalisation reads is gathered, instead of what it gives, where its gradients then stay in parts."""

import numpy as np

import irpar
from irpar.ir import ArrayTensor, Module, clone_module
from irpar.ir.text.files import parse_module

BLOCK = """
graph @block(%x: f32[2, 16, 8]) -> (%y) opset 21 {
  %scale = constant : f32[8] [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] from "scale"
  %bias = constant : f32[8] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] from "bias"
  %up = constant : f32[8, 32] data("#up", 0, 1024) from "up"
  %down = constant : f32[32, 8] data("#down", 0, 1024) from "down"
  %n = LayerNormalization(%x, %scale, %bias) {axis=-1} : f32[2, 16, 8]
  %h = MatMul(%n, %up) : f32[2, 16, 32]
  %a = Relu(%h) : f32[2, 16, 32]
  %y = MatMul(%a, %down) : f32[2, 16, 8]
}
"""
SHARDINGS = {
    **{name: [None, ["tp"], None] for name in ("x", "y", "target")},
    "up": [None, ["tp"]],
    "down": [["tp"], None],
    "scale": [None],
    "bias": [None],
}


def step() -> Module:
    random = np.random.default_rng(0)
    weights = {
        name: ArrayTensor(random.standard_normal(shape).astype(np.float32))
        for name, shape in (("#up", (8, 32)), ("#down", (32, 8)))
    }
    return irpar.train_step(parse_module(BLOCK, resources=weights), loss="mse", optimizer="sgd")


def test_only_vectors_are_reduced_for_a_normalisation():
    module = clone_module(step())
    irpar.annotate(module, SHARDINGS)
    plan = irpar.partition(module, "tp=4").plan
    sent = [(entry["phase"], entry["kind"], entry["value"].partition("_")[0]) for entry in plan.collectives]
    assert sent == [
        ("forward", "all_gather", "x"),
        ("forward", "reduce_scatter", "y"),
        ("forward", "all_reduce", "loss"),
        ("backward", "all_gather", "grad.forward"),
        ("backward", "all_reduce", "grad.scale"),
        ("backward", "all_reduce", "grad.bias"),
    ]


def test_the_numbers_are_those_of_one_device():
    module = step()
    random = np.random.default_rng(1)
    batch = {name: random.standard_normal((2, 16, 8)).astype(np.float32) for name in ("x", "target")}
    with irpar.partition(module, "one=1").trainer(learning_rate=0.1) as trainer:
        losses, state = [trainer.step(batch) for _ in range(3)], trainer.read_all()
    irpar.annotate(module, SHARDINGS)
    with irpar.partition(module, "tp=4").trainer(learning_rate=0.1) as trainer:
        np.testing.assert_allclose([trainer.step(batch) for _ in range(3)], losses, rtol=1e-5)
        for name, array in trainer.read_all().items():
            np.testing.assert_allclose(array, state[name], rtol=1e-4, atol=1e-6)
