"""Heads that are put behind each other and joined, as one node that reads them where they lie."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, parse_module
from irpar.passes.infer_types import InferTypes
from tests.passes.fuse_kernels.texts import computed

JOINED = """
    graph @g(%q: f16[2, 6, 8, 4], %kt: f16[2, 3, 4, 8], %v: f16[2, 3, 8, 4]) -> (%y) opset 21 {
        %wide = constant : i64[3] [2, 8, 24]
        %tall = constant : i64[3] [2, 12, 8]
        %narrow = constant : i64[3] [2, 8, 12]
        %qt = Transpose(%q) {perm=[0, 2, 1, 3]} : ?
        %qr = Reshape(%qt, %wide) : ?
        %kr = Reshape(%kt, %tall) : ?
        %kn = Transpose(%kr) {perm=[0, 2, 1]} : ?
        %vt = Transpose(%v) {perm=[0, 2, 1, 3]} : ?
        %vr = Reshape(%vt, %narrow) : ?
        %y = Concat(%qr, %kn, %vr) {axis=2} : ?
    }
"""


def joined(text: str) -> tuple[Module, list[Node]]:
    module = parse_module(text)
    InferTypes().run(module)
    return module, stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))


@pytest.mark.parametrize("batch", [2, 1])
def test_heads_are_read_where_they_lie(batch: int) -> None:
    module, nodes = joined(JOINED.replace("[2, ", f"[{batch}, "))
    assert [node.op_type for node in nodes] == ["Transpose", "Transpose", "Transpose", "JoinHeads"]
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(value.shape).astype(np.float16) for value in module.graph.inputs]
    np.testing.assert_array_equal(computed(module, inputs, nodes), computed(module, inputs))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-> (%y)", "-> (%y, %kn)"),
        ("%tall = constant : i64[3] [2, 12, 8]", "%tall = constant : i64[3] [2, 8, 12]"),
        ("{axis=2}", "{axis=1}"),
    ],
    ids=["a part is read elsewhere", "no whole heads", "another axis"],
)
def test_what_are_no_heads(old: str, new: str) -> None:
    assert old in JOINED
    text = JOINED.replace(old, new)
    if "[2, 8, 12]\n        %narrow" in text:
        text = text.replace("%kn = Transpose(%kr) {perm=[0, 2, 1]}", "%kn = Identity(%kr)")
    if "axis=1" in text:
        text = text.replace("f16[2, 6, 8, 4]", "f16[2, 3, 8, 4]").replace("[2, 8, 24]", "[2, 8, 12]")
    _, nodes = joined(text)
    assert "JoinHeads" not in {node.op_type for node in nodes}
