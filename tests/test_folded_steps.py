"""Training steps of many equal layers, planned as a few of them: the same programs and plans as without that."""

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.analysis.layers.chain import find_chain
from irpar.analysis.layers.units import NotAlike
from irpar.ir import parse_module
from irpar.onnx_io import to_module
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import NORMALISE, composed
from irpar.training.step import train_step
from tests.test_folded_layers import ALIKE, COUNT, chain_module, check_same, notes, with_all


def chain_step(**options):
    """A training step of a chain of small layers whose weights are sharded."""
    step = train_step(chain_module(COUNT + 1, odd=None), loss="mse", **options)
    step.shard("l.*.w", [None, "tp"])
    return step


def with_last(node):
    """A chain of layers, and a node behind them that is a result."""
    text = str(chain_module(odd=None)).replace("-> (", "-> (%every, ").rstrip().removesuffix("}")
    module = parse_module(f"{text}  %every = {node}\n}}\n")
    module.shard("l.*.w", [None, "tp"])
    return module


def step_of(family, layers=COUNT, **options):
    """A training step of a model of a builder, with its usual annotations."""
    step = train_step(to_module(models.build(family, layers=layers)), **options)
    known = {value.source_name for value in step.graph.values()}
    for name, spec in models.annotations(family, layers=layers).items():
        if "*" in name or name in known:
            step.shard(name, spec)
    return step


def check_folded(step, zero, mesh="dp=2,tp=2", **options):
    """A step is planned as a few layers, and as it is without that."""
    pipeline = PassManager.parse(composed(None if zero is None else f"zero{{stage={zero},threshold-kb=0}}"))
    told = check_same(step, mesh, pipeline=pipeline, **options)
    assert any(ALIKE in note for note in told), told


