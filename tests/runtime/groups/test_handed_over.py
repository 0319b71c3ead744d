"""What one rank hands to another, which it may write over: ranks in one process share arrays."""

import numpy as np
import pytest

import irpar
from irpar.ir import parse_module

STEP = """
graph @step(%x: f64[9, 64], state parameter %w: f64[9, 64], state moment %z: f64[9, 64]) -> (%loss, %w_1 replaces %w, %z_1 replaces %z) opset 21 {
  %k = constant : f64[] 0.5
  %y = ReduceSum(%x) {keepdims=0 | phase=forward} : f64[]
  %loss = Mul(%y, %k) {| phase=forward} : f64[]
  %z_1 = Sub(%z, %w) {| phase=optimizer} : f64[9, 64]
  %d = Mul(%w, %k) {| phase=optimizer} : f64[9, 64]
  %w_1 = Sub(%w, %d) {| phase=optimizer} : f64[9, 64]
}
"""


@pytest.mark.parametrize("engine", ["numpy", "ort"])
def test_state_that_its_rank_writes_over_while_another_still_reads_it(engine: str) -> None:
    random = np.random.default_rng(0)
    start = {name: random.standard_normal((9, 64)) for name in "wz"}
    module = parse_module(STEP)
    module.shard("w", ["b", None])
    module.shard("z", ["a", None])
    partition = irpar.partition(module, "a=3,b=3")
    assert "permute" in partition.plan.totals["by_kind"]
    with partition.session(engine=engine) as session:
        session.write_all(start)
        session.run({"x": np.ones((9, 64))})
        np.testing.assert_array_equal(session.read("z"), start["z"] - start["w"])
        np.testing.assert_array_equal(session.read("w"), start["w"] - start["w"] * 0.5)
