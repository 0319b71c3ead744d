"""What a local program knows of its place: values computed from the graph input `irpar.coords`."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import ArrayTensor, Builder, DType, Graph, TensorType, Value
from irpar.sharding import Axis, Mesh, Sharding, ceil_div

COORDS = "irpar.coords"
"""Name of the int64 graph input with the rank's mesh coordinates."""

_SCALAR = TensorType(DType.I64, ())


def coords_input(graph: Graph, mesh: Mesh) -> Value:
    """The input `irpar.coords` (i64, one element a mesh axis) of the outermost graph around `graph`; added if missing.

    Raises:
        ValueError: another value has that name.
    """
    root = root_of(graph)
    found = root.names.table.get(COORDS)
    if found is None:
        return root.add_input(COORDS, TensorType(DType.I64, (len(mesh.axes),)))
    if not found.is_input or found.type != TensorType(DType.I64, (len(mesh.axes),)):
        raise ValueError(f"%{COORDS} is {found.type}, not the coordinates on mesh {mesh}")
    return found


def root_of(graph: Graph) -> Graph:
    """The outermost graph around a nested one."""
    while graph.parent is not None and graph.parent.graph is not None:
        graph = graph.parent.graph
    return graph


def block_index(builder: Builder, mesh: Mesh, axes: Sequence[Axis]) -> Value:
    """The rank's row-major position along axes and sub-axes, major first: an int64 scalar.

    Computed once for each graph, at its start; asked again, the same value comes back.
    """
    root = root_of(builder.graph)
    name = _name("index", mesh, axes)
    found = root.names.table.get(name)
    if found is not None:
        return found
    coords = coords_input(root, mesh)
    # Without `like`: the value belongs to no one node of the source.
    start = Builder(root, builder.opsets, before=root.first)
    position: Value | None = None
    for axis in axes:
        coordinate = _coordinate(start, coords, mesh, axis)
        if position is not None:
            major = start.op("Mul", [position, _number(start, mesh.axis_size(axis))], type=_SCALAR)
            coordinate = start.op("Add", [major, coordinate], type=_SCALAR)
        position = coordinate
    if position is None:
        position = start.op("Identity", [_number(start, 0)], type=_SCALAR)
    position.rename(name)
    return position


def _coordinate(builder: Builder, coords: Value, mesh: Mesh, axis: Axis) -> Value:
    """The coordinate along an axis or sub-axis: `coords[axis] / minor % size`."""
    place = mesh.axis_names.index(axis.name)
    found = builder.op("Gather", [coords, _number(builder, place)], {"axis": 0}, type=_SCALAR)
    if axis.size is None:
        return found
    minor = mesh.axes[axis.name] // (axis.pre * axis.size)
    if minor > 1:
        found = builder.op("Div", [found, _number(builder, minor)], type=_SCALAR)
    if axis.pre > 1:
        found = builder.op("Mod", [found, _number(builder, axis.size)], type=_SCALAR)
    return found


def block_start(builder: Builder, mesh: Mesh, axes: Sequence[Axis], block: int) -> Value:
    """Where the rank's block starts in a dim cut over axes in blocks of `block` elements: an int64 scalar.

    The last blocks of a dim that does not divide may start beyond its end.
    """
    root = root_of(builder.graph)
    name = f"{_name('start', mesh, axes)}.{block}"
    found = root.names.table.get(name)
    if found is not None:
        return found
    index = block_index(builder, mesh, axes)
    assert index.node is not None
    after = Builder(root, builder.opsets, before=index.node.next)
    return after.op("Mul", [index, _number(after, block)], type=_SCALAR, name=name)


def start_of_block(lies: Sharding | None, dim: int, size: int, builder: Builder) -> Value | None:
    """Where the rank's block starts in a dim of `size` elements: an int64 scalar; None where that is not sharded."""
    if lies is None or lies.dim_parts(dim) == 1:
        return None
    return block_start(builder, lies.mesh, lies.axes[dim], ceil_div(size, lies.dim_parts(dim)))


def _name(what: str, mesh: Mesh, axes: Sequence[Axis]) -> str:
    # A "-" cannot be in the name of an axis, so that sub-axes have names of their own.
    parts = [axis.name if axis.size is None else f"{axis.name}-{axis.pre}-{axis.size}" for axis in axes]
    return ".".join(("irpar", what, mesh.name, *parts))


def _number(builder: Builder, number: int) -> Value:
    return builder.graph.add_constant(ArrayTensor(np.asarray(number, np.int64)), f"irpar.number_{number}")
