"""What is trained where nothing is named: parameters of the export, single numbers among them, but no buffers."""

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import irpar
from irpar.training.settings import Settings
from irpar.training.step import make_step, train_step
from tests.command_line import call

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
WEIGHTS = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "scale": np.float32(1.5),
    "freq": np.linspace(0.5, 1, 4, dtype=np.float32),
    "half": np.float32(0.5),
}


def model(kinds):
    """y = (x w * scale + freq) * half, of initializers of which the export says so much."""
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3] x) => (float[2, 4] y) { p = MatMul(x, w)  s = Mul(p, scale)  a = Add(s, freq)  y = Mul(a, half) }"""
    )
    for name, array in WEIGHTS.items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        if name in kinds:
            info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, np.shape(array))
            entry = info.metadata_props.add()
            entry.key, entry.value = (FOLDED if "[" in kinds[name] else KIND), kinds[name]
            made.graph.value_info.append(info)
    return made


ANGLES = {"w": "['m.fc.weight']", "freq": "['arange', 'cos_1', 'm.rotary.inv_freq', 'mul']", "half": "['val_3']"}
MASK = {"w": "['m.wpe.weight', 'arange', 'embedding']", "freq": "['arange', 'ge', 'val_7']"}
SAID = {"w": "PARAMETER", "scale": "PARAMETER", "freq": "BUFFER"}


@pytest.mark.parametrize(
    ("kinds", "options", "trained"),
    [
        ({}, {}, {"w", "freq"}),
        ({}, {"also_trainable": ("scale",)}, {"w", "freq", "scale"}),
        (SAID, {}, {"w", "scale"}),
        (SAID, {"also_trainable": ("fr*",)}, {"w", "scale", "freq"}),
        (SAID, {"trainable": ("freq",)}, {"freq"}),
        (ANGLES, {}, {"w"}),
        (MASK, {}, {"w"}),
        (MASK, {"also_trainable": ("freq",)}, {"w", "freq"}),
        ({"w": "['weight']", "freq": "['arange_1', 'pow_2', 'val_3']"}, {}, {"w"}),
        ({"w": "['w', 'val_0']", "freq": "['bias', 'unsqueeze']"}, {}, {"w", "freq"}),
        (SAID, {"also_trainable": ("freq",), "freeze": ("f*", "w")}, {"scale"}),
    ],
)
def test_what_is_trained(kinds, options, trained):
    step = train_step(model(kinds), loss="mse", optimizer="sgd", **options)
    assert {value.source_name for value, state in step.graph.states.items() if state.is_trained} == trained


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (
            {},
            'not trained, since they are single numbers: scale, half; if one is a parameter, also_trainable=["scale"]',
        ),
        (SAID, "not trained, since the export calls them buffers: freq"),
        (ANGLES, "not trained, since the export computed them of no parameter: freq"),
    ],
)
def test_what_is_not_trained_is_told(kinds, told):
    _, notes = make_step(irpar.load(model(kinds)), Settings(loss="mse"), {})
    assert [note for note in notes if "not trained" in note] == [told]


@pytest.mark.parametrize("options", [{"freeze": ("scale", "half")}, {"trainable": ("w",)}])
def test_nothing_is_said_of_what_was_asked_for(options):
    _, notes = make_step(irpar.load(model({})), Settings(loss="mse", **options), {})
    assert not [note for note in notes if "not trained" in note]


def test_a_number_that_was_computed_of_a_parameter_is_told():
    _, notes = make_step(irpar.load(model({"scale": "['logit_scale', 'exp']"})), Settings(loss="mse"), {})
    assert (
        "not trained, since they are single numbers that the export computed: scale, of logit_scale; with "
        "torch.onnx.export(..., dynamo=True, optimize=False) these are trained" in notes
    )


def test_statistics_are_no_parameters_whatever_is_named():
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[4, 3] x) => (float[4, 3] y)
        <float[3] g = {1, 1, 1}, float[3] b = {0, 0, 0}, float[3] mean = {0, 0, 0}, float[3] var = {1, 1, 1}> {
          y = BatchNormalization(x, g, b, mean, var) }"""
    )
    step = train_step(made, loss="mse", optimizer="sgd", also_trainable=["mean", "v*"], freeze_statistics=True)
    assert {value.source_name for value, state in step.graph.states.items() if state.is_trained} == {"g", "b"}


def test_what_was_computed_of_parameters_is_told():
    _, notes = make_step(irpar.load(model(MASK)), Settings(loss="mse"), {})
    assert (
        "trained as they are, though the export computed them: w, of m.wpe.weight; with "
        "torch.onnx.export(..., dynamo=True, optimize=False) these are trained" in notes
    )


def test_parameters_that_are_frozen_are_no_buffers():
    _, notes = make_step(irpar.load(model(SAID)), Settings(loss="mse", freeze=("scale",)), {})
    assert [note for note in notes if "not trained" in note] == [
        "not trained, since the export calls them buffers: freq"
    ]


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("m.logit_scale", True),
        ("logit_scale", True),
        ("constants.half", False),
        ("val_12", False),
        ("/Mul_output", False),
    ],
)
def test_what_is_named_as_parameters_are(name, is_told):
    made = model({})
    for node in made.graph.node:
        node.input[:] = [{"scale": name, "half": "c.half", "w": "m.w"}.get(each, each) for each in node.input]
    for tensor in made.graph.initializer:
        tensor.name = {"scale": name, "half": "c.half", "w": "m.w"}.get(tensor.name, tensor.name)
    _, notes = make_step(irpar.load(made), Settings(loss="mse"), {})
    assert [f"single numbers: {name};" in note for note in notes if "not trained" in note] == [True] * is_told


def test_a_single_number_is_updated():
    """By the gradient of a mean of squares, worked out by hand."""
    step = train_step(model(SAID), loss="mse", optimizer="sgd")
    rng = np.random.default_rng(0)
    x, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (2, 4)))
    step.shard("x", ["dp", None])
    session = irpar.partition(step, "dp=2").session()
    session.run({"x": x, "target": target, "learning_rate": np.float32(0.1)})
    w, scale, freq, half = WEIGHTS.values()
    error = 2 * ((x @ w * scale + freq) * half - target) / target.size
    np.testing.assert_allclose(session.read("scale"), scale - 0.1 * (error * half * (x @ w)).sum(), rtol=1e-5)


def test_the_option(tmp_path, capsys):
    onnx.save(model({}), tmp_path / "m.onnx")
    words = ("train", tmp_path / "m.onnx", "-o", tmp_path / "o.onnx", "--loss", "mse")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "if one is a parameter, --also-trainable scale" in out
    code, out, _ = call(capsys, *words, "--also-trainable", "scale", "--force")
    assert code == 0
    assert "trains 3 tensors of 17 numbers" in out
