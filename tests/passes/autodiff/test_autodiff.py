"""autodiff: golden text, what is chosen, what is refused."""

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.ir import ArrayTensor
from irpar.ir.text.files import parse_module
from irpar.passes.autodiff import Autodiff, GradientError
from irpar.passes.autodiff.saved import saved_activations, zero_gradients

TIED = """
graph @tied(%x: f32[8, 4]) -> (%y, %n) opset 21 {
  %w = constant : f32[4, 4] [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]] from "w"
  %u = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "u"
  %h = MatMul(%x, %w) : f32[8, 4]
  %y = MatMul(%h, %w) : f32[8, 4]
  %k = Greater(%h, %y) : bool[8, 4]
  %n = Cast(%k) {to=7} : i64[8, 4]
}
"""


def test_a_weight_of_two_uses_gets_one_sum_and_one_of_none_zeros(check_golden):
    check_golden(
        "autodiff",
        TIED,
        """
        graph @tied(%x: f32[8, 4], %grad.y: f32[8, 4]) -> (%grad.w, %grad.u) opset 21 {
          %w = constant : f32[4, 4] [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]] from "w"
          %u = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "u"
          %number = constant : f32[] 0.0
          %numbers = constant : i64[1] [4]
          %h = MatMul(%x, %w) {| phase=forward} : f32[8, 4]
          %y = MatMul(%h, %w) {| phase=forward} : f32[8, 4]
          %k = Greater(%h, %y) {| phase=forward} : bool[8, 4]
          %n = Cast(%k) {to=7 | phase=forward} : i64[8, 4]
          %backward = Transpose(%w) {perm=[1, 0] | phase=backward} : f32[4, 4]
          %grad.h = MatMul(%grad.y, %backward) {| phase=backward} : f32[8, 4]
          %backward_2 = Transpose(%h) {perm=[1, 0] | phase=backward} : f32[4, 8]
          %backward_3 = MatMul(%backward_2, %grad.y) {| phase=backward} : f32[4, 4]
          %backward_4 = Transpose(%x) {perm=[1, 0] | phase=backward} : f32[4, 8]
          %backward_5 = MatMul(%backward_4, %grad.h) {| phase=backward} : f32[4, 4]
          %grad.w = Add(%backward_3, %backward_5) {| phase=backward} : f32[4, 4]
          %grad.u = Expand(%number, %numbers) {| phase=backward} : f32[4]
        }
        """,
    )


def test_only_what_is_asked_for_is_written():
    module = parse_module(TIED)
    result = Autodiff(wrt=("x",), keep_outputs=True).run(module)
    assert result.statistics == {"gradients": 1}
    assert module.graph.output_names == ["y", "n", "grad.x"]
    backward = [node.op_type for node in module.graph if node.phase == "backward"]
    assert backward == ["Transpose", "MatMul", "Transpose", "MatMul"]
    assert saved_activations(module.graph) == {}


def test_what_is_saved_has_bytes():
    module = parse_module(TIED)
    Autodiff().run(module)
    assert {value.name: count for value, count in saved_activations(module.graph).items()} == {"h": 128}


def test_symbolic_dims_stay():
    module = parse_module(
        """
        graph @g(%x: f32[batch, seq, 4], %b: f32[seq, 1]) -> (%y) opset 21 {
          %y = Mul(%x, %b) : f32[batch, seq, 4]
        }
        """
    )
    Autodiff(wrt=("x", "b")).run(module)
    assert [str(value.type) for value in module.graph.outputs] == ["f32[batch, seq, 4]", "f32[seq, 1]"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Autodiff(wrt=("v",)), '"v" matches no weight or input of floats'),
        (Autodiff(wrt=("z*",)), '"z*" matches no weight or input of floats'),
        (Autodiff(outputs=("q",)), '"q" matches no output of floats'),
        (Autodiff(outputs=("n",)), '"n" is i64[8, 4]: only floats have gradients'),
    ],
)
def test_names_that_mean_nothing_are_refused(options: Autodiff, told: str) -> None:
    with pytest.raises(GradientError) as caught:
        options.run(parse_module(TIED))
    assert caught.value.what == told
    assert caught.value.do


def test_a_tensor_that_is_an_output_too_is_refused() -> None:
    text = """
        graph @g(%x: f32[4]) -> (%x, %y) opset 21 {
          %w = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "w"
          %y = Mul(%x, %w) : f32[4]
        }
        """
    with pytest.raises(GradientError, match="would be an input and a result") as caught:
        Autodiff(wrt=("x",)).run(parse_module(text))
    assert caught.value.do == (
        'leave "x" out of what gradients are asked for (--wrt), or differentiate y alone (--output)'
    )
    with pytest.raises(GradientError, match='"x" is an output') as caught:
        Autodiff(wrt=("x",), outputs=("x",)).run(parse_module(text))
    assert "another output" in caught.value.do
    for options in (Autodiff(wrt=("x",), outputs=("y",)), Autodiff(wrt=("w",))):
        module = parse_module(text)
        options.run(module)
        assert len(module.graph.outputs) == 1


