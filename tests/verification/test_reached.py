"""Which bodies run on which draw, as ONNX Runtime's profile tells."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar
from irpar.verification import Original
from irpar.verification.reached import Control, ProfileError, _by_draw, _End
from tests.written import model_of_text


def control(model: onnx.ModelProto) -> Control:
    module = irpar.onnx_io.to_module(model)
    return Control(Original.of_module(module), [module.graph])


# Only n = 4 is a shape that p can have: what refuses others is needed to tell which branch runs.
PARTICULAR = """g (float[4,8] x, bool[4] p, int64[1] n) => (float[4,8] y) {
  r = Reshape(p, n)  i = Cast<to=7>(r)  m = ReduceMax<keepdims=0>(i)  q = Cast<to=9>(m)
  y = If(q) <then_branch = a () => (float[4,8] u) { u = Neg(x) },
             else_branch = b () => (float[4,8] v) { v = Abs(x) }> }"""


def draw(condition: bool, shape: int, batch: int = 4) -> dict[str, Any]:
    return {
        "x": np.ones((batch, 8), np.float32),
        "p": np.full(batch, condition),
        "n": np.array([shape], np.int64),
    }


def test_counts_belong_to_the_draws_that_gave_them() -> None:
    # Every other draw fails in a node, and one does not get past the checks of the inputs.
    found = control(model_of_text(PARTICULAR, (), {}, 21)).counts(
        [draw(True, 4), draw(True, 3), draw(False, 4), draw(False, 3), draw(True, 4, batch=5), draw(True, 4)]
    )
    assert found == [(1, 0), None, (0, 1), None, None, (1, 0)]


def test_a_profile_of_other_runs_is_refused() -> None:
    ends = [_End.DONE, _End.REFUSED, _End.IN_A_NODE, _End.REFUSED, _End.DONE]
    counts = [(number,) for number in range(5)]
    assert _by_draw(counts, ends) == [(0,), None, None, None, (4,)]
    assert _by_draw(counts[:3], ends) == [(0,), None, None, None, (2,)]
    for runs in (0, 2, 4):
        with pytest.raises(ProfileError, match=f"has {runs} runs of 3"):
            _by_draw(counts[:runs], ends)
