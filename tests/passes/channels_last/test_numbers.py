"""channels-last: random graphs and models compute the same, and are written with ONNX's operators."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.ir import Module
from irpar.ir.clone import clone_module
from irpar.onnx_io import to_module, to_proto
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from tests.budget import budget

from ..conftest import run_model
from ..fuse_kernels.texts import computed
from ..golden import read, run_pipeline

Shape = tuple[int, ...]
CHANNELS, SIDE = (4, 8), 6
CONSTANTS = (
    "%half = constant : f32[] 0.5",
    "%axes = constant : i64[2] [2, 3]",
    "%channel = constant : i64[1] [1]",
    "%zero = constant : i64[1] [0]",
    "%four = constant : i64[1] [4]",
    "%pads = constant : i64[8] [0, 0, 1, 0, 0, 0, 0, 1]",
    "%scales = constant : f32[4] [1.0, 1.0, 0.5, 2.0]",
    "%eps = constant : f32[] 0.001",
)
ONE = ("Relu", "Sigmoid", "HardSwish", "Tanh", "Neg", "Elu")


def typed(shape: Shape) -> str:
    return f"f32[{', '.join(map(str, shape))}]"


class Drawn:
    """A graph of images, node by node.

    Attributes:
        values: the images, by name.
        inputs: what comes in.
        lines: the nodes.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.inputs: dict[str, Shape] = {"x": (2, draw(st.sampled_from(CHANNELS)), SIDE, SIDE)}
        self.values = dict(self.inputs)
        self.lines: list[str] = []
        for _ in range(draw(st.integers(2, 9))):
            kind = draw(st.sampled_from(("conv", "conv", "conv", "one", "one", "two", "gate", "pool", "norm", "other")))
            name = draw(st.sampled_from(sorted(self.values)[-3:]))
            getattr(self, kind)(name, self.values[name])

    def given(self, shape: Shape, is_constant: bool = True) -> str:
        """A weight, or something else that comes in."""
        name = f"{'k' if is_constant else 'i'}{len(self.inputs)}"
        self.inputs[name] = shape
        return name

    def add(self, text: str, shape: Shape) -> None:
        name = f"t{len(self.lines)}"
        self.lines.append(f"%{name} = {text} : {typed(shape)}")
        self.values[name] = shape

    def conv(self, name: str, shape: Shape) -> None:
        features, kernel = self.draw(st.sampled_from(CHANNELS)), self.draw(st.sampled_from((1, 3)))
        groups = self.draw(st.sampled_from((1, 1, 2, shape[1])))
        if features % groups:
            return
        weight = self.given((features, shape[1] // groups, kernel, kernel))
        bias = f", %{self.given((features,))}" if self.draw(st.booleans()) else ""
        pads = f'auto_pad="{self.draw(st.sampled_from(("SAME_UPPER", "SAME_LOWER")))}"'
        made = (shape[0], features, *shape[2:])
        self.add(f"Conv(%{name}, %{weight}{bias}) {{{pads}, group={groups}}}", made)

    def one(self, name: str, shape: Shape) -> None:
        self.add(f"{self.draw(st.sampled_from(ONE))}(%{name})", shape)

    def two(self, name: str, shape: Shape) -> None:
        others = [other for other, own in self.values.items() if own == shape]
        operands = [f"%{name}", f"%{self.draw(st.sampled_from(others))}"]
        self.add(f"{self.draw(st.sampled_from(('Add', 'Add', 'Mul', 'Max')))}({', '.join(operands)})", shape)

    def gate(self, name: str, shape: Shape) -> None:
        sizes = self.draw(st.sampled_from(((1, shape[1], 1, 1), (shape[1], 1, 1), (shape[3],), (2, 1, 1, shape[3]))))
        other = self.given(sizes, self.draw(st.booleans()))
        self.add(f"Mul(%{other}, %{name})", shape)

    def pool(self, name: str, shape: Shape) -> None:
        kind = self.draw(st.sampled_from(("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean")))
        if kind.endswith("l") and not kind.startswith("Global"):
            counts = ", count_include_pad=1" if kind == "AveragePool" and self.draw(st.booleans()) else ""
            self.add(f"{kind}(%{name}) {{kernel_shape=[3, 2], pads=[1, 0, 1, 1]{counts}}}", shape)
        else:
            small = (*shape[:2], 1, 1)
            self.add(f"{kind}(%{name})" if kind[0] == "G" else f"ReduceMean(%{name}, %axes)", small)

    def norm(self, name: str, shape: Shape) -> None:
        scale, shift, mean = (self.given((shape[1],)) for _ in range(3))
        square = f"v{len(self.lines)}"
        weight = self.given((shape[1],))
        self.lines.append(f"%{square} = Abs(%{weight}) : {typed((shape[1],))}")
        self.add(f"BatchNormalization(%{name}, %{scale}, %{shift}, %{mean}, %{square})", shape)

    def other(self, name: str, shape: Shape) -> None:
        batch, channels, height, width = shape
        kinds = ("Concat", "Split", "Slice", "Pad", "Resize", "Softmax", "Transpose", "Group", "Spread")
        match self.draw(st.sampled_from(kinds)):
            case "Concat" if channels == 4:
                self.add(f"Concat(%{name}, %{name}) {{axis=-3}}", (batch, 8, height, width))
            case "Slice" if channels == 8:
                self.add(f"Slice(%{name}, %four, %pads_end, %channel)", (batch, 4, height, width))
            case "Split" if channels == 8:
                first, second = f"t{len(self.lines)}", f"u{len(self.lines)}"
                half = (batch, 4, height, width)
                line = f"%{first}, %{second} = Split(%{name}) {{axis=1, num_outputs=2}} : {typed(half)}, {typed(half)}"
                self.lines.append(line)
                self.values |= {first: half, second: half}
            case "Pad":
                self.add(f"Pad(%{name}, %pads, %half)", (batch, channels, height + 1, width + 1))
            case "Resize" if height % 2 == 0:
                modes = '{mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"}'
                self.add(f"Resize(%{name}, _, %scales) {modes}", (batch, channels, height // 2, width * 2))
            case "Spread" if height * width <= 64:
                steps = self.draw(st.sampled_from(((2, 2), (1, 3))))
                bias = f", %{self.given((4,))}" if self.draw(st.booleans()) else ""
                settings = f"kernel_shape={[*steps]}, strides={[*steps]}"
                weight = self.given((channels, 4, *steps))
                made = (batch, 4, height * steps[0], width * steps[1])
                self.add(f"ConvTranspose(%{name}, %{weight}{bias}) {{{settings}}}", made)
            case "Group":
                kind = self.draw(st.sampled_from(("GroupNormalization", "InstanceNormalization")))
                groups = "num_groups=2, " if kind[0] == "G" else ""
                numbers = (self.given((channels,)) for _ in range(2))
                self.add(f"{kind}(%{name}, %{', %'.join(numbers)}) {{{groups}epsilon=0.01}}", shape)
            case "Softmax":
                self.add(f"Softmax(%{name}) {{axis=1}}", shape)
            case "Transpose":
                turned = f"u{len(self.lines)}"
                self.lines.append(
                    f"%{turned} = Transpose(%{name}) {{perm=[0, 2, 3, 1]}} : {typed((batch, height, width, channels))}"
                )
                self.add(f"Transpose(%{turned}) {{perm=[0, 3, 1, 2]}}", shape)

    def text(self) -> str:
        """Constants come in, so that they can be given in numbers."""
        gives = self.draw(st.lists(st.sampled_from(sorted(self.values)[-3:]), min_size=1, max_size=3, unique=True))
        takes = ", ".join(f"%{name}: {typed(shape)}" for name, shape in self.inputs.items())
        lines = (*CONSTANTS, "%pads_end = constant : i64[1] [8]", *self.lines)
        body = "\n".join(f"  {line}" for line in lines)
        return f"graph @g({takes}) -> ({', '.join(f'%{name}' for name in gives)}) opset 21 {{\n{body}\n}}\n"


def with_numbers(text: str, random: np.random.Generator) -> Module:
    """A module whose weights are constants."""
    module = read(text)
    graph = module.graph
    weights = [value for value in graph.inputs if value.name.startswith("k")]
    arrays = {value: irpar.ir.ArrayTensor(random.normal(size=value.shape).astype("f4") * 0.5) for value in weights}
    graph.inputs_to_constants(arrays)
    return module


@settings(max_examples=budget(60), deadline=None)
@given(st.data())
def test_random_graphs_compute_the_same(data: st.DataObject) -> None:
    text = Drawn(data.draw).text()
    module = with_numbers(text, np.random.default_rng(0))
    changed = clone_module(module)
    run_pipeline("channels-last", changed)
    random = np.random.default_rng(1)
    inputs = [random.normal(size=value.shape).astype("f4") for value in module.graph.inputs]
    for found, wanted in zip(computed(changed, inputs), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max(), err_msg=text)


MODELS = [
    ("resnet", {}, 10),
    ("resnet", {"bottleneck": True, "width": 8, "opset": 19}, 15),
    ("resnet", {"dtype": "float16"}, 10),
    ("unet", {}, 17),
    ("unet", {"opset": 18}, 17),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "convolutions"), MODELS, ids=str)
def test_models_compute_the_same_and_are_written_with_their_operators(
    family: str, settings: dict[str, Any], convolutions: int
) -> None:
    model = models.build(family, **settings)
    module = to_module(model)
    whole = irpar.partition(module, "x=1").module
    assert whole is not None
    changed = clone_module(whole)
    run_pipeline("channels-last", changed)
    assert sum(node.op_type == "ConvChannelsLast" for node in changed.graph) == convolutions
    random = np.random.default_rng(2)
    inputs = [random.normal(size=value.shape).astype(value.dtype.numpy) for value in whole.graph.inputs]
    wanted = computed(whole, inputs)
    bound = 0.02 if settings.get("dtype") == "float16" else 1e-4
    for found, expected in zip(computed(changed, inputs), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)
    written = to_proto(changed)
    onnx.checker.check_model(written, full_check=True)
    named = dict(zip((value.name for value in written.graph.input), inputs, strict=True))
    for found, expected in zip(run_model(written, named), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)


CUTS = {"batch": {0: "x"}, "rows": {2: "x"}, "channels": {}}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("family", "image"), [("resnet", "pixels"), ("unet", "sample")])
def test_partitions_compute_the_same(family: str, image: str, cut: str) -> None:
    """Of the batch, of rows with what windows cover of their neighbours, and of the channels of weights."""
    # Of one image: rows of several would go to the batch.
    loaded = to_module(models.build(family, **({"batch": 1} if cut == "rows" else {})))
    if CUTS[cut]:
        loaded.shard(image, [CUTS[cut].get(dim) for dim in range(4)])
    else:
        irpar.annotate(loaded, models.annotations(family, "y", "x"))
    made = irpar.partition(loaded, irpar.Mesh({"y": 1, "x": 2}), pipeline=f"{DEFAULT_PIPELINE},channels-last")
    assert made.module is not None
    names = {node.op_type for node in made.module.graphs[0]}
    assert "ConvChannelsLast" in names
    assert ("CollectivePermute" in names) >= (cut == "rows")
    made.verify(engine="numpy").check()
