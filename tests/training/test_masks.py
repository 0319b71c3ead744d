"""What is trained and looks like a mask is named."""

import pytest

from irpar.ir.text.files import parse_module
from irpar.training.masks import masks_among


def among(body: str, shape: str = "[4, 4]") -> list[str]:
    graph = parse_module(
        f"""
        graph @g(%s: f32[2, 4, 4], %m: f32{shape}) -> (%y) opset 21 {{
          {body}
        }}
        """
    ).graph
    return masks_among([graph.inputs[1]])


@pytest.mark.parametrize(
    "body",
    [
        "%a = Add(%s, %m) : f32[2, 4, 4]\n%y = Softmax(%a) : f32[2, 4, 4]",
        "%a = Add(%m, %s) : f32[2, 4, 4]\n%b = Add(%a, %s) : f32[2, 4, 4]\n%y = Softmax(%b) : f32[2, 4, 4]",
        "%n = constant : i64[1] [0]\n%u = Unsqueeze(%m, %n) : f32[1, 4, 4]\n%a = Add(%s, %u) : f32[2, 4, 4]\n"
        "%y = Softmax(%a) : f32[2, 4, 4]",
    ],
)
def test_a_table_that_is_added_to_scores(body: str) -> None:
    assert among(body) == ["m"]


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("%a = MatMul(%s, %m) : f32[2, 4, 4]\n%y = Softmax(%a) : f32[2, 4, 4]", "[4, 4]"),
        ("%a = Add(%s, %m) : f32[2, 4, 4]\n%y = Softmax(%a) : f32[2, 4, 4]", "[4]"),
        ("%a = Add(%s, %m) : f32[2, 4, 4]\n%y = Softmax(%a) : f32[2, 4, 4]", "[1, 4]"),
        ("%a = Add(%s, %m) : f32[2, 4, 4]\n%y = Relu(%a) : f32[2, 4, 4]", "[4, 4]"),
        ("%y = Add(%s, %m) : f32[2, 4, 4]", "[4, 4]"),
        (
            "%a = Add(%s, %m) : f32[2, 4, 4]\n%b = Softmax(%a) : f32[2, 4, 4]\n%c = Relu(%a) : f32[2, 4, 4]\n"
            "%y = Mul(%b, %c) : f32[2, 4, 4]",
            "[4, 4]",
        ),
    ],
    ids=["a weight", "a bias", "a row", "no Softmax", "a result", "something else too"],
)
def test_other_parameters(body: str, shape: str) -> None:
    assert among(body, shape) == []
