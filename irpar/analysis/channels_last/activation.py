"""What follows on the sums of a convolution, or on what is standardised, if nothing else reads these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from irpar.analysis.kernel_fusion import Stretch
from irpar.ir import Node, Value
from irpar.ops.facts import float_attribute, operand, replicated_data


@dataclass(frozen=True)
class Activation:
    """What follows on sums.

    Attributes:
        nodes: that compute it, in order.
        name: as ConvChannelsLast has it.
        bounds: of Clip.
    """

    nodes: tuple[Node, ...] = ()
    name: str = ""
    bounds: tuple[tuple[str, float], ...] = ()

    def attributes(self) -> dict[str, object]:
        """Those of ConvChannelsLast."""
        return {"activation": self.name, **dict(self.bounds)} if self.name else {}


def _readers(value: Value, stretch: Stretch) -> tuple[Node, ...]:
    """The nodes that read a value, if all of them are in the stretch and nothing else reads it; else none."""
    alike = value.node
    is_inside = value not in stretch.kept and all(
        user in stretch.places and user not in stretch.taken and alike is not None and _is_alike(user, alike)
        for user in value.users
    )
    return value.users if is_inside else ()


def _is_alike(node: Node, other: Node) -> bool:
    return (node.phase, node.stage, node.place) == (other.phase, other.stage, other.place)


def reader(value: Value, stretch: Stretch, *names: str) -> Node | None:
    """The only node that reads a value, once, if it is one of ONNX's operators of these names."""
    readers = _readers(value, stretch)
    is_one = len(readers) == 1 and value.use_count == 1 and not readers[0].domain and readers[0].op_type in names
    return readers[0] if is_one else None


def activation_of(value: Value, stretch: Stretch) -> Activation:
    """What is computed of sums, if nothing else reads them."""
    gated = _gated(value, stretch)
    if gated is not None:
        return gated
    node = reader(value, stretch, "Relu", "Sigmoid", "HardSwish", "Clip", "Swish")
    if node is None or node.operand(0) is not value:
        return Activation()
    if node.op_type == "Swish":
        return Activation((node,), "Silu") if float_attribute(node, "alpha", 1.0) == 1 else Activation()
    if node.op_type != "Clip":
        return Activation((node,), node.op_type)
    bounds = _bounds(node)
    return Activation() if bounds is None else Activation((node,), "Clip", tuple(bounds.items()))


_GATES: Mapping[str, str] = {"Sigmoid": "Silu", "HardSigmoid": "HardSwish"}


def _gated(value: Value, stretch: Stretch) -> Activation | None:
    """A product of sums and a gate that is made of them."""
    readers = _readers(value, stretch)
    if len(readers) != 2 or value.use_count != 2:
        return None
    gate, product = sorted(readers, key=stretch.places.__getitem__)
    if gate.domain or gate.op_type not in _GATES or reader(gate.result, stretch, "Mul") is not product:
        return None
    if gate.op_type == "HardSigmoid":
        given = [float_attribute(gate, "alpha", 0.2), float_attribute(gate, "beta", 0.5)]
        if not np.allclose(given, [1 / 6, 0.5], rtol=1e-6):
            return None
    return Activation((gate, product), _GATES[gate.op_type])


def _bounds(node: Node) -> dict[str, float] | None:
    """The bounds of a Clip, where they are numbers."""
    if node.version < 11:
        return {name: float_attribute(node, name, 0.0) for name in ("min", "max") if name in node.attributes}
    found: dict[str, float] = {}
    for index, name in enumerate(("min", "max"), start=1):
        value = operand(node, index)
        data = None if value is None else replicated_data(value)
        if data is not None:
            found[name] = float(data.numpy().reshape(()))
        elif value is not None:
            return None
    return found


def numbers_beside(node: Node, value: Value, dims: Sequence[int]) -> Value | None:
    """The other operand of a node, if it is a number for each channel, which dims behind the batch are."""
    (other,) = (one for one in node.inputs if one is not value)
    rank = len(value.shape)
    if not other.is_static or other.dtype is not value.dtype or len(other.shape) > rank:
        return None
    aligned = (*(1 for _ in range(rank - len(other.shape))), *other.shape)
    return other if aligned == (1, *dims, *(1 for _ in range(rank - 1 - len(dims)))) else None
