"""Layers of graphs: what is one, where it begins, and what is none."""

import textwrap

from irpar.analysis.layers import find_layers
from irpar.ir import parse_module
from irpar.models import build
from irpar.onnx_io import to_module
from irpar.pass_manager import PassManager


def layers_of(text, least=4):
    return find_layers(parse_module(textwrap.dedent(text)).graph, least)


def normalised(family, **settings):
    module = to_module(build(family, **settings))
    PassManager.parse("inline-functions,infer-types,fold-constants,cse,simplify-layout,dce").run(module)
    return module.graph


def test_the_layers_of_a_gpt_are_one_kind_and_go_from_stream_to_stream():
    (layers,) = find_layers(normalised("gpt", layers=5))
    assert layers.count == 5
    assert [len(layers.results_of(nodes)) for nodes in layers.members] == [1] * 5
    assert {nodes[-1].label for nodes in layers.members} == {f"/h.{number}/Add_1" for number in range(5)}


def test_encoder_and_decoder_have_layers_of_their_own():
    assert sorted(layers.count for layers in find_layers(normalised("t5", layers=4))) == [4, 4]


def test_blocks_of_a_resnet_are_found_within_each_stage():
    found = find_layers(normalised("resnet", blocks=(3, 4)))
    assert sum(layers.count for layers in found) >= 6
    for layers in found:
        shapes = {str(nodes[-1].result.type) for nodes in layers.members}
        assert len(shapes) == 1


def test_branches_beside_each_other_are_layers_too():
    text = """
        graph @g(%x: f32[2], %y: f32[2]) -> (%z) opset 21 {
          %a0 = Tanh(%x) : f32[2]
          %a1 = Tanh(%y) : f32[2]
          %b0 = Exp(%a0) : f32[2]
          %b1 = Exp(%a1) : f32[2]
          %c0 = Sin(%b0) : f32[2]
          %c1 = Sin(%b1) : f32[2]
          %d0 = Mul(%c0, %a0) : f32[2]
          %d1 = Mul(%c1, %a1) : f32[2]
          %z = Add(%d0, %d1) : f32[2]
        }
    """
    (layers,) = layers_of(text)
    assert [[node.result.name for node in nodes] for nodes in layers.members] == [
        ["a0", "b0", "c0", "d0"],
        ["a1", "b1", "c1", "d1"],
    ]


def test_shapes_as_numbers_keep_layers_apart_and_scales_do_not():
    def text(kind, first, second):
        shape, rank = ("i64[1]", "[{}]") if kind == "axes" else ("f32[]", "{}")
        operator = "ReduceSum({}, {}) {{keepdims=1}}" if kind == "axes" else "Mul({}, {})"
        lines = [f"%s{n} = constant : {shape} {rank.format(each)}" for n, each in enumerate((first, second))]
        for n in range(2):
            lines += [
                f"%a{n} = Tanh(%x{n}) : f32[1, 1]",
                f"%b{n} = {operator.format(f'%a{n}', f'%s{n}')} : f32[1, 1]",
                f"%c{n} = Exp(%b{n}) : f32[1, 1]",
                f"%x{n + 1} = Add(%c{n}, %x{n}) : f32[1, 1]",
            ]
        return "graph @g(%x0: f32[1, 1]) -> (%x2) opset 21 {\n" + "\n".join(lines) + "\n}"

    assert len(layers_of(text("scale", 0.5, 0.25))) == 1
    assert len(layers_of(text("axes", 0, 0))) == 1
    assert not layers_of(text("axes", 0, 1))


def test_types_and_shardings_keep_layers_apart():
    text = """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4]) -> (%z) opset 21 {
          %a = Tanh(%x) : f32[4]
          %b = Exp(%a) : f32[4]SHARDED
          %c = Tanh(%b) : f32[4]
          %z = Exp(%c) : f32[4]
        }
    """
    assert len(layers_of(text.replace("SHARDED", ""), least=2)) == 1
    assert not layers_of(text.replace("[4]SHARDED", "[4@tp]"), least=2)
