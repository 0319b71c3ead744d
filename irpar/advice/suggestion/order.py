"""Where in a model tensors are first used."""

from irpar.analysis.completion.flow import Flow


def order_of_use(flow: Flow) -> dict[str, int]:
    """The inputs of a graph, and its constants and those of its bodies in the order in which nodes read them.

    Returns:
        By the name that the source model has for each, its place; what nothing reads comes last.
    """
    values = list(flow.graph.inputs)
    values += [value for node in flow.nodes for value in node.inputs if value.is_constant]
    values += [value for value in flow.values() if value.is_constant]
    names = dict.fromkeys(value.source_name for value in values)
    return {name: place for place, name in enumerate(names)}
