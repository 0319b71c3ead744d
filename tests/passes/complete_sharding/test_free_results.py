"""Results of the graph that are sums and free: each device keeps its share."""

import pytest

from irpar.ir import Module, parse_module
from irpar.pass_manager import PassManager

PIPELINE = "complete-sharding,insert-redistribution"
ONE = """
mesh @m = [{dp}"tp"=4]
graph @g(%a: f32[{rows}, 256@tp]) -> (%y) opset 21 {{
  %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
  %y = MatMul(%a, %w) : f32[{result}, 64]{whole}
}}
"""


def one(rows: str = "8", whole: str = "") -> str:
    """A product over tp, its rows over dp where it is named."""
    return ONE.format(dp='"dp"=2, ' if "dp" in rows else "", rows=rows, result=rows.split("@")[0], whole=whole)


def partitioned(text: str, completion: str = "complete-sharding") -> Module:
    module = parse_module(text)
    PassManager.parse(PIPELINE.replace("complete-sharding", completion)).run(module)
    return module


def kinds(module: Module) -> list[str]:
    return [node.op_type for node in module.graph if node.domain == "irpar"]


def lies(module: Module) -> dict[str, str]:
    return {value.name: str(value.sharding) for value in module.graph.values()}


def test_a_free_result_keeps_its_share_by_rows() -> None:
    module = partitioned(one())
    assert kinds(module) == ["ReduceScatter"]
    assert str(module.graph.outputs[0].sharding) == "[@tp, _]"


def test_what_is_cut_stays_cut_and_blocks_stay_equal() -> None:
    assert str(partitioned(one("8@dp")).graph.outputs[0].sharding) == "[@(dp,tp), _]"
    assert str(partitioned(one("6@dp")).graph.outputs[0].sharding) == "[@dp, @tp]"


@pytest.mark.parametrize(
    ("whole", "completion"),
    [
        (" replicated", "complete-sharding"),
        ("", "complete-sharding{share-results=false}"),
        ("", "complete-sharding{strategy=propagate}"),
    ],
)
def test_whoever_wants_it_whole_gets_it(whole: str, completion: str) -> None:
    assert kinds(partitioned(one(whole=whole), completion)) == ["AllReduce"]


TAIL = """
mesh @m = ["tp"=4]
graph @g(%a: f32[8, 256@tp], %r: f32[8, 64] replicated) -> (%y) opset 21 {
  %w = constant : f32[256@tp, 64] data("w.bin", 0, 65536)
  %b = constant : f32[64] data("w.bin", 65536, 256)
  %p = MatMul(%a, %w) : f32[8, 64] from "fc"
  %q = Add(%p, %b) : f32[8, 64]
  %s = Add(%r, %q) : f32[8, 64]
  %y = Transpose(%s) {perm=[1, 0]} : f32[64, 8]
}
"""


def test_shares_go_on_to_the_result_beside_blocks_of_what_is_whole() -> None:
    module = partitioned(TAIL)
    assert kinds(module) == ["ReduceScatter", "AllSlice"]
    assert lies(module)["y"] == "[@tp, _]"
    assert [name for name, _ in module.chain("y", "tp")][:3] == ["y", "s", "q"]


def test_what_others_read_is_reduced() -> None:
    read_twice = TAIL.replace("-> (%y)", "-> (%y, %z)").replace("\n}", "\n  %z = MatMul(%q, %r2) : f32[8, 64]\n}")
    read_twice = read_twice.replace("%r: ", "%r2: f32[64, 64] replicated, %r: ")
    assert kinds(partitioned(read_twice)) == ["AllReduce"]


def test_a_second_run_changes_nothing() -> None:
    module = parse_module(TAIL)
    manager = PassManager.parse("complete-sharding")
    assert manager.run(module).changed
    assert not manager.run(module).changed


def test_what_the_axes_cut_already_is_not_cut_by_them_again() -> None:
    """The greatest of all is broadcast to a result that lies in blocks of the same axis."""
    module = partitioned("""
        mesh @m = ["x"=2]
        graph @g(%a: f32[8, 16@x], %c: f32[8, 4@x]) -> (%y) opset 17 {
          %most = ReduceMax(%a) {keepdims=1} : f32[1, 1]
          %y = Add(%most, %c) : f32[8, 4]
        }""")
    assert kinds(module) == ["AllReduce"]
    assert str(module.graph.outputs[0].sharding) == "[_, @x]"
