"""simplify-collectives: what trips of a loop add up is moved once, behind the loop."""

from typing import Any

import numpy as np
import pytest

from irpar.ir import Module
from irpar.ir.verifier import verify
from irpar.pass_manager import PassManager
from irpar.runtime.executor import Executor
from tests.passes.golden import check, read

HEAD = 'mesh @m = ["x"=2]\n'
SUM = """graph @g(%xs: f32[3, 8, 16@x], %b: f32[16@x, 4], %s: f32[8, 4] replicated) -> (%y) opset 21 {
  %number = constant : f32[] replicated 0.5
  START
  %y = Scan(%START, %xs) {body=graph @body(%t: OF, %x: f32[8, 16@x]) -> (%u) {
    %p = MatMul(%x, %b) : f32[8, 4] partial(sum: x)
    TERM
    %u = Add(%t, %q) : OF
  }, num_scan_inputs=1} : OF
}
"""
ZERO = """%zero = constant : f32[] replicated 0.0
  %sizes = constant : i64[2] replicated [8, 4]
  %z = Expand(%zero, %sizes) : OF"""
REDUCED = '%q = irpar.AllReduce(%p) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "why"'
SCATTERED = '%q = irpar.ReduceScatter(%p) {axes=["x"], reduce="sum", dim=0, id=0} : f32[8@x, 4] doc "why"'
SCALED = REDUCED.replace("%q", "%r") + "\n    %q = Mul(%r, %number) : f32[8, 4] replicated"
TURNED = """%k = irpar.AllReduce(%p) {axes=["x"], reduce="sum", id=0} : f32[8, 4] replicated doc "why"
    %l = Transpose(%k) {perm=[1, 0]} : f32[4, 8] replicated
    %q = Transpose(%l) {perm=[1, 0]} : f32[8, 4] replicated"""
WHOLE, ROWS = "f32[8, 4] replicated", "f32[8@x, 4]"


def text_of(term: str, lies: str, *, is_zero: bool = True) -> str:
    text = SUM.replace("TERM", term).replace("%START", "%z" if is_zero else "%s")
    text = text.replace("  START\n", f"  {ZERO}\n" if is_zero else "").replace("OF", lies)
    return HEAD + (text if is_zero else text.replace("%s: f32[8, 4] replicated", f"%s: {lies}"))


def results(module: Module) -> dict[str, Any]:
    executor = Executor(module, module.mesh, engine="numpy")
    draw = np.random.default_rng(0)
    inputs = {spec.name: draw.standard_normal(spec.shape).astype(np.float32) for spec in executor.inputs}
    return executor.run(inputs, check_replicas=True)


@pytest.mark.parametrize("is_zero", [True, False])
@pytest.mark.parametrize(
    ("term", "lies"), [(REDUCED, WHOLE), (SCATTERED, ROWS), (SCALED, WHOLE), (TURNED, WHOLE)], ids="rstu"
)
@pytest.mark.parametrize("pipeline", ["simplify-collectives,localize", "localize,simplify-collectives"])
def test_sums_are_moved_once(pipeline: str, term: str, lies: str, is_zero: bool) -> None:
    """In both views, also where the loop does not begin with zeros."""
    text = text_of(term, lies, is_zero=is_zero)
    plain, module = read(text), read(text)
    PassManager.parse("localize").run(plain)
    PassManager.parse(pipeline).run(module)
    verify(module)
    moves = [node for graph in module.graphs for node in graph.walk() if node.op_type in ("AllReduce", "ReduceScatter")]
    assert [node.graph for node in moves] == module.graphs
    expected, found = results(plain), results(module)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-5)


def test_parts_of_an_axis_are_reduced_behind_the_loop() -> None:
    """What is partial over an axis is not partial any more once it is reduced over all parts of it."""
    term = REDUCED.replace('["x"]', '["x:(2)2", "x:(1)2"]').replace("%q", "%r")
    cut = '%q = irpar.AllSlice(%r) {axes=["x"], dim=0} : f32[8@x, 4] doc "why"'
    text = text_of(f"{term}\n    {cut}", ROWS).replace('"x"=2', '"x"=4')
    plain, module = read(text), read(text)
    PassManager.parse("localize").run(plain)
    assert PassManager.parse("simplify-collectives").run(module).changed
    verify(module)
    PassManager.parse("localize").run(module)
    np.testing.assert_allclose(results(module)["y"], results(plain)["y"], rtol=1e-5, atol=1e-5)


def test_the_text_of_a_sum_that_is_scattered_once() -> None:
    check(
        "simplify-collectives",
        text_of(SCATTERED, ROWS),
        """
        mesh @m = ["x"=2]
        graph @g(%xs: f32[3, 8, 16@x], %b: f32[16@x, 4], %s: f32[8, 4] replicated) -> (%y) opset 21 {
          %number = constant : f32[] replicated 0.5
          %nothing = constant : f32[] replicated -0.0
          %sizes_1 = constant : i64[2] replicated [8, 4]
          %zeros = Expand(%nothing, %sizes_1) : f32[8, 4] replicated
          %v_1 = irpar.MakePartial(%zeros) {axes=["x"], reduce="sum"} : f32[8, 4] partial(sum: x)
          %y.parts = Scan(%v_1, %xs) {body=graph @body(%t: f32[8, 4] partial(sum: x), %x: f32[8, 16@x]) -> (%u) {
            %p = MatMul(%x, %b) : f32[8, 4] partial(sum: x)
            %u = Add(%t, %p) : f32[8, 4] partial(sum: x)
          }, num_scan_inputs=1} : f32[8, 4] partial(sum: x)
          %y = irpar.ReduceScatter(%y.parts) {axes=["x"], reduce="sum", dim=0, id=0} : f32[8@x, 4] doc "why"
        }
        """,
    )


def test_what_is_read_in_a_trip_is_moved_in_each() -> None:
    text = text_of(REDUCED, WHOLE).replace("-> (%u) {", "-> (%u, %q) {").replace("%y = Scan", "%y, %all = Scan")
    text = text.replace(
        "num_scan_inputs=1} : f32[8, 4] replicated",
        "num_scan_inputs=1} : f32[8, 4] replicated, f32[3, 8, 4] replicated",
    )
    assert not PassManager.parse("simplify-collectives").run(read(text)).changed


def test_products_of_trips_are_no_sums() -> None:
    text = text_of(REDUCED, WHOLE).replace("%u = Add(", "%u = Mul(")
    assert not PassManager.parse("simplify-collectives").run(read(text)).changed
