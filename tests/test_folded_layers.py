"""Models of many equal layers, planned as a few of them: the same programs and plans as without that, to the byte."""

from random import Random
from unittest import mock

import pytest

import irpar
from irpar import models
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.fused_moves import saved_together
from irpar.analysis.completion.moves import placements_of
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.layers.chain import LEAST_COUNT, find_chain
from irpar.analysis.layers.fold import folded_module
from irpar.analysis.layers.units import NotAlike
from irpar.ir import Node, parse_module
from irpar.ir.annotate import annotate_further, glob_of, matches
from irpar.ir.annotation import Annotation
from irpar.ir.state_rules import add_states
from irpar.ir.verifier import verify
from irpar.onnx_io import to_module
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, NORMALISE
from irpar.passes.zero.cuts import cut_of
from irpar.sharding import Axis, Mesh, Sharding

ALIKE, APART = " equal layers of ", "equal layers were planned each for itself: "
COUNT = LEAST_COUNT


def chain_module(count=COUNT, scale="0.5", odd_scale="0.5", odd=7):
    """Layers that add exp(tanh(x) @ w * scale) to x; the scale of one of them may be another."""
    lines = [f'%w{n} = constant : f32[8, 8] data("w{n}", 0, 256) from "l.{n}.w"' for n in range(count)]
    lines += [f"%s = constant : f32[] {scale}", f"%s_odd = constant : f32[] {odd_scale}"]
    for n in range(count):
        before, factor = f"h{n - 1}" if n else "x", "s_odd" if n == odd else "s"
        lines += [
            f'%t{n} = Tanh(%{before}) : f32[4, 8] from "/l.{n}/tanh"',
            f'%m{n} = MatMul(%t{n}, %w{n}) : f32[4, 8] from "/l.{n}/fc"',
            f'%f{n} = Mul(%m{n}, %{factor}) : f32[4, 8] from "/l.{n}/scale"',
            f'%e{n} = Exp(%f{n}) : f32[4, 8] from "/l.{n}/exp"',
            f'%h{n} = Add(%{before}, %e{n}) : f32[4, 8] from "/l.{n}/add"',
        ]
    body = "\n".join(f"  {line}" for line in lines)
    return parse_module(f"graph @g(%x: f32[4, 8]) -> (%h{count - 1}) opset 21 {{\n{body}\n}}\n")


def built(family, layers, said=(), **settings):
    """A model of a builder with its usual annotations, and more."""
    module = to_module(models.build(family, layers=layers, **settings))
    known = {value.source_name for value in module.graph.values()}
    for name, spec in models.annotations(family, layers=layers).items():
        if "*" in name or name in known:
            module.shard(name, spec)
    for name, spec in said:
        module.shard(name, spec)
    return module


def with_all(module, mesh, **options):
    """The partition that is planned with all layers."""
    with mock.patch("irpar.folded_layers.find_chain", return_value=None):
        return irpar.partition(module, mesh, **options)


def chains_of(family):
    """How many chains of layers a model of a builder has: an encoder and a decoder have one each."""
    return 2 if family == "t5" else 1


def notes(partition):
    return [note for note in partition.passes.notes if ALIKE in note or APART in note]


def check_same(module, mesh, **options):
    """Both ways to plan a module give the same; returns the notes."""
    made, expected = irpar.partition(module, mesh, **options), with_all(module, mesh, **options)
    assert made.plan.to_json() == expected.plan.to_json()
    assert str(made.module) == str(expected.module)
    assert not notes(expected)
    verify(made.module)
    return notes(made)


def test_a_folded_module_has_the_ends_of_the_chain():
    module = chain_module()
    PassManager.parse(NORMALISE).run(module)
    chain = find_chain(module)
    assert (chain.layers.count, chain.layers.size) == (COUNT, 5)
    folded = folded_module(module, chain)
    verify(folded)
    kept = [0, 1, 2, COUNT - 2, COUNT - 1]
    assert [value.source_name for value in folded.graph.constants if value.source] == [f"l.{n}.w" for n in kept]
    assert [node.source for node in folded.graph if node.op_type == "Tanh"] == [f"/l.{n}/tanh" for n in kept]
    (tanh,) = (node for node in folded.graph if node.source == f"/l.{COUNT - 2}/tanh")
    assert tanh.inputs[0].name == "h2"
    assert len(module.graph) == 5 * COUNT


