"""accumulate: what a loop over micro-batches holds, what stays before it, and what is refused."""

import re

import pytest

from irpar.ir import Module, parse_module
from irpar.pass_manager import PassManager
from irpar.pass_manager.pipeline import PipelineError
from irpar.passes.accumulate import AccumulateError
from irpar.sharding import IrparError, Mesh
from tests.passes.golden import run

STEP = """
mesh @m = ["dp"=2]
graph @step(%x: f32[8@dp, 4], %k: f32[1, 4], %grad.loss: f32[], state statistic %n: i64[]) -> (%loss, %g as "grad.w", %n_1 as "n.next" replaces %n, %y) opset 21 {
  %w = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "w"
  %one = constant : i64[] 1
  %rows = constant : i64[1] [0]
  %v = Neg(%w) {| phase=forward} : f32[4]
  %h = Add(%x, %k) {| phase=forward} : f32[8, 4]
  %y = MatMul(%h, %v) {| phase=forward} : f32[8]
  %loss = ReduceMean(%y) {keepdims=0 | phase=forward} : f32[]
  %n_1 = Add(%n, %one) {| phase=forward} : i64[]
  %s = ReduceMean(%h, %rows) {keepdims=0 | phase=backward} : f32[4]
  %m = Neg(%grad.loss) {| phase=backward} : f32[]
  %g = Mul(%s, %m) {| phase=backward} : f32[4]
}
"""


def scan_of(module: Module) -> tuple[list[str], list[str], list[str]]:
    """The operators before the Scan, those in its body, and its results by name."""
    (scan,) = (node for node in module.graph if node.op_type == "Scan")
    (body,) = scan.nested_graphs()
    before = [node.op_type for node in module.graph if module.graph.is_before(node, scan)]
    return before, [node.op_type for node in body], [value.name for value in scan.results]


def test_what_depends_on_samples_is_in_the_loop() -> None:
    module = run("accumulate{micro-batches=4}", STEP)
    before, inside, results = scan_of(module)
    assert before == ["Mul", "Neg", "Neg", "Expand", "Expand"]
    assert inside == ["Add", "MatMul", "ReduceMean", "Mul", "Add", "Add", "ReduceMean", "Mul", "Add"]
    assert results == ["n.next", "loss", "grad.w", "y"]
    types = {value.name: str(value.type) for value in (*module.graph.inputs, *module.graph.outputs)}
    assert types["x"] == "f32[4, 8, 4]"
    assert types["k"] == "f32[1, 4]"
    assert types["y"] == "f32[4, 8]"
    assert types["grad.w"] == "f32[4]"


def test_inputs_keep_their_sharding_beside_the_trips() -> None:
    module = run("accumulate{micro-batches=4}", STEP)
    assert str(module.graph.inputs[0].sharding) == "[_, @dp, _]"


def test_annotations_of_a_model_without_a_mesh_go_along() -> None:
    module = parse_module(STEP.replace('mesh @m = ["dp"=2]\n', "").replace("8@dp", "8"))
    module.shard("x", ["dp", None])
    PassManager.parse("accumulate{micro-batches=4}").run(module)
    module.set_mesh(Mesh({"dp": 2}))
    assert str(module.graph.inputs[0].sharding) == "[_, @dp, _]"


def test_state_goes_from_trip_to_trip() -> None:
    module = run("accumulate{micro-batches=4}", STEP)
    (scan,) = (node for node in module.graph if node.op_type == "Scan")
    assert scan.operands[0] is module.graph.inputs[3]
    (state,) = module.graph.states.values()
    assert state.output is not None
    assert module.graph.output_names[state.output] == "n.next"


def test_one_micro_batch_is_the_step_itself() -> None:
    assert not PassManager.parse("accumulate{micro-batches=1}").run(parse_module(STEP)).changed


