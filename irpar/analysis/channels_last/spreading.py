"""A ConvTranspose whose windows lie side by side: a product, whose columns are then put where they belong.

x [n, h, w, c] by weights [c, 2 * 2 * m]   ->   [n, h, w, 2, 2, m]   ->   [n, h, 2, w, 2, m]   =   [n, 2 * h, 2 * w, m]
"""

from math import prod

from irpar.analysis.kernel_fusion import Stretch
from irpar.ir import Node, Value
from irpar.ops.facts import CannotTellError, int_attribute, ints_attribute, needed, operand, text_attribute

from .convolution import FLOATS
from .layout import last
from .units import Unit, image
from .writer import Writer


def spreading(node: Node, stretch: Stretch) -> Unit:
    """A ConvTranspose of which each element of the result is made of one place.

    Raises:
        CannotTellError: it is another one.
    """
    x, weight, result = needed(node, 0), needed(node, 1), image(node.result)
    rank = len(image(x).static_shape)
    if x.dtype not in FLOATS or weight.dtype is not x.dtype or not weight.is_constant:
        raise CannotTellError("operands")
    kernel = image(weight).static_shape[2:]
    is_plain = (
        text_attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID") and "output_shape" not in node.attributes
    )
    listed = {name: ints_attribute(node, name) or () for name in ("dilations", "output_padding", "pads")}
    strides = ints_attribute(node, "strides") or (1,) * (rank - 2)
    if not is_plain or strides != kernel or int_attribute(node, "group", 1) > 1:
        raise CannotTellError("windows over each other")
    if any(listed["pads"]) or any(listed["output_padding"]) or {*listed["dilations"]} - {1}:
        raise CannotTellError("windows apart")
    if result.static_shape[2:] != tuple(size * step for size, step in zip(x.shape[2:], kernel, strict=True)):
        raise CannotTellError("another result")
    return Unit((node,), (x,), (node.result,), lambda w: [_write(w, node, kernel)])


def _write(w: Writer, node: Node, kernel: tuple[int, ...]) -> Value:
    x, weight, bias, name = needed(node, 0), needed(node, 1), operand(node, 2), f"{node.result.name}_last"
    spatial, features = len(kernel), weight.shape[1]
    (*before, channels) = last(x.shape)
    columns = prod(kernel) * features
    matrix = w.last(weight)
    matrix = w.reshaped(matrix, (channels, columns), f"{matrix.name}_columns")
    of = x.tensor_type.with_shape((*before, columns))
    made = w.typed("MatMul", [w.last(x), matrix], of=of, name=f"{name}_columns")
    made = w.reshaped(made, (*before, *kernel, features), f"{name}_apart")
    order = (0, *(dim for place in range(1, spatial + 1) for dim in (place, place + spatial)), 2 * spatial + 1)
    of = of.with_shape([made.shape[dim] for dim in order])
    made = w.typed("Transpose", [made], {"perm": order}, of=of, name=f"{name}_woven")
    if bias is not None:
        made = w.typed("Add", [made, bias], of=of, name=f"{name}_shifted")
    return w.reshaped(made, last(node.result.shape), name)
