"""plan.json: what was decided, what is sent, and which rank runs what. The format is described in docs/plan.md."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from irpar.analysis.cost.device import graph_seconds
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import graph_flops
from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.memory.arena import arena_bytes
from irpar.analysis.memory.by_use import bytes_by_use
from irpar.analysis.memory.liveness import Uses, memories_of, peak, uses_of, value_bytes
from irpar.analysis.memory.scratch import Needs
from irpar.analysis.opening import with_calls_opened
from irpar.analysis.redistribution.held import settled_annotations
from irpar.analysis.segments import segment_entries
from irpar.analysis.training_facts import facts_of
from irpar.analysis.types.control_flow import runs
from irpar.files.atomic import left_aside, notes_on_aside
from irpar.files.regular_file import open_file, read_text
from irpar.inputs.values import plain
from irpar.ir import (
    COMMUNICATION,
    Conflict,
    Decision,
    ExternalTensor,
    Graph,
    JoinedTensor,
    Module,
    Node,
    Value,
    dtype_of_text,
    holder_in,
    tensor_type,
)
from irpar.ops import traits
from irpar.ops.collectives import KINDS, POINT_TO_POINT, collective_axes, is_planned, sent_bytes
from irpar.ops.coords import COORDS
from irpar.ops.facts import int_attribute, ints_attribute
from irpar.ops.memory_copies import copies_of, is_copy, source_memory, target_memory
from irpar.ops.updates import as_written
from irpar.sharding import Axis, IrparError, Mesh, Sharding

from .entries import known_times
from .parts import Part
from .plan_record import FORMAT
from .plan_record import Plan as Plan
from .plan_schema import misfit
from .prediction import predict
from .target import MODEL_FILE

LEAST_NAMED_BYTES = 1024
"""Smaller replicated values are not listed."""


class PlanError(IrparError):
    """A plan.json that cannot be read or does not fit its parts."""


def source_of(module: Module) -> dict[str, Any]:
    """What plan.json says of the model file: name, sha256 of the .onnx file, external files with size and mtime."""
    external = []
    for path, name in files_of(module).items():
        known = path.stat() if path.exists() else None
        external.append(
            {"file": name, "size": known.st_size if known else None, "mtime": known.st_mtime if known else None}
        )
    if module.source is None:
        return {"model": None, "sha256": None, "external": external}
    return {"model": str(module.source.absolute()), "sha256": sha256_of(module.source), "external": external}


def files_of(module: Module) -> dict[Path, str]:
    """The files of external data in which numbers of a module lie, and how the model calls them."""
    files: dict[Path, str] = {}
    for graph in module.all_graphs():
        constants = [value.data for value in graph.constants]
        for data in (*constants, *(state.data for state in graph.states.values())):
            for tensor in data.bases if data is not None else ():
                if isinstance(tensor, ExternalTensor):
                    files.setdefault(tensor.path, tensor.name)
    return files


def check_unchanged(source: Mapping[str, Any], files: Mapping[Path, str]) -> None:
    """Refuse to read at run time from external data that was written after its model was partitioned.

    Args:
        source: from `source_of`, of the model.
        files: from `files_of`, of the programs.

    Raises:
        PlanError: a file has another size, or another time, than it had.
    """
    known = {entry["file"]: entry for entry in source["external"]}
    for path, name in files.items():
        entry, found = known.get(name), path.stat() if path.exists() else None
        if entry is None or found is None or entry["mtime"] is None:
            continue
        if (found.st_size, found.st_mtime) != (entry["size"], entry["mtime"]):
            raise _written_to(path)


class ReadFiles:
    """The files that a run reads weights from, as they were when it first opened them.

    Args:
        files: from `files_of`.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._known = {path: path.stat() for path in files if path.exists()}

    def check(self) -> None:
        """Refuse another run once one was written to; where another file has its name, the run still has the first.

        Raises:
            PlanError: naming it.
        """
        for path, known in self._known.items():
            try:
                now = path.stat()
            except OSError:
                continue
            is_same = (now.st_dev, now.st_ino) == (known.st_dev, known.st_ino)
            if is_same and (now.st_size, now.st_mtime_ns) != (known.st_size, known.st_mtime_ns):
                raise _written_to(path)


