"""ONNX's own multi-device annotations as annotations of a module, and a whole model written with them."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from irpar.analysis.redistribution.held import is_met
from irpar.ir import Annotation, Module, Shape, Value, clone_module, tensor_type
from irpar.ir.annotate import apply_to
from irpar.onnx_io.device_annotations import DeviceAnnotations, Tiled, Tiling
from irpar.onnx_io.device_writer import write_devices
from irpar.onnx_io.errors import OnnxError
from irpar.onnx_io.save import save
from irpar.pass_manager import Pass
from irpar.pass_manager.default_pipeline import COMPLETE, COMPLETION, MOVES, NORMALISE
from irpar.pass_manager.instrumentation import Instrumentation
from irpar.sharding import Axis, Mesh, Sharding, option
from irpar.sharding.tiles import axes_of_blocks, blocks_over

from .devices import SpellingError, spec_of
from .named import infer_undeclared_types, rank_of

_MOST_ORDERS = 8
"""Orders of devices that are tried for a mesh."""
_log = logging.getLogger(__name__)

Placed = dict[int, tuple[int, ...]]
"""Device to the place of its block along every dim of a tensor."""


# -- reading ------------------------------------------------------------------------------------------------------


def apply(module: Module, read: DeviceAnnotations, mesh: Mesh | None = None) -> int:
    """Annotate a module as its ONNX file does.

    Args:
        module: the module, as it was loaded.
        read: what its nodes say.
        mesh: the mesh to say it with. By default that of the module; where there is none, one whose axes d0, d1 ... are
            the cuts that the annotations make.

    Returns:
        How many tensors are annotated.

    Raises:
        IrparError: a tensor lies in two ways, its dims do not fit, or no mesh has axes for all of its annotations.
    """
    if read.name is None:
        if len(read.names) > 1:
            _log.warning(
                "the model has the device configurations %s; choose one with %s to read its annotations",
                ", ".join(read.names),
                option("configuration", "NAME"),
            )
        return 0
    _apply_stages(read)
    tensors = _tensors(module, read)
    if not tensors:
        return 0
    if mesh is not None:
        if not annotated_values(module):
            module.meshes.clear()  # A file that irpar wrote names one; this is another view of the same devices.
        module.set_mesh(mesh)
    if not module.meshes:
        module.set_mesh(_mesh_of([tensor.tiling for tensor in tensors], read.num_devices))
    if module.mesh.size != read.num_devices:
        raise SpellingError(
            f"the mesh {module.mesh} has {module.mesh.size} devices, configuration {read.name} has {read.num_devices}",
            do=f"give a mesh of {read.num_devices} devices, or do not read the annotations: "
            + option("configuration", "none"),
        )
    known: dict[int, list[tuple[Axis, ...]] | None] = {}  # Few tilings, many tensors; the reader makes equal ones once.
    for tensor in tensors:
        if id(tensor.tiling) not in known:
            known[id(tensor.tiling)] = _axes(module.mesh, tensor.tiling)
        _annotate(module, tensor, known[id(tensor.tiling)], read.name)
    return len(tensors)


def _apply_stages(read: DeviceAnnotations) -> None:
    for node, stage in read.stages:
        node.stage = stage
    for node, stage in read.stages:
        for operand in node.operands:
            made = None if operand is None else operand.node
            if operand is not None and made is not None and made.stage is not None and made.stage > stage:
                raise OnnxError(
                    f"the node is of pipeline stage {stage}, but reads %{operand.name} of stage {made.stage}",
                    where=f"node {node.label}",
                    notes=(f"which is made by node {made.label}",),
                    do="number the stages so that none reads what a later one makes",
                )
    if read.stages:
        _log.warning("the pipeline stages of the model are kept on its nodes; no pass shards by them yet")


def _tensors(module: Module, read: DeviceAnnotations) -> list[Tiled]:
    """Each annotated tensor once.

    Raises:
        OnnxError: two nodes say different things of one.
    """
    if any(rank_of(tiled.value) is None for tiled in read.tiled):
        infer_undeclared_types(module)
    found: dict[Value, tuple[Tiled, Placed]] = {}
    for tiled in read.tiled:
        known, lies = found.setdefault(tiled.value, (tiled, {}))
        if not lies:
            lies.update(_by_dims(tiled))
        elif known.tiling != tiled.tiling and lies != _by_dims(tiled):
            raise OnnxError(
                f"%{tiled.value.name} lies in two ways: a tensor of irpar has one sharding, "
                "and is brought to where an operator needs it by what irpar inserts",
                where=tiled.node,
                notes=(f"the other: {known.node}",),
                do="keep one of the two annotations, or put an Identity between the two nodes",
            )
    return [tiled for tiled, _ in found.values()]


def _dims(tiled: Tiled) -> list[int]:
    """The cut dims of a tensor, counted from the first.

    Raises:
        OnnxError: there is no such dim, one comes twice, or one has another size.
    """
    value, where = tiled.value, f"{tiled.node}, tensor {tiled.value.name}"
    type_ = tensor_type(value.type)
    shape = None if type_ is None else type_.shape
    if shape is None:
        raise OnnxError(
            f"it is {value.type}: only tensors of known rank lie on devices", where=where, do="leave it out"
        )
    dims = []
    for cut in tiled.tiling.dims:
        if not -len(shape) <= cut.axis < len(shape):
            raise OnnxError(
                f"axis {cut.axis} of a tensor of {len(shape)} dim(s): {type_}",
                where=where,
                do=f"use axes from {-len(shape)} to {len(shape) - 1}" if shape else "do not shard scalars",
            )
        dim = cut.axis % len(shape)
        size = shape[dim]
        if dim in dims:
            raise OnnxError(f"dim {dim} is sharded twice", where=where, do="join the two entries of sharded_dim")
        if cut.size is not None and isinstance(size, int) and cut.size != size:
            raise OnnxError(
                f"the annotation has dim {dim} of size {cut.size}, it is {size}", where=where, do="correct dim_value"
            )
        dims.append(dim)
    return dims


def _by_dims(tiled: Tiled) -> Placed:
    """Device to its place along every dim of the tensor; equal where tilings are."""
    dims = _dims(tiled)
    rank = rank_of(tiled.value) or 0
    lies = {}
    for device, place in tiled.tiling.placed().items():
        whole = [0] * rank
        for dim, number in zip(dims, place, strict=True):
            whole[dim] = number
        lies[device] = tuple(whole)
    return lies


def _axes(mesh: Mesh, tiling: Tiling) -> list[tuple[Axis, ...]] | None:
    blocks = blocks_over(mesh, tiling.placed())
    return None if blocks is None else axes_of_blocks(mesh, blocks, [dim.count for dim in tiling.dims])


def _annotate(module: Module, tiled: Tiled, axes: list[tuple[Axis, ...]] | None, configuration: str) -> None:
    mesh, value = module.mesh, tiled.value
    if axes is None:
        raise _no_axes(f"the mesh {mesh}", tiled.tiling, f"{tiled.node}, tensor {value.name}")
    of_dim = dict(zip(_dims(tiled), axes, strict=True))
    spec = spec_of([of_dim.get(dim, ()) for dim in range(rank_of(value) or 0)])
    where = f"{tiled.node} (device configuration {configuration})"
    apply_to(module, Annotation(value.source_name, tuple(spec), where), mesh, [value])


def _no_axes(mesh: str, tiling: Tiling, where: str) -> SpellingError:
    shown = ", ".join("{" + ", ".join(map(str, group[:8])) + "}" for group in tiling.groups[:8])
    return SpellingError(
        f"these groups of devices are no axes, nor parts of axes, of {mesh}",
        where=where,
        notes=(f"devices, block by block: {shown}{' ...' if len(tiling.groups) > 8 else ''}",),
        do="shard every tensor along the axes of one grid of devices",
    )


def _mesh_of(tilings: Sequence[Tiling], num_devices: int) -> Mesh:
    """A mesh with axes for all tilings: the devices in their own order, or in that of one of the tilings.

    Raises:
        SpellingError: there is none.
    """
    distinct = sorted(dict.fromkeys(tilings), key=lambda tiling: -len(tiling.groups))
    orders = [tuple(range(num_devices)), *(tuple(d for group in tiling.groups for d in group) for tiling in distinct)]
    first: Tiling | None = None
    for order in list(dict.fromkeys(orders))[: _MOST_ORDERS + 1]:
        line = Mesh({"d0": num_devices}, devices=order)
        found = [(tiling, _axes(line, tiling)) for tiling in distinct]
        failed = next((tiling for tiling, axes in found if axes is None), None)
        if failed is None:
            return _grid(line, [axis for _, axes in found for of_dim in axes or () for axis in of_dim])
        first = first or failed
    assert first is not None
    raise _no_axes(f"one mesh of {num_devices} devices that all tensors lie on", first, "the model")


def _grid(line: Mesh, axes: Sequence[Axis]) -> Mesh:
    """A mesh whose axes are the parts of a single axis; the single axis where the parts do not nest."""
    bounds = {1, line.size}
    for axis in axes:
        bounds |= {axis.pre, axis.pre * line.axis_size(axis)}
    pairs = list(itertools.pairwise(sorted(bounds)))
    if not pairs or any(high % low for low, high in pairs):
        return line
    return Mesh({f"d{place}": high // low for place, (low, high) in enumerate(pairs)}, devices=line.devices)


# -- writing ------------------------------------------------------------------------------------------------------


class Decided(NamedTuple):
    """What completion decided for a value, and what the value was then."""

    sharding: Sharding
    shape: Shape | None
    is_constant: bool


@dataclass
class DecidedShardings:
    """What `complete-sharding` decided, as far as anybody reads it so; `observe` is told of each pass.

    Attributes:
        decided: by name of the value in the source model; None where two values stand for it that do not lie alike, or
            where what gives it and what reads it wanted it otherwise: annotated, it would be brought there.
    """

    decided: dict[str, Decided | None] = field(default_factory=dict)

    def observe(self, pass_: Pass, module: Module) -> None:
        """For `Instrumentation.observe`."""
        if self.decided and not module.is_local:
            self._leave_out(module)
        if pass_.name != COMPLETION:
            return
        for value in module.graph.values():
            type_ = tensor_type(value.type)
            if value.sharding is None or value.source is None or type_ is None:
                continue
            # Sections of a weight that are sharded alike are a cut of the weight.
            shape = type_.shape if value.data is None else value.data.base.shape
            decided = Decided(value.sharding, shape, value.is_constant)
            if self.decided.setdefault(value.source, decided) != decided:
                self.decided[value.source] = None

    def _leave_out(self, module: Module) -> None:
        """Leave out what a reader now meets otherwise than it was decided."""
        for value in module.graph.values():
            decided = None if value.source is None or value.is_constant else self.decided.get(value.source)
            if decided is not None and not is_met(value, decided.sharding):
                self.decided[value.source_name] = None


def annotated_values(module: Module) -> dict[Value, Sharding]:
    """The shardings that values of a module have."""
    return {value: value.sharding for value in module.graph.values() if value.sharding is not None}


def decided_values(module: Module, known: DecidedShardings) -> dict[Value, Sharding]:
    """What was decided for the values of a module that a partition was made of.

    What a pass computed before is left out: an annotation would keep it from being computed again.
    """
    infer_undeclared_types(module)
    found = {}
    for value in module.graph.values():
        decided = known.decided.get(value.source_name)
        type_ = tensor_type(value.type)
        if decided is None or type_ is None:
            continue
        if (type_.shape, value.is_constant) == (decided.shape, decided.is_constant):
            found[value] = decided.sharding
    return found


def complete(module: Module, mesh: Mesh | None = None) -> Module:
    """A copy of a module in which completion has decided how all values are sharded.

    Args:
        module: annotated; its sizes bound.
        mesh: the mesh; may be left out where the module has one.

    Raises:
        IrparError: as from `irpar.partition`.
    """
    from irpar.pass_manager import PassManager

    made, work = clone_module(module), clone_module(module)
    if mesh is not None:
        for one in (made, work):
            infer_undeclared_types(one)
            one.set_mesh(mesh)
    known = DecidedShardings()
    PassManager.parse(f"{NORMALISE},{COMPLETE},{MOVES}", Instrumentation(observe=known.observe)).run(work)
    for value, sharding in decided_values(made, known).items():
        value.sharding = sharding
    return made


def save_annotated(
    module: Module, path: str | Path, shardings: Mapping[Value, Sharding] | None = None, mesh: Mesh | None = None
) -> dict[str, str]:
    """Write a whole model with ONNX's multi-device annotations; its weights go to `<path>.data`.

    The names of the mesh axes go with it, as metadata, so that irpar reads back the same shardings.

    Args:
        module: the module, in global view.
        path: the .onnx file.
        shardings: of its values; by default those that they have.
        mesh: what the shardings are over; by default the mesh of the module.

    Returns:
        Name of each sharded value that ONNX cannot say the sharding of to the reason.

    Raises:
        IrparError: there is no mesh, or the model cannot be written.
    """
    given = annotated_values(module) if shardings is None else shardings
    copy = clone_module(module)
    of_copy = dict(zip(module.graph.values(), copy.graph.values(), strict=True))
    if mesh is not None:
        copy.annotations = []
        copy.set_mesh(mesh)
    for value in of_copy.values():
        value.sharding = None  # The annotations alone say it, so that none can contradict them.
    told = {of_copy[value]: sharding for value, sharding in given.items()}
    left: dict[str, str] = {}
    save(copy, path, finish=lambda model: left.update(write_devices(model, copy.graph, copy.mesh, told)))
    return left