def test_layers_that_are_left_out_are_as_the_third_one():
    module = chain_module()
    module.shard("l.*.w", [None, "tp"])
    assert check_same(module, "dp=2,tp=2") == [
        f"simplify-collectives: {COUNT} equal layers of 5 nodes were planned as 5 of them"
    ]


def test_a_gpt_of_equal_layers_gives_the_same_plan_and_programs():
    (note,) = check_same(built("gpt", COUNT), "dp=2,tp=2")
    assert ALIKE in note


def test_weights_may_be_inputs():
    module = chain_module()
    for value in list(module.graph.constants):
        if value.source is not None:
            module.graph.constant_to_input(value)
    module.shard("l.*.w", [None, "tp"])
    (note,) = check_same(module, "dp=2,tp=2")
    assert ALIKE in note


@pytest.mark.parametrize(
    ("module", "said", "why"),
    [
        (chain_module(), {"l.5.w": [None, "tp"]}, "%w0 is not of the same kind in all layers"),
        (chain_module(odd_scale="0.25"), {"l.*.w": [None, "tp"]}, "%s is read by some layers, or is computed for one"),
    ],
)
def test_layers_that_differ_are_planned_each_for_itself(module, said, why):
    for name, spec in said.items():
        module.shard(name, spec)
    assert check_same(module, "dp=2,tp=2") == [f"dce: {APART}{why}"]


@pytest.mark.slow
def test_values_that_have_come_and_gone_count_in_the_names_of_later_ones():
    """What is annotated is moved and takes its name from what its node gives, layer by layer."""
    said = [("/h.*/Add_1_output_0", ["dp", "tp", None]), ("/h.*/Add_output_0", ["dp", "tp", None])]
    (note,) = check_same(built("gpt", COUNT, said), "dp=2,tp=2")
    assert ALIKE in note


def test_a_short_chain_is_planned_as_it_is():
    module = chain_module(COUNT - 1)
    PassManager.parse(NORMALISE).run(module)
    assert find_chain(module) is None


def two_chains(count, further):
    """Layers behind each other, and others that read each what all of these give."""
    text = str(chain_module(count, odd=None)).rstrip().removesuffix("}")
    constants = [f'%v{n} = constant : f32[8, 8] data("v{n}", 0, 256) from "d.{n}.v"' for n in range(further)]
    lines = []
    for n in range(further):
        before = f"d{n - 1}" if n else "x"
        lines += [
            f'%k{n} = MatMul(%h{count - 1}, %v{n}) : f32[4, 8] from "/d.{n}/k"',
            f'%g{n} = Sigmoid(%{before}) : f32[4, 8] from "/d.{n}/gate"',
            f'%j{n} = Mul(%k{n}, %g{n}) : f32[4, 8] from "/d.{n}/mul"',
            f'%d{n} = Sub(%{before}, %j{n}) : f32[4, 8] from "/d.{n}/sub"',
        ]
    body = "\n".join(f"  {line}" for line in (*constants, *lines))
    return parse_module(f"{text.replace(f'-> (%h{count - 1})', f'-> (%d{further - 1})')}{body}\n}}\n")


@pytest.mark.parametrize("network", ["bytes", "h100-nvlink-ib"])
@pytest.mark.parametrize(("count", "further"), [(COUNT, COUNT), (COUNT, COUNT + 5), (COUNT + 9, COUNT)])
def test_each_of_two_chains_is_planned_as_a_few_of_its_layers(count, further, network):
    module = two_chains(count, further)
    module.shard("l.*.w", [None, "tp"])
    module.shard("d.*.v", [None, "tp"])
    told = check_same(module, "dp=2,tp=2", network=network)
    assert sorted(note.split(": ")[1] for note in told) == sorted(
        [
            f"{count} equal layers of 5 nodes were planned as 5 of them",
            f"{further} equal layers of 4 nodes were planned as 5 of them",
        ]
    )


def test_where_one_of_two_chains_has_layers_that_differ_the_other_is_planned_as_a_few():
    module = two_chains(COUNT + 9, COUNT)
    module.shard("l.*.w", [None, "tp"])
    module.shard("d.3.v", [None, "tp"])
    assert check_same(module, "tp=2") == [
        f"simplify-collectives: {COUNT + 9} equal layers of 5 nodes were planned as 5 of them"
    ]


