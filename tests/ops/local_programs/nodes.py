"""Nodes of operators with local programs, drawn at random, as models of which an operand is sharded where they work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import strategies as st
from onnx import TensorProto, helper

import irpar
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.api import Engine
from irpar.ir import Node
from irpar.ops import definitions
from irpar.ops.local_programs.program import LocalProgram
from tests.runtime.groups.ring import check_rings

from .recurrent import recurrent

Operands = dict[str, np.ndarray]
Drawn = tuple[onnx.NodeProto, Operands, int]
"""A node, its operands, and a dim of the one called x along which it works; those called other.. are inputs too."""

Cuts = int | dict[str, list[list[str] | None]]
"""A dim of x that all axes of the mesh cut; or how each of some operands is sharded."""

INTEGER_REDUCTIONS = ("ReduceSum", "ReduceL1", "ReduceSumSquare", "ReduceMean", "ReduceProd")
"""Of floats they give partial results."""
OPSETS = {"RMSNormalization": 23, "CumProd": 26, "Attention": 24, "Upsample": 9}


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Drawn:
    """A node of an operator."""
    return draw(DRAWN[name]()) if name in DRAWN else draw(reducing(name))


@st.composite
def reducing(draw: st.DrawFn, name: str) -> Drawn:
    """A node that needs something of all elements along a dim."""
    rank = draw(st.integers(3, 4)) if name == "InstanceNormalization" else draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    attributes: dict[str, Any] = {}
    others: dict[str, np.ndarray] = {}
    results = ["y"]
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def normals(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    size = shape[axis] = draw(st.integers(24, 50))
    match name:
        case "LayerNormalization" | "RMSNormalization":
            first = draw(st.integers(0, axis))
            attributes = {"axis": first, "epsilon": 1e-3}
            others = {"scale": normals(*shape[first:])}
            if name == "LayerNormalization":
                if draw(st.booleans()):
                    others["shift"] = normals(*shape[first:])
                results += ["mean", "inverse"] if draw(st.booleans()) else []
        case "InstanceNormalization":
            shape[axis], axis = 2, draw(st.integers(2, rank - 1))
            shape[axis] = size
            others = {"scale": normals(shape[1]), "shift": normals(shape[1])}
        case "MeanVarianceNormalization":
            attributes = {"axes": sorted({axis, draw(st.integers(0, rank - 1))})}
        case _ if name.startswith("Reduce"):
            attributes = {"keepdims": draw(st.integers(0, 1))}
            others = {"axes": np.array(sorted({axis, draw(st.integers(0, rank - 1))}))}
        case "LpNormalization":
            attributes = {"axis": axis, "p": draw(st.integers(1, 2))}
        case "ArgMax" | "ArgMin":
            attributes = {
                "axis": axis,
                "keepdims": draw(st.integers(0, 1)),
                "select_last_index": draw(st.integers(0, 1)),
            }
        case "TopK":
            attributes = {"axis": axis, "largest": draw(st.integers(0, 1))}
            others = {"k": np.array([draw(st.integers(1, size))])}
            results = ["y", "places"]
        case "DynamicQuantizeLinear":
            results = ["y", "scale", "point"]
        case "CumSum" | "CumProd":
            attributes = {"exclusive": draw(st.integers(0, 1)), "reverse": draw(st.integers(0, 1))}
            others = {"axis": np.array(axis)}
        case _:
            attributes = {"axis": axis}
    data = normals(*shape)
    if name in ("ArgMax", "ArgMin", "TopK", "Hardmax"):
        data = np.round(data * 2)  # with equal elements
    if name == "ReduceLogSum":
        data = np.abs(data)
    if name in INTEGER_REDUCTIONS:
        data = (data * draw(st.sampled_from([2, 2**28]))).astype(np.int32)
    if name == "CumProd":
        data = np.clip(np.abs(data), 0.7, 1.3).astype(np.float32)
    node = helper.make_node(name, ["x", *others], results, **attributes)
    return node, {"x": data, **others}, axis


def _normals(draw: st.DrawFn, *sizes: int) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.standard_normal(sizes).astype(np.float32)


def _shape(draw: st.DrawFn, least: int = 8, most: int = 30) -> tuple[list[int], int]:
    """A shape, and the dim of it that is long."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    shape[axis] = draw(st.integers(least, most))
    return shape, axis


