"""Building by family and preset: what every family has to keep."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from irpar.models import FAMILIES, ConfigError, build, config_of, save
from irpar.models.config import OPSETS

VARIANTS = [
    ("mlp", {}),
    ("mlp", {"gemm": True, "layers": 3}),
    ("gpt", {}),
    ("gpt", {"fused_qkv": True, "tied": True}),
    ("llama", {}),
    ("llama", {"preset": "gqa"}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_opsets_and_dynamic_dims_change_no_numbers(name, settings, run_model, inputs):
    expected = run_model(build(name, **settings), inputs[name])
    assert 0.3 < expected.std() < 3, "activations must be of order 1 so that errors are visible"
    for opset in (18, 20, 23, 26):
        for dynamic in (False, True):
            model = build(name, opset=opset, dynamic=dynamic, **settings)
            np.testing.assert_allclose(run_model(model, inputs[name]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_versions_are_what_readers_load(opset):
    model = build("mlp", opset=opset)
    assert model.opset_import[0].version == opset
    assert model.ir_version <= 13
    onnx.checker.check_model(model, full_check=True)
    assert build("mlp", opset=opset, ir_version=13).ir_version == 13


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_seeds_give_equal_models(name):
    assert build(name).SerializeToString() == build(name).SerializeToString()
    assert build(name).SerializeToString() != build(name, seed=1).SerializeToString()


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_and_values_have_unique_names(name):
    graph = build(name, layers=3, dynamic=True).graph
    names = [node.name for node in graph.node]
    values = [value for node in graph.node for value in node.output]
    values += [tensor.name for tensor in graph.initializer] + [value.name for value in graph.input]
    assert len(set(names)) == len(names)
    assert len(set(values)) == len(values)


def test_names_follow_scopes():
    graph = build("gpt").graph
    assert "h.0.attn.q.weight" in [tensor.name for tensor in graph.initializer]
    assert "/h.0/attn/q/MatMul" in [node.name for node in graph.node]


@pytest.mark.parametrize(
    ("name", "symbols"), [("mlp", ["batch"]), ("gpt", ["batch", "seq"]), ("llama", ["batch", "seq"])]
)
def test_dynamic_models_take_other_sizes(name, symbols, run_model, inputs):
    model = build(name, dynamic=True)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims if dim.dim_param] == symbols
    whole = inputs[name]
    part = {key: value[:3, :20] if name != "mlp" else value[:3] for key, value in whole.items()}
    expected = run_model(model, whole)[:3, :20] if name != "mlp" else run_model(model, whole)[:3]
    np.testing.assert_allclose(run_model(model, part), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_dynamic_models_compute_shapes_as_exports_do(name):
    ops = {node.op_type for node in build(name, dynamic=True).graph.node}
    assert {"Shape", "Gather", "Unsqueeze", "Concat", "Reshape"} <= ops
    assert "Shape" not in {node.op_type for node in build(name).graph.node}


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_decoders_are_causal(name, dynamic, run_model, inputs):
    model = build(name, dynamic=dynamic)
    ids = inputs[name]["input_ids"]
    changed = ids.copy()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = (run_model(model, {"input_ids": each}) for each in (ids, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.abs(before[:, 20:] - after[:, 20:]).max(axis=(0, 2)).min() > 1e-3, "every later position must see it"


@pytest.mark.parametrize(("name", "dtype"), [("gpt", "float16"), ("llama", "float16")])
def test_half_precision_agrees_with_float32(name, dtype, run_model, inputs):
    half = run_model(build(name, dtype=dtype), inputs[name]).astype(np.float32)
    np.testing.assert_allclose(half, run_model(build(name), inputs[name]), atol=0.03)


def test_bfloat16_models_are_valid():
    for opset in (18, 23):
        onnx.checker.check_model(build("llama", dtype="bfloat16", opset=opset), full_check=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_are_valid_configurations(name):
    for preset in FAMILIES[name].presets:
        assert config_of(name, preset).batch >= 1


def test_gpt_small_and_llama_70b_have_the_sizes_they_are_named_after(tmp_path):
    small = save(tmp_path / "gpt.onnx", "gpt", "small", weights="none", tied=True)
    assert small.parameters == 124_439_808
    large = save(tmp_path / "llama.onnx", "llama", "70b", weights="none")
    assert large.parameters == 70_553_706_496
    onnx.checker.check_model(str(tmp_path / "llama.onnx"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", {}, "no model family 'bert': there are mlp, gpt, llama"),
        ("gpt", {"preset": "huge"}, "no preset 'huge' for gpt"),
        ("mlp", {"heads": 4}, "mlp has no setting 'heads'"),
        ("gpt", {"hidden": 65}, "hidden 65 is not divisible by heads 4"),
        ("gpt", {"layers": 0}, "layers must be at least 1, got 0"),
        ("gpt", {"ffn": -1}, "ffn must be at least 1, got -1"),
        ("gpt", {"opset": 17}, "opset must be 18 to 26, not 17"),
        ("gpt", {"opset": 23, "ir_version": 10}, "ir_version must be 11 to 13 for opset 23, not 10"),
        ("gpt", {"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16"),
        ("gpt", {"seed": -1}, "seed must not be negative"),
        ("llama", {"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ("llama", {"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ("llama", {"hidden": 12}, "hidden / heads is 3, an odd number"),
    ],
)
def test_bad_configurations_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **settings)


def test_a_model_of_more_than_two_gigabytes_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("irpar.models.weights.INLINE_LIMIT", 100_000)
    with pytest.raises(ConfigError, match=r"passed at fc2\.weight.*--external"):
        build("mlp")


def test_external_weights_equal_inline_ones(tmp_path: Path, run_model, inputs):
    path = tmp_path / "llama.onnx"
    size = save(path, "llama", weights="external")
    assert (tmp_path / "llama.onnx.data").stat().st_size >= size.weight_bytes == 4 * size.parameters
    np.testing.assert_array_equal(run_model(str(path), inputs["llama"]), run_model(build("llama"), inputs["llama"]))


def test_an_unknown_weight_mode_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='weights must be "inline", "external" or "none"'):
        save(tmp_path / "m.onnx", "mlp", weights="zip")
