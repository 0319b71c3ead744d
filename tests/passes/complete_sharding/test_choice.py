"""Where values conflict, what is chosen sends least; and never more than what propagation alone gives."""

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module
from irpar.ops.collectives import sent_bytes
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from tests.budget import budget

OWN = "insert-redistribution{refine=false}"
"""What completion alone decided."""
COST = DEFAULT_PIPELINE.replace("insert-redistribution", OWN)
PROPAGATE = COST.replace("complete-sharding", "complete-sharding{strategy=propagate}")

MLP = """
mesh @m = ["tp"=4]
graph @mlp(%x: f32[2, 32@tp, 64]) -> (%y) opset 21 {
  %w1 = constant : f32[64, 256@tp] data("w.bin", 0, 65536)
  %w2 = constant : f32[256@tp, 64] data("w.bin", 65536, 65536)
  %h = MatMul(%x, %w1) : f32[2, 32, 256]
  %a = Relu(%h) : f32[2, 32, 256]
  %y = MatMul(%a, %w2) : f32[2, 32@tp, 64]
}
"""
PARTS = """
mesh @m = ["tp"=4]
graph @g(%a: f32[32, 64@tp], %b: f32[32, 64@tp]) -> (%y) opset 21 {
  %v = constant : f32[64@tp, 16] data("w.bin", 0, 4096)
  %w = constant : f32[64@tp, 16] data("w.bin", 4096, 4096)
  %half = constant : f32[] 0.5
  %p = MatMul(%a, %v) : f32[32, 16]
  %q = MatMul(%b, %w) : f32[32, 16]
  %r = Mul(%q, %half) : f32[32, 16]
  %s = Add(%p, %r) : f32[32, 16]
  %y = Relu(%s) : f32[32, 16]
}
"""


def completed(text: str, strategy: str = "cost") -> Module:
    module = parse_module(text)
    PassManager.parse(f"complete-sharding{{strategy={strategy}}},{OWN}").run(module)
    return module


def kinds(module: Module) -> list[str]:
    return [node.op_type for node in module.graph if node.domain == "irpar"]


def test_a_sequence_that_is_cut_is_gathered_before_the_weights_and_scattered_behind_them() -> None:
    module = completed(MLP)
    assert kinds(module) == ["AllGather", "ReduceScatter"]
    lies = {value.name: str(value.sharding) for value in module.graph.values()}
    assert lies["h"] == "[_, _, @tp]"
    assert kinds(completed(MLP, "propagate")) != ["AllGather", "ReduceScatter"]


def test_the_choice_is_explained_by_an_annotation() -> None:
    module = completed(MLP)
    for name in ("h", "a"):
        _, decision = module.chain(name, "tp")[-1]
        assert "sends least" in decision.why
        assert decision.follows in ("w1", "w2")


def test_partial_sums_are_reduced_once() -> None:
    module = completed(PARTS)
    assert kinds(module) == ["ReduceScatter"]
    (reduction,) = [node for node in module.graph if node.domain == "irpar"]
    assert reduction.inputs[0].name == "s"
    assert "MatMul of %p sums over tp" in reduction.doc
    assert kinds(completed(PARTS, "propagate")) == ["AllReduce", "AllReduce"]


def test_a_second_run_changes_nothing() -> None:
    for text in (MLP, PARTS):
        module = parse_module(text)
        manager = PassManager.parse("complete-sharding")
        assert manager.run(module).changed
        before = str(module)
        assert not manager.run(module).changed
        assert str(module) == before


def partitioned(module: Module, mesh: dict[str, int], pipeline: str | None = None) -> irpar.Partition:
    return irpar.partition(module, irpar.Mesh(mesh), pipeline=pipeline)


@st.composite
def annotated(draw: st.DrawFn) -> tuple[str, dict, dict]:
    """A family with annotations that may well conflict."""
    family = draw(st.sampled_from(["mlp", "gpt", "llama", "bert", "moe", "vit"]))
    mesh = draw(st.sampled_from([{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}]))
    cuts = dict(models.annotations(family, "dp" if "dp" in mesh else None, "tp"))
    module = to_module(models.build(family))
    ends = [*module.graph.inputs, *module.graph.outputs]
    for value, name in zip(ends, [*(v.name for v in module.graph.inputs), *module.graph.output_names], strict=True):
        if draw(st.booleans()) and len(value.shape) > 1:
            dim = draw(st.integers(0, len(value.shape) - 1))
            spec: list = [None] * len(value.shape)
            spec[dim] = ["tp"]
            if value.shape[dim] % mesh["tp"] == 0:
                cuts[name] = spec
    return family, mesh, cuts


