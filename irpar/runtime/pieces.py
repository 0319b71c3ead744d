"""Whether the pieces of an output folder belong together: the plan, the model of each part, and its weights."""

import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from irpar.analysis.types.node_checks import check_node
from irpar.ir import DOMAIN, ExternalTensor, Module
from irpar.onnx_io import check_external, load
from irpar.ops import called_communication
from irpar.ops.bodies import waits_for_copy
from irpar.ops.collectives import KINDS, check_collective
from irpar.ops.memory_copies import copies_of, copy_problems, is_copy
from irpar.output.checksums import read_sums, sums_file
from irpar.output.fingerprint import fingerprint, whole_digest
from irpar.output.parts import Part
from irpar.output.plan_reading import PlanError, read_plan
from irpar.output.plan_record import Plan
from irpar.output.plan_source import sha256_of
from irpar.output.safetensors import read_safetensors
from irpar.output.target import PLAN_FILE, STATE_FILE, WEIGHTS_FILE
from irpar.output.writer import PART, PARTITION
from irpar.sharding import IrparError, Mesh, listed, option

from .errors import ProgramError, RunError
from .instructions import MemoryCopy
from .specs import input_specs, output_specs

_COPY_AGAIN = "copy the folder again (or unpack the pack again) from where it was written, or partition the model again"
_MOST_NAMED = 8
"""Of absent parts, and of the ranks of each."""


class OpenedParts(NamedTuple):
    """What `open_parts` found in a folder.

    Attributes:
        plan: its plan.json.
        mesh: the mesh of all ranks, whether their parts are here or not.
        parts: the parts, each with those of its ranks that were asked for, in order of their numbers.
        modules: the model of each of `parts`.
    """

    plan: Plan
    mesh: Mesh
    parts: tuple[Part, ...]
    modules: tuple[Module, ...]


def open_parts(
    folder: str | os.PathLike[str], ranks: Collection[int] | None = None, plan: Plan | None = None
) -> OpenedParts:
    """Open the parts of some ranks; those of others need not be there, as in a folder that `irpar pack` was used for.

    The model of a part is compared with the plan byte by byte, its weights by samples. Where a checksum file stands
    beside a part, every file of the part is compared with it, once, here.

    Args:
        folder: what `irpar partition` wrote, or what a pack of it was unpacked to.
        ranks: those that will run; None: all.
        plan: its plan.json, where that was read.

    Raises:
        IrparError: plan.json or a part is missing, damaged, or of another partition; there is no such rank.
    """

    def check_data(folder: Path, plan: Plan, index: int, module: Module) -> None:
        _check_weights(folder, plan.parts[index], module)
        _give_state(folder, plan, plan.parts[index]["model"], module)

    return _open(Path(folder), ranks, plan, check_data)


def open_programs(
    folder: str | os.PathLike[str], ranks: Collection[int] | None = None, plan: Plan | None = None
) -> OpenedParts:
    """As `open_parts`, for who looks at programs and runs none: weights need not be there, and state has no numbers."""
    return _open(Path(folder), ranks, plan, lambda folder, plan, index, module: None)


def _open(
    folder: Path,
    ranks: Collection[int] | None,
    plan: Plan | None,
    check_data: Callable[[Path, Plan, int, Module], None],
) -> OpenedParts:
    plan = plan or plan_of(folder)
    members = ranks_by_part(plan, ranks)
    _check_there(folder, plan, members, ranks)
    for index in members:
        _check_sums(folder, plan, index)
    for index in members:
        _check_program(folder, plan, index)
    modules = {index: load(folder / plan.parts[index]["model"]) for index in members}
    check_pieces(folder, plan, modules)
    for index, module in modules.items():
        check_data(folder, plan, index, module)
    mesh = plan.mesh_of_ranks
    # A part that no rank runs was looked at, since the plan may have been edited; it is not run.
    used = {index: of for index, of in members.items() if of}
    parts = tuple(Part(index, modules[index].graph, of, mesh.coords(of[0])) for index, of in used.items())
    return OpenedParts(plan, mesh, parts, tuple(modules[index] for index in used))


