"""Gradients through If, Loop and Scan, against differences in float64."""

import numpy as np
import onnx
import pytest

from irpar.ir import Module
from irpar.onnx_io.load import to_module
from irpar.passes.infer_types import InferTypes
from tests.ops.gradients.proof import check_module, gradients_of


def module_of(text: str) -> Module:
    module = to_module(onnx.parser.parse_model(text))
    InferTypes().run(module)
    return module


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


IF = """
    <ir_version: 10, opset_import: ["" : 21]>
    choice (bool c, double[3, 4] x, double[4] b) => (double[3, 4] y) {
      h = Tanh (x)
      y = If (c) <
        then_branch = taken () => (double[3, 4] t) { s = Mul (h, x)  t = Add (s, b) },
        else_branch = other () => (double[3, 4] e) { e = Sin (h) }
      >
    }"""

SCAN = """
    <ir_version: 10, opset_import: ["" : 21]>
    recurrence (double[2, 4] s0, double[5, 2, 4] xs, double[4, 4] w) => (double[2, 4] s, double[5, 2, 4] ys) {
      s, ys = Scan (s0, xs) <num_scan_inputs = 1,
        body = step (double[2, 4] before, double[2, 4] x) => (double[2, 4] after, double[2, 4] y) {
          h = MatMul (before, w)
          a = Add (h, x)
          after = Tanh (a)
          y = Mul (after, x)
        }>
    }"""

BACKWARDS = """
    <ir_version: 10, opset_import: ["" : 21]>
    recurrence (double[2, 4] s0, double[2, 5, 4] xs) => (double[2, 4] s, double[2, 4, 5] ys) {
      s, ys = Scan (s0, xs) <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
          scan_output_axes = [2], scan_output_directions = [1],
        body = step (double[2, 4] before, double[2, 4] x) => (double[2, 4] after, double[2, 4] y) {
          a = Mul (before, x)
          after = Add (a, x)
          y = Mul (after, after)
        }>
    }"""

LOOP = """
    <ir_version: 10, opset_import: ["" : 21]>
    repeated (int64 trips, double[2, 4] s0, double[4, 4] w) => (double[2, 4] s, double[N, 2, 4] ys) {
      go = Constant <value = bool {1}> ()
      s, ys = Loop (trips, go, s0) <
        body = trip (int64 i, bool on, double[2, 4] before) => (bool still, double[2, 4] after, double[2, 4] y) {
          still = Identity (on)
          h = MatMul (before, w)
          n = Cast <to = 11> (i)
          a = Add (h, n)
          after = Tanh (a)
          y = Mul (after, before)
        }>
    }"""

LOOP_WITH_IF = """
    <ir_version: 10, opset_import: ["" : 21]>
    repeated (int64 trips, double[2, 4] s0, double[4] b) => (double[2, 4] s) {
      go = Constant <value = bool {1}> ()
      two = Constant <value = int64 {2}> ()
      s = Loop (trips, go, s0) <
        body = trip (int64 i, bool on, double[2, 4] before) => (bool still, double[2, 4] after) {
          still = Identity (on)
          h = Sin (before)
          early = Less (i, two)
          after = If (early) <
            then_branch = first () => (double[2, 4] t) { m = Mul (h, before)  t = Add (m, b) },
            else_branch = later () => (double[2, 4] e) { e = Mul (h, b) }
          >
        }>
    }"""

NESTED = """
    <ir_version: 10, opset_import: ["" : 21]>
    nested (double[2, 3] s0, double[4, 2, 3] xs, double[3] w) => (double[2, 3] s) {
      three = Constant <value = int64 {3}> ()
      go = Constant <value = bool {1}> ()
      s = Scan (s0, xs) <num_scan_inputs = 1,
        body = outer (double[2, 3] before, double[2, 3] x) => (double[2, 3] after) {
          after = Loop (three, go, before) <
            body = inner (int64 i, bool on, double[2, 3] u) => (bool still, double[2, 3] v) {
              still = Identity (on)
              a = Mul (u, w)
              b = Add (a, x)
              v = Sin (b)
            }>
        }>
    }"""

LINEAR_LOOP = """
    <ir_version: 10, opset_import: ["" : 21]>
    powers (int64 trips, double[3] x) => (double[3] y) {
      go = Constant <value = bool {1}> ()
      y = Loop (trips, go, x) <
        body = trip (int64 i, bool on, double[3] before) => (bool still, double[3] after) {
          still = Identity (on)
          after = Add (before, before)
        }>
    }"""


UNEVEN = """
    <ir_version: 10, opset_import: ["" : 21]>
    triangle (int64 trips, double[3] x, double[3] w) => (double[3] y) {
      go = Constant <value = bool {1}> ()
      y = Loop (trips, go, x) <
        body = outer (int64 i, bool on, double[3] before) => (bool still, double[3] after) {
          still = Identity (on)
          begins = Identity (on)
          last, each = Loop (LIMIT, begins, before) <
            body = inner (int64 j, bool runs, double[3] u) => (bool goes_on, double[3] v, double[3] square) {
              goes_on = CONDITION
              a = Mul (u, w)
              b = Add (a, before)
              v = Sin (b)
              square = Mul (v, u)
            }>
          first = Constant <value = int64[1] {0}> ()
          total = ReduceSum <keepdims = 0> (each, first)
          after = Add (last, total)
        }>
    }"""

