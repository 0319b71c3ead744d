"""Which operators the engines know: ONNX Runtime by its schemas, irpar's own kernels by their table."""

from collections.abc import Iterable
from functools import cache

from irpar.ir import Graph, Node
from irpar.kernels import has_kernel, lookup
from irpar.ops.bodies import waits_for_copy
from irpar.ops.effects import is_compute
from irpar.ops.memory_copies import is_copy
from irpar.ops.updates import is_for_plans
from irpar.process import import_native
from irpar.sharding import listed


@cache
def _ort_operators() -> frozenset[tuple[str, str]]:
    """(domain, operator) of all schemas in ONNX Runtime: ONNX's operators and its own, such as com.microsoft's."""
    runtime = import_native("onnxruntime.capi.onnxruntime_pybind11_state")

    return frozenset((schema.domain, schema.name) for schema in runtime.get_all_operator_schema())


def is_known(node: Node) -> bool:
    """True where an engine knows the operator of a node, or what is written out for it; calls count as known."""
    if node.callee is not None or not is_compute(node) or has_kernel(node.domain, node.op_type, node.version):
        return True
    return (node.domain, node.op_type) in _ort_operators() or is_for_plans(node)


def writes_out(node: Node) -> bool:
    """Whether irpar's kernel can write the results of a node into arrays that it is given; they are never views."""
    if node.callee is not None:
        return False
    kernel = lookup(node.domain, node.op_type, node.version)
    if kernel is None:
        return False
    return kernel.signature.writes_outs or (kernel.signature.writes_out and len(node.results) == 1)


def gives_new_arrays(node: Node) -> bool:
    """Whether results are surely new arrays, be they written out or copied; others are taken for views."""
    return writes_out(node) or is_copy(node) or waits_for_copy(node)


def unknown_nodes(graphs: Iterable[Graph]) -> dict[str, list[Node]]:
    """Nodes that no engine can run, those in bodies and in called functions included, by operator. Linear in nodes."""
    found: dict[str, list[Node]] = {}
    waiting = list(graphs)
    seen = set(waiting)
    while waiting:
        for node in waiting.pop().walk():
            if node.callee is not None and node.callee.graph not in seen:
                seen.add(node.callee.graph)
                waiting.append(node.callee.graph)
            elif not is_known(node):
                found.setdefault(node.operator, []).append(node)
    return found


def unknown_notes(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """A line for the user about each operator that no engine can run."""
    return tuple(
        f"warning: no engine can run {operator} (node {listed([node.label for node in nodes], 1)}): neither ONNX "
        "Runtime nor irpar's kernels know it"
        for operator, nodes in unknown_nodes(graphs).items()
    )
