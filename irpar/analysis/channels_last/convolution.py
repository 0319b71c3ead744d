"""Convolutions with channels last, with what is computed of their sums: a normalisation, a residual, an activation."""

from dataclasses import dataclass
from math import prod

from irpar.analysis.kernel_fusion import Stretch
from irpar.ir import DOMAIN, DType, Node, TensorType, Value
from irpar.kernels.windows import Windows
from irpar.ops.facts import (
    CannotTellError,
    float_attribute,
    int_attribute,
    ints_attribute,
    needed,
    operand,
    text_attribute,
)

from .activation import Activation, activation_of, numbers_beside, reader
from .layout import last
from .units import LAUNCH_BYTES, Unit, image, moved
from .writer import Writer

FLOATS = (DType.F16, DType.BF16, DType.F32)
_SLOWER_FLOPS = 24
"""FLOPs without tensor cores that take so much longer in a kernel for windows, than as a product, as a byte takes."""


@dataclass(frozen=True)
class Convolution:
    """A convolution, and what is computed of its sums alone.

    Attributes:
        node: the Conv.
        windows: its windows.
        norm: a BatchNormalization whose numbers are known.
        shift, bias: an Add of numbers of features, and these; or the Conv's own.
        addition, residual: an Add, and what is added.
        activation: what follows.
    """

    node: Node
    windows: Windows
    norm: Node | None
    shift: Node | None
    bias: Value | None
    addition: Node | None
    residual: Value | None
    activation: Activation

    @property
    def members(self) -> tuple[Node, ...]:
        """All of these nodes, in order."""
        found = (self.node, self.norm, self.shift, self.addition, *self.activation.nodes)
        return tuple(node for node in found if node is not None)

    @property
    def result(self) -> Value:
        """What the last of them gives."""
        return self.members[-1].result

    def saved(self) -> int:
        """Bytes that are not moved where windows are read in place, and what follows is computed of sums at once.

        Else there is a launch that lays out columns, one that adds a bias, and one of all that follows.
        """
        weight, result = needed(self.node, 1), self.node.result
        depth, places = prod(weight.shape[1:]) * self._groups, prod(result.shape[2:]) * result.shape[0]
        total = 0
        if not self._is_product and not self._is_depthwise:
            total += 2 * depth * places * result.dtype.numpy.itemsize + LAUNCH_BYTES
        if operand(self.node, 2) is not None and not self._is_depthwise:
            total += 2 * moved(result) + LAUNCH_BYTES
        if len(self.members) > 1:
            total += 2 * moved(result) + LAUNCH_BYTES
        if not self._is_product and not self._is_depthwise and (result.dtype is DType.F32 or self._groups > 1):
            total -= 2 * prod(weight.shape) * places // _SLOWER_FLOPS
        return total

    @property
    def _groups(self) -> int:
        return int_attribute(self.node, "group", 1)

    @property
    def _is_depthwise(self) -> bool:
        weight = needed(self.node, 1)
        return self._groups > 1 and weight.shape[1] == 1

    @property
    def _is_product(self) -> bool:
        """Whether each place gives one place, by itself."""
        windows = self.windows
        is_one = {*windows.kernel, *windows.strides} == {1} and not any(map(any, windows.pads))
        return is_one and self._groups == 1

    def write(self, w: Writer) -> list[Value]:
        """One node with channels last."""
        x, weight = needed(self.node, 0), w.last(needed(self.node, 1))
        bias = None if self.bias is None else w.row(self.bias, weight.shape[0])
        if self.norm is not None:
            weight, bias = _normalised(w, self.norm, weight, bias)
        operands = [w.last(x), weight, bias, None if self.residual is None else w.last(self.residual)]
        while operands[-1] is None:
            operands.pop()
        name, result = f"{self.result.name}_last", self.result.tensor_type
        of = result.with_shape(last(result.static_shape))
        attributes = {**self._geometry(), **self.activation.attributes()}
        return [w.typed("ConvChannelsLast", operands, attributes, of=of, name=name, domain=DOMAIN)]

    def _geometry(self) -> dict[str, object]:
        return {**geometry(self.windows), "group": self._groups}


def geometry(windows: Windows) -> dict[str, object]:
    """The attributes that say where windows lie."""
    befores, afters = zip(*windows.pads, strict=True)
    return {
        "kernel_shape": windows.kernel,
        "strides": windows.strides,
        "dilations": windows.dilations,
        "pads": (*befores, *afters),
    }


def windows_of(node: Node, kernel: tuple[int, ...]) -> Windows:
    """The windows of a node over its first operand.

    Raises:
        CannotTellError: padding takes elements away, or attributes do not fit.
    """
    try:
        found = Windows.over(
            needed(node, 0).shape[2:],
            kernel,
            strides=ints_attribute(node, "strides"),
            dilations=ints_attribute(node, "dilations"),
            pads=ints_attribute(node, "pads"),
            auto_pad=text_attribute(node, "auto_pad", "NOTSET"),
            ceil_mode=bool(int_attribute(node, "ceil_mode", 0)),
        )
    except ValueError as error:
        raise CannotTellError("windows") from error
    if min(map(min, found.pads)) < 0:
        raise CannotTellError("padding below zero")
    return found


