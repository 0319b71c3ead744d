"""zero: what is sharded by which stage, what stays as it is and why, and what cannot be."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import irpar
from irpar.ir import Module, clone_module, parse_module
from irpar.models import build
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import with_zero
from irpar.passes.zero import ZeroError
from irpar.passes.zero.cuts import cut_of
from irpar.sharding import Axis, Mesh, Sharding, are_disjoint
from tests.passes.golden import run

STEP = """
mesh @m = ["dp"=2, "tp"=2]
graph @step(%x: f32[8@dp, 4], %mu: f32[], state parameter %w: f32[4, 6@tp], state moment of "w" %m: f32[4, 6] from "w.m") -> (%l, %w_1 replaces %w, %m_1 replaces %m) opset 21 {
  %y = MatMul(%x, %w) {| phase=forward} : f32[8, 6]
  %l = ReduceSum(%y) {keepdims=0 | phase=forward} : f32[]
  %t = Transpose(%w) {| phase=backward} : f32[6, 4]
  %d = MatMul(%y, %t) {| phase=backward} : f32[8, 4]
  %u = Transpose(%d) {| phase=backward} : f32[4, 8]
  %g = MatMul(%u, %y) {| phase=backward} : f32[4, 6] as "grad.w"
  %w_1, %m_1 = irpar.Momentum(%w, %g, %m, %mu, %mu) {| phase=optimizer} : f32[4, 6], f32[4, 6]
}
"""


def annotated(options: str) -> dict[str, str]:
    """How the pass annotates the values of STEP: the sharding of each."""
    module = run(f"zero{{threshold-kb=0, {options}}}", STEP)
    return {value.name: str(value.sharding) for value in module.graph.values() if value.sharding is not None}


def test_stage_1_shards_moments_alone() -> None:
    assert annotated("stage=1") == {"x": "[@dp, _]", "w": "[_, @tp]", "m": "[@dp, @tp]"}


def test_stage_2_shards_gradients_too() -> None:
    assert annotated("stage=2") == {"x": "[@dp, _]", "w": "[_, @tp]", "m": "[@dp, @tp]", "g": "[@dp, @tp]"}


def test_stage_3_shards_parameters_beside_their_annotation() -> None:
    found = {"x": "[@dp, _]", "w": "[@dp, @tp]", "m": "[@dp, @tp]", "g": "[@dp, @tp]"}
    assert annotated("stage=3, regather=false") == found
    assert annotated("stage=3") == found | {"w.again": "[@dp, @tp]"}


def test_the_backward_pass_reads_a_view_of_its_own() -> None:
    module = run("zero{stage=3, threshold-kb=0}", STEP)
    by_name = {value.name: value for value in module.graph.values()}
    again = by_name["w.again"]
    assert again.node is not None
    assert (again.node.op_type, again.node.phase, again.node.inputs) == ("Identity", "backward", (by_name["w"],))
    assert {node.op_type for node in by_name["w"].users} == {"MatMul", "Identity", "Momentum"}
    assert [node.op_type for node in again.users] == ["Transpose"]


def test_sub_axes_shard_inside_groups() -> None:
    text = STEP.replace('"dp"=2', '"dp"=4')
    module = run("zero{stage=1, threshold-kb=0, axes=[dp:(2)2]}", text)
    assert {str(value.sharding) for value in module.graph.states} == {"[_, @tp]", "[@dp:(2)2, @tp]"}


def test_what_the_text_shards_stays() -> None:
    text = STEP.replace("%m: f32[4, 6]", "%m: f32[4, 6@dp]")
    found = {value.name: str(value.sharding) for value in run("zero{stage=2, threshold-kb=0}", text).graph.values()}
    assert (found["m"], found["g"]) == ("[_, @dp]", "[@dp, @tp]")


def test_a_second_run_changes_nothing() -> None:
    """`run` compares what each pass says with the text before and after it."""
    module = run("zero{stage=3, threshold-kb=0},zero{stage=3, threshold-kb=0}", STEP)
    assert [node.op_type for node in module.graph].count("Identity") == 1


def test_inputs_that_are_sharded_otherwise_are_noted() -> None:
    (record,) = (
        PassManager.parse("zero{threshold-kb=0}").run(parse_module(STEP.replace("f32[8@dp, 4]", "f32[8, 4]"))).records
    )
    assert record.notes[1] == (
        "no input is sharded over dp, so ranks along it may compute with the same samples; "
        'do: module.shard(INPUT, ["dp", ...])'
    )
    (record,) = PassManager.parse("zero{threshold-kb=0}").run(parse_module(STEP)).records
    assert record.notes == ("optimizer state of 1 tensor sharded over dp",)
    one = STEP.replace('"dp"=2', '"dp"=1').replace("f32[8@dp, 4]", "f32[8, 4]")
    (record,) = PassManager.parse("zero{threshold-kb=0}").run(parse_module(one)).records
    assert not any("no input is sharded" in note for note in record.notes)


@pytest.mark.parametrize(("axes", "dim"), [("tp", '"tp"'), ("tp,dp:(1)2", '["tp", "dp"]')])
def test_the_note_of_inputs_names_the_axes_of_the_pass(axes: str, dim: str) -> None:
    text = STEP.replace("8@dp", "8").replace("6@tp", "6")
    (record,) = PassManager.parse(f"zero{{threshold-kb=0, axes=[{axes}]}}").run(parse_module(text)).records
    assert record.notes[1].endswith(f"do: module.shard(INPUT, [{dim}, ...])")


def test_what_somebody_annotated_stays() -> None:
    module = parse_module(STEP)
    module.shard("w.m", [None, "dp"])
    PassManager.parse("zero{stage=2, threshold-kb=0}").run(module)
    found = {value.name: str(value.sharding) for value in module.graph.values() if value.sharding is not None}
    assert (found["m"], found["g"]) == ("[_, @dp]", "[@dp, @tp]")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("stage=0", "there is no stage 0"),
        ("stage=4", "there is no stage 4"),
        ("axes=[ep]", 'zero cannot shard over ep: no axis "ep" in mesh dp=2,tp=2'),
        ("axes=[dp:(1)3]", "sub-axis dp:(1)3 does not fit axis dp of size 2"),
        ("axes=[dp, dp]", "the axes dp, dp overlap"),
        ("axes=[]", "zero has no axes"),
        ("threshold-kb=-1", "a threshold of -1.0 kB"),
        ("threshold-kb=nan", "a threshold of nan kB"),
        ("prefetch=0", "a prefetch of 0 layers"),
    ],
)
def test_options_that_do_not_fit(options: str, said: str) -> None:
    with pytest.raises(ZeroError) as caught:
        PassManager.parse(f"zero{{{options}}}").run(parse_module(STEP))
    assert said in str(caught.value)
    assert caught.value.do


def test_a_sub_axis_that_does_not_fit_is_told_how_it_would() -> None:
    with pytest.raises(ZeroError) as caught:
        PassManager.parse("zero{axes=[dp:(1)3]}").run(parse_module(STEP))
    assert caught.value.do == "in dp:(PRE)SIZE, PRE * SIZE must divide 2, and SIZE must be 2 or more"
    assert not caught.value.notes


def test_an_inference_graph_is_refused() -> None:
    module = parse_module('mesh @m = ["dp"=2]\ngraph @g(%x: f32[4]) -> (%y) opset 21 { %y = Relu(%x) : f32[4] }')
    with pytest.raises(ZeroError, match="it is no training step"):
        PassManager.parse("zero").run(module)


def test_frozen_parameters_alone_are_refused() -> None:
    text = STEP.replace(", %w_1 replaces %w, %m_1 replaces %m", ", %w_1, %m_1")
    with pytest.raises(ZeroError, match="no parameter that it replaces"):
        PassManager.parse("zero").run(parse_module(text))


# -- along which dim ----------------------------------------------------------------------------------------------


def test_dims_that_do_not_divide_have_uneven_blocks() -> None:
    mesh = Mesh({"dp": 4})
    found = cut_of(Sharding.replicated(mesh, 2), (7, 9), [Axis("dp")])
    assert (str(found.sharding), found.is_sharded) == ("[_, @dp]", True)
    assert found.why == "uneven blocks: no dim of a block, [7, 9], divides by 4"


def test_reasons_name_blocks_of_dims_that_are_sharded_already() -> None:
    mesh = Mesh({"dp": 4, "tp": 2})
    found = cut_of(Sharding.of_spec(mesh, [None, ["tp"]]), (6, 12), [Axis("dp")])
    assert (str(found.sharding), found.why) == ("[@dp, @tp]", "uneven blocks: no dim of a block, [6, 6], divides by 4")


def test_axes_of_one_device_shard_nothing() -> None:
    found = cut_of(Sharding.replicated(Mesh({"dp": 1, "tp": 2}), 1), (8,), [Axis("dp")])
    assert (found.is_sharded, found.why) == (False, "dp has one device")


def test_axes_that_shard_it_already_are_left_out() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    found = cut_of(Sharding.of_spec(mesh, [None, ["tp"]]), (8, 8), [Axis("dp"), Axis("tp")])
    assert (str(found.sharding), found.why) == ("[@dp, @tp]", "")


def test_short_dims_stay() -> None:
    mesh = Mesh({"dp": 4})
    found = cut_of(Sharding.replicated(mesh, 2), (3, 2), [Axis("dp")])
    assert (found.sharding.is_replicated, found.is_sharded, found.why) == (
        True,
        False,
        "no dim of a block, [3, 2], has 4 elements",
    )
    found = cut_of(Sharding.replicated(mesh, 0), (), [Axis("dp")])
    assert (found.is_sharded, found.why) == (False, "it is a single number")


def test_what_is_sharded_over_the_axes_already_stays() -> None:
    mesh = Mesh({"dp": 4})
    lies = Sharding.of_spec(mesh, [["dp"], None])
    found = cut_of(lies, (8, 8), [Axis("dp")])
    assert (found.sharding, found.is_sharded, found.why) == (lies, False, "it is sharded over dp already")


@given(
    st.lists(st.integers(0, 24), max_size=3),
    st.sampled_from([["dp"], ["dp", "tp"], ["tp"], ["dp:(2)2"], ["ep", "dp:(1)2"]]),
    st.data(),
)
def test_of_any_shape_one_dim_is_sharded_further(shape: list[int], names: list[str], data: Any) -> None:
    mesh = Mesh({"dp": 4, "tp": 2, "ep": 3})
    dims: list[list[str]] = [[] for _ in shape]
    for name in ("dp", "tp", "ep"):
        if shape and data.draw(st.booleans()):
            dims[data.draw(st.integers(0, len(shape) - 1))].append(name)
    lies = Sharding.of_spec(mesh, dims)
    axes = [Axis.parse(name) for name in names]
    found = cut_of(lies, shape, axes)
    axes = [axis for axis in axes if are_disjoint(mesh, [*lies.all_axes, axis])]
    parts = mesh.group_size(axes)
    wanted = [lies.dim_parts(dim) * parts for dim in range(len(shape))]
    if not found.is_sharded:
        assert (found.sharding, bool(found.why)) == (lies, True)
        assert not axes or all(size < blocks for size, blocks in zip(shape, wanted, strict=True))
        return
    assert are_disjoint(mesh, found.sharding.all_axes)
    divided = [dim for dim, blocks in enumerate(wanted) if shape[dim] and shape[dim] % blocks == 0]
    first = sorted(divided, key=lambda dim: lies.dim_parts(dim) > 1)[:1]
    assert not first or found.sharding.axes[first[0]] != lies.axes[first[0]]
    changed = [dim for dim in range(len(shape)) if found.sharding.axes[dim] != lies.axes[dim]]
    assert len(changed) == 1
    parts = found.sharding.dim_parts(changed[0])
    assert parts == lies.dim_parts(changed[0]) * mesh.group_size(axes)
    assert (shape[changed[0]] % parts == 0) == (not found.why)


# -- figures of the paper -----------------------------------------------------------------------------------------

RANKS, LAYERS = 64, 6


@pytest.fixture(scope="module")
def mixed() -> Module:
    """A step of a gpt in bfloat16 with AdamW: 2 bytes of parameter and gradient, 12 of master and moments."""
    model = build("gpt", layers=LAYERS, hidden=512, heads=8, seq=512, vocab=512, batch=RANKS)
    step = irpar.train_step(model, precision="bf16", optimizer="adamw")
    for name in ("input_ids", "target"):
        step.shard(name, ["dp", None])
    return step


def planned(step: Module, options: str | None) -> irpar.Partition:
    return irpar.partition(
        clone_module(step), f"dp={RANKS}", pipeline=None if options is None else with_zero(f"zero{{{options}}}")
    )


def sizes(step: Module) -> list[int]:
    return [math.prod(value.shape) for value, state in step.graph.states.items() if state.is_trained]


FIGURES = {
    # Bytes a parameter of parameters, gradients and optimizer state, and what is sent, of 16-bit parameters.
    None: ((2, 2, 12), 2),
    "stage=1, threshold-kb=0": ((2, 2 / RANKS, 12 / RANKS), 2),
    "stage=2, threshold-kb=0": ((2, 2 / RANKS, 12 / RANKS), 2),
    "stage=3, threshold-kb=0": ((2 / RANKS, 2 / RANKS, 12 / RANKS), 3),
    "stage=3, threshold-kb=0, regather=false": ((2 / RANKS, 2 / RANKS, 12 / RANKS), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", list(FIGURES))
def test_memory_and_volume_are_those_of_the_paper(options: str | None, mixed: Module) -> None:
    """Rajbhandari et al., 2020, sections 5 and 7, with K = 12; stage 1 holds no more gradients than stage 2."""
    made = planned(mixed, options)
    count = sum(sizes(mixed))
    per_parameter, volume = FIGURES[options]
    constants = made.parts[0].graph.constants
    tables = sum(value.tensor_type.nbytes for value in constants)
    for entry in made.plan.ranks:
        memory = entry["memory"]
        found = (memory["parameters"] - tables, memory["gradients"], memory["optimizer"])
        assert [size / count for size in found] == pytest.approx(per_parameter, rel=2e-3, abs=1e-3)
    sent = made.plan.totals["sent_bytes"] / 2
    assert sent == pytest.approx(volume * count * (RANKS - 1) / RANKS, rel=0.03)
    if options:  # Nothing but scalars is all-reduced.
        reduced = [entry["bytes"] for entry in made.plan.collectives if entry["kind"] == "all_reduce"]
        assert max(reduced) <= 64


@pytest.mark.slow
def test_stage_3_holds_one_gathered_layer_at_a_time(mixed: Module) -> None:
    kept = planned(mixed, "stage=3, threshold-kb=0, regather=false").plan.ranks[0]["memory"]["buffers"]
    again = planned(mixed, "stage=3, threshold-kb=0").plan.ranks[0]["memory"]["buffers"]
    assert kept >= 2 * sum(sizes(mixed))
    assert again <= 3 * kept / LAYERS


@pytest.mark.parametrize(("regather", "least", "most"), [("true", 0.9, 1.0), ("false", 0.0, 0.0)])
def test_parameters_are_gathered_once_in_each_pass(regather: str, least: float, most: float) -> None:
    """But in the backward pass not those that it does not read: tables of embeddings, and what is added."""
    step = irpar.train_step(build("gpt", hidden=128, seq=128, batch=8), optimizer="sgd")
    for name in ("input_ids", "target"):
        step.shard(name, ["dp", None])
    options = f"stage=3, threshold-kb=0, regather={regather}"
    made = irpar.partition(clone_module(step), "dp=4", pipeline=with_zero(f"zero{{{options}}}"))
    sent: Counter[str] = Counter()
    for entry in made.plan.collectives:
        if entry["kind"] == "all_gather":
            sent[entry["phase"]] += entry["sent_bytes"]
    share = 4 * sum(sizes(step)) * 3 / 4
    assert 0.9 * share <= sent["forward"] <= share
    assert least * sent["forward"] <= sent["backward"] <= most * sent["forward"]
