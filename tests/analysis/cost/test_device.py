"""How long a node takes on a device."""

import pytest

from irpar.analysis.cost.device import Device, graph_seconds, node_seconds
from irpar.analysis.cost.node import node_flops
from irpar.ir import parse_module

DEVICE = Device({"f32": 1e12, "tf32": 4e12, "f16": 8e12, "i8": 16e12}, 1e9, efficiency=0.5, launch=1e-3)


def module(body: str, inputs: str = "%x: f32[64, 64], %w: f32[64, 64]") -> object:
    return parse_module(f"graph @g({inputs}) -> (%y) opset 21 {{\n{body}\n}}\n").graph


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("f32", 0.5e12),
        ("f16", 4e12),
        ("bf16", 4e12),
        ("f8e4m3fn", 4e12),
        ("f4e2m1", 4e12),
        ("u8", 8e12),
        ("i4", 8e12),
        ("f64", 0.5e12),
        ("i64", 0.5e12),
        ("bool", 0.5e12),
    ],
)
def test_what_has_no_rate_computes_as_something_wider(dtype: str, rate: float) -> None:
    assert DEVICE.rate(dtype) == rate


def test_tf32_where_the_device_says_so() -> None:
    assert Device({"f32": 1e12, "tf32": 4e12}, 1e9, uses_tf32=True).rate("f32") == 4e12
    assert Device({"f32": 1e12}, 1e9, uses_tf32=True).rate("f32") == 1e12


def test_arithmetic_or_memory_whichever_is_longer() -> None:
    matmul = module("%y = MatMul(%x, %w) : f32[64, 64]")
    flops, moved = 2 * 64**3, 3 * 64 * 64 * 4
    assert graph_seconds(matmul, DEVICE) == pytest.approx(moved / 1e9 + 1e-3)
    slow = Device({"f32": 1e6}, 1e12)
    assert graph_seconds(matmul, slow) == pytest.approx(flops / 1e6)


def test_views_and_communication_take_none() -> None:
    assert graph_seconds(module("%y = Identity(%x) : f32[64, 64]"), DEVICE) == 0


def test_a_look_up_reads_what_it_gives() -> None:
    graph = module("%y = Gather(%table, %at) {axis=0} : f32[2, 64]", "%table: f32[100000, 64], %at: i64[2]")
    assert graph_seconds(graph, DEVICE) == pytest.approx((2 * 2 * 64 * 4 + 16) / 1e9 + 1e-3)


def test_an_if_takes_its_slower_branch() -> None:
    graph = module(
        """
  %y = If(%c) {
    then_branch=graph @t() -> (%a) { %a = MatMul(%x, %x) : f32[64, 64] },
    else_branch=graph @e() -> (%b) { %b = Neg(%x) : f32[64, 64] }
  } : f32[64, 64]""",
        "%x: f32[64, 64], %c: bool[]",
    )
    (node,) = graph
    assert node_seconds(node, DEVICE) == pytest.approx(3 * 64 * 64 * 4 / 1e9 + 2e-3)


@pytest.mark.parametrize(
    ("trips", "times"), [("constant : i64[] [0]", 0), ("constant : i64[] [3]", 3), ("Neg(%m) : i64[]", 1)]
)
def test_a_loop_computes_as_often_as_it_runs(trips: str, times: int) -> None:
    body = f"""
      %n = {trips}
      %y = Loop(%n, _, %x) {{body=graph @b(%i: i64[], %c: bool[], %a: f32[64]) -> (%d, %o) {{
        %d = Identity(%c) : bool[]
        %o = Tanh(%a) : f32[64]
      }}}} : f32[64]
    """
    (loop,) = (node for node in module(body, "%x: f32[64], %m: i64[]") if node.op_type == "Loop")
    (inner,) = loop.nested_graphs()
    assert node_flops(loop) == times * sum(map(node_flops, inner))
    assert node_seconds(loop, DEVICE) == pytest.approx(times * graph_seconds(inner, DEVICE) + DEVICE.launch)
