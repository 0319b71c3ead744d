"""The lists of plan.json: parts, functions, state, collectives, copies, and totals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from irpar.analysis.memory.arena import arena_bytes
from irpar.analysis.memory.by_use import bytes_by_use
from irpar.analysis.memory.liveness import Uses, memories_of, peak, uses_of, value_bytes
from irpar.analysis.memory.scratch import Needs
from irpar.analysis.segments import segment_entries
from irpar.analysis.types.control_flow import runs
from irpar.inputs.values import plain
from irpar.ir import COMMUNICATION, Conflict, Graph, Module, Node, Value, holder_in, tensor_type
from irpar.ops import traits
from irpar.ops.collectives import KINDS, POINT_TO_POINT, collective_axes, is_planned, sent_bytes
from irpar.ops.facts import int_attribute, ints_attribute
from irpar.ops.memory_copies import copies_of, is_copy, source_memory, target_memory
from irpar.sharding import Mesh

from .entries import known_times
from .parts import Part
from .plan_reading import PlanError
from .plan_record import Plan as Plan
from .target import MODEL_FILE

LEAST_NAMED_BYTES = 1024
"""Smaller replicated values are not listed."""


def rank_entries(module: Module, mesh: Mesh, parts: Sequence[Part]) -> list[dict[str, Any]]:
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


def part_entries(module: Module, parts: Sequence[Part], flops: Mapping[Graph, int]) -> list[dict[str, Any]]:
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


def value_spec(name: str, value: Value) -> dict[str, Any]:
    """The entry of an input or output: its type in full, and how it is sharded."""
    type_ = tensor_type(value.type)
    return {
        "name": name,
        "dtype": None if type_ is None else type_.dtype.text,
        "shape": None if type_ is None or type_.shape is None else _whole_dims(value),
        "sharding": None if value.sharding is None else value.sharding.spec(),
    }


def input_spec(value: Value, module: Module) -> dict[str, Any]:
    """The same of an input, and the number that is fixed for it."""
    fixed = module.fixed.get(value.source_name)
    return value_spec(value.source_name, value) | {"value": None if fixed is None else plain(fixed.numpy())}


def state_entries(graph: Graph) -> list[dict[str, Any]]:
    """The entries of `state`."""
    return [
        {
            **value_spec(value.source_name, value),
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


def replicated_entries(module: Module, mesh: Mesh) -> list[dict[str, Any]]:
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


def totals_of(
    collectives: Sequence[dict[str, Any]], copies: Sequence[dict[str, Any]], most_flops: int
) -> dict[str, Any]:
    """`totals`: what is sent by kind, copied, and computed by the rank that computes most."""
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
