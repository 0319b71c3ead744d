"""How long one device takes for a node: as long as its arithmetic or its memory traffic, whichever is longer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import DType, Graph, Node, Value, tensor_type
from irpar.ops import traits
from irpar.ops.coords import COORDS
from irpar.ops.memory_copies import node_place

from .node import Work, whole_work

RATES = ("f64", "f32", "tf32", "bf16", "f16", "f8", "i8")
"""What a device may state a rate for; `tf32` is used for `f32` where the device says so."""
_RATE_OF_DTYPE = {"u8": "i8", "i4": "i8", "u4": "i8", "c64": "f32", "c128": "f64"}
_INSTEAD = {"f8": "f16", "bf16": "f16", "f16": "f32", "i8": "f32", "f64": "f32", "tf32": "f32"}
"""Where a device states no rate for a type, the one it is computed in."""


@dataclass(frozen=True)
class Device:
    """One device of a mesh.

    Attributes:
        flops: rate in FLOP/s by type: f32 (which must be there), f64, tf32, bf16, f16, f8, i8.
        memory_bandwidth: bytes/s, reading and writing together.
        memory: its capacity in bytes; None where it is not known.
        efficiency: the part of `flops` that is reached, above 0 up to 1.
        launch: seconds that starting a node takes.
        uses_tf32: f32 is computed as tf32.
    """

    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: float | None = None
    efficiency: float = 1.0
    launch: float = 0.0
    uses_tf32: bool = False

    def rate(self, dtype: str) -> float:
        """FLOP/s that are reached with a dtype such as `f32` or `f8e4m3fn`; without a rate as a wider float."""
        name = "f8" if dtype.startswith(("f4e", "f6e", "f8e")) else _RATE_OF_DTYPE.get(dtype, dtype)
        if name == "f32" and self.uses_tf32:
            name = "tf32"
        while name not in self.flops:
            name = _INSTEAD.get(name, "f32")
        return self.flops[name] * self.efficiency

    def seconds(self, flops: float, moved_bytes: float, dtype: str = "f32") -> float:
        """Seconds for a node: the longer of arithmetic and memory traffic, and its launch."""
        return max(flops / self.rate(dtype), moved_bytes / self.memory_bandwidth) + self.launch


def node_seconds(node: Node, device: Device, work: Work | None = None, host: Device | None = None) -> float:
    """Seconds of one device's share of a node, by default all of it; communication, copies and views take none.

    An If counts its slower branch, a Loop or Scan its trips, as in `irpar.analysis.cost.node`; what has no static type
    counts its launch alone. Nodes in bodies that are on the host take what `host` takes.
    """
    known = traits(node)
    if known.view or not known.is_compute:
        return 0.0
    nested = [graph_seconds(graph, device, host) for graph in node.nested_graphs()]
    if nested:
        return assumed_trips(node) * max(nested) + device.launch
    work = work or whole_work(node)
    return device.seconds(work.flops, _moved_bytes(node, work), _dtype(node))


def graph_seconds(graph: Graph, device: Device, host: Device | None = None) -> float:
    """Seconds of all nodes of one device's program, one after the other.

    Args:
        graph: it.
        device: what computes.
        host: what computes the nodes that are on the host; None: the device, too.

    What only says which blocks the device has is left out: numbers that are the same in every step.
    """
    places = {value for value in graph.inputs if value.name == COORDS}
    seconds = 0.0
    for node in graph:
        if tells_a_place(node, places):
            places.update(node.results)
        else:
            where = host if host is not None and node_place(node) == "host" else device
            seconds += node_seconds(node, where, host=host)
    return seconds


def tells_a_place(node: Node, places: Collection[Value]) -> bool:
    """Whether a node computes a number or a shape of where the device is alone."""
    inputs = [value for value in node.inputs if not value.is_constant]
    types = [tensor_type(value.type) for value in node.results]
    are_indices = all(type_ is not None and type_.dtype is DType.I64 and (type_.rank or 0) <= 1 for type_ in types)
    return bool(inputs) and are_indices and all(value in places for value in inputs)


def _moved_bytes(node: Node, work: Work) -> int:
    """Bytes read and written: of what is looked up, or moved in part, only what is taken."""
    known = traits(node)
    if known.reads_sizes:
        return 0
    given = sum(work.results)
    if known.looks_up or (known.moves_elements and given < work.operands[0]):
        return 2 * given + sum(work.operands[1:])
    return given + sum(work.operands)


def _dtype(node: Node) -> str:
    """What a node computes in: the type of its first tensor."""
    for value in (*node.inputs, *node.results):
        type_ = tensor_type(value.type)
        if type_ is not None:
            return type_.dtype.text
    return "f32"
