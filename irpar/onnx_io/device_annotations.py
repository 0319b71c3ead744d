"""ONNX's own multi-device annotations (IR version 11 on), read with the checks that onnx's checker does not make.

A model has configurations: a name and a number of devices. A node says for a configuration how its operands and results
are cut: a list of devices, block by block in row-major order over the cut dims, where an entry may stand for a group of
devices that hold copies. It may also name a pipeline stage.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from irpar.ir import Node, Value
from irpar.sharding import nearest_names
from irpar.sharding.mesh import MOST_DEVICES

from .errors import OnnxError, text_of

NO_CONFIGURATION = "none"
"""What to choose where the annotations are not to be read."""


@dataclass(frozen=True)
class CutDim:
    """One dim that a tensor is sharded along.

    Attributes:
        axis: the dim; negative counts from the last.
        count: into how many blocks.
        size: the size of the dim, where the annotation tells it.
    """

    axis: int
    count: int
    size: int | None


@dataclass(frozen=True)
class Tiling:
    """How a tensor lies on devices.

    Attributes:
        dims: the dims that it is sharded along.
        groups: per block, row-major over `dims`, the devices that hold it; every device of the configuration is in one.
    """

    dims: tuple[CutDim, ...]
    groups: tuple[tuple[int, ...], ...]

    def placed(self) -> dict[int, tuple[int, ...]]:
        """Device to the block that it holds: its place along each of `dims`."""
        places = itertools.product(*(range(dim.count) for dim in self.dims))
        return {device: place for place, group in zip(places, self.groups, strict=True) for device in group}


@dataclass(frozen=True)
class Tiled:
    """What a node says of one of its operands or results; `node` is what messages call it."""

    value: Value
    tiling: Tiling
    node: str


class DeviceAnnotations:
    """Collects what the nodes of a model say for one of its configurations, while the model is read.

    Attributes:
        name: the configuration; None where the model has none, or several and none was chosen.
        names: all configurations.
        num_devices: its number of devices.
        tiled: what nodes of the main graph say of tensors.
        stages: the pipeline stages of nodes.

    Args:
        chosen: the name of the configuration to read; None where the model has one only.
    """

    def __init__(self, chosen: str | None = None) -> None:
        self.chosen = chosen
        self.name: str | None = None
        self.names: tuple[str, ...] = ()
        self.num_devices = 0
        self.tiled: list[Tiled] = []
        self.stages: list[tuple[Node, int]] = []
        self._tilings: dict[bytes, Tiling] = {}

    def start(self, model: onnx.ModelProto) -> None:
        """Read the configurations of a model.

        Raises:
            OnnxError: one is broken, or there is none of the chosen name.
        """
        sizes: dict[str, int] = {}
        for proto in model.configuration:
            name = text_of(proto.name)
            if name in sizes:
                raise OnnxError(f'two device configurations are called "{name}"', do="give each a name of its own")
            sizes[name] = _num_devices(proto, name)
        self.names = tuple(sizes)
        if self.chosen is not None and self.chosen not in sizes:
            raise OnnxError(
                f'the model has no device configuration "{self.chosen}"',
                notes=nearest_names(self.chosen, sizes),
                do=f"choose from: {', '.join([*sizes, NO_CONFIGURATION])}",
            )
        self.name = self.chosen if self.chosen is not None else self.names[0] if len(sizes) == 1 else None
        if self.name is not None:
            self.num_devices = sizes[self.name]

    def take(
        self, proto: onnx.NodeProto, values: Mapping[str, Value], node: Node | None, label: str, body: str
    ) -> None:
        """Read what a node says.

        Args:
            proto: the node.
            values: its operands and results by name.
            node: it, as it was read; None for a constant.
            label: what messages call it.
            body: the body or function that it is in; empty for the main graph.

        Raises:
            OnnxError: what it says cannot be, or cannot be said of irpar's tensors.
        """
        try:
            seen = set()
            for entry in proto.device_configurations:
                name = text_of(entry.configuration_id)
                if name not in self.names:
                    raise OnnxError(
                        f'the model has no device configuration "{name}"',
                        notes=nearest_names(name, self.names),
                        do=f"declare it in the model, or use one that is: {', '.join(self.names) or 'there is none'}",
                    )
                if name in seen:
                    raise OnnxError(f'the node speaks of configuration "{name}" twice', do="join the two entries")
                seen.add(name)
                if name == self.name:
                    self._entry(entry, values, node, label, body)
        except OnnxError as error:
            raise error.inside(label) from None

    def _entry(self, entry: Any, values: Mapping[str, Value], node: Node | None, label: str, body: str) -> None:
        if body:
            raise OnnxError(
                f"the device annotations are of a node in {body}; irpar reads those of the main graph alone",
                do="annotate the operands and results of the node that holds or calls it, or inline the functions",
            )
        if entry.HasField("pipeline_stage"):
            if entry.pipeline_stage < 0:
                raise OnnxError(f"the pipeline stage is {entry.pipeline_stage}", do="use stages of 0 or more")
            if node is not None:
                self.stages.append((node, entry.pipeline_stage))
        for spec in entry.sharding_spec:
            name = text_of(spec.tensor_name)
            value = values.get(name)
            if value is None:
                raise OnnxError(
                    f'"{name}" is neither an operand nor a result of the node',
                    notes=nearest_names(name, values),
                    do=f"choose from {', '.join(values)}",
                )
            try:
                self.tiled.append(Tiled(value, self._tiling(spec), label))
            except OnnxError as error:
                raise error.inside(f"tensor {name}") from None

    def _tiling(self, spec: Any) -> Tiling:
        """The tiling of a spec; equal ones are read once."""
        bare = onnx.ShardingSpecProto()
        bare.CopyFrom(spec)
        bare.ClearField("tensor_name")
        key = bare.SerializeToString(deterministic=True)
        if key not in self._tilings:
            self._tilings[key] = read_tiling(spec, self.num_devices)
        return self._tilings[key]


def _num_devices(proto: Any, name: str) -> int:
    where = f"device configuration {name}"
    if not name:
        raise OnnxError("a device configuration has no name", do="name it")
    number = int(proto.num_devices)
    if not 1 <= number <= MOST_DEVICES:
        raise OnnxError(
            f"it has {number:,} devices; irpar shards over 1 to {MOST_DEVICES:,}", where=where, do="correct num_devices"
        )
    names = [text_of(device) for device in proto.device]
    if names and (len(names) != number or len(set(names)) < number):
        raise OnnxError(
            f"it has {number} devices, but {len(set(names))} different names for them",
            where=where,
            do="name each device once, or none",
        )
    return number


def read_tiling(spec: Any, num_devices: int) -> Tiling:
    """Read a ShardingSpecProto of a configuration with that many devices.

    Raises:
        OnnxError: it contradicts itself, or leaves devices without a block.
    """
    dims = tuple(_cut_dim(dim) for dim in spec.sharded_dim)
    count = math.prod(dim.count for dim in dims)
    groups = _groups(spec, num_devices)
    if not groups and count in (1, num_devices):
        groups = [(device,) for device in range(num_devices)]  # Without a list: all devices, in their order.
    if count == 1:
        groups = [tuple(device for group in groups for device in group)]
    if len(groups) != count:
        listed = f"{len(groups)} device{'s or groups' if len(groups) > 1 else ' or group'}"
        raise OnnxError(
            f"the tensor is sharded into {count} blocks, but has {listed}",
            do="list one device for each block, or one group of devices (index_to_device_group_map)",
        )
    _check_cover([device for group in groups for device in group], num_devices)
    return Tiling(dims, tuple(map(tuple, groups)))


def _groups(spec: Any, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each entry of the device list."""
    table: dict[int, tuple[int, ...]] = {}
    for entry in spec.index_to_device_group_map:
        if entry.key in table or not len(entry.value):
            what = "is empty" if entry.key not in table else "is there twice"
            raise OnnxError(f"the device group {entry.key} {what}", do="give every group one list of devices")
        table[entry.key] = tuple(entry.value)
    groups = [table.get(entry, (entry,)) for entry in spec.device]
    for device in (device for group in groups for device in group):
        if not 0 <= device < num_devices:
            raise OnnxError(
                f"there is no device {device}: the configuration has {num_devices}, 0 to {num_devices - 1}",
                do="correct the device, or add the group that it stands for to index_to_device_group_map",
            )
    return groups


