"""Updates of optimizers: one elementwise node for each parameter, written out where a program is to run.

w', m' = irpar.Momentum(w, gradient, m, rate, mu)     m' = Add(Mul(m, mu), gradient); w' = Sub(w, Mul(rate, m'))

Passes that shard see one node where a device computes a dozen; localize and every export write these in its place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from irpar.ir import DOMAIN, Graph, Module, Node, Type, Value, clone_module

from .facts import int_attribute, needed, shape_of, shapes_of
from .gradients.refused import OPTIMIZER
from .gradients.writer import GradientWriter
from .op_def import OpDef, definition
from .registry import define
from .rule import FactorRule, RuleBuilder, whole

Body = Callable[[GradientWriter, Node], Sequence[Value]]


def _decayed(w: GradientWriter, node: Node, decay: int) -> Value:
    """The gradient with the weight decay added to it, which is the operand of that index, if it is there."""
    value, gradient = node.inputs[:2]
    return w.add(gradient, w.mul(value, node.inputs[decay])) if len(node.operands) > decay else gradient


def _sgd(w: GradientWriter, node: Node) -> Sequence[Value]:
    """w - rate (g + decay w)."""
    value, _, rate = node.inputs[:3]
    return [w.sub(value, w.mul(rate, _decayed(w, node, 3)))]


def _momentum(w: GradientWriter, node: Node) -> Sequence[Value]:
    """m = mu m + g; w - rate m, or looking ahead w - rate (g + mu m)."""
    value, _, before, rate, mu = node.inputs[:5]
    gradient = _decayed(w, node, 5)
    moment = w.add(w.mul(before, mu), gradient)
    direction = w.add(gradient, w.mul(moment, mu)) if int_attribute(node, "nesterov", 0) else moment
    return [w.sub(value, w.mul(rate, direction)), moment]


def running_means(
    w: GradientWriter, gradient: Value, m: Value, v: Value, rest: Value, keep: Value, other: Value
) -> tuple[Value, Value]:
    """The running means of a gradient and of its square: m + (g - m) rest, v keep + g^2 other."""
    mean = w.add(m, w.mul(w.sub(gradient, m), rest))
    return mean, w.add(w.mul(v, keep), w.mul(w.mul(gradient, gradient), other))


def _adaptive(w: GradientWriter, node: Node, before: Value, gradient: Value) -> Sequence[Value]:
    """before - size m / (sqrt(v) + floor), of the means after the update."""
    _, _, m, v, size, floor, *shares = node.inputs[:9]
    mean, square = running_means(w, gradient, m, v, *shares)
    change = w.div(mean, w.add(w.op("Sqrt", [square]), floor))
    return [w.sub(before, w.mul(change, size)), mean, square]


def _adam(w: GradientWriter, node: Node) -> Sequence[Value]:
    """The decay in the gradient."""
    return _adaptive(w, node, node.inputs[0], _decayed(w, node, 9))


def _adamw(w: GradientWriter, node: Node) -> Sequence[Value]:
    """The decay beside the gradient: what is left of the parameter is the last operand, if it is there."""
    value = node.inputs[0]
    before = w.mul(value, node.inputs[9]) if len(node.operands) > 9 else value
    return _adaptive(w, node, before, node.inputs[1])


_BODIES: dict[str, tuple[int, Body]] = {
    "Sgd": (0, _sgd),
    "Momentum": (1, _momentum),
    "Adam": (2, _adam),
    "AdamW": (2, _adamw),
}
"""The moments of each, which stand behind parameter and gradient, and the new ones behind the new parameter."""
_FLOPS = {"Sgd": 2, "Momentum": 4, "Adam": 12, "AdamW": 12}
"""For each element, without decay."""
_PLAIN = {"Sgd": 3, "Momentum": 5, "Adam": 9, "AdamW": 9}
"""Operands without decay."""


def _infer(node: Node) -> Sequence[Type]:
    return [needed(node, index).type for index in (0, *range(2, 1 + len(node.results)))]


def _rule(node: Node) -> FactorRule:
    """`([i,j],[i,j],[i,j],[])->([i,j],[i,j])`: every dim passes, numbers are read in full."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    results = [dims] * len(node.results)
    numbers = [whole(len(shape or ())) for shape in shapes_of(node)[1 + len(results) :]]
    return rule.done([dims, dims, *results[1:], *numbers], results)


def _flops(node: Node) -> int:
    name = node.op_type
    extra = len(node.operands) - _PLAIN[name]  # Of decay, AdamW's is one multiplication, others add it to the gradient.
    count = _FLOPS[name] + extra * (1 if name == "AdamW" else 2) + 2 * int_attribute(node, "nesterov", 0)
    return count * prod(shape_of(node, 0))


def _body(node: Node, writer: GradientWriter) -> Sequence[Value]:
    return _BODIES[node.op_type][1](writer, node)


for _name in _BODIES:
    define(OpDef(DOMAIN, _name, _infer, _rule, _flops, gradient=OPTIMIZER, decompose=_body))


def is_for_plans(node: Node) -> bool:
    """Whether a node is one that devices do not run: an operator of irpar's own that stands for others."""
    return node.domain == DOMAIN and (known := definition(node)) is not None and known.decompose is not None


def hold_such(graphs: Iterable[Graph]) -> bool:
    """Whether such a node is in graphs or in their bodies."""
    return any(is_for_plans(node) for graph in graphs for body in graph.graphs() for node in body)


def as_written(module: Module) -> Module:
    """A module with what devices run in place of all such nodes: itself, or a copy, its graphs in the same order."""
    if not hold_such((*module.graphs, *(function.graph for function in module.functions.values()))):
        return module
    made = clone_module(module)
    for graph in made.graphs:
        write_out(graph, made.opsets)
    write_out_functions(made)
    return made


def written_out(node: Node, opsets: Mapping[str, int]) -> list[Value]:
    """What takes the place of such a node, written before it: a value for each result."""
    assert node.graph is not None
    known = definition(node)
    assert known is not None
    assert known.decompose is not None
    writer = GradientWriter(node.graph, opsets, before=node, like=node)
    writer.phase = node.phase or ("optimizer" if node.op_type in _BODIES else "forward")
    return list(known.decompose(node, writer))


def write_out(graph: Graph, opsets: Mapping[str, int]) -> None:
    """Let what devices run take the place of all such nodes of a graph and its bodies."""
    for body in tuple(graph.graphs()):
        for node in tuple(body):
            if is_for_plans(node):
                _replace(node, written_out(node, opsets))


def _replace(node: Node, values: Sequence[Value]) -> None:
    """Let values take the place of a node's results, with their names and the shapes of the full tensors."""
    facts = [(value.name, value.global_shape) for value in node.results]
    node.replace(values)
    for value, (name, global_shape) in zip(values, facts, strict=True):
        value.rename(name)
        value.global_shape = global_shape


def write_out_functions(module: Module) -> None:
    """The same in the bodies of functions."""
    for function in module.functions.values():
        write_out(function.graph, function.opsets)