def _written_to(path: Path) -> PlanError:
    return PlanError(
        "the file was written to after its model was partitioned: its weights may be others now",
        where=str(path),
        do="load and partition the model again",
    )


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as plan.json has it.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def original_of(module: Module) -> dict[str, Any]:
    """Memory and FLOPs of the whole model on one device (after the normalising passes); seconds by its network."""
    whole = peak(module.graph)
    states = module.graph.states
    device = network_of(module.network).device
    return {
        "peak_bytes": whole.total_bytes,
        "weight_bytes": whole.constant_bytes,
        "flops": graph_flops(module.graph),
        **({"state_bytes": sum(map(value_bytes, states))} if states else {}),
        **({} if device is None else {"step_seconds": graph_seconds(module.graph, device)}),
    }


def make_plan(
    module: Module,
    mesh: Mesh,
    parts: Sequence[Part],
    *,
    pipeline: str,
    source: dict[str, Any],
    original: dict[str, Any],
) -> Plan:
    """The plan of a local module.

    Args:
        module: after localize.
        mesh: its mesh.
        parts: from `parts_of`.
        pipeline: the pipeline string that made it.
        source: from `source_of`, of the imported module.
        original: from `original_of`, of the module before it was sharded.

    Raises:
        IrparError: a value is sharded otherwise than it was annotated.
    """
    functions = function_entries(module)
    # What is planned is what runs once it is written: a program with calls of communication is the one with these
    # opened, and one with fused kernels has their operators again.
    opened = as_written(with_calls_opened(module))
    same = dict(zip(module.graphs, opened.graphs, strict=True))
    parts = [replace(part, graph=same[part.graph]) for part in parts]
    module = opened
    not_as_annotated = settled_annotations(module)  # First: it corrects decisions, of which values tell.
    flops = {graph: graph_flops(graph) for graph in module.graphs}
    collectives = collective_entries(module, mesh)
    copies = copy_entries(module)
    graph = module.graph
    return Plan(
        source=source,
        pipeline=pipeline,
        mesh={"axes": dict(mesh.axes), "devices": [mesh.device(rank) for rank in range(mesh.size)]},
        ranks=_rank_entries(module, mesh, parts),
        parts=_part_entries(module, parts, flops),
        inputs=[_input_spec(value, module) for value in graph.inputs if value.name != COORDS],
        outputs=[_spec(name, value) for name, value in zip(graph.output_names, graph.outputs, strict=True)],
        collectives=collectives,
        replicated=_replicated(module, mesh),
        totals=_totals(collectives, copies, max(flops.values())),
        original=original,
        values=_values(graph, module.decisions),
        network=module.network,
        memory_limit=module.memory_limit,
        predicted=predict(network_of(module.network), module.graphs, collectives, mesh),
        not_as_annotated=not_as_annotated,
        state=_states(graph),
        copies=copies,
        memories=memory_entries(module),
        training=facts_of(module.metadata),  # type: ignore[arg-type]
        functions=functions,
    )


