"""The rounds of completion, and the operators that pass everything on."""

import pytest

from irpar.ir import TensorType, Value
from irpar.ir.dtypes import dtype_of_text
from irpar.ops import factor_rule
from irpar.passes.complete_sharding.rounds import Rounds, passes_all_on
from irpar.sharding import Axis, DimSharding, Mesh, Sharding
from tests.passes.golden import read

MESH = Mesh({"dp": 2, "tp": 4})


def value() -> Value:
    dtype = dtype_of_text("f32")
    assert dtype is not None
    return Value("x", TensorType(dtype, (8, 64)))


def test_a_dim_that_waits_is_neither_cut_nor_open_before_its_round() -> None:
    x, rounds = value(), Rounds()
    sharding = Sharding.of_spec(MESH, [["dp", "?", "priority=2"], ["tp"]])
    assert rounds.add(x, sharding) == [DimSharding(), DimSharding((Axis("tp"),))]
    assert list(rounds) == [0, 2]
    assert rounds.begin(0) == []
    assert rounds.waiting_axes(x) == [Axis("dp")]
    assert not rounds.is_final
    rounds.end({}, {x: [(), (Axis("tp"),)]})
    assert rounds.kept == {x: ((), (Axis("tp"),))}
    assert rounds.title == " at priority 0"
    assert rounds.begin(2) == [(x, 0, sharding.dims[0])]
    assert rounds.waiting_axes(x) == []
    assert rounds.is_final


def test_one_round_says_nothing() -> None:
    rounds = Rounds()
    rounds.add(value(), Sharding.of_spec(MESH, [["dp"], ["priority=3"]]))
    assert list(rounds) == [0]
    assert (rounds.is_final, rounds.title) == (True, "")


def test_a_round_that_only_opens_dims_keeps_nothing_from_being_chosen() -> None:
    x, rounds = value(), Rounds()
    rounds.add(x, Sharding.of_spec(MESH, [["dp"], ["?", "priority=1"]]))
    rounds.begin(0)
    rounds.end({}, {x: [(Axis("dp"),), ()]})
    assert rounds.kept == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Relu(%x) : f32[4, 8]", True),
        ("Transpose(%x) {perm=[1, 0]} : f32[8, 4]", True),
        ("Reshape(%x, %shape) : f32[4, 2, 4]", True),
        ("Add(%x, %b) : f32[4, 8]", True),
        ("Softmax(%x) {axis=1} : f32[4, 8]", True),
        ("Add(%b, %c) : f32[4, 8]", False),
        ("MatMul(%x, %w) : f32[4, 4]", False),
        ("ReduceSum(%x) {keepdims=0} : f32[]", False),
        ("ReduceMax(%x) {keepdims=1} : f32[1, 1]", False),
        ("Expand(%b, %whole) : f32[4, 8]", False),
    ],
)
def test_operators_that_pass_everything_on(line: str, expected: bool) -> None:
    module = read(
        f"""
        graph @g(%x: f32[4, 8], %w: f32[8, 4], %b: f32[8], %c: f32[4, 1]) -> (%y) opset 21 {{
          %shape = constant : i64[3] [4, 2, 4]
          %whole = constant : i64[2] [4, 8]
          %y = {line}
        }}
        """
    )
    (node,) = module.graph
    rule = factor_rule(node)
    assert rule is not None
    assert passes_all_on(rule) is expected
