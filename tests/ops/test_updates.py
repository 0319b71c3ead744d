"""Updates: what stands for them where a program runs, and that plans count what that does."""

from pathlib import Path

import onnx
import pytest

from irpar.ir import DOMAIN, Module
from irpar.ir.text.files import parse_module
from irpar.onnx_io import save
from irpar.ops.op_def import definition
from irpar.ops.updates import is_for_plans, write_out

from ..passes.golden import check, read

SHAPE = "f32[6, 4]"
TEXTS = {
    "Sgd": ("", "%r", 1),
    "Sgd with decay": ("", "%r, %a", 1),
    "Momentum": ("%m, ", "%r, %a", 2),
    "Momentum with decay": ("%m, ", "%r, %a, %b", 2),
    "Momentum that looks ahead": ("%m, ", "%r, %a", 2),
    "Adam": ("%m, %v, ", "%r, %a, %b, %c, %d", 3),
    "Adam with decay": ("%m, %v, ", "%r, %a, %b, %c, %d, %e", 3),
    "AdamW": ("%m, %v, ", "%r, %a, %b, %c, %d", 3),
    "AdamW with decay": ("%m, %v, ", "%r, %a, %b, %c, %d, %e", 3),
}


def module_of(case: str) -> Module:
    """A graph with one update."""
    moments, numbers, results = TEXTS[case]
    names = ", ".join(f"%y{index}" for index in range(results))
    types = ", ".join([SHAPE] * results)
    tensors = ", ".join(f"%{name}: {SHAPE}" for name in "wgmv")
    scalars = ", ".join(f"%{name}: f32[]" for name in "rabcde")
    facts = "nesterov=1 | phase=optimizer" if "looks ahead" in case else "| phase=optimizer"
    return parse_module(
        f"graph @step({tensors}, {scalars}) -> ({names}) opset 21 {{\n"
        f"  {names} = irpar.{case.split()[0]}(%w, %g, {moments}{numbers}) {{{facts}}} : {types}\n}}\n"
    )


@pytest.mark.parametrize("case", TEXTS)
def test_it_counts_what_is_written_for_it(case: str) -> None:
    module = module_of(case)
    (node,) = module.graph
    known = definition(node)
    assert known is not None
    assert known.flops is not None
    counted = known.flops(node)
    names = [value.name for value in node.results]
    write_out(module.graph, module.opsets)
    total = 0
    for made in module.graph:
        plain = definition(made)
        assert plain is not None
        assert plain.flops is not None
        assert made.domain == ""
        assert made.phase == "optimizer"
        total += plain.flops(made)
    assert counted == total
    assert [value.name for value in module.graph.outputs] == names


@pytest.mark.parametrize("case", TEXTS)
def test_a_file_has_standard_operators(case: str, tmp_path: Path) -> None:
    module = module_of(case)
    before = str(module)
    save(module, tmp_path / "step.onnx")
    assert str(module) == before
    model = onnx.load(tmp_path / "step.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}


def test_localize_writes_it_out() -> None:
    check(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["d"=2]
        graph @step(%w: f32[6@d, 4], %g: f32[6@d, 4], %r: f32[]) -> (%y) opset 21 {
          %y = irpar.Sgd(%w, %g, %r) {| phase=optimizer} : f32[6@d, 4]
        }
        """,
        """
        mesh @m = ["d"=2]
        graph local @step(%w: f32[3, 4] of [6@d, 4], %g: f32[3, 4] of [6@d, 4], %r: f32[] of [] replicated) -> (%y) opset 21 ranks [0, 1] {
          %optimizer = Mul(%r, %g) {| phase=optimizer} : f32[3, 4]
          %y = Sub(%w, %optimizer) {| phase=optimizer} : f32[3, 4] of [6@d, 4]
        }
        """,
    )


def test_localize_writes_it_out_where_nothing_is_sharded() -> None:
    check(
        "complete-sharding,insert-redistribution,localize",
        """
        mesh @m = ["d"=1]
        graph @step(%w: f32[6], %g: f32[6], %r: f32[]) -> (%y) opset 21 {
          %y = irpar.Sgd(%w, %g, %r) {| phase=optimizer} : f32[6]
        }
        """,
        """
        mesh @m = ["d"=1]
        graph local @step(%w: f32[6] of [6] replicated, %g: f32[6] of [6] replicated, %r: f32[] of [] replicated) -> (%y) opset 21 ranks [0] {
          %optimizer = Mul(%r, %g) {| phase=optimizer} : f32[6]
          %y = Sub(%w, %optimizer) {| phase=optimizer} : f32[6] of [6] replicated
        }
        """,
    )


def test_what_is_written_for_it_is_no_update() -> None:
    module = read(
        "graph @step(%w: f32[4], %g: f32[4], %r: f32[]) -> (%y) opset 21 {\n  %y = irpar.Sgd(%w, %g, %r) : f32[4]\n}\n"
    )
    assert [is_for_plans(node) for node in module.graph] == [True]
    write_out(module.graph, module.opsets)
    assert [is_for_plans(node) for node in module.graph] == [False, False]
    assert all(node.domain != DOMAIN for node in module.graph)