@pytest.mark.parametrize("zero", [None, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gradients_and_updates_belong_to_their_layers(optimizer, zero):
    check_folded(chain_step(optimizer=optimizer), zero)


def test_layers_whose_gradients_differ_are_left_out():
    """Nothing asks for a gradient of the input of the model: the first layer computes none."""
    module = chain_step()
    PassManager.parse(NORMALISE).run(module)
    chain = find_chain(module)
    assert chain.layers.count == COUNT
    assert [stretch.backward for stretch in chain.stretches] == [False, True, False]
    first = [node.source for node in chain.layers.members[0] if node.phase == "forward"]
    assert first == [f"/l.1/{name}" for name in ("tanh", "fc", "scale", "exp", "add")]


@pytest.mark.parametrize("zero", [None, 3])
def test_the_norm_of_all_gradients_adds_those_of_all_layers(zero):
    """Another of two true reasons may be told of a term, which sends as little one way as the other."""
    options = {"pipeline": composed(None if zero is None else f"zero{{stage={zero},threshold-kb=0}}")}
    made, expected = (plan(chain_step(clip_norm=1.0), "dp=2,tp=2", **options) for plan in (irpar.partition, with_all))
    assert any(ALIKE in note for note in made.passes.notes), made.passes.notes
    assert str(made.module) == str(expected.module)
    assert made.plan.totals == expected.plan.totals


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_weight_that_all_layers_read_is_planned_with_all_of_them(precision):
    shapes, lines, before = {"shared": [5, 5]}, [], "x"
    for layer in range(18):
        shapes[f"w_{layer}"] = [5, 5]
        lines += [f"a{layer} = MatMul({before}, w_{layer})", f"b{layer} = Tanh(a{layer})"]
        lines += [f"s{layer} = MatMul(b{layer}, shared)", f"d{layer} = Add({before}, s{layer})"]
        before = f"d{layer}"
    header = '<ir_version: 10, opset_import: ["" : 21]> m (float[4,5] x) => (float[4,5] d17)'
    proto = onnx.parser.parse_model(header + "{\n" + "\n".join(lines) + "\n}")
    for node in proto.graph.node:
        node.name = f"/n/{node.output[0]}"
    zeros = (onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in shapes.items())
    proto.graph.initializer.extend(zeros)
    step = irpar.train_step(irpar.load(proto), loss="mse", optimizer="sgd", precision=precision)
    with pytest.raises(NotAlike, match="shared"):
        find_chain(step)


def test_gradients_belong_to_layers_by_names_of_nodes():
    step = chain_step(optimizer="sgd")
    for node in step.graph:
        node.source = None
    with pytest.raises(NotAlike, match="nodes of the model have no names"):
        find_chain(step)


def test_casts_and_sums_of_gradients_belong_to_the_layers_that_they_stand_in():
    check_folded(step_of("gpt", precision="bf16", clip_norm=1.0), 3, mesh="dp=4,tp=2")


@pytest.mark.parametrize("read", ["%h{0}, %h{0}", "%h{0}, %e{0}, %h{0}", "%e{0}, %h{0}"])
@pytest.mark.parametrize("operator", ["Sum", "Max", "Mean"])
def test_what_reads_of_all_layers_may_read_several_values_of_each_and_one_twice(operator, read):
    every = ", ".join(read.format(number) for number in range(COUNT))
    module = with_last(f"{operator}({every}) : f32[4, 8]")
    assert any(ALIKE in note for note in check_same(module, "dp=2,tp=2"))


@pytest.mark.parametrize(
    ("operator", "order"),
    [("Sum", [*range(1, COUNT), 0]), ("Sum", range(COUNT - 1)), ("Sum", [*range(COUNT), 3]), ("Concat", range(COUNT))],
)
def test_what_reads_of_all_layers_otherwise_than_one_behind_another_is_refused(operator, order):
    """In another order, not of all, of one more often; or what computes another shape of more."""
    read = ", ".join(f"%h{number}" for number in order)
    attributes, rows = (" {axis=0}", 4 * COUNT) if operator == "Concat" else ("", 4)
    module = with_last(f"{operator}({read}){attributes} : f32[{rows}, 8]")
    (note,) = check_same(module, "dp=2,tp=2")
    assert "equal layers were planned each for itself" in note
    assert "is read outside of the next layer" in note


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("family", ["gpt", "bert", "vit", "moe"])
def test_steps_of_builders_are_the_same_where_seconds_count(family, zero):
    check_folded(step_of(family), zero, mesh="dp=4,tp=2", network="h100-nvlink-ib")


def test_tables_that_all_layers_read_are_planned_with_all_of_them_where_they_are_trained():
    (trained,) = notes(irpar.partition(step_of("llama", COUNT + 2), "dp=2,tp=2"))
    assert trained.endswith("%constants.rotary is trained, and read by more than one layer")
    (frozen,) = notes(irpar.partition(step_of("llama", COUNT + 2, freeze=["constants.*"]), "dp=2,tp=2"))
    assert ALIKE in frozen


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("family", ["gpt", "bert", "vit", "moe"])
def test_steps_of_builders_cost_the_same(family, zero):
    """What stands before and behind all layers may be chosen otherwise, at the same cost or a lower one."""
    step, pipeline = step_of(family), composed(f"zero{{stage={zero},threshold-kb=0}}")
    made, expected = (plan(step, "dp=4,tp=2", pipeline=pipeline) for plan in (irpar.partition, with_all))
    assert any(ALIKE in note for note in made.passes.notes)
    assert made.plan.totals["flops_per_rank"] <= expected.plan.totals["flops_per_rank"]
    assert made.plan.totals["sent_bytes"] <= expected.plan.totals["sent_bytes"]
    assert len(made.plan.values) == pytest.approx(len(expected.plan.values), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "lamb"])
def test_every_optimizer_updates_layers_alike(optimizer):
    check_folded(step_of("gpt", optimizer=optimizer), 2)


@pytest.mark.slow
def test_a_folded_step_trains_as_the_model_does():
    made = irpar.partition(step_of("gpt"), "dp=2,tp=2", pipeline=composed("zero{stage=3,threshold-kb=0}"))
    assert any(ALIKE in note for note in made.passes.notes)
    assert made.verify().is_equal