@st.composite
def concats(draw: st.DrawFn) -> Drawn:
    shape, axis = _shape(draw)
    operands = {"x": _normals(draw, *shape)}
    for number in range(draw(st.integers(1, 2))):
        shape[axis] = draw(st.integers(8, 20) | st.integers(0, 3))
        operands[f"other{number}"] = _normals(draw, *shape)
    return helper.make_node("Concat", draw(st.permutations(list(operands))), ["y"], axis=axis), operands, axis


@st.composite
def splits(draw: st.DrawFn) -> Drawn:
    shape, axis = _shape(draw)
    sizes = draw(st.lists(st.integers(8, 14), min_size=1, max_size=3))
    sizes = draw(st.permutations([*sizes, *draw(st.lists(st.integers(0, 2), max_size=2))]))
    shape[axis] = sum(sizes)
    operands = {"x": _normals(draw, *shape), "sizes": np.array(sizes)}
    names = [f"y{number}" for number in range(len(sizes))]
    return helper.make_node("Split", ["x", "sizes"], names, axis=axis), operands, axis


@st.composite
def slices(draw: st.DrawFn) -> Drawn:
    shape, axis = _shape(draw, 16)
    size = shape[axis]
    step = draw(st.sampled_from([1, 1, 2, -1]))
    start, end = draw(st.integers(0, 4)), draw(st.integers(size - 3, size + 3))
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        end = start + draw(st.integers(1, 3)) * step
    elif step < 0:
        start, end = end, draw(st.sampled_from([-size - 5, start, 2**31 - 1]))
    starts, ends, axes, steps = [start], [end], [axis], [step]
    other = draw(st.integers(0, len(shape) - 1))
    if other != axis:
        starts, ends, axes, steps = [*starts, 0], [*ends, max(1, shape[other] - 1)], [*axes, other], [*steps, 1]
    numbers = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    operands = {"x": _normals(draw, *shape), **{name: np.array(value) for name, value in numbers.items()}}
    return helper.make_node("Slice", list(operands), ["y"]), operands, axis


@st.composite
def orders(draw: st.DrawFn) -> Drawn:
    """A Gather that takes places of a dim in another order."""
    shape, axis = _shape(draw, 16)
    places = draw(st.permutations(range(-shape[axis], 0)))[: draw(st.integers(8, shape[axis]))]
    if draw(st.booleans()):  # A roll.
        places = list(np.roll(np.arange(shape[axis]), draw(st.integers(1, 5))))
    operands = {"x": _normals(draw, *shape), "order": np.array(places)}
    return helper.make_node("Gather", list(operands), ["y"], axis=axis), operands, axis


@st.composite
def pads(draw: st.DrawFn) -> Drawn:
    shape, axis = _shape(draw)
    mode = draw(st.sampled_from(["constant", "reflect", "edge", "wrap"]))
    counts = np.zeros((2, len(shape)), np.int64)
    counts[:, axis] = [draw(st.integers(0, 3)), draw(st.integers(1, 4))]
    if mode == "constant" and draw(st.booleans()):
        # What is moved out beyond the border; as many elements as there are.
        counts[:, axis] = draw(st.integers(-2 * shape[axis], 2 * shape[axis])) * np.array([1, -1])
    other = draw(st.integers(0, len(shape) - 1))
    if other != axis and mode in ("constant", "edge"):
        counts[draw(st.integers(0, 1)), other] = 1
    operands = {"x": _normals(draw, *shape), "pads": counts.reshape(-1)}
    if mode == "constant" and draw(st.booleans()):
        operands["value"] = np.array(draw(st.sampled_from([0, 1.5])), np.float32)
    return helper.make_node("Pad", list(operands), ["y"], mode=mode), operands, axis