def convolution(node: Node, stretch: Stretch) -> Unit:
    """A Conv with what is computed of its sums alone.

    Raises:
        CannotTellError: it stays as it is.
    """
    x, weight, result = image(operand(node, 0)), image(operand(node, 1)), image(node.result)
    kernel = ints_attribute(node, "kernel_shape") or weight.static_shape[2:]
    if result.dtype not in FLOATS or {x.dtype, weight.dtype} != {result.dtype} or kernel != weight.static_shape[2:]:
        raise CannotTellError("other operands")
    bias = operand(node, 2)
    if bias is not None and bias.type != result.with_shape(weight.static_shape[:1]):
        raise CannotTellError("another bias")
    end = node.result
    norm = _norm(node, end, stretch)
    end = end if norm is None else norm.result
    shift = reader(end, stretch, "Add") if norm is None and bias is None else None
    row = None if shift is None else numbers_beside(shift, end, result.static_shape[1:2])
    shift, bias = (None, bias) if row is None else (shift, row)
    end = end if shift is None else shift.result
    addition, residual = _addition(end, stretch)
    end = end if addition is None else addition.result
    windows, following = windows_of(node, kernel), activation_of(end, stretch)
    found = Convolution(node, windows, norm, shift, bias, addition, residual, following)
    read = [needed(node, 0)] if residual is None else [needed(node, 0), residual]
    turned = 0 if needed(node, 1).is_constant else 2 * moved(needed(node, 1)) + LAUNCH_BYTES
    return Unit(found.members, tuple(read), (found.result,), found.write, found.saved() - turned)


# -- BatchNormalization ---------------------------------------------------------------------------------------------


def is_inference(node: Node) -> bool:
    """Whether a BatchNormalization takes the statistics that it is given."""
    return node.version >= 9 and len(node.results) == 1 and not int_attribute(node, "training_mode", 0)


def _norm(node: Node, value: Value, stretch: Stretch) -> Node | None:
    """A normalisation of sums, where it and the convolution's weights are known."""
    found = reader(value, stretch, "BatchNormalization")
    weights = [value for value in node.operands[1:] if value is not None]
    if found is None or not is_inference(found) or found.operand(0) is not value:
        return None
    return found if all(one.is_constant for one in (*weights, *found.inputs[1:])) else None


def _normalised(w: Writer, norm: Node, weight: Value, bias: Value | None) -> tuple[Value, Value]:
    """The weight [features, ...] and bias whose sums are normalised; computed in float32."""
    factor, shift = scale_and_shift(w, norm)
    of, dtype = weight.shape, weight.dtype
    column = w.reshaped(factor, (of[0], *(1 for _ in of[1:])), f"{factor.name}_column")
    wide = w.cast(weight, DType.F32)
    scaled = w.typed("Mul", [wide, column], of=wide.tensor_type, name=f"{weight.name}_scaled")
    if bias is not None:
        moved_bias = w.typed(
            "Mul", [w.cast(bias, DType.F32), factor], of=factor.tensor_type, name=f"{bias.name}_scaled"
        )
        shift = w.typed("Add", [moved_bias, shift], of=factor.tensor_type, name=f"{bias.name}_shifted")
    return w.cast(scaled, dtype), w.cast(shift, dtype)


def scale_and_shift(w: Writer, norm: Node) -> tuple[Value, Value]:
    """What a normalisation multiplies each channel by, and then adds, in float32."""
    scale, bias, mean, variance = (w.cast(value, DType.F32) for value in norm.inputs[1:])
    of, name = scale.tensor_type, norm.result.name
    epsilon = w.number(float_attribute(norm, "epsilon", 1e-5), DType.F32)
    spread = w.typed("Add", [variance, epsilon], of=of, name=f"{name}_spread")
    root = w.typed("Sqrt", [spread], of=of, name=f"{name}_root")
    factor = w.typed("Div", [scale, root], of=of, name=f"{name}_factor")
    center = w.typed("Mul", [mean, factor], of=of, name=f"{name}_center")
    return factor, w.typed("Sub", [bias, center], of=of, name=f"{name}_shift")


# -- residual --------------------------------------------------------------------------------------------------


def _addition(value: Value, stretch: Stretch) -> tuple[Node | None, Value | None]:
    """An Add of an image of the same type."""
    node = reader(value, stretch, "Add")
    if node is None:
        return None, None
    (other,) = (one for one in node.inputs if one is not value)
    return (node, other) if other.type == value.type else (None, None)


def scaled_and_shifted(node: Node, x: Value, of: TensorType, w: Writer) -> Value:
    """An image with channels last, normalised; what is not folded into weights."""
    factor, shift = scale_and_shift(w, node)
    name = f"{node.result.name}_last"
    wide = TensorType(DType.F32, of.shape)
    scaled = w.typed("Mul", [w.cast(x, DType.F32), factor], of=wide, name=f"{name}_scaled")
    return w.cast(w.typed("Add", [scaled, shift], of=wide, name=f"{name}_wide"), of.dtype)
