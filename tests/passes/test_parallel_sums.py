"""split-weights: products that are added to a third value one after the other are added first, where less is sent."""

import pytest

import irpar
from tests.written import model_of_text

from .golden import check, read, run_pipeline

BLOCK = """
mesh @m = ["tp"=2]
graph @g(%x: f32[4, 8]) -> (%z) opset 21 {{
  %u1 = constant : f32[8, 16{columns}] data("w.bin", 0, 512) from "u1"
  %d1 = constant : f32[16{rows}, 8] data("w.bin", 512, 512) from "d1"
  %u2 = constant : f32[8, 16{columns}] data("w.bin", 1024, 512) from "u2"
  %d2 = constant : f32[16{rows}, 8] data("w.bin", 1536, 512) from "d2"
  %b = constant : f32[8] data("w.bin", 2048, 32) from "b"
  %h1 = MatMul(%x, %u1) : f32[4, 16]
  %a1 = Relu(%h1) : f32[4, 16]
  %p = MatMul(%a1, %d1) : f32[4, 8]
  %h2 = MatMul(%x, %u2) : f32[4, 16]
  %a2 = Tanh(%h2) : f32[4, 16]
  %m = MatMul(%a2, %d2) : f32[4, 8]
  %q = Add(%m, %b) : f32[4, 8]
  %s = Add(%x, %p) : f32[4, 8] from "/first"
  %y = Add(%q, %s) : f32[4, 8] from "/second"
  %z = Softmax(%y) : f32[4, 8]
}}
"""


def block(columns="@tp", rows="@tp"):
    return BLOCK.format(columns=columns, rows=rows)


def test_products_are_added_first():
    before = block()
    check(
        "split-weights",
        before,
        before.replace('  %s = Add(%x, %p) : f32[4, 8] from "/first"\n', "").replace(
            '  %y = Add(%q, %s) : f32[4, 8] from "/second"',
            '  %y_1 = Add(%p, %q) : f32[4, 8] for "/second"\n  %y = Add(%x, %y_1) : f32[4, 8] from "/second"',
        ),
    )


def test_one_sum_is_sent():
    pipeline = "split-weights,split-bias,complete-sharding,insert-redistribution,simplify-collectives"
    module = read(block())
    run_pipeline(pipeline, module)
    assert str(module).count("irpar.AllReduce(") + str(module).count("irpar.ReduceScatter(") == 1


@pytest.mark.parametrize(
    ("columns", "rows", "changed"),
    [
        ("", "", ("", "")),  # Nothing is in parts.
        ("@tp", "@tp", ("%z = Softmax(%y)", "%z = Mul(%y, %s)")),  # The first sum is read besides.
        ("@tp", "@tp", ("%s = Add(%x, %p) : f32[4, 8]", "%s = Add(%x, %p) : f32[4, 8@tp]")),  # It is annotated.
        ("@tp", "@tp", ("Add(%x, %p)", "Sub(%x, %p)")),
    ],
)
def test_sums_stay(columns, rows, changed):
    text = block(columns, rows).replace(*changed) if changed[0] else block(columns, rows)
    check("split-weights", text, text)


@pytest.mark.parametrize("first", ["x", "p"])
@pytest.mark.parametrize("second", ["s", "q"])
def test_numbers_are_those_of_the_model(first, second):
    text = f"""g (float[4,8] x, float[8,16] u1, float[16,8] d1, float[8,16] u2, float[16,8] d2, float[8] b)
      => (float[4,8] z) {{
      h1 = MatMul(x, u1) a1 = Relu(h1) p = MatMul(a1, d1) h2 = MatMul(x, u2) a2 = Tanh(h2) m = MatMul(a2, d2)
      q = Add(m, b) s = Add({first}, {"p" if first == "x" else "x"}) y = Add({second}, {"q" if second == "s" else "s"})
      z = Softmax(y) }}"""
    module = irpar.load(model_of_text(text, ["u1", "d1", "u2", "d2", "b"]))
    for name, spec in (("u1", [None, "tp"]), ("u2", [None, "tp"]), ("d1", ["tp", None]), ("d2", ["tp", None])):
        module.shard(name, spec)
    partition = irpar.partition(module, {"tp": 2})
    assert partition.plan.totals["collectives"] == 1
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