def _give_state(folder: Path, plan: Plan, name: str, module: Module) -> None:
    """Let the states of a part begin with the numbers in the partition's file of state; nothing is read here.

    Raises:
        ProgramError: the states are not the plan's, or the file has other tensors.
    """
    graph = module.graph
    planned = {entry["input"]: entry for entry in plan.state}
    if {value.source_name for value in graph.states} != planned.keys():
        raise ProgramError(f"the state of {name} is not that of plan.json", where=str(folder), do=_COPY_AGAIN)
    held = read_safetensors(folder / STATE_FILE) if any(entry["file"] for entry in plan.state) else {}
    for value, state in graph.states.items():
        if planned[value.source_name]["file"] is None:
            continue
        data = held.get(value.source_name)
        if data is None or data.type != value.tensor_type.with_shape(value.whole_shape):
            found = "is not there" if data is None else f"is {data.type}"
            raise ProgramError(
                f'"{value.source_name}" {found} in {STATE_FILE}',
                where=str(folder),
                notes=(f"the program has {value.tensor_type.with_shape(value.whole_shape)}",),
                do=_COPY_AGAIN,
            )
        graph.states[value] = replace(state, data=data)


def mesh_of(folder: str | os.PathLike[str]) -> Mesh:
    """The mesh of a folder's ranks.

    Raises:
        IrparError: plan.json cannot be read.
    """
    return plan_of(Path(folder)).mesh_of_ranks


def ranks_by_part(plan: Plan, ranks: Collection[int] | None) -> dict[int, tuple[int, ...]]:
    """Which of some ranks run each part that they need, both in order; with None for `ranks` every part and rank.

    Raises:
        RunError: there is no such rank.
    """
    last = len(plan.ranks) - 1
    unknown = [] if ranks is None else sorted(rank for rank in ranks if not 0 <= rank <= last)
    if unknown:
        raise RunError(
            f"there is no rank {unknown[0]}: mesh {plan.mesh_of_ranks} has ranks 0 to {last}",
            do=f"give ranks of 0 to {last}",
        )
    found: dict[int, list[int]] = {index: [] for index in range(len(plan.parts))}
    for entry in plan.ranks:
        if ranks is None or entry["rank"] in ranks:
            found[entry["part"]].append(entry["rank"])
    return {index: tuple(of) for index, of in found.items() if of or ranks is None}


def plan_of(folder: Path) -> Plan:
    """The plan of a folder.

    Raises:
        IrparError: it cannot be read, or is not what a checksum file says.
    """
    try:
        return read_plan(folder)
    except PlanError:
        for path in sorted(folder.glob("part*.sha256")):
            sums = read_sums(path) or {}
            if PLAN_FILE in sums and (folder / PLAN_FILE).is_file():
                _check_sum(folder, PLAN_FILE, sums[PLAN_FILE], path.name)
        raise


def _check_there(
    folder: Path, plan: Plan, members: Mapping[int, tuple[int, ...]], ranks: Collection[int] | None
) -> None:
    """Refuse a folder that lacks the model of a part, or has something else in its place."""
    for index in members:
        model = folder / plan.parts[index]["model"]
        if model.exists() and not model.is_file():
            raise _stray(folder, f"{plan.parts[index]['model']} is not a file")
    absent = {
        index: of for index, of in members.items() if of and not os.path.lexists(folder / plan.parts[index]["model"])
    }
    if not absent:
        return
    named = listed([f"part{index} ({_ranks_text(of)})" for index, of in absent.items()], _MOST_NAMED)
    spelled = ",".join(str(of[0]) for of in list(absent.values())[:_MOST_NAMED])
    spelled += ",..." if len(absent) > _MOST_NAMED else ""
    pack = f"`irpar pack OUT --rank {spelled}` where the partition was written, and tar -xf here"
    first = plan.parts[next(iter(absent))]["model"]
    if ranks is not None:
        what = f"not here: {named}"
        do = f"bring the part: {pack}; or copy the whole folder"
    else:
        what = f"all ranks are to run here, and {len(absent)} of {len(members)} parts are not: {named}"
        do = (
            f"bring the others: {pack}; or run each rank in a process of its own, on the host that has its part "
            "(`irpar launch`, docs/clusters.md)"
        )
    raise RunError(what, where=str(folder), notes=(f"{first} is not there",), do=do)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {named}{', ...' if len(ranks) > _MOST_NAMED else ''}"


def _check_sums(folder: Path, plan: Plan, index: int) -> None:
    """Compare every file of a part, and the plan, with the part's checksum file, where there is one."""
    listing = sums_file(index)
    sums = read_sums(folder / listing)
    if sums is None:
        return
    entry = plan.parts[index]
    names = [PLAN_FILE, entry["model"], *([] if entry["weights"] is None else [_weights_name(entry)])]
    try:
        for name in names[:2]:
            _check_sum(folder, name, sums.get(name), listing)
    except ProgramError:
        _say_whose(folder, plan, index)
        raise
    for name in names[2:]:
        _check_size(folder, name, entry["weights"]["size"])
        _check_sum(folder, name, sums.get(name), listing)


