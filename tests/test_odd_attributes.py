"""Operators with attributes and operands that models rarely have: the partition gives what ONNX Runtime computes.

Each of these was wrong, crashed or was refused once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import irpar
from irpar.onnx_io import to_module
from tests.budget import pairs

Array = np.ndarray[Any, Any]
Spec = Sequence[str | list[str] | None]
ENGINES = ("ort", "numpy")


def floats(*shape: int) -> Array:
    """The same numbers in every run."""
    return np.random.default_rng([7, *shape]).standard_normal(shape).astype(np.float32)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array],
    constants: Mapping[str, Array] | None = None,
    *,
    opset: int = 21,
) -> onnx.ModelProto:
    """A model whose outputs, of no declared type, are what no node reads."""
    read = {name for node in nodes for name in node.input}
    outputs = [name for node in nodes for name in node.output if name not in read]
    graph = helper.make_graph(
        nodes,
        "odd",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def original(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def check(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    shardings: Mapping[str, Spec],
    engines: Sequence[Any] = ENGINES,
) -> irpar.Partition:
    """Partition a model over two devices and compare every output in every engine."""
    expected = original(model, inputs)
    module = to_module(model)
    for name, spec in shardings.items():
        module.shard(name, spec)
    partition = irpar.partition(module, irpar.Mesh({"x": 2}))
    for engine in engines:
        found = partition.executor(engine).run(dict(inputs))
        for array, wanted in zip(found.values(), expected, strict=True):
            assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), engine
            np.testing.assert_allclose(array, wanted, 1e-4, 1e-5, err_msg=engine)
    return partition


def _cuts(rank: int) -> list[Spec]:
    return [["x" if dim == at else None for dim in range(rank)] for at in range(rank)]


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("size", "stride", "extra"), [(1, 2, 0), (2, 3, 0), (1, 3, 1), (2, 3, 1), (3, 2, 0)])
def test_conv_transpose_whose_windows_leave_out_places(auto_pad: str, size: int, stride: int, extra: int) -> None:
    inputs = {"x": floats(2, 4, 5)}
    attributes = {"strides": [stride], "auto_pad": auto_pad, "output_padding": [extra]}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    for opset in (11, 21):
        model = model_of([node], inputs, {"w": floats(4, 3, size)}, opset=opset)
        for cut in _cuts(3):
            check(model, inputs, {"x": cut})


@pytest.mark.parametrize(("opset", "size"), pairs([10, 12, 13, 21, 22], [4, 5]))
def test_positions_of_max_pool_that_rounds_up(opset: int, size: int) -> None:
    inputs = {"x": floats(2, 4, size, size)}
    attributes = {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], **attributes)
    model = model_of([node], inputs, opset=opset)
    # ONNX's own inference before opset 22 has a window more.
    for form in (model, onnx.shape_inference.infer_shapes(model)):
        for cut in _cuts(4)[:3]:
            check(form, inputs, {"x": cut})


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
@pytest.mark.parametrize("opset", [7, 10])
def test_pad_with_a_value_that_its_mode_does_not_read(mode: str, opset: int) -> None:
    inputs = {"x": floats(2, 4, 5)}
    node = helper.make_node("Pad", ["x"], ["y"], pads=[0, 1, 1, 0, 1, 2], mode=mode, value=1.5)
    for cut in _cuts(3):
        check(model_of([node], inputs, opset=opset), inputs, {"x": cut})


@pytest.mark.parametrize("op_type", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_of_one_element(op_type: str, periodic: int) -> None:
    """0 / 0 by the operators' definitions, where they are not periodic."""
    window = helper.make_node(op_type, ["n"], ["w"], periodic=periodic)
    nodes = [window, helper.make_node("Add", ["x", "w"], ["y"])]
    size = np.asarray(1, np.int64)
    inputs = {"x": floats(4, 3)}
    check(model_of(nodes, inputs, {"n": size}), inputs, {"x": ["x", None]})
    check(model_of(nodes, {**inputs, "n": size}), {**inputs, "n": size}, {"x": ["x", None]})


