"""Whether the pieces of an output folder belong together: the plan, the model of each part, and its weights."""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from irpar.analysis.node_checks import check_node
from irpar.analysis.plan import Plan
from irpar.ir import ExternalTensor, Module
from irpar.onnx_io.fingerprint import fingerprint
from irpar.onnx_io.partition import PART, PARTITION
from irpar.onnx_io.target import WEIGHTS_FILE
from irpar.ops.collective_checks import check_collective
from irpar.ops.collectives import DOMAIN, KINDS
from irpar.sharding import IrparError, Mesh

from .errors import ProgramError, RunError

_COPY_AGAIN = "copy the folder again from where it was written, or partition the model again"


def check_pieces(folder: Path, plan: Plan, modules: Sequence[Module]) -> None:
    """Refuse a folder in which a piece is not what the plan says.

    Args:
        folder: the output folder.
        plan: its plan.json.
        modules: the model of each part, in the order of the plan.

    Raises:
        ProgramError: a model or its weights belong to another part or partition, a collective cannot be or is not the
            plan's, or the plan was edited.
        RunError: weights are needed that are not there.
    """
    for index, (entry, module) in enumerate(zip(plan.parts, modules, strict=True)):
        _check_model(folder, plan, index, module)
        _check_weights(folder, entry, module)
        _check_nodes(folder, entry["model"], module)
    _check_collectives(folder, plan, modules)


def _check_nodes(folder: Path, name: str, module: Module) -> None:
    """Check the operands, results and attributes of each node."""
    for node in module.graph.walk():
        try:
            check_node(node)
        except IrparError as error:
            where = f"{folder}, {name}, {error.where}"
            raise ProgramError(error.what, where=where, notes=error.notes, do=_COPY_AGAIN) from None


def _check_collectives(folder: Path, plan: Plan, modules: Sequence[Module]) -> None:
    """Check each collective by itself, and that the parts have those of the plan."""
    planned = {entry["id"]: entry["kind"] for entry in plan.collectives}
    seen: set[int] = set()
    for entry, module in zip(plan.parts, modules, strict=True):
        name = entry["model"]
        for node in module.graph.walk():
            if node.domain != DOMAIN:
                continue
            where = f"{folder}, {name}, node {node.label}"
            kind = KINDS.get(node.op_type)
            if kind is None:
                problem: str | None = f"cannot be executed; there are {', '.join(KINDS)}"
            else:
                problem = next(check_collective(module, node), None)
            if problem is not None:
                raise ProgramError(f"{node.operator} {problem}", where=where, do=_COPY_AGAIN)
            number = node.attributes["id"]
            assert isinstance(number, int)
            if planned.get(number) != kind:
                said = f"it as {planned[number]}" if number in planned else "none of that id"
                raise ProgramError(f"plan.json has {said}: {node.operator} {number}", where=where, do=_COPY_AGAIN)
            seen.add(number)
    missing = sorted(planned.keys() - seen)
    if missing:
        raise _stray(folder, f"no part has collective {missing[0]} of plan.json")


def _check_model(folder: Path, plan: Plan, index: int, module: Module) -> None:
    """Compare what a part's model says of itself with the plan."""
    name = plan.parts[index]["model"]
    said = module.metadata.get(PARTITION)
    if said is None:
        raise _stray(folder, f"{name} is no part of a partition: it has no {PARTITION} in its metadata")
    if said != plan.id:
        raise _stray(folder, f"{name} is of another partition than plan.json", f"{said}, the plan has {plan.id}")
    part = module.metadata.get(PART)
    if part != str(index):
        raise _stray(folder, f"{name} is part {part}, plan.json has it as part {index}")
    ranks = [entry["rank"] for entry in plan.ranks if entry["part"] == index]
    if list(module.graph.ranks) != ranks:
        raise _stray(
            folder, f"{name} was made for ranks {list(module.graph.ranks)}, plan.json runs it on ranks {ranks}"
        )
    mesh = plan.mesh_of_ranks
    found = [str(known) for known in module.meshes.values() if _same(known, mesh)]
    if not found:
        listed = ", ".join(map(str, module.meshes.values())) or "none"
        raise _stray(folder, f"{name} was made for another mesh than plan.json has", f"{listed}, the plan has {mesh}")


def _same(one: Mesh, other: Mesh) -> bool:
    """Equal axes in equal order, and the same device for each rank."""
    if list(one.axes.items()) != list(other.axes.items()):
        return False
    return all(one.device(rank) == other.device(rank) for rank in range(one.size))


def _check_weights(folder: Path, entry: Mapping[str, Any], module: Module) -> None:
    """Compare the weights of a part with what the plan says of them: their size, and a digest of samples."""
    name = str(Path(entry["model"]).with_name(WEIGHTS_FILE))
    planned = entry.get("weights")
    if planned is None:
        if any(isinstance(value.data, ExternalTensor) for value in module.graph.constants):
            raise _missing(folder, name, "the partition was written with --weights none")
        return
    try:
        known = os.stat(folder / name)
    except FileNotFoundError:
        raise _missing(folder, name, "the file was lost") from None
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if not stat.S_ISREG(known.st_mode):
        raise _stray(folder, f"{name} is not a file")
    if known.st_size != planned["size"]:
        raise _stray(folder, f"{name} has {known.st_size:,} bytes, it was written with {planned['size']:,}")
    try:
        found = fingerprint(folder / name)
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if found != planned["digest"]:
        note = f"digest {found}, the plan has {planned['digest']}"
        raise _stray(folder, f"{name} is not the file that was written here", note)


def _stray(folder: Path, what: str, *notes: str) -> ProgramError:
    return ProgramError(what, where=str(folder), notes=notes, do=_COPY_AGAIN)


def _missing(folder: Path, name: str, why: str) -> RunError:
    return RunError(
        f"{name} is not there: {why}", where=str(folder), do="partition the model again with --weights copy"
    )