def _check_program(folder: Path, plan: Plan, index: int) -> None:
    """Compare the model of a part, byte by byte, with what the plan says of it; plans of before do not say it."""
    name, planned = plan.parts[index]["model"], plan.parts[index].get("program")
    if planned is None:
        return
    try:
        found, size = whole_digest(folder / name), (folder / name).stat().st_size
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if found != planned["digest"]:
        _say_whose(folder, plan, index)
        raise ProgramError(
            f"{name} is not the file that was written here",
            where=str(folder),
            notes=(f"{size:,} bytes, digest {found}; the plan has {planned['size']:,} bytes, {planned['digest']}",),
            do=f'{_COPY_AGAIN}; where you changed it yourself, write "program": null for its part in plan.json',
        )


def _say_whose(folder: Path, plan: Plan, index: int) -> None:
    """Tell that the model of a part is another part's or another partition's, where it is."""
    try:
        module = load(folder / plan.parts[index]["model"])
    except IrparError:
        return
    _check_model(folder, plan, index, module)


def _check_sum(folder: Path, name: str, expected: str | None, listing: str) -> None:
    if expected is None:
        raise _stray(folder, f"{listing} has no checksum of {name}")
    if (folder / name).exists() and not (folder / name).is_file():
        raise _stray(folder, f"{name} is not a file")
    try:
        found, size = sha256_of(folder / name), (folder / name).stat().st_size
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if found != expected:
        note = f"its {size:,} bytes have sha256 {found}, {listing} says {expected}"
        raise _stray(folder, f"{name} is not the file that was packed", note)


def check_pieces(folder: Path, plan: Plan, modules: Mapping[int, Module]) -> None:
    """Refuse a folder in which a program is not what the plan says.

    Args:
        folder: the output folder.
        plan: its plan.json.
        modules: number of a part to its model, for some parts or all.

    Raises:
        ProgramError: a model belongs to another part or partition, a collective cannot be or is not the plan's, or the
            plan was edited.
    """
    for index, module in modules.items():
        entry = plan.parts[index]
        _check_model(folder, plan, index, module)
        _check_interface(folder, plan, entry["model"], module)
        _check_nodes(folder, entry["model"], module)
    _check_collectives(folder, plan, modules)
    _check_copies(folder, plan, modules)


def _check_nodes(folder: Path, name: str, module: Module) -> None:
    """Check the operands, results and attributes of each node."""
    bodies = [function.graph for function in module.functions.values()]
    for node in (node for graph in (module.graph, *bodies) for node in graph.walk()):
        try:
            check_node(node)
        except IrparError as error:
            where = f"{folder}, {name}, {error.where}"
            raise ProgramError(error.what, where=where, notes=error.notes, do=_COPY_AGAIN) from None


def _check_collectives(folder: Path, plan: Plan, modules: Mapping[int, Module]) -> None:
    """Check each collective by itself, and that the parts have those of the plan."""
    planned = {entry["id"]: entry["kind"] for entry in plan.collectives}
    seen: set[int] = set()
    for index, module in modules.items():
        name = plan.parts[index]["model"]
        for node in module.graph.walk():
            (inner,) = called_communication(node)[:1] or (node,)
            if inner.domain != DOMAIN or is_copy(inner) or waits_for_copy(inner):
                continue
            where = f"{folder}, {name}, node {node.label}"
            kind = KINDS.get(inner.op_type)
            if kind is None:
                problem: str | None = f"cannot be executed; there are {', '.join(KINDS)}"
            else:
                problem = next(check_collective(module, inner), None)
            if problem is not None:
                raise ProgramError(f"{node.operator} {problem}", where=where, do=_COPY_AGAIN)
            number = node.attributes["id"]
            assert isinstance(number, int)
            if planned.get(number) != kind:
                said = f"it as {planned[number]}" if number in planned else "none of that id"
                raise ProgramError(f"plan.json has {said}: {node.operator} {number}", where=where, do=_COPY_AGAIN)
            seen.add(number)
    missing = sorted(planned.keys() - seen)
    if missing and len(modules) == len(plan.parts):
        raise _stray(folder, f"no part has collective {missing[0]} of plan.json")


