"""Gradients of sequences that are written out, and of lists that a loop appends to."""

import numpy as np
import onnx

from irpar.ir import Module
from irpar.onnx_io.load import to_module
from irpar.passes.infer_types import InferTypes
from tests.ops.gradients.proof import check_module

LISTED = """
    <ir_version: 10, opset_import: ["" : 21]>
    listed (double[2, 3] a, double[2, 3] b) => (double[4, 3] y, double[2, 2, 3] z, double[2, 3] u) {
      one = Constant <value = int64 {1}> ()
      s = SequenceConstruct (a, b)
      y = ConcatFromSequence <axis = 0> (s)
      z = ConcatFromSequence <axis = -3, new_axis = 1> (s)
      u = SequenceAt (s, one)
    }"""
APPENDED = """
    <ir_version: 10, opset_import: ["" : 21]>
    appended (double[2, 3] x, double[3] w) => (double[N, 3] y) {
      trips = Constant <value = int64 {4}> ()
      go = Constant <value = bool {1}> ()
      empty = SequenceEmpty <dtype = 11> ()
      last, rows = Loop (trips, go, x, empty) <
        body = trip (int64 i, bool on, double[2, 3] before, seq(double[2, 3]) list) =>
               (bool still, double[2, 3] after, seq(double[2, 3]) longer) {
          still = Identity (on)
          h = Mul (before, w)
          after = Tanh (h)
          longer = SequenceInsert (list, h)
        }>
      y = ConcatFromSequence <axis = 0> (rows)
    }"""


def module_of(text: str) -> Module:
    module = to_module(onnx.parser.parse_model(text))
    InferTypes().run(module)
    return module


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_a_list_that_is_written_out() -> None:
    check_module(module_of(LISTED), {"a": floats(2, 3), "b": floats(2, 3, seed=1)}, ["a", "b"])


def test_a_list_that_a_loop_appends_to() -> None:
    check_module(module_of(APPENDED), {"x": floats(2, 3), "w": floats(3, seed=1)}, ["x", "w"])


BAGS = """
    <ir_version: 10, opset_import: ["" : 21]>
    bags (double[6, 3] x, int64[5] ends) => (double[N, 3] y) {
      trips = Constant <value = int64 {4}> ()
      go = Constant <value = bool {1}> ()
      empty = SequenceEmpty <dtype = 11> ()
      rows = Loop (trips, go, empty) <
        body = trip (int64 i, bool on, seq(double[1, K]) list) => (bool still, seq(double[1, K]) longer) {
          still = Identity (on)
          first = Constant <value = int64[1] {0}> ()
          one = Constant <value = int64[1] {1}> ()
          here = Reshape (i, one)
          next = Add (here, one)
          start = Gather (ends, here)
          end = Gather (ends, next)
          bag = Slice (x, start, end)
          row = ReduceSum <keepdims = 1> (bag, first)
          longer = SequenceInsert (list, row)
        }>
      y = ConcatFromSequence <axis = 0> (rows)
    }"""


def test_rows_of_which_the_types_tell_one_dim() -> None:
    """Bags of an EmbeddingBag, of sizes that are computed; one of them is empty."""
    feeds = {"x": np.random.default_rng(0).standard_normal((6, 3)), "ends": np.int64([0, 2, 2, 5, 6])}
    check_module(module_of(BAGS), feeds, ["x"])
