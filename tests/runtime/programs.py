"""Local programs as text, for the tests of the runtime."""

import textwrap
from collections.abc import Mapping

import numpy as np

from irpar.ir import ArrayTensor, Module
from irpar.ir.text.files import parse_module


def module(text: str, **resources: np.ndarray) -> Module:
    """Parse a module; keyword `w1` gives the numbers of `data("#w1", ...)`."""
    return parse_module(
        textwrap.dedent(text), resources={f"#{name}": ArrayTensor(array) for name, array in resources.items()}
    )


MLP = """
    mesh @m = ["dp"=2, "tp"=2]
    graph local @mlp(%x: f32[2, 6] of [4@dp, 6]) -> (%y) opset 21 ranks [0, 1, 2, 3] {
      %w1 = constant : f32[6, 4] of [6, 8@tp] whole data("#w1", 0, 192) from "w1"
      %w2 = constant : f32[4, 6] of [8@tp, 6] whole data("#w2", 0, 192) from "w2"
      %h = MatMul(%x, %w1) : f32[2, 4] of [4@dp, 8@tp] from "/fc1/MatMul" as "hidden"
      %r = Relu(%h) : f32[2, 4] of [4@dp, 8@tp] as "active"
      %p = MatMul(%r, %w2) : f32[2, 6] of [4@dp, 6] partial(sum: tp) from "/fc2/MatMul" as "y"
      %y = irpar.AllReduce(%p) {axes=["tp"], reduce="sum", id=0} : f32[2, 6] of [4@dp, 6] as "y"
    }
"""
"""Two layers, Megatron style; ranks are (dp, tp)."""


def mlp_weights() -> dict[str, np.ndarray]:
    """Whole weights for MLP."""
    random = np.random.default_rng(7)
    return {"w1": random.standard_normal((6, 8), np.float32), "w2": random.standard_normal((8, 6), np.float32)}


def mlp_reference(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """What MLP computes."""
    return np.maximum(x @ weights["w1"], 0) @ weights["w2"]


def mlp_input() -> dict[str, np.ndarray]:
    """An input for MLP."""
    return {"x": np.random.default_rng(8).standard_normal((4, 6), np.float32)}


STARTED = """
    mesh @m = ["x"=2]
    graph local @g(%a: f32[2] of [4@x], %b: f32[2] of [4@x]) -> (%y, %z) opset 21 ranks [0, 1] {
      %s = irpar.AllReduceStart(%a) {axes=["x"], reduce="sum", id=0} : inflight<f32[2]>
      %c = Neg(%b) : f32[2] of [4@x]
      %d = irpar.AllGather(%c) {axes=["x"], dim=0, id=1} : f32[4] of [4]
      %z = Exp(%d) : f32[4] of [4]
      %w = irpar.Wait(%s) {id=0} : f32[2] of [2]
      %y = Abs(%w) : f32[2] of [2]
    }
"""
"""An all-reduce under way while an all-gather is made and used."""
