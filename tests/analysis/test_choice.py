"""Where values conflict, what is chosen sends least; and never more than what propagation alone gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.api import DEFAULT_PIPELINE
from irpar.ir import Module
from irpar.ir.text import parse_module
from irpar.onnx_io import to_module
from irpar.pass_manager import PassManager

PROPAGATE = DEFAULT_PIPELINE.replace("complete-sharding", "complete-sharding{strategy=propagate}")

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
    PassManager.parse(f"complete-sharding{{strategy={strategy}}},insert-redistribution").run(module)
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
    assert kinds(module) == ["AllReduce"]
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
@settings(max_examples=12, deadline=None)
def test_never_more_than_propagation_sends(drawn: tuple[str, dict, dict]) -> None:
    family, mesh, cuts = drawn
    sent = []
    for pipeline in (PROPAGATE, DEFAULT_PIPELINE):
        module = to_module(models.build(family))
        irpar.annotate(module, cuts)
        partition = partitioned(module, mesh, pipeline)
        partition.verify().check()
        sent.append(partition.plan.totals["sent_bytes"])
    assert sent[1] <= sent[0]


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_the_sequence_of_a_transformer_over_the_axis_of_its_weights(family: str) -> None:
    """Never more than Megatron's sequence parallelism: an all-gather and a reduce-scatter for each half of a layer."""
    sent = []
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
        sent.append(partition.plan.totals["sent_bytes"])
    head = 4 * 128 * 1024  # the head's weight or the logits are moved, too
    assert sent[1] <= sent[0] + head, sent
