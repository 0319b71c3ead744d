"""dce: delete what no result needs."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import onnx

from irpar.ir import Function, Graph, Module, Node
from irpar.ops.effects import communicates, is_collective, schema_of
from irpar.pass_manager import Pass, PassResult


@dataclass(frozen=True)
class Dce(Pass):
    """Delete nodes without used results, constants without readers, functions without calls.

    Trailing optional results that nothing reads are dropped too, and results of If, collected results of Loop and Scan
    together with what computes them. Inputs and results of the model stay.

    Sends, receives and started collectives stay. In local view a collective stays wherever there are several programs,
    since the members of its group may run different ones.
    """

    name: ClassVar[str] = "dce"
    takes_out: ClassVar[str] = "no result of the model needs it"

    def run(self, module: Module) -> PassResult:
        """Delete in all graphs and functions."""
        sweep = _Sweep(keep_collectives=len(module.graphs) > 1)
        for graph in module.graphs:
            sweep.graph(graph)
        for function in module.functions.values():
            sweep.graph(function.graph)
        for function in _uncalled(module):
            del module.functions[function.key]
            sweep.counts["functions"] += 1
        return PassResult(bool(sweep.counts), statistics=dict(sweep.counts))


class _Sweep:
    """Walks backwards, so that a node is met after all that reads it."""

    def __init__(self, keep_collectives: bool) -> None:
        self.keep_collectives = keep_collectives
        self.counts: Counter[str] = Counter()

    def graph(self, graph: Graph) -> None:
        for node in reversed(graph):
            if not any(value.has_uses for value in node.results) and not self.must_stay(node):
                node.erase()
                self.counts["nodes"] += 1
                continue
            if len(node.results) > 1 and not node.results[-1].has_uses:
                self.counts["results"] += _trim_optional(node)
            if node.holds_graphs:
                self.counts["results"] += _trim_bodies(node)
                for nested in node.nested_graphs():
                    self.graph(nested)
        for value in [value for value in graph.constants if not value.has_uses]:
            graph.remove_constant(value)
            self.counts["constants"] += 1
        self.counts = +self.counts

    def must_stay(self, node: Node) -> bool:
        """Whether the node is there for something else than its results, such as other ranks that wait for it."""
        if not node.results:
            return True
        if not communicates(node):
            return False
        return self.keep_collectives or not is_collective(node)


def _trim_optional(node: Node) -> int:
    """Drop unused results at the end that the operator may leave out.

    Returns:
        How many.
    """
    schema = None if node.callee is not None else schema_of(node.domain, node.op_type, node.version)
    if schema is None or _gives_statistics(node) or _reads_past(node, schema):
        return 0
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    kept = len(node.results)
    while kept > 1 and not node.results[kept - 1].has_uses and _option(schema, kept - 1) == optional:
        kept -= 1
    dropped = len(node.results) - kept
    if dropped:
        node.set_results(node.results[:kept])
    return dropped


def _option(schema: "onnx.defs.OpSchema", index: int) -> object:
    return schema.outputs[index].option if index < len(schema.outputs) else None


def _gives_statistics(node: Node) -> bool:
    """True for a BatchNormalization in training mode, which must have all its results."""
    return node.op_type == "BatchNormalization" and bool(node.attributes.get("training_mode", 0))


def _reads_past(node: Node, schema: "onnx.defs.OpSchema") -> bool:
    """True for an Attention with a cache: ONNX Runtime (1.31) has it only with the cache that it makes of it."""
    given = zip(schema.inputs, node.operands, strict=False)
    return any(value is not None and operand.name.startswith("past") for operand, value in given)


def _trim_bodies(node: Node) -> int:
    """Drop unused results of If, and unused collected results of Loop and Scan, from the node and its bodies.

    Returns:
        How many.
    """
    if node.domain != "" or node.op_type not in ("If", "Loop", "Scan"):
        return 0
    bodies = list(node.nested_graphs())
    # A Loop's body gives its condition before anything else.
    shift = 1 if node.op_type == "Loop" else 0
    first = {"If": 0, "Loop": len(node.operands) - 2, "Scan": len(bodies[0].outputs)}[node.op_type]
    if node.op_type == "Scan":
        scanned = node.attributes["num_scan_inputs"]
        assert isinstance(scanned, int)
        first = len(node.operands) - scanned
    dead = {index for index, value in enumerate(node.results) if index >= first and not value.has_uses}
    if node.op_type == "Scan" and any(name.startswith("scan_output") for name in node.attributes):
        return 0  # these attributes count the results
    if not dead or len(dead) == len(node.results):
        return 0
    for body in bodies:
        kept = [index for index in range(len(body.outputs)) if index - shift not in dead]
        body.set_outputs([body.outputs[i] for i in kept], [body.output_names[i] for i in kept])
    node.set_results([value for index, value in enumerate(node.results) if index not in dead])
    return len(dead)


def _uncalled(module: Module) -> list[Function]:
    """The functions that neither a graph nor a called function calls."""
    called: dict[Function, None] = {}
    waiting = list(module.graphs)
    while waiting:
        for node in waiting.pop().walk():
            if node.callee is not None and node.callee not in called:
                called[node.callee] = None
                waiting.append(node.callee.graph)
    return [function for function in module.functions.values() if function not in called]
