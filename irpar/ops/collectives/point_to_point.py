"""Send and Recv: tensors go from rank to rank, several pairs at once, between any ranks of the run.

What a Send sends on a channel a Recv of that channel takes, in order. The programs of two ranks need not be the same,
nor the shapes of two pairs. A Send does not wait for who takes it, so that ranks may send to each other in a circle; a
Recv waits. Who is not among the sources of a Send, or the targets of a Recv, does nothing; of a Recv it gets zeros.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from irpar.ir import DType, Module, Node, Shape, TensorType, Type, dtype_of_text, tensor_type
from irpar.ops.coords import root_of
from irpar.ops.facts import CannotTellError, ints_attribute, text_attribute

from .arrays import nothing_like
from .local import is_local, local_shape, no_elements, operand_block
from .record import Array, CollectiveOp, Partners, Settings, Share
from .states import unchanged

CHANNELS = 1 << 14
"""How many there are: MPI promises tags up to 32,767, and half of them are for collectives."""

Pair = tuple[int, int]


def _pairs(node: Node) -> list[Pair]:
    """Source and target of each pair."""
    numbers = ints_attribute(node, "pairs") or ()
    return list(zip(numbers[::2], numbers[1::2], strict=False))


# -- types and what is sent -------------------------------------------------------------------------------------------


def _nothing(node: Node) -> Sequence[Type]:
    return []


def _received(node: Node) -> Sequence[Type]:
    return [TensorType(_dtype(node), _shape(node))]


def _dtype(node: Node) -> DType:
    found = dtype_of_text(text_attribute(node, "dtype"))
    if found is None:
        raise CannotTellError("dtype")
    return found


def _shape(node: Node) -> Shape:
    shape = ints_attribute(node, "shape")
    if shape is None:
        raise CannotTellError("shape")
    return shape


def _elements(node: Node, size: int) -> Share:
    """The operand, to as many ranks as the source that sends most."""
    counts = Counter(source for source, _ in _pairs(node))
    return Share(max(counts.values(), default=0) * prod(operand_block(node)), 1)


# -- what a rank does -------------------------------------------------------------------------------------------------


def _sends(settings: Settings, rank: int) -> Partners:
    pairs = zip(settings.pairs[::2], settings.pairs[1::2], strict=True)
    return Partners(settings.channel, targets=tuple(target for source, target in pairs if source == rank))


def _takes(settings: Settings, rank: int) -> Partners:
    pairs = zip(settings.pairs[1::2], settings.pairs[::2], strict=True)
    return Partners(settings.channel, source=dict(pairs).get(rank))


def _blank(settings: Settings) -> Array:
    dtype = dtype_of_text(settings.dtype)
    assert dtype is not None
    return nothing_like(np.empty(settings.shape, dtype.numpy))


# -- what is wrong with a node ----------------------------------------------------------------------------------------


def _send_problems(module: Module, node: Node) -> Iterator[str]:
    if len(node.operands) != 1 or node.operands[0] is None or node.results:
        yield "has not one operand and no result"
        return
    problems = list(_common_problems(module, node))
    yield from problems
    if not problems:
        yield from _partner_problems(module, node, "Recv")


def _recv_problems(module: Module, node: Node) -> Iterator[str]:
    if node.operands or len(node.results) != 1:
        yield "has not no operand and one result"
        return
    problems = [*_common_problems(module, node), *_type_problems(node)]
    yield from problems
    if problems:
        return
    targets = Counter(target for _, target in _pairs(node))
    for target, count in targets.items():
        if count > 1:
            yield f"has {count} pairs that send to rank {target}, which can take one tensor"
            return
    yield from _partner_problems(module, node, "Send")


def _common_problems(module: Module, node: Node) -> Iterator[str]:
    if not is_local(node):
        yield "is in a global graph; what goes from rank to rank stands in local graphs only"
    if not isinstance(node.attributes.get("id"), int):
        yield "has no attribute id, a number"
    channel = node.attributes.get("channel")
    if not isinstance(channel, int) or not 0 <= channel < CHANNELS:
        yield f"has no attribute channel, a number from 0 to {CHANNELS - 1:,}"
    pairs = ints_attribute(node, "pairs")
    if not pairs or len(pairs) % 2:
        yield "has no attribute pairs, sources and targets in turn"
        return
    size = max((mesh.size for mesh in module.meshes.values()), default=0)
    unknown = next((rank for rank in pairs if not 0 <= rank < size), None)
    if unknown is not None:
        yield f"names rank {unknown} in its pairs, where there are ranks 0 to {size - 1}"
    found = _pairs(node)
    for source, target in found:
        if source == target:
            yield f"has a pair that sends from rank {source} to itself"
            return
    twice = next((pair for pair, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        yield f"has the pair from rank {twice[0]} to rank {twice[1]} twice"


def _type_problems(node: Node) -> Iterator[str]:
    dtype = dtype_of_text(text_attribute(node, "dtype"))
    if dtype is None:
        yield "has no attribute dtype, such as f32"
    shape = ints_attribute(node, "shape")
    if shape is None or min(shape, default=0) < 0:
        yield "has no attribute shape, sizes from 0"
        return
    known = tensor_type(node.results[0].type)
    if dtype is not None and known is not None and known.is_static and known != TensorType(dtype, shape):
        yield f"takes {TensorType(dtype, shape)}, but its result is {known}"


def _partner_problems(module: Module, node: Node, other: str) -> Iterator[str]:
    """Every pair must have both ends, as far as the programs of the other ranks are here."""
    ranks = root_of(node.graph).ranks if node.graph is not None else ()
    for source, target in _pairs(node):
        mine, partner = (source, target) if other == "Recv" else (target, source)
        if mine not in ranks:
            continue
        graph = next((graph for graph in module.graphs if partner in graph.ranks), None)
        if graph is None:
            continue
        ends = [
            end
            for end in graph.walk()
            if end.op_type == other
            and end.domain == node.domain
            and end.attributes.get("channel") == node.attributes["channel"]
            and (source, target) in _pairs(end)
        ]
        if not ends:
            does = "takes from" if other == "Send" else "sends to"
            yield f"{does} rank {partner}, whose program has no irpar.{other} of that pair and channel"
            return
        if len(ends) == 1 and other == "Recv" and (problem := _difference(node, ends[0])) is not None:
            yield f"sends {problem} to rank {target}"
            return


def _difference(sent: Node, taken: Node) -> str | None:
    """How the type that is sent differs from the one that is taken."""
    if None in sent.operands or not sent.operands:
        return None
    given, wanted = tensor_type(sent.inputs[0].type), tensor_type(taken.results[0].type)
    if given is None or wanted is None or not (given.is_static and wanted.is_static) or given == wanted:
        return None
    return f"{given}, where {wanted} is taken,"


SEND = CollectiveOp(
    "send",
    "Sends a tensor from rank to rank, by pairs; does not wait for who takes it by a Recv of the same channel.",
    shape=local_shape,
    after=unchanged,
    elements=_elements,
    share=lambda n: Share(1, 1),
    others=("channel", "pairs"),
    results=0,
    over_axes=False,
    partners=_sends,
    types=_nothing,
    problems=_send_problems,
)
RECV = CollectiveOp(
    "recv",
    "Takes what a Send of the same channel sends, by pairs; who is no target gets zeros.",
    shape=_shape,
    after=unchanged,
    elements=no_elements,
    share=lambda n: Share(0, 1),
    others=("channel", "pairs", "dtype", "shape"),
    operands=0,
    over_axes=False,
    partners=_takes,
    blank=_blank,
    types=_received,
    problems=_recv_problems,
)
