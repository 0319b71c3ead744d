"""extract-layers: repeats become functions, and inline-functions gives the graph back as it was."""

from pathlib import Path

import numpy as np
import pytest

import irpar
from irpar.ir import Graph, Node, parse_module, print_module, same_module, verify
from irpar.models import build
from irpar.onnx_io import load, to_module
from irpar.ops.updates import is_for_plans
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.passes.extract_layers import ExtractLayers, LayersError
from tests.budget import every, of_each
from tests.models.variants import VARIANTS

from ..golden import read

FIXTURES = Path(__file__).parents[2] / "fixtures"
NORMALISE = "inline-functions,infer-types,fold-constants,cse,simplify-layout,dce"

LAYER = """
  %m{n} = MatMul(%x{n}, %w{n}) : f32[4, 4] from "/l{n}/m"
  %b{n} = Mul(%m{n}, %s{n}) : f32[4, 4]
  %t{n} = Tanh(%b{n}) : f32[4, 4] from "/l{n}/t"
  %x{next} = Add(%t{n}, %x{n}) : f32[4, 4] from "/l{n}/a"
"""


def chain(layers, layer=LAYER, inputs="%x0: f32[4, 4]", more=""):
    """A graph of layers one behind another, each with its weight and its scale."""
    constants = "".join(
        f'  %w{n} = constant : f32[4, 4] [{", ".join(["[0.5, 0.0, 0.25, 1.0]"] * 4)}] from "w{n}"\n'
        f"  %s{n} = constant : f32[] {0.5 + n}\n"
        for n in range(layers)
    )
    nodes = "".join(layer.format(n=n, next=n + 1) for n in range(layers))
    return f"graph @g({inputs}) -> (%x{layers}) opset 21 {{\n{constants}{more}{nodes}}}\n"


def round_trip(module):
    """Extract, check, open again; gives the statistics. The text must be the same."""
    verify(module)
    before = str(module)
    result = PassManager.parse("extract-layers").run(module)
    verify(module)
    printed = print_module(module)
    assert same_module(module, parse_module(printed.text, resources=printed.resources)) is None
    statistics = result.records[0].statistics
    assert result.changed == (statistics["calls"] > 0)
    PassManager.parse("inline-functions{only=[irpar.layers.*]}").run(module)
    verify(module)
    assert str(module) == before
    return statistics


def test_layers_become_calls_of_one_function():
    module = read(chain(2))
    PassManager.parse("extract-layers").run(module)
    text = str(module)
    assert text[: text.index("graph")].strip() == (
        "function @irpar.layers.layer_1(%x0: f32[4, 4], %w0: f32[4, 4], %s0: f32[]) -> (%x1) opset 21 {\n"
        '  %m0 = MatMul(%x0, %w0) : f32[4, 4] from "/l0/m"\n'
        "  %b0 = Mul(%m0, %s0) : f32[4, 4]\n"
        '  %t0 = Tanh(%b0) : f32[4, 4] from "/l0/t"\n'
        '  %x1 = Add(%t0, %x0) : f32[4, 4] from "/l0/a"\n'
        "}"
    )
    calls = [node for node in module.graph if node.callee is not None]
    assert [[value.name for value in call.operands] for call in calls] == [["x0", "w0", "s0"], ["x1", "w1", "s1"]]


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_a_chain_comes_back_as_it_was(layers):
    assert round_trip(read(chain(layers))) == {"layers": 1, "calls": layers, "nodes": 4 * layers}


def test_what_runs_in_between_is_put_back_too():
    """The mask is made within the first layer, and read by all of them; a probe stands within the second."""
    masked = LAYER.replace("Mul(%m{n}, %s{n})", "Mul(%m{n}, %mask)")
    text = chain(3, masked, "%x0: f32[4, 4], %p: f32[4, 4]")
    text = text.replace("  %b0 =", "  %half = Exp(%p) : f32[4, 4]\n  %mask = Sin(%half) : f32[4, 4]\n  %b0 =")
    text = text.replace("  %t1 =", "  %probe = Cos(%m1) : f32[4, 4]\n  %t1 =").replace("(%x3)", "(%x3, %probe)")
    assert round_trip(read(text)) == {"layers": 1, "calls": 3, "nodes": 12}


def test_orders_of_nodes_may_differ():
    two = """
  %a{n} = Tanh(%x{n}) : f32[4, 4]
  %b{n} = MatMul(%x{n}, %w{n}) : f32[4, 4]
  %c{n} = Mul(%b{n}, %s{n}) : f32[4, 4]
  %x{next} = Add(%a{n}, %c{n}) : f32[4, 4]
"""
    text = chain(4, two)
    for number in (1, 3):
        first = f"  %a{number} = Tanh(%x{number}) : f32[4, 4]\n"
        second = f"  %b{number} = MatMul(%x{number}, %w{number}) : f32[4, 4]\n"
        assert first + second in text
        text = text.replace(first + second, second + first)
    assert round_trip(read(text)) == {"layers": 1, "calls": 4, "nodes": 16}


