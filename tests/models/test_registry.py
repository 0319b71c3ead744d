"""Building by family and preset: what every family has to keep."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from irpar.models import FAMILIES, ConfigError, build, config_of, save
from irpar.models.config import OPSETS
from tests.budget import every

from .variants import VARIANTS

CUT = {"batch": 3, "seq": 20, "target": 10}
"""Other sizes for the symbols of dynamic models."""
WHOLE_ROWS = ("recurrent", "control")
"""Families whose result is of a whole row, or whose rows are all of one size."""
DEPTH = {"layers": 3}
"""What makes a model deep enough for names to repeat, where a family has it."""


@pytest.mark.parametrize(("name", "settings"), every(3, VARIANTS))
def test_opsets_and_dynamic_dims_change_no_numbers(name, settings, run_model, inputs):
    expected = run_model(build(name, **settings), inputs[name])
    # A score of a dlrm is between 0 and 1.
    assert (0.05 if name == "dlrm" else 0.3) < expected.std() < 3, (
        "activations must be of order 1 so that errors are visible"
    )
    for opset in (18, 20, 23, 26):
        for dynamic in (False, True):
            model = build(name, opset=opset, dynamic=dynamic, **settings)
            np.testing.assert_allclose(run_model(model, inputs[name]), expected, rtol=1e-5, atol=1e-5)


def test_a_scan_is_the_recurrence_by_hand(run_model):
    x = np.random.default_rng(2).standard_normal((4, 4, 32)).astype(np.float32)
    for settings in ({}, {"opset": 26}, {"dynamic": True}):
        model = build("control", kind="scan", **settings)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

        def linear(name, value, weights=weights):
            return value @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

        state, states = np.zeros((4, 32), np.float32), []
        for step in range(4):
            state = np.tanh(linear("cell.input", x[:, step]) + linear("cell.state", state))
            states.append(state)
        expected = linear("head.fc", np.stack(states, axis=1))
        np.testing.assert_allclose(run_model(model, {"x": x}), expected, rtol=1e-4, atol=1e-5)


def test_both_branches_of_an_if_are_taken(run_model, inputs):
    model = build("control", kind="if")
    x = np.abs(inputs["control"]["x"])
    positive, negative = run_model(model, {"x": x}), run_model(model, {"x": -x})
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    weights["negative.fc1.weight"].CopyFrom(
        onnx.numpy_helper.from_array(np.zeros((32, 64), np.float32), "negative.fc1.weight")
    )
    np.testing.assert_array_equal(run_model(model, {"x": x}), positive)
    assert np.abs(run_model(model, {"x": -x}) - negative).max() > 0.1


def test_fused_operators_compute_what_their_parts_do(run_model, inputs):
    expected = run_model(build("llama", "gqa"), inputs["llama"])
    for settings in ({}, {"dynamic": True}, {"opset": 26}):
        model = build("llama", "fused", **settings)
        assert {"Attention", "RotaryEmbedding", "RMSNormalization"} <= {node.op_type for node in model.graph.node}
        np.testing.assert_allclose(run_model(model, inputs["llama"]), expected, rtol=1e-4, atol=1e-5)


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
    fields = {field.name for field in dataclasses.fields(FAMILIES[name].config)}
    depth = {key: value for key, value in DEPTH.items() if key in fields}
    graph = build(name, dynamic=True, **depth).graph
    names = [node.name for node in graph.node]
    values = [value for node in graph.node for value in node.output]
    values += [tensor.name for tensor in graph.initializer] + [value.name for value in graph.input]
    assert len(set(names)) == len(names)
    assert len(set(values)) == len(values)


def test_names_follow_scopes():
    graph = build("gpt").graph
    assert "h.0.attn.q.weight" in [tensor.name for tensor in graph.initializer]
    assert "/h.0/attn/q/MatMul" in [node.name for node in graph.node]


@pytest.mark.parametrize("name", FAMILIES)
def test_dynamic_models_take_other_sizes(name, run_model, inputs):
    """A smaller input gives what the whole one does there; masks hide what was cut off from those that see all."""
    model = build(name, dynamic=True)
    whole, part = dict(inputs[name]), {}
    if "attention_mask" in whole:
        whole["attention_mask"] = whole["attention_mask"] * (np.arange(32) < CUT["seq"])
    cut = {"batch": CUT["batch"]} if name in WHOLE_ROWS else CUT
    for value in model.graph.input:
        dims = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        assert dims[0] == "batch"
        part[value.name] = whole[value.name][tuple(slice(cut.get(dim)) for dim in dims)]
    got, expected = run_model(model, part), run_model(model, whole)
    expected = expected[tuple(map(slice, got.shape))]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "t5"])
def test_dynamic_models_compute_shapes_as_exports_do(name):
    ops = {node.op_type for node in build(name, dynamic=True).graph.node}
    assert {"Shape", "Gather", "Unsqueeze", "Concat", "Reshape"} <= ops
    assert "Shape" not in {node.op_type for node in build(name).graph.node}


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_decoders_are_causal(name, dynamic, run_model, inputs):
    model = build(name, dynamic=dynamic)
    ids = inputs[name]["input_ids"]
    changed = ids.copy()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = (run_model(model, {"input_ids": each}) for each in (ids, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.abs(before[:, 20:] - after[:, 20:]).max(axis=(0, 2)).min() > 1e-3, "every later position must see it"


@pytest.mark.parametrize(("name", "mask"), [("bert", "attention_mask"), ("t5", "attention_mask")])
def test_padding_is_not_seen(name, mask, run_model, inputs):
    """Tokens behind the mask change nothing in front of it, and the mask changes what it hides from."""
    feeds = inputs[name]
    seen = feeds[mask].astype(bool)
    other = {**feeds, "input_ids": np.where(seen, feeds["input_ids"], (feeds["input_ids"] + 1) % 256)}
    all_seen = {**feeds, mask: np.ones_like(feeds[mask])}
    model = build(name)
    before, after, unmasked = (run_model(model, each) for each in (feeds, other, all_seen))
    if name == "bert":  # one row for each token of the same input
        before, after, unmasked = before[seen], after[seen], unmasked[seen]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    assert np.abs(unmasked - before).max() > 1e-2


def test_a_t5_decoder_is_causal(run_model, inputs):
    feeds = inputs["t5"]
    changed = feeds["decoder_input_ids"].copy()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = (
        run_model(build("t5"), {**feeds, "decoder_input_ids": ids}) for ids in (feeds["decoder_input_ids"], changed)
    )
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max(axis=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "t5"])
def test_half_precision_agrees_with_float32(name, run_model, inputs):
    feeds = {key: x.astype(np.float16) if x.dtype == np.float32 else x for key, x in inputs[name].items()}
    half = run_model(build(name, dtype="float16"), feeds).astype(np.float32)
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
        ("elmo", {}, "no model family 'elmo': there are mlp, gpt, llama, bert"),
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
        ("bert", {"token_types": 0}, "token_types must be at least 1, got 0"),
        ("moe", {"routing": "hash"}, "routing must be one of einsum, gather, not 'hash'"),
        ("moe", {"capacity": 33}, "capacity 33 is more than the 32 tokens of a row"),
        ("resnet", {"blocks": ()}, "blocks must name at least one stage"),
        ("resnet", {"blocks": (2, 0)}, "every stage needs at least 1 block"),
        ("dlrm", {"tables": 0}, "tables must be at least 1, got 0"),
        ("unet", {"image": 10}, "image 10 is not divisible by 4: each level halves it"),
        ("unet", {"groups": 3}, "width 16 is not divisible by groups 3"),
        ("unet", {"time_width": 3}, "time_width 3 is odd"),
        ("recurrent", {"cell": "rnn"}, "cell must be one of lstm, gru, not 'rnn'"),
        ("control", {"kind": "while"}, "kind must be one of if, loop, scan, not 'while'"),
        ("llama", {"fused": True}, "fused needs opset 23 or later, not 18"),
        ("vit", {"patch": 5}, "image 16 is not divisible by patch 5"),
        ("t5", {"buckets": 6}, "buckets 6 is not divisible by 4"),
        ("t5", {"max_distance": 8}, "max_distance 8 must be above buckets / 2, here 8"),
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