def test_an_operator_without_gradient_is_refused_with_the_path() -> None:
    module = parse_module(
        """
        graph @g(%x: f32[4, 4]) -> (%y) opset 21, "my" 1 {
          %w = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "fc.weight"
          %a = Mul(%x, %w) : f32[4, 4]
          %b = my.Strange(%a) : f32[4, 4] from "/strange"
          %y = Tanh(%b) : f32[4, 4]
        }
        """
    )
    with pytest.raises(GradientError) as caught:
        Autodiff().run(module)
    assert caught.value.what == "my.Strange has no gradient: irpar knows no gradient of it"
    assert "/strange" in caught.value.where
    assert caught.value.notes == ("path from the output back to the parameter: %y <- %b <- %a <- %w",)


def test_older_opsets_and_local_graphs_are_refused() -> None:
    with pytest.raises(GradientError, match="opset 18 or newer, the module has opset 17"):
        Autodiff().run(parse_module("graph @g(%x: f32[4]) -> (%y) opset 17 {\n  %y = Relu(%x) : f32[4]\n}\n"))
    with pytest.raises(GradientError, match="calls a function"):
        Autodiff().run(
            parse_module(
                """
                function @my.F(%p) -> (%q) opset 21 {
                  %q = Relu(%p) : ?
                }
                graph @g(%x: f32[4]) -> (%y) opset 21, "my" 1 {
                  %y = call @my.F(%x) : f32[4]
                }
                """
            )
        )


def test_rows_that_a_convolution_got_are_kept_for_the_gradient_of_its_weight() -> None:
    made = irpar.gradients(
        parse_module(
            """
            graph @g(%x: f32[1, 3, 16, 8]) -> (%y) opset 21 {
              %w = constant : f32[4, 3, 3, 3] data("#w", 0, 432) from "w"
              %y = Conv(%x, %w) {pads=[1, 1, 1, 1]} : f32[1, 4, 16, 8]
            }
            """,
            resources={"#w": ArrayTensor(np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32))},
        ),
        keep_outputs=True,
    )
    for name in ("x", "grad.y"):
        made.shard(name, [None, None, "sp", None])
    partition = irpar.partition(made, "sp=4")
    sent = [(entry["kind"], entry["phase"]) for entry in partition.plan.collectives]
    assert sent == [("permute", "forward"), ("permute", "forward"), ("reduce_scatter", "backward")]
    random = np.random.default_rng(1)
    sizes = {"x": 3, "grad.y": 4}
    inputs = {name: random.standard_normal((1, size, 16, 8)).astype(np.float32) for name, size in sizes.items()}
    assert partition.verify(inputs).is_equal


def test_weights_of_the_same_name_in_two_branches_each_get_a_gradient():
    module = irpar.load(
        onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 18]> g (bool p, double[4] x) => (double[4] y) {
              y = If(p) <
                then_branch = t () => (double[4] a) <double[4] w = {1.0, 2.0, 3.0, 4.0}> { a = Mul(x, w) },
                else_branch = e () => (double[4] c) <double[4] w = {4.0, 3.0, 2.0, 1.0}> { c = Sub(x, w) }
              > }"""
        )
    )
    gradients = irpar.gradients(module)
    assert gradients.graph.output_names == ["grad.w", "grad.w_1"]
    feeds = {"x": np.arange(4.0), "grad.y": np.ones(4)}
    partition = irpar.partition(gradients, "d=1")
    expected = {True: ([0, 1, 2, 3], [0, 0, 0, 0]), False: ([0, 0, 0, 0], [-1, -1, -1, -1])}
    for taken, arrays in expected.items():
        found = partition.run({**feeds, "p": np.array(taken)}, engine="numpy")
        for name, array in zip(gradients.graph.output_names, arrays, strict=True):
            np.testing.assert_array_equal(found[name], array)


def test_gradients_of_a_file_are_verified_against_themselves(tmp_path):
    models.save(tmp_path / "mlp.onnx", "mlp")
    gradients = irpar.gradients(tmp_path / "mlp.onnx")
    gradients.shard("x", ["d", None])
    irpar.partition(gradients, "d=2").verify().check()


def test_zeros_are_named():
    gradients = irpar.gradients(parse_module(TIED))
    assert zero_gradients(gradients.graph) == ["grad.u"]
