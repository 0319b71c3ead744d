"""Shardings written as ONNX's own multi-device annotations."""

from collections.abc import Mapping
from typing import Any

import onnx

from irpar.ir import Graph, Node, Value, tensor_type
from irpar.sharding import Mesh, Sharding

from .errors import OnnxError

CONFIGURATION = "irpar"
"""What the written configuration is called."""
ANNOTATIONS_IR = 11
"""The first IR version with multi-device annotations."""
_MOST_ENTRIES = 50_000_000
"""Of device lists, all together: 8 bytes each in memory."""


def write_devices(
    model: onnx.ModelProto, graph: Graph, mesh: Mesh, shardings: Mapping[Value, Sharding]
) -> dict[str, str]:
    """Add one configuration to a model, and to its nodes how their operands and results lie on the devices.

    A result is annotated where it is made; inputs and constants, which no node makes, wherever a node reads them.

    Args:
        model: what `to_proto` made of the graph.
        graph: the main graph.
        mesh: the mesh; its device ids must be 0, 1, 2 ... in any order.
        shardings: of values of the graph.

    Returns:
        Name of each sharded value that has no annotation to the reason.

    Raises:
        OnnxError: the annotations would be too large, or the device ids have gaps.
    """
    if sorted(mesh.device(rank) for rank in range(mesh.size)) != list(range(mesh.size)):
        raise OnnxError(
            f"the device ids of the mesh {mesh} are not 0 to {mesh.size - 1}, as ONNX counts devices",
            do="number the devices without gaps",
        )
    model.configuration.add(name=CONFIGURATION, num_devices=mesh.size)
    model.ir_version = max(model.ir_version, ANNOTATIONS_IR)
    writer = _Writer(mesh, shardings)
    for node, proto in zip(graph, model.graph.node, strict=False):  # Copies of results follow the nodes.
        writer.node(node, proto)
    return {value.name: writer.why_not(value) for value in shardings if value not in writer.written}


class _Writer:
    """Writes specs; those that are equal but for the tensor are made once."""

    def __init__(self, mesh: Mesh, shardings: Mapping[Value, Sharding]) -> None:
        self.mesh = mesh
        self.shardings = shardings
        self.written: set[Value] = set()
        self._devices: dict[Sharding, onnx.ShardingSpecProto] = {}
        self._entries = 0

    def node(self, node: Node, proto: onnx.NodeProto) -> None:
        told: dict[str, Value] = {}
        for value, name in zip(node.results, proto.output, strict=False):
            told[name] = value
        for operand, name in zip(node.operands, proto.input, strict=True):
            if operand is not None and operand.node is None:
                told.setdefault(name, operand)
        told = {name: value for name, value in told.items() if name and not self.why_not(value)}
        if not told and node.stage is None:
            return
        entry = proto.device_configurations.add(configuration_id=CONFIGURATION)
        if node.stage is not None:
            entry.pipeline_stage = node.stage
        for name, value in told.items():
            self._spec(value, self.shardings[value], name, entry.sharding_spec.add())
            self.written.add(value)

    def why_not(self, value: Value) -> str:
        """Why a value has no annotation; empty where nothing speaks against one."""
        sharding = self.shardings.get(value)
        if sharding is None:
            return "it has no sharding"
        if sharding.partial:
            return "ONNX has no word for partial values"
        if not sharding.is_settled:
            return "ONNX has no word for open dims and priorities"
        if value.node is None and not any(user.graph is value.graph and not user.is_return for user in value.users):
            return "no node of the main graph reads it"
        return ""

    def _spec(self, value: Value, sharding: Sharding, name: str, spec: Any) -> None:
        made = self._devices.get(sharding)
        if made is None:
            made = self._devices[sharding] = self._placed(sharding)
        self._entries += self.mesh.size
        if self._entries > _MOST_ENTRIES:
            raise OnnxError(
                f"the annotations name devices more than {_MOST_ENTRIES:,} times",
                do="annotate a model of fewer nodes, or over fewer devices: ONNX lists all devices for each tensor",
            )
        spec.CopyFrom(made)
        spec.tensor_name = name
        type_ = tensor_type(value.type)
        shape = None if type_ is None else type_.shape
        for dim in spec.sharded_dim:
            size = None if shape is None else shape[dim.axis]
            if isinstance(size, int):
                dim.simple_sharding[0].dim_value = size
            elif size is not None:
                dim.simple_sharding[0].dim_param = str(size)

    def _placed(self, sharding: Sharding) -> onnx.ShardingSpecProto:
        """The spec but for name and sizes."""
        mesh = self.mesh
        cut = [dim for dim, axes in enumerate(sharding.axes) if mesh.group_size(axes) > 1]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(mesh.all_coords()):
            place = tuple(mesh.position(coords, sharding.axes[dim]) for dim in cut)
            groups.setdefault(place, []).append(mesh.device(rank))
        spec = onnx.ShardingSpecProto()
        for dim in cut:
            spec.sharded_dim.add(axis=dim).simple_sharding.add(num_shards=sharding.dim_parts(dim))
        for number, place in enumerate(sorted(groups), start=1):
            devices = groups[place]
            if len(devices) == 1:
                spec.device.append(devices[0])
            else:
                spec.device.append(-number)
                spec.index_to_device_group_map.add(key=-number, value=devices)
        return spec
