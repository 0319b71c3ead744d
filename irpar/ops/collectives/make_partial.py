"""MakePartial: the first device keeps what all hold, the others what changes no reduction.

Sends nothing; localize makes ONNX operators of it.
"""

from irpar.ir import Node

from .local import no_elements, shape_kept
from .record import Atoms, CollectiveOp, State
from .states import is_replicated


def _after(node: Node, state: State, axes: Atoms) -> State | None:
    return (state[0], state[1] | frozenset(axes)) if is_replicated(state, axes) else None


RECORD = CollectiveOp(
    None,
    "The first keeps what all hold, so that reducing gives it again; exists in global view only.",
    shape=shape_kept,
    after=_after,
    elements=no_elements,
    others=("reduce",),
)
