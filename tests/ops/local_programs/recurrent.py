"""Recurrent nodes of two directions, drawn at random; what their local programs cut, the weights, is called x."""

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@st.composite
def recurrent(draw: st.DrawFn, name: str) -> tuple[onnx.NodeProto, dict[str, np.ndarray], int]:
    """A node, its operands, and the dim of x that has the directions."""
    steps, batch, inputs, hidden = (draw(st.integers(1, 5)) for _ in range(4))
    gates = _GATES[name]
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def normals(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    data, bias = normals(steps, batch, inputs), normals(2, 2 * gates * hidden)
    weights = [normals(2, gates * hidden, size) for size in (inputs, hidden)]
    operands = {"other_data": data, "x": weights[0], "r": weights[1], "b": bias}
    names = ["other_data", "x", "r", "b"]
    results = ["y", "last", "cell"] if gates == 4 else ["y", "last"]
    if draw(st.booleans()):
        names += ["", "other_state"]
        operands["other_state"] = normals(2, batch, hidden)
    attributes = {"hidden_size": hidden, "direction": "bidirectional"}
    if gates == 3:
        attributes["linear_before_reset"] = draw(st.integers(0, 1))
    return helper.make_node(name, names, results, **attributes), operands, 0