@st.composite
def tiles(draw: st.DrawFn) -> Drawn:
    shape, axis = _shape(draw)
    counts = [draw(st.integers(1, 2)) for _ in shape]
    counts[axis] = draw(st.integers(2, 3))
    return (
        helper.make_node("Tile", ["x", "counts"], ["y"]),
        {"x": _normals(draw, *shape), "counts": np.array(counts)},
        axis,
    )


@st.composite
def windows(draw: st.DrawFn, name: str) -> Drawn:
    """A convolution or pooling, one or two of whose place dims are long."""
    rank = draw(st.integers(1, 2))
    channels, groups = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    places = [draw(st.integers(16, 30)) if dim == 0 else draw(st.integers(7, 12)) for dim in range(rank)]
    kernel = [draw(st.integers(1, 4)) for _ in range(rank)]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in range(rank)],
        "dilations": [1 if name == "LpPool" else draw(st.integers(1, 2)) for _ in range(rank)],
    }
    mode = draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if mode == "NOTSET":
        attributes["pads"] = [draw(st.integers(0, size - 1)) for _ in range(2) for size in kernel]
    else:
        attributes["auto_pad"] = mode
    if mode.startswith("SAME"):
        attributes["dilations"] = [1] * rank
        # Where windows leave out places, engines differ in where the first one starts.
        attributes["strides"] = [min(pair) for pair in zip(attributes["strides"], kernel, strict=True)]
    if name == "AveragePool":
        attributes["count_include_pad"] = 1 if mode != "VALID" else 0
    if name == "MaxPool" and mode == "NOTSET":
        attributes["ceil_mode"] = draw(st.integers(0, 1))
    operands = {"x": _normals(draw, 2, channels, *places)}
    if name == "Conv":
        outputs = groups * draw(st.integers(1, 2))
        operands["w"] = _normals(draw, outputs, channels // groups, *kernel)
        if draw(st.booleans()):
            operands["b"] = _normals(draw, outputs)
        attributes["group"] = groups
    return helper.make_node(name, list(operands), ["y"], **attributes), operands, 2


@st.composite
def transposed(draw: st.DrawFn) -> Drawn:
    """A ConvTranspose of which the first place dim is long."""
    rank = draw(st.integers(1, 2))
    inputs, groups = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    places = [draw(st.integers(8, 20)) if dim == 0 else draw(st.integers(2, 5)) for dim in range(rank)]
    kernel, strides = [draw(st.integers(1, 4)) for _ in range(rank)], [draw(st.integers(1, 3)) for _ in range(rank)]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": [draw(st.integers(1, 2)) for _ in range(rank)],
        "group": groups,
        "pads": [draw(st.integers(0, (size - 1) // 2)) for _ in range(2) for size in kernel],
        "output_padding": [draw(st.integers(0, stride - 1)) for stride in strides],
    }
    operands = {"x": _normals(draw, 2, inputs, *places), "w": _normals(draw, inputs, draw(st.integers(1, 2)), *kernel)}
    if draw(st.booleans()):
        operands["b"] = _normals(draw, groups * operands["w"].shape[1])
    return helper.make_node("ConvTranspose", list(operands), ["y"], **attributes), operands, 2


@st.composite
def crops(draw: st.DrawFn) -> Drawn:
    """A CenterCropPad, most often of the long dim."""
    shape, axis = _shape(draw)
    axes = sorted({axis, draw(st.integers(0, len(shape) - 1))})
    sizes = [max(1, shape[dim] + draw(st.integers(-4, 5))) for dim in axes]
    operands = {"x": _normals(draw, *shape), "sizes": np.array(sizes)}
    return helper.make_node("CenterCropPad", list(operands), ["y"], axes=axes), operands, axis


@st.composite
def compressions(draw: st.DrawFn) -> Drawn:
    """A Compress with a condition that is known, of some of the elements perhaps."""
    shape, axis = _shape(draw, 16)
    condition = np.random.default_rng(draw(st.integers(0, 99))).random(shape[axis] - draw(st.integers(0, 3))) < 0.8
    operands = {"x": _normals(draw, *shape), "condition": condition}
    return helper.make_node("Compress", list(operands), ["y"], axis=axis), operands, axis


@st.composite
def global_pools(draw: st.DrawFn) -> Drawn:
    """A GlobalLpPool of a long or wide image."""
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(24, 40)), draw(st.integers(1, 4))]
    return (
        helper.make_node("GlobalLpPool", ["x"], ["y"], p=draw(st.integers(1, 3))),
        {"x": _normals(draw, *shape)},
        2,
    )


@st.composite
def resizes(draw: st.DrawFn) -> Drawn:
    """A Resize of an image of which the first place dim is long."""
    places = [draw(st.integers(16, 30)), draw(st.integers(4, 9))]
    mode = draw(st.sampled_from(["nearest", "linear", "cubic"]))
    attributes: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": draw(
            st.sampled_from(["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"])
        ),
    }
    match mode:
        case "nearest":
            kinds = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
            attributes["nearest_mode"] = draw(st.sampled_from(kinds))
        case "cubic":
            attributes |= {"exclude_outside": draw(st.integers(0, 1)), "cubic_coeff_a": -0.5}
    if mode != "nearest":
        attributes["antialias"] = draw(st.integers(0, 1))
    operands = {"x": _normals(draw, 2, 2, *places)}
    both = draw(st.booleans())
    # Of nearest elements that are halfway engines take either.
    steps = [0.5, 2, 3] if mode == "nearest" else [0.5, 0.6, 0.7, 1.2, 1.7, 2, 3]
    if mode == "nearest" and attributes["coordinate_transformation_mode"] == "half_pixel":
        steps = [0.6, 0.7, 1.7]
    ratios = [draw(st.sampled_from(steps)), draw(st.sampled_from([0.5, 1.7, 2])) if both else 1]
    if draw(st.booleans()):
        names = ["x", "", "scales"]
        operands["scales"] = np.array([1, 1, *ratios], np.float32)
    else:
        names = ["x", "", "", "sizes"]
        attributes["axes"] = [2, 3]
        operands["sizes"] = np.array([int(size * ratio) for size, ratio in zip(places, ratios, strict=True)])
        if both:
            policies = ["stretch", "not_larger", "not_smaller"]
            attributes["keep_aspect_ratio_policy"] = draw(st.sampled_from(policies))
    return helper.make_node("Resize", names, ["y"], **attributes), operands, 2


