"""Bodies of functions as single calls see them: attributes of the call put in for the references to them."""

from irpar.sharding import IrparError

from .attributes import Attribute, RefAttribute
from .clone import clone_graph
from .graph import Graph, Node
from .value import Names, Value


class CallError(IrparError):
    """A call that does not fit its function."""


def body_of_call(call: Node, names: Names | None = None, values: dict[Value, Value] | None = None) -> Graph:
    """A copy of the called function's body with the attributes of the call in place; operands are not put in.

    Args:
        call: the call.
        names: the name table that the copy shall use.
        values: gets what stands for each value of the function.

    Raises:
        CallError: an attribute that the function needs is missing, or there are more operands than inputs.
    """
    function = call.callee
    assert function is not None
    if len(call.operands) > len(function.graph.inputs) or len(call.results) > len(function.graph.outputs):
        raise CallError(
            f"{call.op_type} is called with {len(call.operands)} operands for {len(call.results)} results, but has "
            f"{len(function.graph.inputs)} inputs and {len(function.graph.outputs)} outputs",
            where=f"node {call.label}",
            do="mend the call or the function in the model",
        )
    given: dict[str, Attribute] = {}
    for name, default in function.attributes.items():
        value = call.attributes.get(name, default)
        if value is None and name not in call.attributes:
            # An attribute that is declared without default may be left out: nodes that refer to it go without it.
            continue
        given[name] = value  # type: ignore[assignment]
    body = clone_graph(function.graph, values, names=names)
    for node in body.walk():
        _put_in(node, given)
    return body


def _put_in(node: Node, given: dict[str, Attribute]) -> None:
    for name, attribute in list(node.attributes.items()):
        if isinstance(attribute, RefAttribute):
            value = given.get(attribute.name)
            if value is None or isinstance(value, Graph):
                # None removes: ONNX lets an optional attribute be absent by leaving it out of the call.
                node.set_attribute(name, None if value is None else clone_graph(value))
            else:
                node.attributes[name] = value  # In the place of the reference: attributes keep their order.