@given(annotated())
@settings(max_examples=budget(12), deadline=None)
def test_never_more_than_propagation_sends(drawn: tuple[str, dict, dict]) -> None:
    family, mesh, cuts = drawn
    total = []
    for pipeline in (PROPAGATE, COST):
        module = to_module(models.build(family))
        irpar.annotate(module, cuts)
        partition = partitioned(module, mesh, pipeline)
        partition.verify().check()
        total.append(partition.plan.totals["sent_bytes"])
    assert total[1] <= total[0]


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_the_sequence_of_a_transformer_over_the_axis_of_its_weights(family: str) -> None:
    """Never more than Megatron's sequence parallelism: an all-gather and a reduce-scatter for each half of a layer."""
    total = []
    for is_cut in (False, True):
        module = to_module(models.build(family))
        cuts = dict(models.annotations(family, None, "tp"))
        output = module.graph.output_names[0]
        cuts.pop(output, None)
        if is_cut:
            cuts |= {value.name: [None, ["tp"]] for value in module.graph.inputs if len(value.shape) == 2}
            if len(module.graph.outputs[0].shape) == 3:
                cuts[output] = [None, ["tp"], None]
        irpar.annotate(module, cuts)
        partition = partitioned(module, {"tp": 2})
        partition.verify().check()
        total.append(partition.plan.totals["sent_bytes"])
    head = 4 * 128 * 1024  # the head's weight or the logits are moved, too
    assert total[1] <= total[0] + head, total


def variadic(count: int) -> str:
    """A Concat of `count` values that two annotations pull in two directions each."""
    inputs = ", ".join(f"%x{n}: f32[4, 8@t, 12]" for n in range(count))
    names = ", ".join(f"%r{n}" for n in range(count))
    lines = "\n".join(
        f"  %m{n} = MatMul(%x{n}, %w) : f32[4, 8, 12]\n  %r{n} = Relu(%m{n}) : f32[4, 8, 12]" for n in range(count)
    )
    return f"""
mesh @m = ["t"=2]
graph @g({inputs}) -> (%y) opset 21 {{
  %w = constant : f32[12, 12@t] data("w.bin", 0, 576)
{lines}
  %y = Concat({names}) {{axis=0}} : f32[{4 * count}, 8, 12]
}}
"""


@pytest.mark.parametrize("count", [3, 70])
def test_a_node_of_many_torn_values_takes_no_table_of_all_their_combinations(count: int) -> None:
    cheap, plain = (sent(completed(variadic(count), strategy)) for strategy in ("cost", "propagate"))
    assert cheap <= plain


def sent(module: Module) -> int:
    return sum(sent_bytes(node, module.mesh) for node in module.graph if node.domain == "irpar")


SHARED = [
    # One gather for two readers; a constant with two readers; an axis of size 1.
    ({"a": 2, "c": 2}, {"x1": [None, ["a"], ["c"]], "x3": [["c"], None, None]}),
    ({"a": 1, "c": 2}, {"x1": [["c"], None, ["a"]], "v10": [None, None, ["c"]]}),
    ({"a": 2}, {"x1": [["a"], None, None], "v9": [None, None, ["a"]], "w4": [["a"], None]}),
]
SHARED_TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[4,1,8] x1, float[4,1,8] x3) => (float[4,1,2] v5, float[4,1,8] v10) <int64[1] c6={1}> {
  v5 = MatMul (x1, w4) v7 = ReduceMax <keepdims: int = 1> (x3, c6) v9 = ReduceMax <keepdims: int = 1> (x1, c6)
  v10 = Max (v7, v9) }"""


@pytest.mark.parametrize(("mesh", "cuts"), SHARED)
def test_what_is_shared_by_readers_is_counted_once(mesh: dict[str, int], cuts: dict) -> None:
    model = onnx.parser.parse_model(SHARED_TEXT)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 2), np.float32), "w4"))
    found = []
    for pipeline in (PROPAGATE, COST):
        module = to_module(model)
        irpar.annotate(module, cuts)
        found.append(partitioned(module, mesh, pipeline).plan.totals["sent_bytes"])
    assert found[1] <= found[0]