DEEP = """
    <ir_version: 10, opset_import: ["" : 21]>
    pyramid (int64 trips, double[3] x, double[3] w) => (double[3] y) {
      go = Constant <value = bool {1}> ()
      y = Loop (trips, go, x) <
        body = outer (int64 i, bool on, double[3] a) => (bool still, double[3] b) {
          still = Identity (on)
          b = Loop (i, on, a) <
            body = middle (int64 j, bool on2, double[3] c) => (bool still2, double[3] d) {
              still2 = Identity (on2)
              scaled = Mul (c, a)
              d = Loop (j, on2, scaled) <
                body = inner (int64 k, bool on3, double[3] e) => (bool still3, double[3] f) {
                  still3 = Identity (on3)
                  g = Mul (e, w)
                  f = Sin (g)
                }>
            }>
        }>
    }"""


@pytest.mark.parametrize("condition", [True, False])
def test_if(condition: bool) -> None:
    feeds = {"c": np.array(condition), "x": floats(3, 4), "b": floats(4, seed=1)}
    check_module(module_of(IF), feeds, ["x", "b"])


def test_scan() -> None:
    feeds = {"s0": floats(2, 4), "xs": floats(5, 2, 4, seed=1), "w": floats(4, 4, seed=2)}
    check_module(module_of(SCAN), feeds, ["s0", "xs", "w"])
    check_module(module_of(SCAN), feeds, ["w"])
    check_module(module_of(SCAN), feeds, ["xs"])


def test_scan_backwards_along_other_axes() -> None:
    feeds = {"s0": floats(2, 4), "xs": floats(2, 5, 4, seed=1)}
    check_module(module_of(BACKWARDS), feeds, ["s0", "xs"])


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_loop_of_any_number_of_trips(trips: int) -> None:
    feeds = {"trips": np.array(trips), "s0": floats(2, 4), "w": floats(4, 4, seed=2)}
    check_module(module_of(LOOP), feeds, ["s0", "w"])


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_if_in_a_loop(trips: int) -> None:
    feeds = {"trips": np.array(trips), "s0": floats(2, 4), "b": floats(4, seed=2)}
    check_module(module_of(LOOP_WITH_IF), feeds, ["s0", "b"])


def test_loop_in_a_scan() -> None:
    feeds = {"s0": floats(2, 3), "xs": floats(4, 2, 3, seed=1), "w": floats(3, seed=2)}
    check_module(module_of(NESTED), feeds, ["s0", "xs", "w"])


@pytest.mark.parametrize("trips", [0, 3])
def test_loop_whose_gradient_reads_nothing_of_a_trip(trips: int) -> None:
    check_module(module_of(LINEAR_LOOP), {"trips": np.array(trips), "x": floats(3)}, ["x"])


def test_weights_of_batches_in_a_scan() -> None:
    """The gradient of w is one product behind the backward Scan, over trips, batch and rows."""
    text = SCAN.replace("double[2, 4]", "double[2, 3, 4]").replace("double[5, 2, 4]", "double[5, 2, 3, 4]")
    feeds = {"s0": floats(2, 3, 4), "xs": floats(5, 2, 3, 4, seed=1), "w": floats(4, 4, seed=2)}
    module = module_of(text)
    check_module(module, feeds, ["s0", "xs", "w"])
    equations = [node.attributes["equation"] for node in gradients_of(module, ["w"]).graph if node.op_type == "Einsum"]
    assert equations == ["Taby,Tabz->yz"]


@pytest.mark.parametrize("trips", [1, 3])
@pytest.mark.parametrize(
    ("limit", "condition"),
    [("i", "Identity (runs)"), ("trips", "Less (j, i)"), ("trips", "Identity (runs)")],
    ids=["limit", "condition", "alike"],
)
def test_loop_in_a_loop_of_other_trips_each_time(limit: str, condition: str, trips: int) -> None:
    """What the inner one collects is of another size each time: it is computed again instead of being saved."""
    module = module_of(UNEVEN.replace("LIMIT", limit).replace("CONDITION", condition))
    check_module(module, {"trips": np.array(trips), "x": floats(3), "w": floats(3, seed=1)}, ["x", "w"])
    loops = [node for node in gradients_of(module, ["x", "w"]).graph.walk() if node.op_type == "Loop"]
    is_alike = limit == "trips" and condition == "Identity (runs)"
    assert len(loops) == (4 if is_alike else 5)


@pytest.mark.parametrize("trips", [1, 2, 4])
def test_three_loops_of_other_trips_each_time(trips: int) -> None:
    check_module(module_of(DEEP), {"trips": np.array(trips), "x": floats(3), "w": floats(3, seed=1)}, ["x", "w"])
