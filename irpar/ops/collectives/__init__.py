"""irpar's collectives: one file and one record for each kind, which says all that is particular of it.

They have no factor rule: they are where sharding changes, made by insert-redistribution, not what a sharding flows
through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from irpar.ir import DOMAIN, InflightType, Module, Node, Type, register_check, register_module_check
from irpar.ops.facts import CannotTellError, needed, tensor_of
from irpar.ops.gradients.refused import PARTITIONED
from irpar.ops.op_def import OpDef, traits
from irpar.ops.registry import define
from irpar.sharding import Mesh, ceil_div

from . import (
    all_gather,
    all_reduce,
    all_slice,
    all_to_all,
    broadcast,
    make_partial,
    permute,
    point_to_point,
    reduce_scatter,
)
from .checks import problems_of
from .dialects import DIALECTS, OWN, Dialect
from .local import collective_axes, is_local
from .numbering import number_alike, number_collectives
from .order import order_problems
from .record import ATTRIBUTES, Algorithm, CollectiveOp

__all__ = [
    "ALGORITHMS",
    "ATTRIBUTES",
    "COLLECTIVES",
    "DIALECTS",
    "FREE",
    "KINDS",
    "OF_KIND",
    "OWN",
    "POINT_TO_POINT",
    "REDUCING",
    "STARTED",
    "WAIT",
    "CollectiveOp",
    "Dialect",
    "check_collective",
    "collective_axes",
    "is_planned",
    "number_alike",
    "number_collectives",
    "sends",
    "sent_bytes",
]

COLLECTIVES: Mapping[str, CollectiveOp] = {
    "AllReduce": all_reduce.RECORD,
    "AllGather": all_gather.RECORD,
    "ReduceScatter": reduce_scatter.RECORD,
    "AllToAll": all_to_all.RECORD,
    "CollectivePermute": permute.RECORD,
    "Broadcast": broadcast.RECORD,
    "Send": point_to_point.SEND,
    "Recv": point_to_point.RECV,
    "AllSlice": all_slice.RECORD,
    "MakePartial": make_partial.RECORD,
}
"""By operator."""

KINDS = {name: op.kind for name, op in COLLECTIVES.items() if op.kind is not None}
"""What plan.json calls the collectives that send."""

OF_KIND: Mapping[str, CollectiveOp] = {kind: COLLECTIVES[name] for name, kind in KINDS.items()}
"""By that name."""

ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    kind: op.algorithms for kind, op in OF_KIND.items() if op.partners is None
}
"""Kind of collective, as plan.json calls it, to its algorithms by name."""

POINT_TO_POINT = frozenset(name for name, op in COLLECTIVES.items() if op.partners is not None)
"""The operators that are no collectives: they send from rank to rank, and never wait for who takes it."""

STARTED = {f"{name}Start": name for name in KINDS if name not in POINT_TO_POINT}
"""The started forms, whose result is in flight until an irpar.Wait, and the collectives that they begin."""

WAIT = "Wait"

FREE = frozenset(COLLECTIVES.keys() - KINDS.keys())
"""The operators that send nothing, have no id, and stand in global view only."""

REDUCING = frozenset(kind for kind, op in OF_KIND.items() if "reduce" in op.others)
"""The kinds that compute: they bring partial values together."""


def is_planned(node: Node) -> bool:
    """True for what plan.json lists: collectives that send, and what goes from rank to rank."""
    return sends(node) or traits(node).point_to_point


def sends(node: Node) -> bool:
    """True for a collective that sends, which has a kind and an id; those in `FREE` do not."""
    known = traits(node)
    return known.collective and known.communicates


def sent_bytes(node: Node, mesh: Mesh) -> int:
    """The most bytes that a device sends in a collective, by the ring model, uneven blocks padded, rounded up.

    With n members and S bytes: all-reduce 2(n-1)/n of the operand, all-gather (n-1)/n of the gathered result,
    reduce-scatter (n-1)/n of the operand, all-to-all (n-1)/n of the local buffer, permute and broadcast the operand.

    Raises:
        KeyError: the node is no collective.
        CannotTellError: in a global graph the operand or result has no sharding.
    """
    op = COLLECTIVES[node.op_type]
    count, divisor = op.elements(node, mesh.group_size(collective_axes(node)) if op.over_axes else mesh.size)
    if not count:
        return 0
    found = tensor_of(node, 0)
    return ceil_div(count * found.dtype.bits, 8 * divisor)


def check_collective(module: Module, node: Node) -> Iterator[str]:
    """What is wrong with a collective: its attributes, and how it changes the sharding."""
    op = COLLECTIVES[node.op_type]
    return problems_of(op, node) if op.problems is None else op.problems(module, node)


def _infer(op: CollectiveOp) -> Callable[[Node], Sequence[Type]]:
    """Whole types stay as they are; local ones follow from the attributes."""

    def infer(node: Node) -> Sequence[Type]:
        found = tensor_of(node, 0)
        return [found.with_shape(op.shape(node)) if is_local(node) else found]

    return infer


def _infer_started(op: CollectiveOp) -> Callable[[Node], Sequence[Type]]:
    infer = op.types or _infer(op)
    return lambda node: [InflightType(type_) for type_ in infer(node)]


def _infer_wait(node: Node) -> Sequence[Type]:
    found = needed(node, 0).type
    if not isinstance(found, InflightType):
        raise CannotTellError("what it waits for")
    return [found.elem]


for _name, _collective in COLLECTIVES.items():
    define(
        OpDef(
            DOMAIN,
            _name,
            _collective.types or _infer(_collective),
            collective=_collective.partners is None,
            communicates=_name in KINDS,
            point_to_point=_collective.partners is not None,
            gradient=PARTITIONED,
        )
    )
    register_check(DOMAIN, _name, check_collective)
for _name, _begun in STARTED.items():
    define(
        OpDef(DOMAIN, _name, _infer_started(COLLECTIVES[_begun]), communicates=True, starts=True, gradient=PARTITIONED)
    )
define(OpDef(DOMAIN, WAIT, _infer_wait, communicates=True, waits=True, gradient=PARTITIONED))
register_module_check(order_problems)