@pytest.mark.parametrize(("opset", "trains"), [(9, None), (15, 0), (15, 1)])
@pytest.mark.parametrize("count", [4, 5])
def test_batch_normalization_of_a_vector(opset: int, trains: int | None, count: int) -> None:
    """A vector is a batch of one channel."""
    inputs = {"x": floats(count)}
    attributes = {} if trains is None else {"training_mode": trains}
    results = ["y", "mean", "variance"] if trains else ["y"]
    node = helper.make_node("BatchNormalization", ["x", *"sbmv"], results, **attributes)
    constants = {name: np.abs(floats(1)) + number for number, name in enumerate("sbmv")}
    check(model_of([node], inputs, constants, opset=opset), inputs, {"x": ["x"]})


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(("scales", "opset"), pairs([(0.5, 1.5), (2, 1), (1, 1), (1, 1.1)], [11, 19]))
def test_resize_of_a_crop_by_scales(mode: str, scales: tuple[float, float], opset: int) -> None:
    """ONNX Runtime gives it the size of the whole times the scales, and leaves alone what keeps its size."""
    inputs = {"x": floats(2, 4, 4, 6)}
    attributes: dict[str, Any] = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    node = helper.make_node("Resize", ["x", "region", "scales"], ["y"], mode=mode, **attributes)
    region = np.asarray([0, 0, 0.2, 0.1, 1, 1, 0.9, 1.2], np.float32)
    constants = {"region": region, "scales": np.asarray([1, 1, *scales], np.float32)}
    for cut in _cuts(4)[1:3]:
        check(model_of([node], inputs, constants, opset=opset), inputs, {"x": cut})


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_that_keeps_every_size(mode: str) -> None:
    """ONNX Runtime copies, whatever the scales."""
    inputs = {"x": floats(2, 4, 6, 5)}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode)
    model = model_of([node], inputs, {"scales": np.asarray([1, 1, 1.1, 1], np.float32)})
    for cut in _cuts(4)[:3]:
        assert check(model, inputs, {"x": cut}).plan.collectives == []


REDUCTIONS = (
    "ReduceSum",
    "ReduceL1",
    "ReduceSumSquare",
    "ReduceProd",
    "ReduceMean",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
)


@pytest.mark.parametrize(("op_type", "dtype"), pairs(list(REDUCTIONS), [np.int32, np.int64]))
def test_reductions_of_integers_end_where_the_type_ends(op_type: str, dtype: Any) -> None:
    """ONNX Runtime computes them in double precision. Blocks may go beyond the type where the whole does not."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    rows = [[least] * 4, [most] * 4, [most, most, least, least], [2, -3, 4, 1], [-7, 2, 0, 0], [most // 2] * 4]
    inputs = {"x": np.asarray(rows, dtype)}
    axes = np.asarray([1], np.int64)
    for opset, keep in ((13, 0), (18, 1)):
        if opset < 18 and op_type != "ReduceSum":
            node = helper.make_node(op_type, ["x"], ["y"], axes=[1], keepdims=keep)
        else:
            node = helper.make_node(op_type, ["x", "axes"], ["y"], keepdims=keep)
        model = model_of([node], inputs, {"axes": axes}, opset=opset)
        for cut in _cuts(2):
            check(model, inputs, {"x": cut})


def test_compress_by_a_condition_that_is_longer_than_the_data() -> None:
    inputs = {"x": floats(4, 6)}
    condition = np.asarray([True, False, True, True, False, True, True, True])
    for attributes in ({"axis": 1}, {"axis": -2}):
        node = helper.make_node("Compress", ["x", "condition"], ["y"], **attributes)
        for cut in _cuts(2):
            check(model_of([node], inputs, {"condition": condition}), inputs, {"x": cut})


def test_batch_normalization_that_trains_on_nothing() -> None:
    inputs = {"x": floats(4, 6, 0)}
    node = helper.make_node("BatchNormalization", ["x", *"sbmv"], ["y", "mean", "variance"], training_mode=1)
    constants = {name: np.abs(floats(6)) for name in "sbmv"}
    for cut in _cuts(3)[:2]:
        check(model_of([node], inputs, constants), inputs, {"x": cut})


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_recurrent_layers_that_clip(op_type: str, gates: int, direction: str) -> None:
    """Gates are limited, what an LSTM's cell gives is not."""
    ways, size = 1 + (direction == "bidirectional"), 3
    inputs = {"x": floats(4, 6, 5)}
    constants = {
        "w": floats(ways, gates * size, 5),
        "r": floats(ways, gates * size, size),
        "b": floats(ways, 2 * gates * size),
        "h": floats(ways, 6, size),
        "c": floats(ways, 6, size) * 3,
    }
    names = [*"xwrb", "", "h", *(["c"] if op_type == "LSTM" else [])]
    constants = {name: array for name, array in constants.items() if name in names}
    node = helper.make_node(op_type, names, ["y"], hidden_size=size, direction=direction, clip=0.5)
    check(model_of([node], inputs, constants), inputs, {"x": [None, "x", None]})