def _check_copies(folder: Path, plan: Plan, modules: Mapping[int, Module]) -> None:
    """Check each copy between memories by itself, and that the parts have those of the plan."""
    planned = {entry["id"]: (entry["from"], entry["to"]) for entry in plan.copies}
    seen: set[int] = set()
    for index, module in modules.items():
        for node in copies_of(module.graph):
            where = f"{folder}, {plan.parts[index]['model']}, node {node.label}"
            problem = next(copy_problems(module, node), None)
            if problem is not None:
                raise ProgramError(f"{node.operator} {problem}", where=where, do=_COPY_AGAIN)
            copy = MemoryCopy.of(node)
            if planned.get(copy.id) != (copy.source, copy.target):
                said = "{} to {}".format(*planned[copy.id]) if copy.id in planned else "none of that id"
                what = f"plan.json has {said}: copy {copy.id} from {copy.source} to {copy.target}"
                raise ProgramError(what, where=where, do=_COPY_AGAIN)
            seen.add(copy.id)
    missing = sorted(planned.keys() - seen)
    if missing and len(modules) == len(plan.parts):
        raise _stray(folder, f"no part has copy {missing[0]} of plan.json")


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


def _check_interface(folder: Path, plan: Plan, name: str, module: Module) -> None:
    """Compare the inputs and outputs of a part with those of the plan."""
    for told, specs in ((plan.inputs, input_specs(module.graph)), (plan.outputs, output_specs(module.graph))):
        planned = [(entry["name"], entry["dtype"], entry["shape"], entry["sharding"]) for entry in told]
        found = [
            (
                spec.name,
                None if spec.dtype is None else spec.dtype.text,
                None if spec.shape is None else [dim if isinstance(dim, int) else None for dim in spec.shape],
                None if spec.sharding is None else spec.sharding.spec(),
            )
            for spec in specs
        ]
        if planned != found:
            raise ProgramError(
                f"plan.json and {name} have different inputs or outputs",
                where=str(folder),
                notes=(f"plan: {planned}", f"part: {found}"),
                do="partition the model again; a file of this folder was changed",
            )


def _same(one: Mesh, other: Mesh) -> bool:
    """Equal axes in equal order, and the same device for each rank."""
    if list(one.axes.items()) != list(other.axes.items()):
        return False
    return all(one.device(rank) == other.device(rank) for rank in range(one.size))


def _check_weights(folder: Path, entry: Mapping[str, Any], module: Module) -> None:
    """Compare the weights of a part with what the plan says of them: their size, and a digest of samples."""
    name = _weights_name(entry)
    planned = entry.get("weights")
    constants = (value for graph in module.all_graphs() for value in graph.constants)
    files = {value.data.name for value in constants if isinstance(value.data, ExternalTensor)}
    if other := sorted(files - {WEIGHTS_FILE}):
        raise _stray(folder, f"{entry['model']} has weights in {other[0]}, not in {WEIGHTS_FILE}")
    if planned is None:
        if files:
            raise RunError(
                f"{name} is not there: the partition was written with {option('weights', 'none')}",
                where=str(folder),
                do=f"write the partition again with {option('weights', 'copy')}",
            )
        return
    _check_size(folder, name, planned["size"])
    try:
        found = fingerprint(folder / name)
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if found != planned["digest"]:
        note = f"digest {found}, the plan has {planned['digest']}"
        raise _stray(folder, f"{name} is not the file that was written here", note)
    check_external(module)


def _weights_name(entry: Mapping[str, Any]) -> str:
    return str(Path(entry["model"]).with_name(WEIGHTS_FILE))


def _check_size(folder: Path, name: str, size: int) -> None:
    """Refuse weights that are not there, are no file, or have another size."""
    try:
        known = os.stat(folder / name)
    except FileNotFoundError:
        raise RunError(f"{name} is not there: the file was lost", where=str(folder), do=_COPY_AGAIN) from None
    except OSError as error:
        raise RunError(f"cannot read {name}: {error.strerror}", where=str(folder), do=_COPY_AGAIN) from error
    if not stat.S_ISREG(known.st_mode):
        raise _stray(folder, f"{name} is not a file")
    if known.st_size != size:
        raise _stray(folder, f"{name} has {known.st_size:,} bytes, it was written with {size:,}")


def _stray(folder: Path, what: str, *notes: str) -> ProgramError:
    return ProgramError(what, where=str(folder), notes=notes, do=_COPY_AGAIN)
