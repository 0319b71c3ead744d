"""inline-functions: put bodies of functions in the place of their calls."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.opening import InlineError, open_calls
from irpar.ir import Function, Graph, Module
from irpar.pass_manager import Pass, PassResult

MOST_NODES = 5_000_000
"""That opening all functions may make, the bodies of functions counted."""


@dataclass(frozen=True)
class InlineFunctions(Pass):
    """Open the calls of functions: all of them, or of those whose names match `only`, such as `[my.domain.*, Gelu]`.

    Before: any graph. After: no call of such a function is left, and none of these functions. A node that comes from a
    body has the call's source and scope before its own; a result keeps the name that it had at the call.

    A function whose body follows another opset version than its caller is opened where its operators mean the same in
    both; else it is refused. Calls that extract-communication and extract-layers made become what they were made of,
    to the name.
    """

    name: ClassVar[str] = "inline-functions"
    only: tuple[str, ...] = ()

    def run(self, module: Module) -> PassResult:
        """Open the calls in all graphs and functions.

        Raises:
            InlineError: functions call each other in a circle, follow opsets that do not agree, or would become too
                many nodes.
        """
        if not module.functions:
            return PassResult(False, statistics={"calls": 0, "functions": 0})
        order = _callees_first(module)
        chosen = {function for function in order if self.opens(function)}
        _refuse_explosion(module, order, chosen)
        calls = 0
        # A body is opened itself before it is copied to its callers, so that no call is opened twice.
        for function in order:
            calls += _open_calls(function.graph, chosen, function.opsets)
        for graph in module.graphs:
            calls += _open_calls(graph, chosen, module.opsets)
        for function in chosen:
            del module.functions[function.key]
        return PassResult(bool(chosen), statistics={"calls": calls, "functions": len(chosen)})

    def opens(self, function: Function) -> bool:
        """Whether the option `only` names the function, by its name or by domain and name."""
        names = function.name, f"{function.domain}.{function.name}"
        return not self.only or any(fnmatch.fnmatchcase(name, glob) for glob in self.only for name in names)


def _callees_first(module: Module) -> list[Function]:
    """The functions, each after those that it calls.

    Raises:
        InlineError: they call each other in a circle, or call what the module does not have.
    """
    import networkx as nx  # slow to import, and few models need it

    calls = nx.DiGraph()
    calls.add_nodes_from(module.functions.values())
    for function in module.functions.values():
        calls.add_edges_from((callee, function) for callee in _called(function.graph))
    for callee in (*calls, *(callee for graph in module.graphs for callee in _called(graph))):
        if module.functions.get(callee.key) is not callee:
            raise InlineError(f"{callee!r} is called but not in the module", do="add the function to the module")
    try:
        return list(nx.topological_sort(calls))
    except nx.NetworkXUnfeasible:
        circle = [edge[1] for edge in nx.find_cycle(calls)][::-1]
        names = [_name(function) for function in (*circle, circle[0])]
        raise InlineError(
            f"functions call each other in a circle: {' -> '.join(names)}", do="ONNX has no recursion: use a Loop"
        ) from None


def _called(graph: Graph) -> list[Function]:
    return [node.callee for node in graph.walk() if node.callee is not None]


def _refuse_explosion(module: Module, order: Sequence[Function], chosen: set[Function]) -> None:
    """Count the nodes before any call is opened: functions that call others twice double them at each level.

    Raises:
        InlineError: naming the function that would become too many.
    """
    sizes: dict[Function, int] = {}
    total = 0
    for function in order:
        size = _opened_size(function.graph, sizes)
        if function in chosen:
            sizes[function] = size
        total += size
        _refuse_size(size, total, _name(function))
    for graph in module.graphs:
        called = [callee for callee in _called(graph) if callee in sizes]
        largest = max(called, key=sizes.__getitem__, default=None)
        size = _opened_size(graph, sizes)
        total += size
        _refuse_size(size, total, "the graph" if largest is None else _name(largest))


def _opened_size(graph: Graph, sizes: dict[Function, int]) -> int:
    """Nodes of a graph once the calls in it are opened; `sizes` has the functions that are opened."""
    return sum(1 if node.callee is None else sizes.get(node.callee, 1) for node in graph.walk())


def _refuse_size(size: int, total: int, name: str) -> None:
    if total > MOST_NODES:
        raise InlineError(
            f"opening {name} makes {size:,} nodes, {total:,} with what was opened before; {MOST_NODES:,} is the most",
            do="export the model without these functions, or open only some of them: inline-functions{only=[...]}",
        )


def _open_calls(graph: Graph, chosen: set[Function], opsets: dict[str, int]) -> int:
    calls = [node for node in graph.walk() if node.callee in chosen]
    open_calls(calls, opsets)
    return len(calls)


def _name(function: Function) -> str:
    return f"{function.domain}.{function.name}"
