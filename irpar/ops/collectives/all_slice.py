"""AllSlice: each device keeps its own block along a dim. Sends nothing; localize makes ONNX operators of it."""

from irpar.ir import Node

from .local import no_elements
from .record import Atoms, CollectiveOp, State
from .reduce_scatter import shape_of_part
from .states import dim_of, gained, is_replicated


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    return gained(state, dim_of(node), axes) if is_replicated(state, axes) else None


RECORD = CollectiveOp(
    None,
    "Each keeps its own block along dim; exists in global view only.",
    shape=shape_of_part,
    after=_after,
    elements=no_elements,
    dims=("dim",),
)