def _rank_entries(module: Module, mesh: Mesh, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The entries of `ranks`: which part each runs, and what it holds."""
    needs = Needs()
    held = {graph: _held(graph, needs) for graph in module.graphs}
    part_of = {rank: part for part in parts for rank in part.ranks}
    return [
        {
            "rank": rank,
            "coords": list(mesh.coords(rank)),
            "part": part_of[rank].index,
            **held[part_of[rank].graph],
        }
        for rank in range(mesh.size)
    ]


def _held(graph: Graph, needs: Needs) -> dict[str, Any]:
    """What a rank that runs a program holds at most, in bytes: at once, in one arena, by use, and beside the device."""
    uses = uses_of(graph)
    most = peak(graph, uses)
    return {
        "peak_bytes": most.total_bytes,
        "arena_bytes": arena_bytes(graph, uses, needs),
        "memory": bytes_by_use(graph, most, uses),
        **_held_elsewhere(graph, uses),
    }


def _part_entries(module: Module, parts: Sequence[Part], flops: Mapping[Graph, int]) -> list[dict[str, Any]]:
    """The entries of `parts`: the program of each, what it computes, and its segments."""
    segments = {graph: list(segment_entries(graph)) for graph in module.graphs}
    return [
        {
            "model": f"part{part.index}/{MODEL_FILE}",
            "weight_bytes": sum(value_bytes(value) for inner in part.graph.graphs() for value in inner.constants),
            "flops": flops[part.graph],
            "segments": segments[part.graph],
            "program": None,  # Known when they are written.
            "weights": None,
        }
        for part in parts
    ]


def function_entries(module: Module) -> list[dict[str, Any]]:
    """The functions of communication of a local module, and which collectives are calls of each."""
    if not module.functions:
        return []
    calls: dict[str, dict[int, None]] = {}
    for node in (node for graph in module.graphs for node in graph.walk()):
        if node.callee is not None and node.callee.domain == COMMUNICATION:
            calls.setdefault(node.callee.name, {})[int_attribute(node, "id")] = None
    found = []
    for function in module.functions.values():
        if function.name in calls:
            given = set(function.graph.outputs)
            inner = [value for node in function.graph for value in node.results if value not in given]
            sizes = {"nodes": len(function.graph), "buffers": len(inner), "bytes": sum(map(value_bytes, inner))}
            entry = {"name": function.name, **sizes}
            found.append({**entry, "collectives": sorted(calls[function.name])})
    return found


def _spec(name: str, value: Value) -> dict[str, Any]:
    type_ = tensor_type(value.type)
    return {
        "name": name,
        "dtype": None if type_ is None else type_.dtype.text,
        "shape": None if type_ is None or type_.shape is None else _whole_dims(value),
        "sharding": None if value.sharding is None else value.sharding.spec(),
    }


def _input_spec(value: Value, module: Module) -> dict[str, Any]:
    fixed = module.fixed.get(value.source_name)
    return _spec(value.source_name, value) | {"value": None if fixed is None else plain(fixed.numpy())}


def _states(graph: Graph) -> list[dict[str, Any]]:
    return [
        {
            **_spec(value.source_name, value),
            "input": value.source_name,
            "output": None if state.output is None else graph.output_names[state.output],
            "kind": state.kind,
            "parameter": state.parameter,
            "memory": value.memory,
            "file": None,  # Known when it is written.
        }
        for value, state in graph.states.items()
    ]


def _whole_dims(value: Value) -> list[int | None]:
    """The global shape; None for a dim whose size depends on data."""
    dims = value.tensor_type.shape if value.global_shape is None else value.global_shape
    return [dim if isinstance(dim, int) else None for dim in dims or ()]


def collective_entries(module: Module, mesh: Mesh) -> list[dict[str, Any]]:
    """The entries of `collectives`: one for each id, the sizes being the most that any program has."""
    found: dict[int, dict[str, Any]] = {}
    for graph in module.graphs:
        for node in graph.walk():
            if not is_planned(node):
                continue
            known = found.get(node.attributes["id"])  # type: ignore[arg-type]
            if known is None:
                conflict = module.conflicts.get(node.results[0].name) if node.results else None
                known = _collective(node, mesh, conflict)
                found[known["id"]] = known
            else:
                known["bytes"] = max(known["bytes"], value_bytes(_operand(node)))
                known["sent_bytes"] = max(known["sent_bytes"], sent_bytes(node, mesh))
    return [found[number] for number in sorted(found)]


def _collective(node: Node, mesh: Mesh, conflict: Conflict | None) -> dict[str, Any]:
    pairs = ints_attribute(node, "pairs") if node.op_type in POINT_TO_POINT else None
    axes = () if pairs is not None else collective_axes(node)
    operand = _operand(node)
    return {
        "id": node.attributes["id"],
        "kind": KINDS[node.op_type],
        "reduce": node.attributes.get("reduce"),
        "axes": [str(axis) for axis in axes],
        "group_size": mesh.group_size(axes) if pairs is None else len(set(pairs)),
        "dtype": operand.dtype.text,
        "bytes": value_bytes(operand),
        "sent_bytes": sent_bytes(node, mesh),
        "times": runs(node.graph),
        "value": operand.source_name,
        "phase": node.phase,
        "reason": node.doc,
        "conflict": None if conflict is None else asdict(conflict),
        **({} if pairs is None else {"pairs": list(pairs)}),
    }


def _operand(node: Node) -> Value:
    """What a collective sends; of one that sends nothing, what it gives."""
    return node.inputs[0] if node.operands else node.result


def copy_entries(module: Module) -> list[dict[str, Any]]:
    """The entries of `copies`: one for each id, the size being the most that any program has.

    Raises:
        PlanError: a copy has no id.
    """
    found: dict[int, dict[str, Any]] = {}
    for node in (node for graph in module.graphs for node in copies_of(graph)):
        number = node.attributes.get("id")
        if not isinstance(number, int):
            raise PlanError(
                f"a copy to the {target_memory(node)} has no id",
                where=f"node {node.label}",
                do="end the pipeline with group-segments, which numbers copies",
            )
        (operand,) = node.inputs
        entry = {
            "id": number,
            "from": source_memory(node),
            "to": target_memory(node),
            "bytes": value_bytes(operand),
            "times": runs(node.graph),
            "value": operand.source_name,
            "phase": node.phase,
            "reason": node.doc or None,
            **_moments(node),
        }
        known = found.setdefault(number, entry)
        known["bytes"] = max(known["bytes"], entry["bytes"])
    return [found[number] for number in sorted(found)]


def memory_entries(module: Module) -> list[dict[str, Any]]:
    """The entries of `memories`: inputs, weights, state, the most that a rank has of each; none if all is on device."""
    held = {
        graph: [*graph.inputs, *(value for body in graph.graphs() for value in body.constants)]
        for graph in module.graphs
    }
    if all(value.memory == "device" for values in held.values() for value in values):
        return []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for graph, values in held.items():
        for value in values:
            state = graph.states.get(value)
            entry = {
                "value": value.source_name,
                "kind": state.kind if state else "constant" if value.is_constant else "input",
                "memory": value.memory,
                "bytes": value_bytes(value),
                "why": module.placed.get(value.name),
            }
            known = found.setdefault((value.source_name, value.memory), entry)
            known["bytes"] = max(known["bytes"], entry["bytes"])
    return list(found.values())


def _moments(node: Node) -> dict[str, str | None]:
    """When a copy takes place: before which node it begins, and which one is the first to read what it gives.

    Of nodes of a graph that come later, so that what only other copies follow has none.
    """
    given = node.result
    if traits(node).starts:
        (wait,) = given.users
        given = wait.result
    readers = {holder_in(user, node.graph) for user in given.users}
    begins = next((one for one in _from(node.next) if not (is_copy(one) or traits(one).waits)), None)
    reads = next((one for one in _from(given.node) if one in readers), None)
    return {name: None if found is None else found.label for name, found in (("before", begins), ("reader", reads))}


def _from(node: Node | None) -> Iterator[Node]:
    """A node of a graph and those behind it."""
    while node is not None and not node.is_return:
        yield node
        node = node.next


def _held_elsewhere(graph: Graph, uses: Uses) -> dict[str, int]:
    """The most that a rank holds in the memories beside the device's, of those in which something lies."""
    memories = (memory for memory in memories_of(graph) if memory != "device")
    return {f"{memory}_bytes": peak(graph, uses, memory).total_bytes for memory in memories}


def _replicated(module: Module, mesh: Mesh) -> list[dict[str, Any]]:
    """Ops that run replicated because they have no rule, and weights that every device holds whole."""
    if mesh.size == 1:
        return []
    graph = module.graph
    listed: list[dict[str, Any]] = []
    for value in (value for body in graph.graphs() for value in body.constants):
        size = value_bytes(value)
        if value.source is None:
            continue  # A table of irpar's own, such as places of elements.
        if size >= LEAST_NAMED_BYTES and (value.sharding is None or value.sharding.is_replicated):
            known = module.decision(value.name)
            reason = known.why if known else "not annotated, and no reader needs a block of it"
            listed.append({"value": value.source_name, "bytes": size, "why": reason})
    for node in graph.walk():
        why = module.whole.get(node.results[0].name) if node.results else None
        if why is not None:
            known_size = all(value.is_static for value in node.results)
            listed.append(
                {"op": node.label, "bytes": sum(map(value_bytes, node.results)) if known_size else None, "why": why}
            )
    return listed


def _totals(collectives: Sequence[dict[str, Any]], copies: Sequence[dict[str, Any]], most_flops: int) -> dict[str, Any]:
    by_kind: dict[str, dict[str, int]] = {}
    for entry in collectives:
        kind = by_kind.setdefault(entry["kind"], {"collectives": 0, "sent_bytes": 0})
        kind["collectives"] += known_times(entry)
        kind["sent_bytes"] += known_times(entry) * entry["sent_bytes"]
    return {
        "collectives": sum(kind["collectives"] for kind in by_kind.values()),
        "sent_bytes": sum(kind["sent_bytes"] for kind in by_kind.values()),
        "copied_bytes": sum(known_times(entry) * entry["bytes"] for entry in copies),
        "by_kind": by_kind,
        "flops_per_rank": most_flops,
    }


def _values(graph: Graph, decisions: dict[str, list[Decision]]) -> list[dict[str, Any]]:
    """All values with a sharding, and why they are sharded so; outputs under the names that they have outside, too."""
    rows = [
        _value(value, value.name, value.source_name, decisions.get(value.name, ()))
        for body in graph.graphs()
        for value in body.values()
        if value.sharding is not None
    ]
    known = {name for row in rows for name in (row["name"], row["source"])}
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        if name not in known and value.sharding is not None:
            same = Decision(f"is %{value.name}", value.name)
            axes = cutting_names(value.sharding)
            rows.append(_value(value, name, name, [replace(same, axes=(axis,)) for axis in axes] or [same]))
    listed = {row["name"] for row in rows}
    for reason in (reason for row in rows for reason in row["why"]):
        _pass_over_gone(reason, listed, decisions)
    return rows


def _pass_over_gone(reason: dict[str, Any], listed: Set[str], decisions: Mapping[str, Sequence[Decision]]) -> None:
    """Where the program has no value any more that a reason follows: it follows the nearest that this one does itself.

    A value of which only the shape was read (by EyeLike, say) is computed no longer once shapes are constants. Where
    it was annotated itself, the chain ends with that.
    """
    name, met = reason["follows"], set[str]()
    while name is not None and name not in listed and name not in met:
        met.add(name)
        about = [why for why in decisions.get(name, ()) if not why.axes or set(reason["axes"]) & set(why.axes)]
        if not about:
            return
        nearest = min(about, key=lambda why: not why.axes)  # As readers of chains do: of these axes before of all.
        name = nearest.follows
        if name is None:
            reason |= {"why": f"{reason['why']}, {nearest.why}", "follows": None}
    if name in listed:
        reason["follows"] = name


def _value(value: Value, name: str, source: str, decisions: Sequence[Decision]) -> dict[str, Any]:
    assert value.sharding is not None
    axes = value.sharding.canonical.axis_names
    return {
        "name": name,
        "source": source,
        "shape": list(value.whole_shape),
        "sharding": value.sharding.spec(),
        "partial": [str(axis) for axis in value.sharding.partial],
        "sections": _sections(value),
        "why": [
            {"why": decision.why, "follows": decision.follows, "axes": list(decision.axes)}
            for decision in decisions
            if not decision.axes or not axes.isdisjoint(decision.axes)
        ],
    }


def _sections(value: Value) -> dict[str, Any] | None:
    """Of a constant with blocks of several sections of a tensor side by side: along which dim, and which sections."""
    data = value.data
    if not isinstance(data, JoinedTensor) or data.sections is None:
        return None
    return {"dim": data.dim, "of": [list(section) for section in data.sections]}


def read_plan(folder: Path) -> Plan:
    """Read and check plan.json of an output folder.

    Raises:
        PlanError: it is missing, is not JSON, is of another format, or a field is missing or is not what it should be.
    """
    path = folder / "plan.json"
    again = "partition the model again"
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise PlanError(
            f"cannot read the plan: {error.strerror}",
            where=str(path),
            notes=notes_on_aside(left_aside(folder)),
            do="give the folder that `irpar partition -o` made",
        ) from error
    except ValueError as error:
        raise PlanError(f"plan.json is not JSON: {error}", where=str(path), do=again) from error
    except RecursionError:
        raise PlanError("plan.json is nested too deep", where=str(path), do=again) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"plan.json has format {found!r}, this irpar reads {FORMAT!r}",
            where=str(path),
            do=f"{again} with this version",
        )
    problem = misfit(data)
    if problem is None:
        plan = Plan(**{name: value for name, value in data.items() if name in Plan.__dataclass_fields__})
        problem = _contradiction(plan)
    if problem is not None:
        raise PlanError(
            f"plan.json cannot be used: {problem}", where=str(path), do=f"{again}; plan.json is not meant to be edited"
        )
    return plan


