"""Random programs on random meshes with random annotations: the partition computes what the original computes.

A draw that failed once stands below as a small program of its own.
"""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import irpar
from irpar.ops import definitions

from .random_graphs import Array
from .random_operators import OPERATORS
from .random_programs import Outcome, Program, Spec, UnsteadyError, check, partitioned, programs

ANY_TIME = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]


class Tally:
    """What many draws came to."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def check(self, program: Program) -> None:
        """Check one program; every tenth is saved, opened and run from disk too."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = check(program, Path(folder), saved=self.ends.total() % 10 == 0)
            except UnsteadyError:
                outcome = Outcome("the original has no steady answer")
        self.operators.update(program.drawn)
        self.collectives.update(outcome.collectives)
        self.ends[outcome.refusal or "right"] += 1

    def report(self) -> None:
        """Print what was drawn and what came of it; refuse a run that looked at nothing."""
        never = sorted(set(OPERATORS) - set(self.operators))
        print(f"\n{self.ends}\n{self.collectives}\n{self.operators}\nnever drawn: {', '.join(never) or 'none'}")
        assert self.ends["right"] > 0.9 * self.ends.total()
        assert {"all_gather", "all_reduce", "all_to_all"} <= set(self.collectives)


def test_random_programs() -> None:
    tally = Tally()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=ANY_TIME)
    @given(programs())
    def draws(program: Program) -> None:
        tally.check(program)

    draws()
    tally.report()


@pytest.mark.slow
def test_many_random_programs() -> None:
    tally = Tally()
    phases = (Phase.generate, Phase.shrink)

    @settings(max_examples=1500, deadline=None, database=None, suppress_health_check=ANY_TIME, phases=phases)
    @given(programs())
    def draws(program: Program) -> None:
        tally.check(program)

    draws()
    tally.report()


UNDRAWN = {
    "of operator sets that ONNX Runtime does not know yet": {"CausalConvWithState", "LinearAttention", "SwiGLU"},
    "of operator sets of long ago": {"Scatter", "Upsample"},
    "ONNX Runtime cannot run it": {"BitCast"},
    "irpar has no kernel of its own": {"DeformConv", "MaxRoiPool", "TfIdfVectorizer"},
    "of ONNX Runtime alone": {"SimplifiedLayerNormalization"},
    "of strings, which are not drawn": {"RegexFullMatch", "StringConcat"},
}
"""Operators with a rule that random programs do not have, and why."""


def test_every_operator_with_a_rule_can_be_drawn() -> None:
    ruled = {found.name for found in definitions() if found.rule is not None and found.domain == ""}
    undrawn = {name for names in UNDRAWN.values() for name in names}
    assert ruled - set(OPERATORS) == undrawn


# -- draws that failed once -----------------------------------------------------------------------------------------


