"""Tables of integers that are sharded by rows: what is looked up is sent, as integers, and not the table."""

from typing import Any, Literal

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import irpar

ROWS, WIDE = 40, 16


def _model(dtype: str, body: str, **tables: np.ndarray[Any, Any]) -> ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (int64[2, 3] i) => ({dtype} y) {{ {body} }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in tables.items())
    return model


def _codes(dtype: Any) -> np.ndarray[Any, Any]:
    limits = np.iinfo(dtype)
    return np.random.default_rng(3).integers(limits.min, limits.max, (ROWS, WIDE), dtype, endpoint=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_rows_of_each_type(dtype: str, engine: Literal["ort", "numpy"]) -> None:
    table = _codes(getattr(np, dtype))
    module = irpar.load(_model(f"{dtype}[2, 3, {WIDE}]", "y = Gather(table, i)", table=table))
    irpar.annotate(module, {"table": ["tp", None], "y": [None, None, None]})
    partition = irpar.partition(module, "tp=4")
    ids = np.asarray([[0, 39, -1], [9, 10, -40]])
    np.testing.assert_array_equal(partition.run({"i": ids}, engine=engine)["y"], table[ids])
    # An all-reduce over four ranks sends 3/4 of what it reduces, twice.
    assert partition.plan.totals["sent_bytes"] == 3 * 2 * (2 * 3 * WIDE * table.itemsize) // 4


@pytest.mark.parametrize("count", [(), (WIDE,)], ids=["one scale", "a scale of each column"])
def test_a_quantised_embedding_that_is_the_head_too(count: tuple[int, ...]) -> None:
    """What is dequantised behind the lookup is sent as bytes; the head multiplies blocks of the same table."""
    body = """
        e = Gather(q, i)  x = DequantizeLinear<axis=-1>(e, s, z)
        d = DequantizeLinear<axis=-1>(q, s, z)  t = Transpose<perm=[1, 0]>(d)  y = MatMul(x, t)"""
    scales, zeros = np.full(count, 0.02, np.float32), np.full(count, 3, np.int8)
    module = irpar.load(_model(f"float[2, 3, {ROWS}]", body, q=_codes(np.int8), s=scales, z=zeros))
    irpar.annotate(module, {"q": ["tp", None]})
    partition = irpar.partition(module, "tp=4")
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_reduce"]
    assert partition.plan.totals["sent_bytes"] == 3 * 2 * (2 * 3 * WIDE) // 4
    partition.verify().check()


def test_a_cache_of_integers_is_written_by_blocks() -> None:
    """Each rank writes the rows that fall into its block; nothing is sent."""
    table, rows = _codes(np.int8), np.arange(WIDE * 6, dtype=np.int8).reshape(2, 3, WIDE)
    body = "j = Unsqueeze(i, last)  y = ScatterND(table, j, rows)"
    given = {"table": table, "rows": rows, "last": np.asarray([-1])}
    module = irpar.load(_model(f"int8[{ROWS}, {WIDE}]", body, **given))
    irpar.annotate(module, {"table": ["tp", None], "y": ["tp", None]})
    partition = irpar.partition(module, "tp=4")
    assert not partition.plan.totals["collectives"]
    ids = np.asarray([[0, 39, 20], [9, 10, 11]])
    table[ids] = rows
    np.testing.assert_array_equal(partition.run({"i": ids})["y"], table)
