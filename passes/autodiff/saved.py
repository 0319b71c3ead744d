"""What a forward pass leaves for the backward pass, and what that makes nothing of."""

from irpar.ir import Graph, Value, captured_or_read, tensor_type

from .reverse import GRAD


def saved_activations(graph: Graph) -> dict[Value, int | None]:
    """The results of forward nodes that backward nodes read, in order, with their bytes; None where not known."""
    saved: dict[Value, int | None] = {}
    read = {value for node in graph if node.phase == "backward" for value in captured_or_read(node)}
    for node in graph:
        if node.phase == "forward":
            for value in node.results:
                if value in read:
                    found = tensor_type(value.type)
                    saved[value] = found.nbytes if found is not None and found.is_static else None
    return saved


def zero_gradients(graph: Graph) -> list[str]:
    """The results that are gradients of tensors that nothing flows into: written as zeros."""
    found = zip(graph.output_names, graph.outputs, strict=True)
    return [name for name, value in found if name.startswith(GRAD) and _is_zeros(value)]


def _is_zeros(value: Value) -> bool:
    node = value.node
    if node is None or node.identity != ("", "Expand"):
        return False
    data = node.inputs[0].data
    return data is not None and not data.shape and not data.numpy()