@st.composite
def upsamples(draw: st.DrawFn) -> Drawn:
    """An Upsample, which is a Resize of long ago."""
    operands = {"x": _normals(draw, 1, 2, draw(st.integers(8, 20)), 4)}
    operands["scales"] = np.array([1, 1, draw(st.sampled_from([1.5, 2, 3])), 2], np.float32)
    mode = draw(st.sampled_from(["nearest", "linear"]))
    return helper.make_node("Upsample", list(operands), ["y"], mode=mode), operands, 2


@st.composite
def losses(draw: st.DrawFn, name: str) -> Drawn:
    """A loss over many classes, or a mean over many rows of which some do not count as much."""
    batch, classes, places = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.sampled_from([(), (3,), (2, 3)]))
    attributes: dict[str, Any] = {"reduction": draw(st.sampled_from(["none", "sum", "mean"]))}
    axis = draw(st.sampled_from([0, 1, 1]))
    size = draw(st.integers(24, 40))
    batch, classes = (size, classes) if axis == 0 else (batch, size)
    operands = {"x": _normals(draw, batch, classes, *places)}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    operands["labels"] = rng.integers(0, classes, (batch, *places))
    if draw(st.booleans()):
        operands["weights"] = np.abs(_normals(draw, classes)) + 0.1
    if draw(st.booleans()):
        attributes["ignore_index"] = draw(st.sampled_from([-100, 1]))
        operands["labels"].reshape(-1)[1:3] = attributes["ignore_index"]
    logs = ["logs"] if name == "SoftmaxCrossEntropyLoss" and draw(st.booleans()) else []
    return helper.make_node(name, list(operands), ["y", *logs], **attributes), operands, axis


