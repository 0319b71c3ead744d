"""Normalisations of groups of channels, as an operator or as exporters write it, with an activation."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from irpar.analysis.kernel_fusion import Stretch
from irpar.ir import DOMAIN, Node, Value
from irpar.ops.facts import CannotTellError, float_attribute, int_attribute, needed, replicated_data

from .activation import Activation, activation_of, numbers_beside, reader
from .convolution import FLOATS
from .layout import last
from .units import Unit, image
from .writer import Writer


@dataclass(frozen=True)
class GroupNorm:
    """Groups of the channels of an image, standardised.

    Attributes:
        nodes: that do so, in order, without the activation, and what joins its dims again behind that.
        x: the image.
        groups, epsilon: of the norm.
        scale, bias: numbers of the channels, of any shape, or None.
        activation: what follows.
        joining: a Reshape of channels that were two dims, groups and their channels.
    """

    nodes: tuple[Node, ...]
    x: Value
    groups: int
    epsilon: float
    scale: Value | None
    bias: Value | None
    activation: Activation
    joining: Node | None = None

    @property
    def _members(self) -> tuple[Node, ...]:
        return (*self.nodes, *self.activation.nodes, *([] if self.joining is None else [self.joining]))

    def unit(self) -> Unit:
        """It, with what follows."""
        return Unit(self._members, (self.x,), (self._members[-1].result,), self._write)

    def _write(self, w: Writer) -> list[Value]:
        (*_, channels) = shape = last(self.x.shape)
        operands: list[Value | None] = [w.last(self.x)]
        operands += [None if value is None else w.row(value, channels) for value in (self.scale, self.bias)]
        while operands[-1] is None:
            operands.pop()
        numbers: Mapping[str, object] = {"num_groups": self.groups, "epsilon": self.epsilon}
        attributes = {**numbers, **self.activation.attributes()}
        of, name = self.x.tensor_type.with_shape(shape), f"{self._members[-1].result.name}_last"
        return [w.typed("GroupNormChannelsLast", operands, attributes, of=of, name=name, domain=DOMAIN)]


def group_norm(node: Node, stretch: Stretch) -> Unit:
    """GroupNormalization with numbers of channels, or InstanceNormalization: each channel is a group.

    Raises:
        CannotTellError: it stays as it is.
    """
    x, scale, bias = needed(node, 0), needed(node, 1), needed(node, 2)
    row = image(x).with_shape(x.shape[1:2])
    is_narrow = x.dtype in FLOATS and int_attribute(node, "stash_type", 1) == 1
    if not is_narrow or scale.type != row or bias.type != row:
        raise CannotTellError("other numbers")
    groups = x.shape[1] if node.op_type == "InstanceNormalization" else int_attribute(node, "num_groups")
    numbers = groups, float_attribute(node, "epsilon", 1e-5), scale, bias
    return GroupNorm((node,), x, *numbers, activation_of(node.result, stretch)).unit()


def grouped_norm(node: Node, stretch: Stretch) -> Unit:
    """InstanceNormalization of an image of groups that a Reshape makes, turned back, scaled and shifted.

    Raises:
        CannotTellError: it is another Reshape.
    """
    x = needed(node, 0)
    batch, channels, *places = image(x).static_shape
    shape = node.result.shape if node.result.is_static else ()
    norm = reader(node.result, stretch, "InstanceNormalization")
    if norm is None or x.dtype not in FLOATS or len(shape) < 3 or shape[0] != batch or channels % shape[1]:
        raise CannotTellError("no groups")
    if prod(shape[1:]) != channels * prod(places) or not _are(norm.inputs[1], 1) or not _are(norm.inputs[2], 0):
        raise CannotTellError("other groups")
    back = reader(norm.result, stretch, "Reshape")
    whole, apart = x.shape, (batch, shape[1], channels // shape[1], *places)
    if back is None or not back.result.is_static or back.result.shape not in (whole, apart):
        raise CannotTellError("another shape")
    dims = back.result.shape[1 : 2 if back.result.shape == whole else 3]
    nodes, found = [node, norm, back], {}
    for name in ("Mul", "Add"):
        joined = reader(nodes[-1].result, stretch, name)
        other = None if joined is None else numbers_beside(joined, nodes[-1].result, dims)
        if joined is not None and other is not None:
            nodes.append(joined)
            found[name] = other
    following = activation_of(nodes[-1].result, stretch)
    end = (*nodes, *following.nodes)[-1].result
    joining = None if back.result.shape == whole else reader(end, stretch, "Reshape")
    if end.shape != whole and (joining is None or joining.result.type != x.type):
        raise CannotTellError("another shape")
    numbers = shape[1], float_attribute(norm, "epsilon", 1e-5), found.get("Mul"), found.get("Add")
    return GroupNorm(tuple(nodes), x, *numbers, following, joining).unit()


def _are(value: Value, number: float) -> bool:
    """Whether all elements of a constant are a number."""
    data = replicated_data(value)
    return data is not None and bool((data.numpy().astype(np.float32) == number).all())