@pytest.mark.parametrize(
    ("op_type", "shape", "numbers", "attributes", "rank"),
    [
        ("Squeeze", (4, 1, 6), [1], {}, 2),
        ("Unsqueeze", (4, 6), [0, 2], {}, 4),
        ("ReduceSum", (4, 6, 3), [1], {"keepdims": 1}, 3),
        ("ReduceSum", (4, 6, 3), [0, 2], {"keepdims": 0}, 1),
        ("Split", (4, 6), [2, 4], {"axis": 1}, 2),
        ("Reshape", (4, 6), [3, 2, 4], {}, 3),
    ],
)
def test_values_of_computed_size_and_known_rank_are_annotated(
    op_type: str, shape: tuple[int, ...], numbers: list[int], attributes: dict[str, int], rank: int
) -> None:
    inputs = {"x": floats(*shape), "n": np.asarray(numbers)}
    results = ["v", "rest"] if op_type == "Split" else ["v"]
    nodes = [helper.make_node(op_type, ["x", "n"], results, **attributes), helper.make_node("Relu", ["v"], ["y"])]
    check(model_of(nodes, inputs), inputs, {"v": [None] * rank})
    with pytest.raises(irpar.IrparError, match="its size depends on data"):
        check(model_of(nodes, inputs), inputs, {"v": ["x" if dim == rank - 1 else None for dim in range(rank)]})


@pytest.mark.parametrize(("dtype", "zero_point"), pairs([np.int8, np.uint8, np.int16, np.uint16], [None, 0, 3]))
def test_what_is_dequantised_is_sliced_after_it(dtype: Any, zero_point: int | None) -> None:
    """ONNX Runtime moves the one behind the other."""
    numbers = np.asarray([[-7, -3, 1, -4]]) if np.iinfo(dtype).min else np.asarray([[7, 3, 1, 200]])
    inputs = {"x": numbers.astype(dtype)}
    constants = {"scale": np.asarray(0.1, np.float32)}
    if zero_point is not None:
        constants["point"] = np.asarray(zero_point, dtype)
    node = helper.make_node("DequantizeLinear", ["x", *constants], ["y"])
    for opset in (17, 21):
        if opset == 21 or dtype in (np.int8, np.uint8):
            check(model_of([node], inputs, constants, opset=opset), inputs, {"y": ["x", None]})


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_squeeze_where_nothing_is_squeezed(opset: int) -> None:
    """A block of size 1 stays."""
    inputs = {"x": floats(5, 2, 3)}
    model = model_of([helper.make_node("Squeeze", ["x"], ["y"])], inputs, opset=opset)
    for cut in _cuts(3)[:2]:
        check(model, inputs, {"x": cut})


def test_squeeze_of_dims_that_an_empty_list_names() -> None:
    """ONNX Runtime takes it for none at all."""
    inputs = {"x": floats(4, 1, 6)}
    model = model_of([helper.make_node("Squeeze", ["x", "axes"], ["y"])], inputs, {"axes": np.zeros(0, np.int64)})
    for cut in (["x", None, None], [None, None, "x"]):
        check(model, inputs, {"x": cut})


def test_squeeze_of_dims_that_are_named_when_it_runs() -> None:
    inputs = {"x": floats(4, 1, 6), "axes": np.array([1])}
    model = model_of([helper.make_node("Squeeze", ["x", "axes"], ["y"])], inputs)
    for cut in (["x", None, None], [None, "x", None], [None, None, "x"]):
        check(model, inputs, {"x": cut})


def test_features_at_places_in_several_rows() -> None:
    inputs = {"x": floats(4, 7), "places": np.arange(8).reshape(4, 2) % 7}
    node = helper.make_node("ArrayFeatureExtractor", ["x", "places"], ["y"], domain="ai.onnx.ml")
    model = model_of([node], inputs)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    for name, array in inputs.items():
        for cut in _cuts(array.ndim):
            check(model, inputs, {name: cut})
    check(model, inputs, {"y": ["x", None]})
    check(model, inputs, {"y": [None, "x"]})


