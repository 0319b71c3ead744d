"""A step of decoding whose cache is sharded along the sequence: nothing that is sent grows with the cache."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar

from .decoding_steps import BATCH, FORMS, HEADS, SIZE, WIDTH, Step


def partitioned(step: Step, ranks: int, folder: Path) -> irpar.Partition:
    step.save(folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    for name in ("past_k", "past_v"):
        module.shard(name, [None, None, "sp", None])
    return irpar.partition(module, {"sp": ranks})


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_the_step_is_right_and_sends_no_cache(form: str, new: int, ranks: int, tmp_path: Path) -> None:
    sent = {}
    for length in (48, 144):
        step = Step(form, length, new)
        partition = partitioned(step, ranks, tmp_path)
        sent[length] = partition.plan.totals["sent_bytes"]
        inputs = step.inputs()
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        expected = dict(zip(names, session.run(None, inputs), strict=True))
        for engine in ("ort", "numpy"):
            found = partition.run(inputs, engine=engine)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{engine} {name}")
    assert sent[48] == sent[144]


def _fused_step(op_type: str, opset: int, length: int, new: int, path: Path) -> dict[str, np.ndarray]:
    """Save attention of ONNX Runtime's own form over a cache; gives its inputs."""
    rng = np.random.default_rng(1)
    # ONNX Runtime takes several tokens behind a cache of one row alone.
    batch = 1 if new > 1 else BATCH
    key_heads = HEADS // 2 if op_type == "GroupQueryAttention" else HEADS
    wide = {"q": WIDTH, "k": key_heads * SIZE, "v": key_heads * SIZE}
    inputs = {name: rng.standard_normal((batch, new, size)) for name, size in wide.items()}
    past = (batch, key_heads, length, SIZE)
    inputs |= {f"past_{name}": rng.standard_normal(past) for name in "kv"}
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
    if op_type == "GroupQueryAttention":
        angles = np.arange(length)[:, None] / 100 ** np.linspace(0, 1, SIZE // 2)
        numbers = {"total": np.array(length, np.int32), "cos": np.cos(angles), "sin": np.sin(angles)}
        inputs["lengths"] = np.array([length // 2, length - 2][:batch], np.int32)
        operands = ["q", "k", "v", "past_k", "past_v", "lengths", "total", "cos", "sin"]
        attributes = {"num_heads": HEADS, "kv_num_heads": key_heads, "do_rotary": 1}
        after = length
    else:
        numbers = {}
        operands = ["q", "k", "v", "", "", "", "past_k", "past_v"]
        attributes = {"num_heads": HEADS}
        after = length + new
    node = helper.make_node(op_type, operands, ["y", "present_k", "present_v"], domain="com.microsoft", **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in inputs.items()}
    given = [helper.make_tensor_value_info(name, types[name], value.shape) for name, value in inputs.items()]
    cache = [batch, key_heads, after, SIZE]
    shapes = {"y": [batch, new, WIDTH], "present_k": cache, "present_v": cache}
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    constants = [
        numpy_helper.from_array(value if value.dtype == np.int32 else value.astype(np.float32), name)
        for name, value in numbers.items()
    ]
    graph = helper.make_graph([node], "step", given, made, constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return inputs


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("opset", [16, 21])
@pytest.mark.parametrize("op_type", ["GroupQueryAttention", "MultiHeadAttention"])
def test_forms_of_onnx_runtime(op_type: str, opset: int, new: int, ranks: int, tmp_path: Path) -> None:
    sent = {}
    for length in (48, 144):
        inputs = _fused_step(op_type, opset, length, new, tmp_path / "model.onnx")
        module = irpar.load(tmp_path / "model.onnx")
        for name in ("past_k", "past_v"):
            module.shard(name, [None, None, "sp", None])
        partition = irpar.partition(module, {"sp": ranks})
        sent[length] = partition.plan.totals["sent_bytes"]
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        expected = dict(zip(names, session.run(None, inputs), strict=True))
        for engine in ("ort", "numpy"):
            found = partition.run(inputs, engine=engine)
            np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-4, atol=1e-5)
            for name in ("present_k", "present_v"):
                for row, last in enumerate(inputs.get("lengths", [found[name].shape[2]] * len(found[name]))):
                    own = np.s_[row, :, : last + 1]  # What is behind the last token nobody reads.
                    np.testing.assert_allclose(found[name][own], expected[name][own], rtol=1e-4, atol=1e-5)
    assert sent[48] == sent[144]


@pytest.mark.parametrize("op_type", ["GroupQueryAttention", "MultiHeadAttention"])
def test_an_axis_of_one_device_leaves_attention_as_it_is(op_type: str, tmp_path: Path) -> None:
    _fused_step(op_type, 16, 48, 1, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("past_k", [None, None, "sp", None])
    made = irpar.partition(module, {"sp": 1, "tp": 2}).module
    assert made is not None
    assert op_type in {node.op_type for node in made.graph}
    assert made.opsets[""] == 16


def test_a_cache_that_grows_hands_on_what_its_blocks_no_longer_hold(tmp_path: Path) -> None:
    """64 places over four devices are 16 each; of 65 the first three hold 17, and three rows at most go to another."""
    partition = partitioned(Step("Concat", 64, 1), 4, tmp_path)
    permutes = [entry for entry in partition.plan.collectives if entry["kind"] == "permute"]
    assert [entry["bytes"] for entry in permutes] == 2 * [3 * BATCH * HEADS * SIZE * 4]
    assert "all_gather" not in partition.plan.totals["by_kind"]
