"""autodiff: gradients of outputs by weights and inputs, in the graph."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from irpar.ir import Graph, Module, Value
from irpar.ops.gradients.writer import OLDEST_OPSET, GradientWriter
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import nearest_names

from .dependence import is_real
from .refusals import GradientError
from .reverse import Gradients, Reverse

GRAD = "grad."
"""Before the name of a value: the name of its gradient."""


@dataclass(frozen=True)
class Autodiff(Pass):
    """Turn a graph into that of its gradients, by reverse mode.

    Before: global view, types are inferred, no function is called, ONNX's operators are of opset 18 or newer. After:
    the graph has an input `grad.<output>` for each of the outputs that were asked for, and results `grad.<tensor>` in
    place of its own; each node has a phase, forward or backward. Nodes that no gradient needs are left to dce.

    Attributes:
        outputs: names or globs of the outputs that are differentiated; none: all of floats.
        wrt: names or globs of the weights and inputs by which; none: all weights of floats.
        keep_outputs: whether the graph keeps its own results, before the gradients.
    """

    name = "autodiff"
    outputs: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    keep_outputs: bool = False

    def run(self, module: Module) -> PassResult:
        """Write the backward pass.

        Raises:
            GradientError: a name matches nothing that has a gradient, an operator on the way has none, or the graph is
                not what is needed before.
        """
        _check(module)
        graph = module.graph
        outputs = chosen_outputs(graph, self.outputs)
        wanted = chosen_tensors(graph, self.wrt)
        for node in graph.walk():
            node.phase = node.phase or "forward"
        seeds = [(value, graph.add_input(GRAD + name, value.type)) for value, name in outputs]
        found = Reverse(graph, module.opsets, wanted).run(seeds)
        results = _results(graph, module, wanted, found)
        kept = list(zip(graph.outputs, graph.output_names, strict=True)) if self.keep_outputs else []
        pairs = [*kept, *((value, GRAD + of.source_name) for of, value in results)]
        graph.set_outputs([value for value, _ in pairs], [name for _, name in pairs])
        zeros = len(wanted) - len(found)
        notes = (f"{zeros} of {len(wanted)} gradients are zero: no output depends on these tensors",) if zeros else ()
        return PassResult(True, notes, {"gradients": len(wanted)})


def _results(graph: Graph, module: Module, wanted: Sequence[Value], found: Gradients) -> Iterator[tuple[Value, Value]]:
    """Each wanted value and its gradient, zeros where nothing flows into it; named after it where it is new."""
    writer = GradientWriter(graph, module.opsets)
    for value in wanted:
        gradient = found.get(value)
        if gradient is None:
            gradient = writer.zeros(value)
        if gradient.node is not None and gradient.name.startswith(("v_", "number")):
            gradient.rename(GRAD + value.source_name)
        yield value, gradient


def _check(module: Module) -> None:
    """Refuse a module that autodiff cannot work on.

    Raises:
        GradientError: see `Autodiff`.
    """
    if module.is_local:
        raise GradientError(
            "the module is in local view already", do="run autodiff before localize, on the graph of full tensors"
        )
    version = module.opsets.get("", 0)
    if version < OLDEST_OPSET:
        raise GradientError(
            f"gradients are written in opset {OLDEST_OPSET} or newer, the module has opset {version}",
            do="run raise-opset before autodiff",
        )
    for graph in module.graphs:
        for node in graph.walk():
            if node.callee is not None:
                raise GradientError(
                    f"{node.operator} calls a function", where=f"node {node.label}", do="run inline-functions before"
                )


def chosen_outputs(graph: Graph, patterns: Sequence[str]) -> list[tuple[Value, str]]:
    """The results that are differentiated, with their names.

    Raises:
        GradientError: a pattern matches none, or one that is not of floats; there is none of floats.
    """
    named = list(zip(graph.outputs, graph.output_names, strict=True))
    if not patterns:
        found = [(value, name) for value, name in named if is_real(value.type)]
        if not found:
            raise GradientError("no output of the model is of floats, so none has a gradient", do="name no output")
        return found
    chosen: dict[str, Value] = {}
    for pattern in patterns:
        matched = {name: value for value, name in named if _matches(pattern, name)}
        _require(pattern, "output", matched, [name for _, name in named])
        chosen |= matched
    return [(value, name) for value, name in named if name in chosen]


def chosen_tensors(graph: Graph, patterns: Sequence[str]) -> list[Value]:
    """The weights and inputs whose gradients are asked for; by default all weights of floats.

    Raises:
        GradientError: a pattern matches none, or one that is not of floats.
    """
    weights = [value for value in graph.constants if value.source is not None]
    if not patterns:
        return [value for value in weights if is_real(value.type)]
    named = {value.source_name: value for value in (*graph.inputs, *weights)}
    chosen: dict[str, Value] = {}
    for pattern in patterns:
        matched = {name: value for name, value in named.items() if _matches(pattern, name)}
        if any(mark in pattern for mark in "*?["):
            matched = {name: value for name, value in matched.items() if is_real(value.type)}
        _require(pattern, "weight or input", matched, list(named))
        chosen |= matched
    return [value for name, value in named.items() if name in chosen]


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or re.fullmatch(fnmatch.translate(pattern), name) is not None


def _require(pattern: str, what: str, matched: dict[str, Value], names: Sequence[str]) -> None:
    if not matched:
        raise GradientError(
            f'"{pattern}" matches no {what} of floats',
            notes=nearest_names(pattern, names),
            do=f"name a{'n' if what[0] in 'aeiou' else ''} {what} of the model",
        )
    for name, value in matched.items():
        if not is_real(value.type):
            raise GradientError(
                f'"{name}" is {value.type}: only floats have gradients', do=f"leave it out of the {what}s"
            )
