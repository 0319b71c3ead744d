"""Operators that no kernel computes, as the operators of ONNX that they are made of.

MultiHeadAttention, GroupQueryAttention and their like are how ONNX Runtime's tools write what ONNX says in several
nodes: what differentiates them (`OpDef.decompose`) also says how engines without ONNX Runtime compute them.
"""

from typing import TYPE_CHECKING, Any

from irpar.ir import Graph, Node, Tensor, Value
from irpar.ops import definition
from irpar.ops.facts import CannotTellError, is_told, replicated_data
from irpar.ops.gradients.writer import GradientWriter, NoGradientError

from .operation import Environment, Operation

if TYPE_CHECKING:
    from .bodies import Scope

OPSET = 23
"""Of the operators that are written: the first that has Attention."""
_MOST_READ = 1 << 10
"""Elements of a constant that says how a node is written; more come in, and are not held twice."""


def opened(node: Node, scope: "Scope") -> Operation | None:
    """What computes a node in ONNX's operators; None where nobody knows how, or not of such operands."""
    graph = _in_parts(node)
    if graph is None:
        return None
    body = scope.body(graph)
    places = [place for place, value in enumerate(node.operands) if value is not None and _read(value) is None]
    firsts = [place for place in places if node.operands.index(node.operands[place]) == place]

    def run(inputs: list[Any], environment: Environment) -> list[Any]:
        return body.call([inputs[place] for place in firsts], Environment())

    return run


def _read(value: Value) -> Tensor | None:
    """The numbers of an operand that may say how a node is written."""
    data = replicated_data(value)  # Of a block the rank has other numbers than the constant.
    return data if data is not None and data.size <= _MOST_READ else None


def _in_parts(node: Node) -> Graph | None:
    """A graph of ONNX's operators from the operands of a node, but for small constants, to its results."""
    known = definition(node)
    if known is None or known.decompose is None or not known.runs_decomposed or not is_told(node):
        return None
    graph = Graph(f"{node.op_type} in parts")
    inside: dict[Value, Value] = {}
    for value in node.inputs:
        if value not in inside:
            data = _read(value)
            given = graph.add_input(value.name, value.type) if data is None else graph.add_constant(data, value.name)
            inside[value] = given
    operands = [None if value is None else inside[value] for value in node.operands]
    results = [Value(value.name, value.type) for value in node.results]
    alone = graph.append(
        Node(node.op_type, operands, node.attributes, results=results, domain=node.domain, version=node.version)
    )
    try:
        made = list(known.decompose(alone, GradientWriter(graph, {"": OPSET}, before=alone, like=alone)))
    except (CannotTellError, NoGradientError):
        return None
    graph.set_outputs(made)
    alone.erase()
    return graph