def _contradiction(plan: Plan) -> str | None:
    """What in a plan contradicts itself."""
    try:
        mesh = plan.mesh_of_ranks
        for spec in (*plan.inputs, *plan.outputs):
            _check_spec(spec, mesh)
        for entry in plan.collectives:
            if (
                "pairs" not in entry
                and mesh.group_size([Axis.parse(axis) for axis in entry["axes"]]) != entry["group_size"]
            ):
                return f"collective {entry['id']} joins another number of ranks than its axes"
    except IrparError as error:
        return error.what
    if [(entry["rank"], tuple(entry["coords"])) for entry in plan.ranks] != list(enumerate(mesh.all_coords())):
        return f"the ranks are not those of mesh {mesh}"
    wrong = _wrong_state(plan)
    if wrong is not None:
        return wrong
    known = {entry["id"] for entry in plan.collectives}
    for entry in plan.functions:
        if not entry["collectives"] or not known.issuperset(entry["collectives"]):
            return f"function {entry['name']} has none of the collectives, or one that is not there"
    if not all(entry["part"] < len(plan.parts) for entry in plan.ranks):
        return f"a rank has a part outside 0 .. {len(plan.parts) - 1}"
    for model in (entry["model"] for entry in plan.parts):
        if Path(model).is_absolute() or ".." in Path(model).parts or "\0" in model:
            return f"a part is outside its folder: {model}"
    return None


def _wrong_state(plan: Plan) -> str | None:
    """What in the entries of state contradicts the rest of a plan."""
    inputs, outputs = ({spec["name"]: spec for spec in specs} for specs in (plan.inputs, plan.outputs))
    for entry in plan.state:
        name = entry["input"]
        if name not in inputs or (entry["output"] is not None and entry["output"] not in outputs):
            return f"state {name} is no input, or {entry['output']}, which replaces it, is no output"
        if entry["file"] not in (None, "state.safetensors"):
            return f"state {name} lies in {entry['file']}, which no partition has"
    return None


def _check_spec(spec: dict[str, Any], mesh: Mesh) -> None:
    """Refuse an input or output whose facts do not fit each other.

    Raises:
        PlanError: saying what.
    """
    if spec["dtype"] is not None and dtype_of_text(spec["dtype"]) is None:
        raise PlanError(f"{spec['name']} has the dtype {spec['dtype']}, which is none")
    if spec["sharding"] is not None:
        sharding = Sharding.of_spec(mesh, spec["sharding"])
        if spec["shape"] is None or sharding.rank != len(spec["shape"]):
            raise PlanError(f"sharding of {spec['name']} has another number of dims than its shape")
