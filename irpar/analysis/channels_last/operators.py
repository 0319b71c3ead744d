"""Operators that compute with channels last as they do with channels first, and those that turn one into the other."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from irpar.analysis.kernel_fusion import Stretch
from irpar.ir import DOMAIN, Node, TensorType, Value
from irpar.ops import traits
from irpar.ops.facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    int_attribute,
    ints_attribute,
    ints_of,
    ints_operand,
    needed,
    needed_ints,
    operand,
    text_attribute,
)

from .convolution import FLOATS, convolution, geometry, is_inference, scaled_and_shifted, windows_of
from .group_norm import group_norm, grouped_norm
from .layout import axis_last, last, lies_alike, to_first, to_last
from .spreading import spreading
from .units import Unit, image, turning
from .writer import Writer

Find = Callable[[Node, Stretch], Unit]
"""What a node is with channels last.

Raises:
    CannotTellError: nothing.
"""


def unit_of(node: Node, stretch: Stretch) -> Unit | None:
    """What a node can be computed as with channels last, if it can."""
    find = _OPERATORS.get(node.identity)
    if find is None and traits(node).is_elementwise and len(node.results) == 1:
        find = _elementwise
    if find is None or node.callee is not None:
        return None
    try:
        return find(node, stretch)
    except CannotTellError:
        return None


def _simple(
    node: Node, reads: tuple[Value, ...], write: Callable[[Writer], list[Value]], is_fused: bool = False
) -> Unit:
    """A node that reads images, and makes some."""
    images = tuple(value for value in reads if not value.is_constant)
    return Unit((node,), images, node.results, write, is_fused=is_fused)


def _type(value: Value) -> TensorType:
    """Of an image with channels last."""
    return image(value).with_shape(last(value.shape))


def _name(value: Value) -> str:
    return f"{value.name}_last"


def _elementwise(node: Node, stretch: Stretch) -> Unit:
    """Operands of as many dims are images; others are broadcast to these."""
    rank = len(image(node.result).static_shape)
    read = [value for value in node.inputs if value.is_static and len(value.shape) == rank]
    images = tuple(value for value in dict.fromkeys(read) if any(size != 1 for size in value.shape))
    if not images or not all(value.is_static for value in node.inputs):
        raise CannotTellError("operands")

    def write(w: Writer) -> list[Value]:
        operands = [None if value is None else w.beside(value, rank) for value in node.operands]
        result = node.result
        made = w.typed(
            node.op_type, operands, node.attributes, of=_type(result), name=_name(result), domain=node.domain
        )
        return [made]

    return _simple(node, images, write, is_fused=True)


def _along(node: Node, stretch: Stretch) -> Unit:
    """Concat and Split: along an axis that lies elsewhere then."""
    images = tuple(node.inputs) if node.op_type == "Concat" else (needed(node, 0),)
    rank = len(image(images[0]).static_shape)
    axis = axis_last(axis_attribute(node, rank, 0), rank)

    def write(w: Writer) -> list[Value]:
        operands = [w.last(value) if place < len(images) else value for place, value in enumerate(node.inputs)]
        values = [Value(_name(value), _type(value)) for value in node.results]
        return list(w.node(node.op_type, operands, {**node.attributes, "axis": axis}, results=values).results)

    return _simple(node, tuple(dict.fromkeys(images)), write)


def _slice(node: Node, stretch: Stretch) -> Unit:
    """Of axes that lie elsewhere then."""
    x = needed(node, 0)
    rank = len(image(x).static_shape)
    if node.version < 10:
        raise CannotTellError("axes in attributes")
    starts = needed(node, 1)
    axes = ints_operand(node, 3) or tuple(range(starts.shape[0]))
    turned = np.asarray([axis_last(axis, rank) for axis in axes], starts.dtype.numpy)

    def write(w: Writer) -> list[Value]:
        operands = [w.last(x), starts, needed(node, 2), w.constant(turned, "axes"), *node.operands[4:]]
        return [w.typed("Slice", operands, of=_type(node.result), name=_name(node.result))]

    return _simple(node, (x,), write)


def _pad(node: Node, stretch: Stretch) -> Unit:
    """Of dims that lie elsewhere then."""
    x = needed(node, 0)
    rank = len(image(x).static_shape)
    if node.version < 11 or operand(node, 3) is not None:
        raise CannotTellError("pads of some axes")
    pads = needed_ints(node, 1)
    turned = np.asarray((*last(pads[:rank]), *last(pads[rank:])), np.int64)

    def write(w: Writer) -> list[Value]:
        operands = [w.last(x), w.constant(turned, "pads"), *node.operands[2:3]]
        return [w.typed("Pad", operands, node.attributes, of=_type(node.result), name=_name(node.result))]

    return _simple(node, (x,), write)


def _resize(node: Node, stretch: Stretch) -> Unit:
    """Of dims that lie elsewhere then."""
    x = needed(node, 0)
    rank = len(image(x).static_shape)
    is_cropped = text_attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    if node.version < 11 or is_cropped or "axes" in node.attributes:
        raise CannotTellError("of some axes")
    given = 3 if operand(node, 3) is not None else 2
    numbers = operand(node, given)
    if numbers is None or numbers.data is None or numbers.shape != (rank,):
        raise CannotTellError("sizes")
    turned = numbers.data.numpy()[list(to_last(rank))]

    def write(w: Writer) -> list[Value]:
        operands = [w.last(x), *(None for _ in range(given - 1)), w.constant(turned, "sizes")]
        return [w.typed("Resize", operands, node.attributes, of=_type(node.result), name=_name(node.result))]

    return _simple(node, (x,), write)


_MODES = {"AveragePool": "average", "MaxPool": "max", "GlobalAveragePool": "average", "GlobalMaxPool": "max"}


def _pool(node: Node, stretch: Stretch) -> Unit:
    """PoolChannelsLast; windows of all places where it is global."""
    x = needed(node, 0)
    if image(x).dtype not in FLOATS or len(node.results) > 1:
        raise CannotTellError("another pool")
    kernel = x.shape[2:] if node.op_type.startswith("Global") else ints_attribute(node, "kernel_shape")
    attributes = {"mode": _MODES[node.op_type], **geometry(windows_of(node, kernel or ()))}
    for name in ("ceil_mode", "count_include_pad"):
        if int_attribute(node, name, 0):
            attributes[name] = 1

    def write(w: Writer) -> list[Value]:
        result = node.result
        return [
            w.typed("PoolChannelsLast", [w.last(x)], attributes, of=_type(result), name=_name(result), domain=DOMAIN)
        ]

    return _simple(node, (x,), write)


def _norm(node: Node, stretch: Stretch) -> Unit:
    """A normalisation that no convolution takes into its weights: a product and a sum."""
    x = needed(node, 0)
    if image(x).dtype not in FLOATS or not is_inference(node):
        raise CannotTellError("statistics of its own")
    return _simple(node, (x,), lambda w: [scaled_and_shifted(node, w.last(x), _type(node.result), w)], is_fused=True)


def _reduction(node: Node, stretch: Stretch) -> Unit:
    """Over axes that lie elsewhere then; a result without them is the same, if batch and channels stay in order."""
    x = needed(node, 0)
    rank = len(image(x).static_shape)
    since = 13 if node.op_type == "ReduceSum" else 18
    axes = axes_of(ints_of(node, "axes", 1, since) or (), rank)
    keeps = bool(int_attribute(node, "keepdims", 1))
    stays = tuple(dim for dim in to_last(rank) if dim not in axes)
    if not axes or (not keeps and stays != tuple(sorted(stays))):
        raise CannotTellError("axes")
    turned = tuple(sorted(axis_last(axis, rank) for axis in axes))

    def write(w: Writer) -> list[Value]:
        result = node.result
        rest = {name: value for name, value in node.attributes.items() if name != "axes"}
        operands = [w.last(x)]
        attributes: dict[str, Any] = {**rest}
        if node.version < since:
            attributes["axes"] = turned
        else:
            operands.append(w.constant(np.asarray(turned, np.int64), "axes"))
        if keeps:
            return [w.typed(node.op_type, operands, attributes, of=_type(result), name=_name(result))]
        return list(w.node(node.op_type, operands, attributes, results=[result]).results)

    makes, stay = (node.results, ()) if keeps else ((), node.results)
    return Unit((node,), (x,), makes, write, keeps=stay)


def _transpose(node: Node, stretch: Stretch) -> Unit:
    """One that puts channels last, or back, computes nothing then; of three dims it is for what reads the result."""
    x, perm = needed(node, 0), ints_attribute(node, "perm")
    rank = len(image(x).static_shape)
    image(node.result)
    is_either = to_last(rank) == to_first(rank)
    is_for_conv = is_either and any(user.identity == ("", "Conv") for user in node.result.users)
    if perm == to_last(rank) and not is_for_conv:
        saved = 0 if lies_alike(x.shape) else turning(x)
        return Unit((node,), (x,), (), lambda w: [w.last(x)], saved, keeps=node.results)
    if perm == to_first(rank):
        saved = 0 if lies_alike(node.result.shape) else turning(x)
        return Unit((node,), (), node.results, lambda w: [x], saved)
    raise CannotTellError("another order")


_OPERATORS: Mapping[tuple[str, str], Find] = {
    ("", "BatchNormalization"): _norm,
    ("", "Concat"): _along,
    ("", "Conv"): convolution,
    ("", "ConvTranspose"): spreading,
    ("", "GroupNormalization"): group_norm,
    ("", "InstanceNormalization"): group_norm,
    ("", "Pad"): _pad,
    ("", "Reshape"): grouped_norm,
    ("", "Resize"): _resize,
    ("", "Slice"): _slice,
    ("", "Split"): _along,
    ("", "Transpose"): _transpose,
    **{("", name): _pool for name in _MODES},
    **{("", name): _reduction for name in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")},
}
"""What knows how a node is computed with channels last, by its operator; elementwise operators are alike."""
