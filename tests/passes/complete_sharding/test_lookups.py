"""Shares of what is looked up in tables that are sharded by rows."""

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.onnx_io import to_module
from tests.passes.golden import run

TOWER = """
mesh @m = ["tp"=4]
graph @g(%ids: i64[64], %t: f32[1000@tp, 16]) -> (%y) opset 21 {
  %w = constant : f32[16, 32] data("w.bin", 64000, 2048)
  %e = Gather(%t, %ids) : f32[64, 16]
  %h = MatMul(%e, %w) : f32[64, 32]
  %r = Relu(%h) : f32[64, 32]
  %n = Neg(%h) : f32[64, 32]
  %y = Add(%r, %n) : f32[64, 32]LIES
}
"""


def lies(text: str, names: str) -> list[str]:
    module = run("complete-sharding,insert-redistribution", text)
    table = module.graph.names.table
    return [str(table[name].sharding) for name in names]


def test_what_follows_a_lookup_is_computed_by_rows() -> None:
    """Also where several nodes read what is made of it."""
    assert lies(TOWER.replace("LIES", ""), "hrny") == ["[@tp, _]"] * 4
    module = run("complete-sharding,insert-redistribution", TOWER.replace("LIES", ""))
    assert [node.op_type for node in module.graph if node.domain == "irpar"] == ["ReduceScatter"]


def test_a_result_that_is_annotated_whole_is_brought_together() -> None:
    module = run("complete-sharding,insert-redistribution", TOWER.replace("LIES", " replicated"))
    assert [node.op_type for node in module.graph if node.domain == "irpar"] == ["AllReduce"]


def test_it_is_explained() -> None:
    module = run("complete-sharding,insert-redistribution", TOWER.replace("LIES", ""))
    decisions = [decision.why for _, decision in module.chain("y", "tp")]
    assert "is the share of a device of what Gather of %e sums over tp, as that shards %t" in decisions


def towers(tables: int, rows: int) -> onnx.ModelProto:
    """Tables side by side, and perceptrons behind them."""
    random = np.random.default_rng(1)
    tensors = {f"t{number}": (500, 8) for number in range(tables)} | {"w": (8 * tables, 96), "v": (96, 6)}
    lines = [f"e{number} = Gather (t{number}, ids)" for number in range(tables)]
    joined = ", ".join(f"e{number}" for number in range(tables))
    lines += [f"c = Concat <axis = 1> ({joined})", "h = MatMul (c, w)", "r = Relu (h)", "y = MatMul (r, v)"]
    body = "\n".join(lines)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (int64[{rows}] ids) => (float[{rows}, 6] y) {{ {body} }}'
    )
    for name, shape in tensors.items():
        array = random.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(("mesh", "rows"), [({"tp": 4}, 64), ({"tp": 3}, 64), ({"tp": 4}, 7), ({"dp": 2, "tp": 2}, 12)])
@pytest.mark.parametrize("tables", [1, 3])
def test_towers_behind_tables(tables: int, rows: int, mesh: dict[str, int]) -> None:
    module = to_module(towers(tables, rows))
    module.shard("t*", ["tp", None])
    if "dp" in mesh:
        module.shard("ids", ["dp"])
    partition = irpar.partition(module, mesh)
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
    plan = partition.plan
    assert set(plan.totals["by_kind"]) == {"reduce_scatter"}
    ranks = np.prod(list(mesh.values()))
    assert plan.totals["flops_per_rank"] < 1.3 * plan.original["flops"] / ranks


def test_a_decoder_with_its_vocabulary_sharded_stays_as_its_weights_are_sharded() -> None:
    """Shares of the embedding would send less, but leave more of the other weights to each device."""
    module = to_module(models.build("gpt", layers=2))
    irpar.annotate(module, models.annotations("gpt", layers=2))
    module.shard("wte.weight", ["tp", None])
    plan = irpar.partition(module, "dp=1,tp=4").plan
    assert max(part["weight_bytes"] for part in plan.parts) < 0.5 * plan.original["weight_bytes"]