def test_targets_that_count_weigh_a_micro_batch() -> None:
    text = STEP.replace('%g as "grad.w"', '%c as "loss_targets", %g as "grad.w"').replace(
        "  %n_1", "  %c = ReduceSum(%y) {keepdims=0 | phase=forward} : f32[]\n  %n_1"
    )
    module = run("accumulate{micro-batches=4}", text)
    before, inside, _ = scan_of(module)
    assert before == ["Neg", "Expand", "Expand", "Expand"]
    assert inside.count("Neg") == 1
    assert module.graph.output_names == ["loss", "grad.w", "n.next", "y"]
    assert [node.op_type for node in list(module.graph)[-2:]] == ["Div", "Div"]


def test_gradients_that_are_equal_are_added_up_once() -> None:
    text = STEP.replace('%g as "grad.w"', '%g as "grad.w", %g as "grad.v"')
    module = run("accumulate{micro-batches=4}", text)
    assert scan_of(module)[2] == ["n.next", "loss", "grad.w", "y"]
    named = dict(zip(module.graph.output_names, module.graph.outputs, strict=True))
    assert named["grad.v"] is named["grad.w"]


def test_inputs_that_are_named_are_whole() -> None:
    text = STEP.replace("%k: f32[1, 4]", "%k: f32[8, 4]")
    shapes = []
    for options in ("", ", undivided=[k]"):
        module = run(f"accumulate{{micro-batches=4{options}}}", text)
        shapes.append(str(module.graph.inputs[1].type))
    assert shapes == ["f32[4, 8, 4]", "f32[8, 4]"]


@pytest.mark.parametrize("count", [0, -2, 2**31, 2**70])
def test_numbers_that_mean_nothing(count: int) -> None:
    with pytest.raises(AccumulateError, match=f"{count} micro-batches"):
        PassManager.parse(f"accumulate{{micro-batches={count}}}").run(parse_module(STEP))


def test_the_number_must_be_given() -> None:
    with pytest.raises(PipelineError, match="accumulate needs the option micro-batches"):
        PassManager.parse("accumulate")


@pytest.mark.parametrize(
    ("before", "after", "options", "said"),
    [
        ("%grad.loss", "%other", "", "the graph has no gradients of a loss"),
        ("f32[8@dp, 4]", "f32[]", ", undivided=[k]", "no input has a first dim that counts samples"),
        ("%x", "%target", "", "only target would be divided into micro-batches"),
        ("", "", ", undivided=[q*]", 'undivided "q*" matches no input'),
    ],
)
def test_graphs_that_do_not_fit(before: str, after: str, options: str, said: str) -> None:
    text = STEP.replace(before, after) if before else STEP
    if after == "f32[]":
        text = text.replace("%h = Add(%x, %k) {| phase=forward} : f32[8, 4]", "%h = Add(%x, %k) : f32[1, 4]")
        text = re.sub(r"%y = (.*) : f32\[8\]", r"%y = \1 : f32[1]", text)
    with pytest.raises(AccumulateError) as caught:
        PassManager.parse(f"accumulate{{micro-batches=4{options}}}").run(parse_module(text))
    assert said in str(caught.value)
    assert caught.value.do


def test_inputs_that_micro_batches_would_share_are_named() -> None:
    with pytest.raises(AccumulateError) as caught:
        PassManager.parse("accumulate{micro-batches=4}").run(parse_module(STEP.replace("%x", "%target")))
    assert caught.value.do.endswith('or say that micro-batches share these inputs: undivided=["k"]')


def test_local_view_is_refused() -> None:
    module = parse_module('mesh @m = ["dp"=2]\ngraph @g(%x: f32[4]) -> (%y) opset 21 { %y = Relu(%x) : f32[4] }')
    PassManager.parse("complete-sharding,insert-redistribution,localize").run(module)
    with pytest.raises(IrparError, match="accumulate needs the global view"):
        PassManager.parse("accumulate{micro-batches=4}").run(module)