@st.composite
def images(draw: st.DrawFn, name: str) -> Drawn:
    """A normalisation of (batch, channels, places), with places, the batch, or channels of a group that are many."""
    batch, groups, inside = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    places = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 2)))]
    axis = draw(st.sampled_from([2, 1] if name == "GroupNormalization" else [2, 0]))
    size = draw(st.integers(16, 30))
    if axis == 1:
        groups, inside = draw(st.sampled_from([(1, 12), (1, 24), (2, 12), (4, 6)]))
    batch, places[0] = (size, places[0]) if axis == 0 else (batch, size if axis == 2 else places[0])
    channels = groups * inside
    operands = {"x": _normals(draw, batch, channels, *places)}
    operands |= {side: _normals(draw, channels) for side in ("scale", "shift")}
    attributes: dict[str, Any] = {"epsilon": 1e-3}
    results = ["y"]
    if name == "GroupNormalization":
        attributes["num_groups"] = groups
    else:
        attributes |= {"training_mode": 1, "momentum": draw(st.sampled_from([0.9, 0.3]))}
        operands |= {"mean": _normals(draw, channels), "variance": np.abs(_normals(draw, channels))}
        results += ["new_mean", "new_variance"]
    return helper.make_node(name, list(operands), results, **attributes), operands, axis


@st.composite
def skips(draw: st.DrawFn, name: str) -> Drawn:
    """A normalisation of com.microsoft's of rows that are long."""
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(16, 30))]
    operands = {"x": _normals(draw, *shape)}
    if name == "SimplifiedLayerNormalization":
        operands["scale"] = _normals(draw, shape[2])
        return helper.make_node(name, list(operands), ["y"], epsilon=1e-3), operands, 2
    operands["other"] = _normals(draw, *shape)
    sides = ["scale", "shift", "bias"] if name == "SkipLayerNormalization" else ["scale", "bias"]
    operands |= {side: _normals(draw, shape[2]) for side in sides[: draw(st.integers(1, 3))]}
    results = draw(st.sampled_from([["y"], ["y", "", "", "sum"]]))
    return helper.make_node(name, list(operands), results, domain="com.microsoft", epsilon=1e-3), operands, 2


@st.composite
def attentions(draw: st.DrawFn) -> Drawn:
    """Few queries over many keys, of which K is called x."""
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    queries, keys, size, value_size = (
        draw(st.integers(1, 3)),
        draw(st.integers(16, 40)),
        4,
        draw(st.sampled_from([4, 6])),
    )
    is_packed = draw(st.booleans())
    attributes: dict[str, Any] = {}
    if is_packed:
        attributes = {"q_num_heads": key_heads * group, "kv_num_heads": key_heads}

    def heads(count: int, places: int, width: int) -> np.ndarray:
        return _normals(draw, *((batch, places, count * width) if is_packed else (batch, count, places, width)))

    operands = {
        "other_q": heads(key_heads * group, queries, size),
        "x": heads(key_heads, keys, size),
        "other_v": heads(key_heads, keys, value_size),
    }
    names = list(operands)
    shape = draw(st.sampled_from([(queries, keys), (batch, 1, queries, keys), (1, queries, keys)]))
    match draw(st.sampled_from(["none", "none", "bool", "float"])):
        case "bool":
            operands["mask"] = _normals(draw, *shape) > -1
        case "float":
            operands["mask"] = _normals(draw, *shape)
    if draw(st.booleans()):
        operands["valid"] = np.array([keys - draw(st.integers(0, 9)) for _ in range(batch)])
    attributes["is_causal"] = draw(st.integers(0, 1))
    attributes |= draw(st.sampled_from([{}, {"scale": 0.3}, {"softcap": 2.0}]))
    names = [*names, "mask" if "mask" in operands else "", "", "", "valid" if "valid" in operands else ""]
    return helper.make_node("Attention", names, ["y"], **attributes), operands, 1 if is_packed else 2


