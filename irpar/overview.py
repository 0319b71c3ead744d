"""What people ask of a model from Python before they shard it: what it is made of, and what to shard."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from irpar.advice.inspection import Inspection
from irpar.advice.suggestion.result import Suggestion
from irpar.api import module_of
from irpar.sharding import IrparError, Mesh

if TYPE_CHECKING:
    from irpar.ir import Module
    from irpar.onnx_io import Source


def inspect(model: "Module | Source", *, bind: Mapping[str, int] | None = None) -> Inspection:
    """What a model is made of, and what cannot be sharded and why. A module stays as it is.

    Args:
        model: a module, or what `load` takes.
        bind: sizes for symbolic dims; FLOPs and memory need those of all.

    Raises:
        IrparError: as from `load`.
    """
    from irpar.advice.inspection import inspect as gather

    return gather(module_of(model, bind))


def suggest(
    model: "Module | Source", mesh: Mesh | Mapping[str, int] | str, *, bind: Mapping[str, int] | None = None
) -> Suggestion:
    """What to shard over a mesh. A module stays as it is; `suggestion.apply(module)` annotates it.

    Args:
        model: a module without a mesh, or what `load` takes; annotations are not looked at.
        mesh: as for `partition`; axes named dp, data or batch shard the inputs, all others the weights.
        bind: sizes for symbolic dims; all are needed.

    Raises:
        IrparError: a size is not known, the mesh has one device, or the model cannot be partitioned at all.
    """
    from irpar.advice.suggestion.suggest import suggest as choose

    devices = Mesh.of(mesh)
    if devices.size == 1:
        raise IrparError(f"a mesh of one device ({devices}) shards nothing", do="give the devices, such as tp=4")
    module = module_of(model, bind)
    name = module.source.name if module.source is not None else module.graph.name
    return replace(choose(module, devices), model=name)