def test_skip_connections_several_results_and_tied_weights():
    """Each layer gives two values to the next, one of them past it to the end; all layers have one weight."""
    layer = """
  %m{n} = MatMul(%x{n}, %w0) : f32[4, 4]
  %k{n} = Exp(%m{n}) : f32[4, 4]
  %t{n} = Tanh(%m{n}) : f32[4, 4]
  %x{next} = Add(%t{n}, %x{n}) : f32[4, 4]
"""
    text = chain(3, layer).replace("(%x3)", "(%x3, %k0, %k1, %k2)")
    module = read(text)
    assert round_trip(module) == {"layers": 1, "calls": 3, "nodes": 12}
    PassManager.parse("extract-layers").run(module)
    assert {len(node.results) for node in module.graph} == {2}


def test_bodies_within_layers_keep_their_names():
    module = read(chain(3, inputs="%x0: f32[4, 4], %flag: bool[]"))
    # Each Tanh becomes an If whose branches read from outside.
    for node in [node for node in module.graph if node.op_type == "Tanh"]:
        source = node.operands[0]
        branches = {}
        for name, operator in (("then_branch", "Tanh"), ("else_branch", "Exp")):
            branch = Graph(f"{name}_{node.result.name}", names=module.graph.names)
            made = branch.append(Node(operator, [source], version=21))
            made.result.type = source.type
            branch.set_outputs([made.result])
            branches[name] = branch
        held = Node("If", [module.graph.inputs[1]], branches, version=21)
        held.result.type = node.result.type
        module.graph.insert_before(node, held)
        node.replace([held.result])
    assert round_trip(module) == {"layers": 1, "calls": 3, "nodes": 12}


def test_layers_that_differ_in_more_than_weights_stay_apart():
    text = chain(4).replace('%t2 = Tanh(%b2) : f32[4, 4] from "/l2/t"', '%t2 = Sin(%b2) : f32[4, 4] from "/l2/t"')
    assert round_trip(read(text)) == {"layers": 1, "calls": 3, "nodes": 12}


def test_a_graph_whose_layers_are_functions_is_left_alone():
    module = read(chain(3))
    PassManager.parse("extract-layers").run(module)
    result = PassManager.parse("extract-layers").run(module)
    assert not result.changed
    assert result.notes == ("extract-layers: layers are functions already",)


def test_numbers_are_the_same(check_numbers):
    model = build("gpt", layers=3)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    ids = np.random.default_rng(0).integers(0, 200, shape)
    module = check_numbers(model, f"{NORMALISE},extract-layers", {"input_ids": ids})
    assert [function.name for function in module.functions.values()] == ["layer_1"]


@pytest.mark.parametrize(("family", "settings"), every(2, VARIANTS), ids=str)
def test_every_builder_comes_back_as_it_was(family, settings):
    module = to_module(build(family, **settings))
    PassManager.parse(NORMALISE).run(module)
    round_trip(module)


@pytest.mark.parametrize(
    "path",
    every(2, of_each(lambda path: path.stem.partition("_")[0], sorted(FIXTURES.glob("*.onnx")))),
    ids=lambda path: path.stem,
)
def test_every_export_comes_back_as_it_was(path):
    for pipeline in ("inline-functions,infer-types", NORMALISE):
        module = load(path)
        PassManager.parse(pipeline).run(module)
        round_trip(module)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (ExtractLayers(min_size=1), "min-size of extract-layers is 1"),
        (ExtractLayers(min_count=0), "min-count of extract-layers is 0"),
        (ExtractLayers(match=("/l0/m", "/l9/*")), '"/l9/\\*" matches no layer'),
    ],
)
def test_options_that_cannot_be_are_refused(given, what):
    module = read(chain(2))
    before = str(module)
    with pytest.raises(LayersError, match=what) as caught:
        given.run(module)
    assert caught.value.do
    assert str(module) == before


def test_options_choose():
    module = read(chain(3))
    assert not PassManager.parse("extract-layers{min-size=5}").run(module).changed
    assert not PassManager.parse("extract-layers{min-count=4}").run(module).changed
    assert PassManager.parse("extract-layers{match=[/l2/*]}").run(module).changed


@pytest.mark.parametrize("engine", ["ort", pytest.param("numpy", marks=pytest.mark.slow)])
def test_updates_of_parameters_in_layers_are_written_out(engine):
    step = irpar.train_step(to_module(build("gpt", layers=2, batch=4)), optimizer="momentum", clip_norm=1.0)
    step.shard("input_ids", ["dp", None])
    pipeline = DEFAULT_PIPELINE.replace("split-weights", "extract-layers,split-weights")
    partition = irpar.partition(step, "dp=2", pipeline=pipeline)
    assert any(layer.startswith("layer_") for _, layer, _ in partition.module.functions)
    inputs = {
        "input_ids": np.arange(4 * 32).reshape(4, 32) % 256,
        "target": np.arange(4 * 32).reshape(4, 32) % 255,
        "learning_rate": np.float32(0.01),
    }
    bodies = [function.graph for function in partition.module.functions.values()]
    assert not any(is_for_plans(node) for body in bodies for node in body)
    found = partition.run(inputs, engine=engine)
    expected = irpar.partition(step, "dp=2").run(inputs, engine=engine)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4, err_msg=name)