DRAWN: dict[str, Callable[[], st.SearchStrategy[Drawn]]] = {
    "Concat": concats,
    "Split": splits,
    "Slice": slices,
    "Gather": orders,
    "Pad": pads,
    "Tile": tiles,
    "Attention": attentions,
    "ConvTranspose": transposed,
    "Resize": resizes,
    "CenterCropPad": crops,
    "Compress": compressions,
    "GlobalLpPool": global_pools,
    "Upsample": upsamples,
    **{
        name: (lambda draws=draws, name=name: draws(name))
        for draws, names in {
            losses: ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
            images: ("GroupNormalization", "BatchNormalization"),
            recurrent: ("RNN", "GRU", "LSTM"),
            skips: ("SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
        }.items()
        for name in names
    },
    **{name: (lambda name=name: windows(name)) for name in ("Conv", "MaxPool", "AveragePool", "LpPool")},
}
"""Operators by what draws their nodes; the others see `reducing`."""


def partitioned(
    node: onnx.NodeProto, operands: Operands, cuts: Cuts, mesh: dict[str, int], folder: Path
) -> irpar.Partition:
    """The partition of a model of the node alone."""
    opset = OPSETS.get(node.op_type, 21)
    inputs = [
        helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(operands["x"].dtype), operands["x"].shape)
    ]
    inputs += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in operands.items()
        if name.startswith("other")
    ]
    constants = [
        onnx.numpy_helper.from_array(array, name)
        for name, array in operands.items()
        if name != "x" and not name.startswith("other")
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    if isinstance(cuts, int):
        cuts = {"x": [list(mesh) if dim == cuts else None for dim in range(operands["x"].ndim)]}
    for name, cut in cuts.items():
        module.shard(name, cut)
    return irpar.partition(module, irpar.Mesh(mesh))


@contextmanager
def chosen(program: LocalProgram) -> Iterator[None]:
    """Let nodes run by a local program wherever they can, whatever it costs: a TopK of many may be cheaper whole."""

    def cost(_: Node, view: RuleView | None, placement: Placement, *__: object) -> tuple[int, int]:
        way = None if view is None else view.way_of(placement)
        # What is registered has a rule that is guarded.
        is_it = way is not None and way.program is not None and way.program.sends is program.sends
        is_it = is_it and bool(way.program_axes(placement.factors))
        return (-(1 << 60) if is_it else 0), 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("irpar.analysis.completion.situation.running_cost", cost)
        yield


def partitioned_node(
    node: onnx.NodeProto, operands: Operands, cuts: Cuts, mesh: dict[str, int], folder: Path
) -> irpar.Partition:
    """The same by the local program of the operator."""
    (program,) = [
        found.local_program
        for found in definitions()
        if found.name == node.op_type and found.domain in ("", node.domain) and found.local_program
    ]
    with chosen(program):
        return partitioned(node, operands, cuts, mesh, folder)


def check(partition: irpar.Partition, operands: Operands, folder: Path) -> None:
    """Compare both engines with ONNX Runtime on the original, and what they sent with the plan, in rings too."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    given = {entry.name: operands[entry.name] for entry in session.get_inputs()}
    expected = dict(zip(names, session.run(names, given), strict=True))
    engines: tuple[Engine, ...] = ("ort", "numpy")
    for engine in engines:
        got = check_rings(partition, given, engine)
        for name, whole in expected.items():
            np.testing.assert_allclose(got[name], whole, rtol=2e-4, atol=2e-5, err_msg=f"{name} by {engine}")
