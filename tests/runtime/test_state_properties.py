"""Random meshes, shardings and sizes: steps of a session are a loop over the whole program by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import irpar
from irpar.ir import parse_module
from tests.budget import budget

TEXT = """
graph @step(%x: f32[{rows}, {columns}], state parameter %w: f32[{columns}, {width}], state moment of "w" %m: f32[{columns}, {width}]) -> (%y, %w_1 replaces %w, %m_1 replaces %m) opset 21 {{
  %rate = constant : f32[] 0.125
  %keep = constant : f32[] 0.5
  %y = MatMul(%x, %w) : f32[{rows}, {width}]
  %t = Transpose(%x) : f32[{columns}, {rows}]
  %g = MatMul(%t, %y) : f32[{columns}, {width}]
  %k = Mul(%m, %keep) : f32[{columns}, {width}]
  %m_1 = Add(%k, %g) : f32[{columns}, {width}]
  %s = Mul(%m_1, %rate) : f32[{columns}, {width}]
  %w_1 = Sub(%w, %s) : f32[{columns}, {width}]
}}
"""
SIZES = st.integers(1, 5)
AXES = st.sampled_from([None, "dp", "tp", ["dp", "tp"], ["tp", "dp"]])


def spec(draw: st.DrawFn, rank: int) -> list[object]:
    """A sharding in which no axis cuts twice."""
    found: list[object] = []
    free = {"dp", "tp"}
    for _ in range(rank):
        axes = draw(AXES)
        named = {axes} if isinstance(axes, str) else set(axes or ())
        found.append(axes if named <= free else None)
        free -= named if named <= free else set()
    return found


@given(st.data())
@settings(max_examples=budget(200))
def test_momentum_by_hand(data: st.DataObject) -> None:
    rows, columns, width = (data.draw(SIZES) for _ in range(3))
    module = parse_module(TEXT.format(rows=rows, columns=columns, width=width))
    for name in ("x", "w", "m"):
        if data.draw(st.booleans()):
            module.shard(name, spec(data.draw, 2))
    partition = irpar.partition(module, {"dp": data.draw(st.integers(1, 3)), "tp": data.draw(st.integers(1, 3))})
    random = np.random.default_rng(0)
    w, m = (random.integers(-2, 3, (columns, width)).astype(np.float32) for _ in range(2))
    with partition.session(engine="numpy") as session:
        session.write_all({"w": w, "m": m})
        for _ in range(3):
            x = random.integers(-1, 2, (rows, columns)).astype(np.float32)
            y = x @ w
            np.testing.assert_allclose(session.run({"x": x})["y"], y, rtol=1e-5, atol=1e-4)
            m = m / 2 + x.T @ y
            w = w - m / 8
        np.testing.assert_allclose(session.read("w"), w, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(session.read("m"), m, rtol=1e-5, atol=1e-4)
