"""What a forward pass leaves for the backward pass."""

from irpar.ir import Graph, Value, captured_or_read, tensor_type


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
