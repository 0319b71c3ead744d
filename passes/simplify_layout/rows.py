"""A GatherND whose first index counts the rows gets them as batch dims, which may be cut.

i = Concat([[0], [1], [2], [3]], last : [4, 1])
z = GatherND(x : [4, 6, 8], i : [4, 2]) : [4, 8]    z = GatherND(x, last) {batch_dims=1}
"""

from irpar.ir import Builder, Module, Node
from irpar.ops.block_indices import counted_dims, without_columns

from .merged_dims import has_elements


def index_by_rows(node: Node, module: Module) -> bool:
    """Let a GatherND index row by row what its indices count row by row; False where there is nothing to do."""
    if (
        node.identity != ("", "GatherND")
        or node.strategy is not None
        or not all(map(has_elements, (*node.inputs, node.result)))
    ):
        return False
    data, index = node.inputs
    batch = int(str(node.attributes.get("batch_dims", 0)))
    # One index is left.
    count = min(counted_dims(index, data.shape, batch), index.shape[-1] - 1)
    if index.sharding is not None or count <= 0:
        return False
    assert node.graph is not None
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    node.set_operand(1, without_columns(index, count, builder))
    node.set_attribute("batch_dims", batch + count)
    if index.node is not None and not index.has_uses:
        index.node.erase()
    return True