def test_a_value_that_is_read_far_behind_its_layer_is_named():
    module = chain_module()
    graph = module.graph
    graph.set_outputs([*graph.outputs, graph.value("h5")], ["y", "z"])
    PassManager.parse(NORMALISE).run(module)
    with pytest.raises(NotAlike, match="%h5 is read outside of the next layer"):
        find_chain(module)


def test_who_prints_modules_meets_all_layers(capsys):
    watch = Instrumentation(print_ir_after=("complete-sharding",))
    module = chain_module()
    made = irpar.partition(module, "dp=2,tp=2", pipeline=PassManager.parse(DEFAULT_PIPELINE, watch))
    assert notes(made) == []
    assert "/l.8/tanh" in capsys.readouterr().err


def test_an_error_of_a_pass_is_that_of_the_whole_model():
    module = chain_module()
    module.graph.add_input("noise", module.graph.inputs[0].type)
    module.graph.first.set_operand(0, drawn(module.graph))
    with pytest.raises(irpar.IrparError, match="draws random numbers"):
        irpar.partition(module, "dp=2,tp=2")


def drawn(graph):
    """A result of a node that draws random numbers, before all others."""
    like = graph.value("x")
    node = Node("RandomNormalLike", [like], domain="", version=21)
    node.result.type = like.type
    return graph.insert_before(graph.first, node).result


@pytest.mark.slow
def test_all_layers_count_where_costs_are_compared():
    """What pays in each layer and costs at the ends is right for many layers, and would not be for five."""
    said = [
        ("/blocks.*/Add_1_output_0", ["tp", None, "dp"]),
        ("blocks.*.mlp.fc2.bias", ["tp"]),
        ("/blocks.*/mlp/fc1/Add_output_0", ["dp", None, "tp"]),
    ]
    check_same(built("vit", 24, said), "dp=1,tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4,tp=1", "dp=1,tp=4"])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "vit", "t5"])
def test_builders_give_the_same(family, mesh):
    assert [ALIKE in note for note in check_same(built(family, 24), mesh)] == [True] * chains_of(family)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["h100-nvlink-ib", "a100-pcie"])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "vit", "t5", "moe"])
def test_builders_give_the_same_where_seconds_count(family, network):
    told = check_same(built(family, 24), "dp=2,tp=2", network=network)
    assert [ALIKE in note for note in told] == [True] * chains_of(family)


def wide_chain(count=COUNT):
    """Layers of two products that read the same, whose sums can be sent at once; their weights are cut in rows."""
    lines = [
        f'%{w}{n} = constant : f32[512, 512] data("{w}{n}", 0, 1048576) from "l.{n}.{w}"'
        for n in range(count)
        for w in "uv"
    ]
    for n in range(count):
        before = f"h{n - 1}" if n else "x"
        lines += [
            f'%p{n} = MatMul(%{before}, %u{n}) : f32[8, 512] from "/l.{n}/p"',
            f'%q{n} = MatMul(%{before}, %v{n}) : f32[8, 512] from "/l.{n}/q"',
            f'%r{n} = Relu(%p{n}) : f32[8, 512] from "/l.{n}/relu"',
            f'%t{n} = Tanh(%q{n}) : f32[8, 512] from "/l.{n}/tanh"',
            f'%h{n} = Add(%r{n}, %t{n}) : f32[8, 512] from "/l.{n}/add"',
        ]
    body = "\n".join(f"  {line}" for line in lines)
    module = parse_module(f"graph @g(%x: f32[8, 512]) -> (%h{count - 1}) opset 21 {{\n{body}\n}}\n")
    module.meshes["m"] = Mesh({"tp": 2})
    for glob, spec in {"l.*.[uv]": ["tp", None], "[rth]*": [None, None]}.items():
        module.shard(glob, spec)
    return module


