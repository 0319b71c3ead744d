"""Programs of ranks that differ in small constants alone: one, in which each slices its own block."""

import numpy as np
import pytest

import irpar
from irpar.ir import Module, parse_module

STEP = """
mesh @m = ["dp"=2]
graph @step(%x: f32[8@dp, 4], state parameter %s: f32[4] = [0.0, 0.0, 0.0, 0.0]) -> (%y, %s_1 replaces %s) opset 21 {
  %k = constant : f32[8@dp, 4] {numbers}
  %axes = constant : i64[1] [0]
  %y = Mul(%x, %k) : f32[8, 4]
  %sum = ReduceSum(%y, %axes) {keepdims=0} : f32[4]
  %s_1 = Add(%s, %sum) : f32[4]
}
"""


def text(rows: int) -> str:
    numbers = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4).tolist()
    made = STEP.replace("{numbers}", str(numbers).replace(" ", "").replace(",", ", "))
    return made.replace("[8@dp", f"[{rows}@dp").replace("f32[8, 4]", f"f32[{rows}, 4]")


def step(rows: int = 8) -> Module:
    return parse_module(text(rows))


@pytest.mark.parametrize("rows", [8, 7])
def test_ranks_share_a_program_and_slice(rows: int) -> None:
    """7 rows are blocks of 4 and 3, which need two programs in any case."""
    module = step(rows)
    made = irpar.partition(module)
    assert len(made.plan.parts) == (1 if rows == 8 else 2)
    x = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    numbers = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    for engine in ("ort", "numpy"):
        with made.session(engine=engine) as session:
            np.testing.assert_allclose(session.run({"x": x})["y"], x * numbers, rtol=1e-6)
            np.testing.assert_allclose(session.read("s"), (x * numbers).sum(0), rtol=1e-5)


def test_programs_whose_weights_are_constants_stay_as_they_are() -> None:
    lines = [line for line in text(8).splitlines() if not any(word in line for word in ("ReduceSum", "Add", "%axes"))]
    plain = "\n".join(lines).replace(", state parameter %s: f32[4] = [0.0, 0.0, 0.0, 0.0]", "")
    made = irpar.partition(parse_module(plain.replace(", %s_1 replaces %s", "")))
    assert len(made.plan.parts) == 2


def test_weights_beside_a_cache_stay_where_they_are_sharded() -> None:
    made = irpar.partition(parse_module(text(8).replace("state parameter", "state cache")))
    assert len(made.plan.parts) == 2


def test_large_constants_stay_where_they_are_sharded() -> None:
    assert len(irpar.partition(step(10_000)).plan.parts) == 2
