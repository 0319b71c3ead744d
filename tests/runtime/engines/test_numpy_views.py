"""Which changes of shape copy on numpy: those of what a Transpose has put in another order."""

import pytest

from irpar.ir.text.files import parse_module
from irpar.runtime.engines.numpy_views import Views


@pytest.mark.parametrize(
    ("attributes", "shape", "copies"),
    [("", "[4, 3]", True), ("{perm=[1, 0]}", "[4, 3]", True), ("{perm=[0, 1]}", "[3, 4]", False)],
)
def test_a_reshape_behind_a_transpose(attributes: str, shape: str, copies: bool) -> None:
    graph = parse_module(
        f"""
        graph @g(%x: f32[3, 4]) -> (%y) opset 21 {{
          %shape = constant : i64[1] [12]
          %n = Neg(%x) : f32[3, 4]
          %t = Transpose(%n) {attributes} : f32{shape}
          %y = Reshape(%t, %shape) : f32[12]
        }}
        """
    ).graph
    views = Views(graph)
    assert {node.op_type for node in views.copies} == ({"Reshape"} if copies else set())