def test_positions_that_lead_from_any_map_to_any_other() -> None:
    """Those that come in, or of a MaxPool of another size; the reason is told."""
    inputs = {"x": floats(4, 6, 5), "places": np.arange(120)[::-1].reshape(4, 6, 5).copy()}
    node = helper.make_node("MaxUnpool", ["x", "places"], ["y"], kernel_shape=[1], strides=[3])
    for name in inputs:
        for cut in _cuts(3):
            check(model_of([node], inputs), inputs, {name: cut})
    check(model_of([node], {"x": inputs["x"]}, {"places": inputs["places"]}), {"x": inputs["x"]}, {"x": _cuts(3)[0]})
    image = {"x": floats(4, 6, 6)}
    pooled = helper.make_node("MaxPool", ["x"], ["v", "places"], kernel_shape=[2], strides=[2])
    for strides in ([2], [3]):
        back = helper.make_node("MaxUnpool", ["v", "places"], ["y"], kernel_shape=[2], strides=strides)
        partition = check(model_of([pooled, back], image), image, {"x": _cuts(3)[0]})
        assert any("of a tensor of that size" in why for why in _whys(partition)) == (strides == [3])


@pytest.mark.parametrize("order", [1, -1])
def test_positions_of_a_pool_beside_others_of_their_shape(order: int) -> None:
    """What is known of the one does not hold for the other, whichever comes first."""
    places = np.arange(0, 288, 4).reshape(2, 4, 3, 3).copy()
    places[0, 0] += 73
    inputs = {"x": floats(2, 4, 6, 6), "v": floats(2, 4, 3, 3), "places": places}
    windows = {"kernel_shape": [2, 2], "strides": [2, 2]}
    pool = helper.make_node("MaxPool", ["x"], ["p", "i"], **windows)
    back = [
        helper.make_node("MaxUnpool", names, [names[0] + "b"], **windows) for names in (["p", "i"], ["v", "places"])
    ]
    cut = [None, "x", None, None]
    partition = check(model_of([pool, *back[::order]], inputs), inputs, {"x": cut, "v": cut})
    assert [why for why in _whys(partition) if "may lie in any map" in why]


def test_constant_positions_of_a_file(tmp_path: Path) -> None:
    inputs, places = {"v": floats(2, 2, 3, 3)}, np.arange(0, 144, 4).reshape(2, 2, 3, 3)
    node = helper.make_node("MaxUnpool", ["v", "places"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    onnx.save(model_of([node], inputs, {"places": places}), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    irpar.annotate(module, {"v": ["x", None, None, None]})
    assert irpar.partition(module, "x=2").plan.collectives == []


def _whys(partition: irpar.Partition) -> list[str]:
    return [entry["why"] for entry in partition.plan.replicated if "op" in entry]


@pytest.mark.parametrize("group", [2, 3])
def test_convolutions_of_one_channel_over_a_block_of_a_larger_image(group: int) -> None:
    """What a device gets beside its neighbours' borders is a view, whose rows do not follow each other."""
    inputs = {"x": floats(1, group, 3, 6)}
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=group, kernel_shape=[2, 2])
    check(model_of([node], inputs, {"w": floats(group, 1, 2, 2)}), inputs, {"x": [None, None, None, "x"]})


def test_hardmax_of_nothing() -> None:
    inputs = {"x": floats(5, 0)}
    check(model_of([helper.make_node("Hardmax", ["x"], ["y"])], inputs), inputs, {"x": ["x", None]})


@pytest.mark.parametrize("has_points", [False, True])
def test_scales_that_other_ranks_send(has_points: bool) -> None:
    """With them ONNX Runtime's product that quantizes its data gives zeros."""
    random = np.random.default_rng(3)
    constants = {
        "w": random.integers(0, 256, (4, 2, 16), dtype=np.uint8),
        "s": random.uniform(0.01, 0.02, (4, 2)).astype(np.float32),
    }
    if has_points:
        constants["z"] = random.integers(0, 256, (4, 1), dtype=np.uint8)
    sizes = {"K": 64, "N": 4, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", **sizes)
    inputs = {"x": floats(4, 64)}
    model = model_of([node], inputs, constants)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    module = to_module(model)
    module.shard("s", [None, "x"])
    module.shard("x", ["x", None])
    found = irpar.partition(module, irpar.Mesh({"x": 2})).executor("ort").run(dict(inputs))
    np.testing.assert_allclose(found["y"], original(model, inputs)[0], 0.05, 0.05)
