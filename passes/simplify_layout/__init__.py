"""simplify-layout: chains of Reshape and Transpose become short, and merged dims are taken apart."""

from collections import Counter
from dataclasses import dataclass

from irpar.ir import Module, Node
from irpar.pass_manager import Pass, PassResult

from .chains import chain_of, goes_on, is_layout, simplify
from .merged_dims import MergedDims
from .pads import pad_windows, take_off_windows
from .repeats import repeat_apart
from .rolls import roll
from .rows import index_by_rows


@dataclass(frozen=True)
class SimplifyLayout(Pass):
    """Replace chains of nodes that only move elements by shorter ones that say the same.

    Before: types are inferred. After: no chain of static Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Identity
    nodes is longer than it must be, and operators that treat a dim's elements one by one, as their factor rule says,
    work on the parts of a dim that was merged before them. What a Tile repeats is a dim of its own, merged behind it.
    Exporters merge batch and heads to one dim and split it again behind attention; a cut of the heads cannot be told on
    the merged dim, and would have to be undone around it. They write the norm of a group of channels as one of
    instances, over a dim of all its channels, rows and columns. A GatherND whose first index counts the rows
    (`x[arange(batch), last]`) has them as batch dims, which may be cut.
    Pieces of a dim that are joined in another order (a roll) are taken in that order by one Gather.
    Zeros that are put around the places of a convolution, and places that are cut off its result, are its pads.
    """

    name = "simplify-layout"

    def run(self, module: Module) -> PassResult:
        """Simplify all graphs."""
        found: Counter[str] = Counter(chains=0, merges=0, rows=0, pads=0, rolls=0)
        for graph in module.all_graphs():
            dims = MergedDims(module)
            # First: pieces of a dim that is merged are taken apart one by one.
            found["rolls"] += sum(roll(node, module) for node in graph)
            for node in graph:
                made = repeat_apart(node, module)
                found["merges"] += bool(made)
                for each in made or (node,):
                    found.update(_simplify(each, dims, module))
        return PassResult(any(found.values()), statistics=dict(found))


def _simplify(node: Node, dims: MergedDims, module: Module) -> dict[str, int]:
    """What is done about a node."""
    if not is_layout(node):
        if pad_windows(node) or take_off_windows(node):
            return {"pads": 1}
        rows = index_by_rows(node, module)
        return {"rows": rows, "merges": dims.take_apart(node)}
    chain = chain_of(node)
    return {"chains": simplify(chain, module)} if len(chain) > 1 and not goes_on(node) else {}
