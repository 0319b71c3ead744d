"""What a Tile repeats becomes a dim of its own, merged with the one that it repeats.

z = Tile(k : [8, 6, 16], [4, 1, 1]) : [32, 6, 16]     e = Expand(k : [1, 8, 6, 16]) : [4, 8, 6, 16]
                                                      z = Reshape(e) : [32, 6, 16]

So exporters write keys that all rows of a batch share, beside queries of batch x heads.
"""

from irpar.analysis.weights.atoms import follow
from irpar.ir import Builder, Ints, Module, Node, TensorType

from .merged_dims import has_elements, with_shape

_EXPAND_SINCE = 8


def repeat_apart(node: Node, module: Module) -> list[Node]:
    """Let a Tile expand a dim for each that it repeats, but where that is of features.

    Returns:
        The nodes that take its place; none where it stays, and of other operators.
    """
    if node.identity != ("", "Tile") or node.strategy is not None or module.opsets.get("", 0) < _EXPAND_SINCE:
        return []
    data, repeats = node.inputs
    if repeats.data is None or not (has_elements(data) and has_elements(node.result)):
        return []
    pairs = [(int(count), size) for count, size in zip(repeats.data.numpy(), data.shape, strict=True)]
    if not pairs or pairs[-1][0] != 1 or all(1 in pair for pair in pairs):
        return []
    assert node.graph is not None
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    wide = tuple(one for count, size in pairs for one in ((count, size) if count > 1 else (size,)))
    apart = tuple(one for count, size in pairs for one in ((1, size) if count > 1 else (size,)))
    name = node.result.name
    value = follow([("Reshape", apart)], data, name, builder)
    target = builder.constant(Ints(wide), "shape")
    value = builder.op("Expand", [value, target], type=TensorType(value.dtype, wide), name=name)
    value = with_shape(value, node.result, builder)
    node.replace([value])
    value.rename(name)
    return builder.made
