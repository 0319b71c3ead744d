"""Products of the same few rows that one node takes the place of, gates between them, and what stays apart."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Node, parse_module
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from irpar.sharding import Mesh
from tests.runtime.devices import strict_device
from tests.runtime.engines.test_cupy import DeviceGroup

TAKES = "%x: f16[1, 1, 1024], " + ", ".join(f"%{name}: f16[1024, 512]" for name in "abcd")
PRODUCTS = tuple(f"%{y} = MatMul(%x, %{w}) : f16[1, 1, 512]" for y, w in zip("pqrs", "abcd", strict=True))
GATE = (
    *PRODUCTS[:2],
    "%t = Sigmoid(%p) : f16[1, 1, 512]",
    "%u = Mul(%p, %t) : f16[1, 1, 512]",
    "%y = Mul(%u, %q) : f16[1, 1, 512]",
)


def graph(*lines: str, gives: str, takes: str = TAKES) -> str:
    inside = "\n".join(f"  {line}" for line in lines)
    return f"graph @g({takes}) -> ({gives}) opset 23 {{\n{inside}\n}}\n"


def fused(text: str) -> list[Node]:
    (segment,) = build_program(parse_module(text).graph).segments
    return stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over))


def test_products_of_the_same_rows_are_one_node() -> None:
    (node,) = fused(graph(*PRODUCTS[:3], gives="%p, %q, %r"))
    assert node.identity == ("irpar", "SharedMatMul")
    assert [value.name for value in node.inputs] == ["x", "a", "b", "c"]
    assert [value.name for value in node.results] == ["p", "q", "r"]
    assert not node.attributes


def test_more_are_several_nodes() -> None:
    first, second = fused(graph(*PRODUCTS, gives="%p, %q, %r, %s"))
    assert (first.op_type, second.op_type) == ("SharedMatMul", "MatMul")


@pytest.mark.parametrize(
    ("lines", "gate", "matrices"),
    [
        (GATE, "silu", ["a", "b"]),
        ((*GATE[:4], "%y = Mul(%q, %u) : f16[1, 1, 512]"), "silu", ["a", "b"]),
        ((*PRODUCTS[:2], "%t = Sigmoid(%q) : f16[1, 1, 512]", "%u = Mul(%t, %q) : f16[1, 1, 512]", GATE[-1].replace("%q", "%p")), "silu", ["b", "a"]),
        ((*PRODUCTS[:2], '%u = Gelu(%p) {approximate="tanh"} : f16[1, 1, 512]', GATE[-1]), "gelu_tanh", ["a", "b"]),
    ],
    ids=["a gate", "behind", "of the second", "gelu"],
)  # fmt: skip
def test_a_gate_is_part_of_it(lines: tuple[str, ...], gate: str, matrices: list[str]) -> None:
    (node,) = fused(graph(*lines, gives="%y"))
    assert node.op_type == "SharedMatMul"
    assert node.attributes["gate"] == gate
    assert [value.name for value in node.inputs] == ["x", *matrices]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (graph(*PRODUCTS[:2], gives="%p, %q").replace("1, 1,", "1, 9,"), 0),
        (graph(*PRODUCTS[:2], gives="%p, %q").replace("512]", "511]"), 0),
        (graph(*PRODUCTS[:2], gives="%p, %q").replace("512]", "8]"), 0),
        (graph(*PRODUCTS[:2], gives="%p, %q").replace("f16", "f64"), 0),
        (graph("%e = Neg(%b) : f16[1024, 512]", PRODUCTS[0], "%q = MatMul(%x, %e) : f16[1, 1, 512]", gives="%p, %q"), 0),
        (graph(*GATE, gives="%y, %p"), 1),
        (graph(*PRODUCTS[:2], '%u = Gelu(%p) {approximate="none"} : f16[1, 1, 512]', GATE[-1], gives="%y"), 1),
    ],
    ids=["many rows", "no whole chunks", "small", "float64", "made there", "the gate is read", "another gate"],
)  # fmt: skip
def test_else_they_stay_apart(text: str, count: int) -> None:
    nodes = fused(text)
    assert sum(node.op_type == "SharedMatMul" for node in nodes) == count
    assert all("gate" not in node.attributes for node in nodes)


@pytest.mark.parametrize("lines", [GATE, (*PRODUCTS[:2], GATE[-1].replace("%u", "%p"))], ids=["gate", "products"])
def test_the_engine_computes_the_same(lines: tuple[str, ...]) -> None:
    module, mesh = parse_module(graph(*lines, gives="%y")), Mesh({"x": 1})
    numbers = np.random.default_rng(0)
    inputs = {
        value.name: numbers.normal(size=value.tensor_type.static_shape, scale=0.2).astype(np.float16)
        for value in module.graph.inputs
    }
    with Executor(module, mesh, engine="numpy") as executor:
        expected = executor.run(inputs)["y"]
    with strict_device(), Executor(module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        np.testing.assert_allclose(executor.run(inputs)["y"], expected, rtol=2e-2, atol=2e-2)