def _check_cover(devices: Sequence[int], num_devices: int) -> None:
    """Refuse devices that hold two blocks or none.

    Raises:
        OnnxError: naming them.
    """
    device, times = Counter(devices).most_common(1)[0]
    if times > 1:
        raise OnnxError(
            f"device {device} is listed {times} times",
            do="give every device one block; devices that hold copies of a block are a group",
        )
    missing = sorted(set(range(num_devices)) - set(devices))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise OnnxError(
            f"{len(missing)} of the {num_devices} devices hold no block of it: {shown}",
            do="irpar's tensors lie on all devices: add these to groups, as holders of copies, "
            "or declare a configuration without them",
        )


def _cut_dim(proto: Any) -> CutDim:
    """A ShardedDimProto.

    Several shardings of one dim see it as reshaped to several. That is blocks in a row only where each but the last one
    that cuts is sharded to single rows.
    """
    axis = int(proto.axis)
    parts = [
        (int(part.dim_value) if part.HasField("dim_value") else None, int(part.num_shards))
        for part in proto.simple_sharding
    ]
    where = f"axis {axis}"
    if not proto.HasField("axis") or not parts:
        raise OnnxError("a sharded dim has no axis, or no sharding", do="write axis and simple_sharding")
    if any(count < 1 or (size is not None and size < 0) for size, count in parts):
        raise OnnxError(
            f"a dim is sharded into {min(count for _, count in parts)} shards", where=where, do="use 1 shard or more"
        )
    if len(parts) == 1:
        return CutDim(axis, parts[0][1], parts[0][0])
    sizes = [size for size, _ in parts if size is not None]
    is_plain = len(sizes) == len(parts) and all(
        size and size % count == 0 for size, (_, count) in zip(sizes, parts, strict=True)
    )
    rest = [count for _, count in itertools.dropwhile(lambda part: part[0] == part[1], parts)][1:]
    if not is_plain or any(count > 1 for count in rest):
        raise OnnxError(
            "the shardings of the dim, seen as several dims, make blocks that are not in a row",
            where=f"{where}: {', '.join(f'{count} shards of {size}' for size, count in parts)}",
            do="reshape the tensor, and shard the dims of the result",
        )
    return CutDim(axis, math.prod(count for _, count in parts), math.prod(sizes))
