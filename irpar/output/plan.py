"""plan.json: what was decided, what is sent, and which rank runs what. The format is described in docs/plan.md."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import graph_flops
from irpar.analysis.opening import with_calls_opened
from irpar.analysis.redistribution.held import settled_annotations
from irpar.analysis.training_facts import facts_of
from irpar.ir import Module
from irpar.ops.coords import COORDS
from irpar.ops.updates import as_written
from irpar.sharding import Mesh

from .parts import Part
from .plan_entries import (
    collective_entries,
    copy_entries,
    function_entries,
    input_spec,
    memory_entries,
    part_entries,
    rank_entries,
    replicated_entries,
    state_entries,
    totals_of,
    value_spec,
)
from .plan_record import Plan
from .plan_values import value_entries
from .prediction import predict


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
        ranks=rank_entries(module, mesh, parts),
        parts=part_entries(module, parts, flops),
        inputs=[input_spec(value, module) for value in graph.inputs if value.name != COORDS],
        outputs=[value_spec(name, value) for name, value in zip(graph.output_names, graph.outputs, strict=True)],
        collectives=collectives,
        replicated=replicated_entries(module, mesh),
        totals=totals_of(collectives, copies, max(flops.values())),
        original=original,
        values=value_entries(graph, module.decisions),
        network=module.network,
        memory_limit=module.memory_limit,
        predicted=predict(network_of(module.network), module.graphs, collectives, mesh),
        not_as_annotated=not_as_annotated,
        state=state_entries(graph),
        copies=copies,
        memories=memory_entries(module),
        training=facts_of(module.metadata),  # type: ignore[arg-type]
        functions=functions,
    )
