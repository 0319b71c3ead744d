"""autodiff: gradients of outputs by weights and inputs, in the graph."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.types.inference import Inference
from irpar.errors import listed, nearest_names
from irpar.globs import matching_names
from irpar.ir import Graph, Module, Value, tensor_type
from irpar.ops.effects import has_fixed_dtype
from irpar.ops.gradients.writer import OLDEST_OPSET, GradientWriter
from irpar.pass_manager import Pass, PassResult

from .decomposition import decompose
from .dependence import is_real
from .refusals import GradientError
from .reverse import GRAD, Gradients, Reverse, name_gradient

__all__ = [
    "GRAD",
    "PARAMETER",
    "TABLE",
    "Autodiff",
    "GradientError",
    "chosen_outputs",
    "chosen_tensors",
    "folded_from",
    "kind_in_export",
]

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The metadata in which torch.export's signature says what an initializer was."""
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
"""The metadata in which its optimizer lists the weights and nodes that it made an initializer of."""
PARAMETER, TABLE = "PARAMETER", "TABLE"
_ANGLES = frozenset({"cos", "sin"})
_MADE = frozenset(
    {
        *_ANGLES,
        *("_tensor_constant", "_to_copy", "_unsafe_index", "_unsafe_view", "abs", "add", "alias", "all"),
        *("any", "arange", "argmax", "bitwise_and", "bitwise_not", "bitwise_or", "broadcast_to", "cat"),
        *("ceil", "clamp", "clone", "const", "constant_pad_nd", "contiguous", "convert_element_type", "copy"),
        *("cumsum", "detach", "diagonal", "div", "embedding", "empty", "eq", "exp", "expand", "eye", "fill"),
        *("flip", "floor", "full", "full_like", "gather", "ge", "getitem", "gt", "index", "index_select"),
        *("index_tensor", "isneginf", "le", "lift_fresh_copy", "linspace", "log", "logical_and"),
        *("logical_not", "logical_or", "lt", "masked_fill", "maximum", "mean", "meshgrid", "minimum", "mul"),
        *("ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "outer", "pad", "permute"),
        *("pow", "reciprocal", "repeat", "repeat_interleave", "reshape", "roll", "round", "rsqrt"),
        *("scalar_tensor", "scatter", "select", "select_scatter", "sign", "slice", "slice_scatter", "split"),
        *("sqrt", "squeeze", "stack", "sub", "sum", "t", "tensor_constant", "to", "transpose", "tril", "triu"),
        *("type_as", "unsqueeze", "val", "view", "where", "zeros", "zeros_like"),
    }
)
"""What nodes of torch.export are called, by their operators, without the numbers behind them."""


@dataclass(frozen=True)
class Autodiff(Pass):
    """Turn a graph into that of its gradients, by reverse mode.

    Before: global view, types are inferred, no function is called, ONNX's operators are of opset 18 or newer. After:
    the graph has an input `grad.<output>` for each of the outputs that were asked for, and results `grad.<tensor>` in
    place of its own; each node has a phase, forward or backward. Nodes that no gradient needs are left to dce.

    Attributes:
        outputs: names or globs of the outputs that are differentiated; none: all of floats.
        wrt: names or globs of the weights and inputs by which; none: all weights (see `chosen_tensors`).
        keep_outputs: whether the graph keeps its own results, before the gradients.
        straight_through: whether gradients pass QuantizeLinear as if it did not round, where it does not saturate.
        only_reached: whether tensors that no output depends on get no gradient, instead of zeros.
    """

    name = "autodiff"
    outputs: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    keep_outputs: bool = False
    straight_through: bool = False
    only_reached: bool = False

    def run(self, module: Module) -> PassResult:
        """Write the backward pass.

        Raises:
            GradientError: a name matches nothing that has a gradient, or an output and a tensor that is asked for; an
                operator on the way has no gradient, or the graph is not what is needed before.
        """
        _check(module, self.keep_outputs)
        graph = module.graph
        wanted = chosen_tensors(module, self.wrt)
        inference = Inference()
        straight = self.straight_through
        decompose(graph, module.opsets, wanted, inference.result_types, straight_through=straight)
        outputs = chosen_outputs(graph, self.outputs)
        _check_names(outputs, wanted)
        for node in graph.walk():
            node.phase = node.phase or "forward"
        seeds = [(value, graph.add_input(GRAD + name, value.type)) for value, name in outputs]
        found = Reverse(graph, module.opsets, wanted, inference, straight_through=straight).run(seeds)
        zeros = len(wanted) - len(found)
        if self.only_reached:
            wanted = [value for value in wanted if value in found]
        results = _results(graph, module, wanted, found)
        kept = list(zip(graph.outputs, graph.output_names, strict=True)) if self.keep_outputs else []
        pairs = [*kept, *((value, GRAD + of.source_name) for of, value in results)]
        graph.set_outputs([value for value, _ in pairs], [name for _, name in pairs])
        total = len(found) + zeros
        notes = (f"{zeros} of {total} gradients are zero: no output depends on these tensors",) if zeros else ()
        return PassResult(True, notes, {"gradients": len(wanted)})


def _results(graph: Graph, module: Module, wanted: Sequence[Value], found: Gradients) -> Iterator[tuple[Value, Value]]:
    """Each wanted value and its gradient, zeros where nothing flows into it; named after it where it is new."""
    writer = GradientWriter(graph, module.opsets)
    for value in wanted:
        gradient = found.get(value)
        if gradient is None:
            gradient = writer.zeros(value)
        name_gradient(gradient, value)
        yield value, gradient


def _check(module: Module, keep_outputs: bool) -> None:
    """Refuse a module that autodiff cannot work on.

    Raises:
        GradientError: see `Autodiff`.
    """
    if module.is_local:
        raise GradientError(
            "the module is in local view already", do="run autodiff before localize, on the graph of full tensors"
        )
    if not keep_outputs and any(state.output is not None for state in module.graph.states.values()):
        raise GradientError("a result replaces a state, and gradients would take its place", do="keep the outputs")
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


def _check_names(outputs: Sequence[tuple[Value, str]], wanted: Sequence[Value]) -> None:
    """Refuse outputs of the name of what is asked for, such as inputs that the graph returns.

    The gradient that comes in and the one that goes out would both be `grad.<name>`.

    Raises:
        GradientError: naming one.
    """
    asked = {value.source_name for value in wanted}
    for _, name in outputs:
        if name in asked:
            others = [other for _, other in outputs if other not in asked]
            take = f"differentiate {listed(others, 5)} alone" if others else "differentiate another output"
            raise GradientError(
                f'"{name}" is an output and a tensor whose gradient is asked for: '
                f'"{GRAD}{name}" would be an input and a result',
                do=f'leave "{name}" out of what gradients are asked for (--wrt), or {take} (--output)',
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
            raise GradientError(
                "no output of the model is of floats, so none has a gradient",
                do="differentiate a model with an output of floats",
            )
        return found
    known = {name: value for value, name in named}
    chosen: dict[str, Value] = {}
    for pattern in patterns:
        matched = {name: known[name] for name in matching_names(pattern, known)}
        _require(pattern, "output", matched, known)
        chosen |= matched
    return [(value, name) for value, name in named if name in chosen]


def chosen_tensors(module: Module, patterns: Sequence[str]) -> list[Value]:
    """The weights and inputs whose gradients are asked for; by default all weights.

    These are the initializers of floats that have dims. A single number is a constant of the exporter (a mask's
    -3.4e38, a root) far more often than a weight; the scales of a Resize are none. Where PyTorch's exporter says what
    an initializer is, that counts: a parameter may be a single number, and a buffer (frequencies of rotary embeddings,
    sinusoids) is no weight.

    Raises:
        GradientError: a pattern matches none, or one that is not of floats; there is none of floats.
    """
    graph = module.graph
    weights = [value for value in graph.constants if value.source is not None]
    if not patterns:
        given = (value for value in weights if value.name not in module.literals)
        found = [value for value in given if _is_weight(value)]
        if not found:
            raise GradientError("the model has no weight of floats", do="name inputs of floats: --wrt NAME")
        return found
    named = {value.source_name: value for value in (*graph.inputs, *weights)}
    chosen: dict[str, Value] = {}
    for pattern in patterns:
        matched = {name: named[name] for name in matching_names(pattern, named)}
        if pattern not in named:
            matched = {name: value for name, value in matched.items() if is_real(value.type)}
        _require(pattern, "weight or input", matched, named)
        chosen |= matched
    return [value for name, value in named.items() if name in chosen]


def kind_in_export(value: Value) -> str | None:
    """What an initializer was in PyTorch, where its exporter says so: PARAMETER, BUFFER, CONSTANT_TENSOR.

    TABLE where the exporter's optimizer computed it of nothing but nodes, or of angles: masks, rotary embeddings,
    sinusoids. A name that is no node's, as far as nodes are known, is that of a weight.
    """
    known = (value.metadata or {}).get(_KIND)
    folded = folded_from(value)
    if known is not None or not folded:
        return known
    return TABLE if set(map(_base, folded)) & _ANGLES or not weights_of(folded) else None


def weights_of(names: Iterable[str]) -> list[str]:
    """Those of the names of weights and nodes that are, or may be, of weights."""
    return [name for name in names if "." in name or _base(name) not in _MADE]


def _base(name: str) -> str:
    return re.sub(r"(_default|_Tensor|_Scalar)?(_\d+)*$", "", name)


def folded_from(value: Value) -> tuple[str, ...]:
    """The names of the weights, which have dots, and nodes that PyTorch's exporter made an initializer of."""
    text = (value.metadata or {}).get(_FOLDED_FROM, "[]")
    return tuple(re.findall(r"'([^']+)'", text))


def _is_weight(value: Value) -> bool:
    """Whether an initializer is of floats, has dims, and is more than a setting of the operators that read it."""
    kind = kind_in_export(value)
    if not is_real(value.type) or not tensor_type(value.type) or kind not in (None, PARAMETER):
        return False
    if kind is None and not value.tensor_type.rank:
        return False
    uses = tuple(value.uses)
    return not uses or not all(has_fixed_dtype(node, index) for node, index in uses)


def _require(pattern: str, what: str, matched: dict[str, Value], known: Mapping[str, Value]) -> None:
    if not matched:
        floats = [name for name, value in known.items() if is_real(value.type)]
        raise GradientError(
            f'"{pattern}" matches no {what} of floats',
            notes=nearest_names(pattern, floats),
            do=f"name one of {listed(floats, 5)}" if floats else f"there is no {what} of floats",
        )
    for name, value in matched.items():
        if not is_real(value.type):
            raise GradientError(f'"{name}" is {value.type}: only floats have gradients', do="leave it out")