@pytest.mark.parametrize("cut", [["tp", None], [None, "tp"]])
@pytest.mark.parametrize("network", ["h100-nvlink-ib", "a100-pcie"])
def test_what_is_sent_at_once_is_that_of_all_layers(network, cut):
    """Weights of all layers wait for nothing, and go in one launch."""
    module = chain_module()
    module.shard("l.*.w", cut)
    module.shard("h*", [None, None])
    (note,) = check_same(module, "tp=2", network=network)
    assert ALIKE in note
    assert [
        node.op_type for node in irpar.partition(module, "tp=2", network=network).module.graphs[0] if node.domain
    ] == ["AllGather"]


@pytest.mark.parametrize("count", [COUNT, COUNT + 9])
def test_launches_that_are_spared_in_each_layer_are_spared_in_all(count):
    network, sums = network_of("a100-pcie"), []
    module = wide_chain(count)
    PassManager.parse(NORMALISE).run(module)
    for planned in (folded_module(module, find_chain(module)), module):
        PassManager.parse("complete-sharding").run(planned)
        flow = Flow(planned.graph, planned.mesh, planned.repeats)
        sums.append(saved_together(flow, placements_of(flow, network), network, planned.annotated))
    assert sums[0] == sums[1]
    assert sums[0][1] == count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_annotations_of_all_layers_give_the_same(seed):
    random = Random(f"layers/{seed}")
    family = random.choice(["gpt", "llama", "bert", "vit"])
    module = built(family, 17)
    PassManager.parse("infer-types").run(module)
    said = {value for annotation in module.annotations for value in matches(module, annotation)}
    kinds = {}
    for value in module.graph.values():
        if value.is_static and value.shape and value not in said:
            kinds.setdefault(glob_of(value.source_name), []).append(value)
    layered = [
        pattern
        for pattern, values in kinds.items()
        if len(values) == len(matches(module, Annotation(pattern, ()))) == 17
    ]
    for pattern in random.sample(layered, 3):
        module.shard(pattern, random_spec(random, len(kinds[pattern][0].shape)))
    check_same(module, random.choice(["dp=2,tp=2", "dp=1,tp=2", "dp=4,tp=1"]))


def random_spec(random, rank):
    axes = random.sample(["dp", "tp"], 2)
    return [axes.pop() if axes and random.random() < 0.4 else None for _ in range(rank)]


@pytest.mark.slow
def test_a_folded_gpt_computes_what_the_model_does(tmp_path):
    path = tmp_path / "gpt.onnx"
    models.save(path, "gpt", layers=COUNT)
    module = irpar.load(path)
    irpar.annotate(module, models.annotations("gpt", layers=COUNT))
    made = irpar.partition(module, "dp=2,tp=2")
    assert ALIKE in notes(made)[0]
    assert made.verify().is_equal


@pytest.mark.parametrize(("family", "further"), [("gpt", "dp"), pytest.param("llama", None, marks=pytest.mark.slow)])
def test_weights_that_are_state_which_nothing_replaces_are_folded(family, further):
    """As those of evaluation programs are; sharded over dp too, as with ZeRO."""
    module, mesh = built(family, COUNT), Mesh({"dp": 2, "tp": 2})
    module.set_mesh(mesh)
    weights = [value.source_name for value in module.graph.constants if value.data.size > 8]
    for value in add_states(module, dict.fromkeys(weights, "parameter")):
        if further is not None:
            lies = value.sharding or Sharding.replicated(mesh, len(value.shape))
            annotate_further(module, value, cut_of(lies, value.shape, [Axis(further)]).sharding, "the training step")
    assert any(ALIKE in note for note in check_same(module, None))


def test_a_state_that_is_replaced_is_folded_too():
    module = chain_module()
    module.add_state("x", f"h{COUNT - 1}")
    assert any(ALIKE in note for note in check_same(module, {"d": 2}))


@pytest.mark.parametrize("layers", [[3], [5], range(COUNT)])
def test_states_that_layers_write_and_do_not_read_are_refused(layers):
    """As caches that a program for prompts fills."""
    module = chain_module()
    graph = module.graph
    written = [graph.value(f"e{layer}") for layer in layers]
    names = [f"cache{layer}" for layer in layers]
    graph.set_outputs([*graph.outputs, *written], [*graph.output_names, *names])
    for layer, name in zip(layers, names, strict=True):
        graph.add_input(f"c{layer}", graph.value(f"e{layer}").type)
        module.add_state(f"c{layer}", name)
    (note,) = check_same(module, {"tp": 2})
    assert APART in note