def parsed(text: str, mesh: dict[str, int], annotations: dict[str, Spec], opset: int = 21) -> Program:
    """A program in ONNX's text form; inputs are quarters, 0 and 1 for ids."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    random = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        numbers = random.integers(-8, 9, shape) / 4 if dtype.kind == "f" else random.integers(0, 2, shape)
        inputs[value.name] = np.asarray(numbers).astype(dtype)
    return Program(model, irpar.Mesh(mesh), annotations, inputs)


FAILED: dict[str, Program] = {
    "an annotated result of which the model declares no type": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) { y = Relu(x) z = Exp(y) }", {"x": 2}, {"y": [["x"], None]}
    ),
    "bools gathered along an axis that is cut": parsed(
        "g (float[2, 4] x, int64[3] ids) => (bool[2, 3] z) <float[1] zero = {0}>"
        "{ y = Greater(x, zero) z = Gather<axis = 1>(y, ids) }",
        {"x": 2},
        {"y": [None, ["x"]]},
    ),
    "a needed result that nothing reads, before others that something reads": parsed(
        "g (float[4, 6] x, float[6] s) => (float[4, 1] m, float[4, 1] d) { y, m, d = LayerNormalization(x, s) }",
        {"x": 2},
        {"x": [["x"], None]},
    ),
    "sub-axes whose cuts do not divide each other": parsed(
        "g (float[6, 6, 7] x, float[6, 6, 7] y) => (float[6, 6, 7] z) { z = Add(x, y) }",
        {"x": 6},
        {"x": [["?"], ["x:(1)2"], ["x:(2)3"]], "y": [["x:(3)2"], None, ["x:(1)3"]]},
    ),
    "an axis of one device": parsed(
        "g (float[4, 6] x, float[4, 6] y) => (float[4, 6] z) { z = Add(x, y) }",
        {"x": 1, "y": 2},
        {"x": [["x"], ["y"]], "y": [["y"], ["x"]]},
    ),
    "Hardmax of an old operator set, which takes several dims as one": parsed(
        "g (float[2, 3, 4] x) => (float[2, 3, 4] z) { z = Hardmax<axis = 0>(x) }",
        {"x": 2},
        {"z": [None, None, ["x"]]},
        opset=12,
    ),
    "a chain of layouts that ends in a scalar": parsed(
        "g (float[7] x) => (float z) <int64[1] a = {-1}, int64[2] b = {1, 1}>"
        "{ y = ReduceSum<keepdims = 1>(x, a) w = Reshape(y, b) z = Squeeze(w) }",
        {"x": 2},
        {"x": [["x"]]},
    ),
    "annotated behind a target shape that is computed": parsed(
        "g (float[2, 6] x, float[12] y) => (float[2, 6] z) { s = Shape(x) r = Reshape(y, s) z = Exp(r) }",
        {"x": 2},
        {"r": [None, ["x"]]},
    ),
    "a Gemm with a bias whose result is annotated": parsed(
        "g (float[5, 4] x, float[4, 6] w, float[6] c) => (float[5, 6] z) { z = Gemm(x, w, c) }",
        {"x": 2, "y": 2},
        {"z": [["x"], None], "c": [["y"]]},
    ),
    "a chain of layouts that does nothing between two annotations": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) { y = Transpose(x) z = Transpose(y) }",
        {"x": 2},
        {"x": [None, None], "z": [["x"], None]},
    ),
    "a chain of layouts with an annotation inside": parsed(
        "g (float[2, 6] x) => (float[2, 6] z) { y = Transpose(x) z = Transpose(y) }",
        {"x": 2},
        {"y": [["x"], None], "z": [["x"], None]},
    ),
    "an If that is decided, with an annotated result": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) <bool p = {1}> { z = If(p) <"
        "then_branch = a () => (float[4, 6] a) { a = Neg(x) }, else_branch = b () => (float[4, 6] b) { b = Abs(x) }> }",
        {"x": 2},
        {"z": [["x"], None]},
    ),
    "an If of which a branch computes what is there already": parsed(
        "g (float[4, 6] x, bool p) => (float[4, 6] z, float[4, 6] n) { n = Neg(x) z = If(p) <"
        "then_branch = a () => (float[4, 6] a) { a = Neg(x) }, else_branch = b () => (float[4, 6] b) { b = Abs(x) }> }",
        {"x": 2},
        {"n": [None, ["x"]], "z": [["x"], None]},
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_draws_that_failed_once(name: str, tmp_path: Path) -> None:
    assert check(FAILED[name], tmp_path, saved=True).refusal == ""


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] z) { r = RandomUniformLike(x) z = Add(x, r) }",
        "g (float[4] x) => (float[4] z) <float ratio = {0.5}, bool train = {1}> { z = Dropout(x, ratio, train) }",
    ],
)
def test_devices_do_not_draw_their_own_random_numbers(text: str, tmp_path: Path) -> None:
    with pytest.raises(irpar.IrparError, match="draws random numbers, and each of the 2 devices would draw its own"):
        partitioned(parsed(text, {"x": 2}, {"x": [["x"]]}), tmp_path)
    partitioned(parsed(text, {"x": 1}, {"x": [["x"]]}), tmp_path)
