"""Masks of dropout from counters: a pure function of a seed, the step, the tensor and the place of each element.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011): counters that are mixed well are random numbers that
any rank can compute for any element, and compute again. The mixing is that of a 32-bit hash of two multiplications
(Ettinger's search of such constants), in int64, whose products stay below 2^63.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from irpar.errors import IrparError, nearest_names
from irpar.globs import matching_names
from irpar.ir import Builder, DType, Module, Node, TensorType, Value, tensor_type
from irpar.ir.added_input import add_named_input
from irpar.ops.gradients.writer import GradientWriter
from irpar.passes.optimizer.names import NEXT
from irpar.sharding import option

SEED = "seed"
"""The name of the state that masks begin with."""
COUNT = "dropout_step"
"""The name of the state that counts runs, so that each has other masks."""
_WORD = 2**32
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)


class DropoutError(IrparError):
    """A dropout that cannot be."""


def add_dropout(module: Module, shares: Mapping[str, float], seed: int = 0) -> int:
    """Drop elements of the named values, and where the model has Dropout nodes.

    Args:
        module: in global view.
        shares: name or glob to the share of elements that are dropped.
        seed: what masks begin with.

    Returns:
        Of how many values.

    Raises:
        DropoutError: a name matches nothing, a share is none, no int64 holds the seed, or a Dropout is in a body.
    """
    if not 0 <= seed < 2**63:
        raise DropoutError(f"a seed of {seed}", do="give a number from 0 to 2^63 - 1")
    wanted = _named(module, shares)
    for node in [node for node in module.graph.walk() if node.identity == ("", "Dropout")]:
        if node.graph is not module.graph:
            _require_no_share(node)
            continue
        result = node.results[0]
        share = wanted.pop(result) if result in wanted else _own_share(node)
        if len(node.results) > 1 and node.results[1].has_uses:
            raise DropoutError(
                "the mask of a Dropout is read, which training makes otherwise",
                where=f"node {node.label}",
                do=f"take the node out of the model, and give {option('dropout', {'NAME': 'SHARE'})}",
            )
        wanted[_as_itself(module, node)] = share
    wanted = {value: share for value, share in wanted.items() if share}
    if wanted:
        _drop(module, wanted, seed)
    return len(wanted)


def _as_itself(module: Module, node: Node) -> Value:
    """What a Dropout gives, as a value of its own that is not dropped yet; other readers of what it drops keep that."""
    builder = Builder(module.graph, module.opsets, before=node, like=node)
    result = node.results[0]
    made = builder.op("Identity", [node.inputs[0]], type=result.type)
    result.replace_uses(made)
    name, source = result.name, result.source
    node.erase()
    made.rename(name)
    made.source = source
    return made


def _require_no_share(node: Node) -> None:
    """Refuse a node in a body of a loop or a branch that drops: its masks would have to know of the trip.

    Raises:
        DropoutError: see there.
    """
    if _own_share(node):
        raise DropoutError(
            "a Dropout in a body of a loop or a branch cannot drop",
            where=f"node {node.label}",
            do="take the node out of the model, or move it out of the body",
        )


def _named(module: Module, shares: Mapping[str, float]) -> dict[Value, float]:
    """The values that names or globs are of, with their shares.

    Raises:
        DropoutError: a name matches nothing, or a share is none.
    """
    graph = module.graph
    made = {value.source_name: value for node in graph for value in node.results if _is_float(value)}
    known = made | {value.source_name: value for value in graph.inputs if _is_float(value)}
    found: dict[Value, float] = {}
    for pattern, share in shares.items():
        if not 0 <= share < 1:
            raise DropoutError(f'dropout of {share} for "{pattern}"', do="give a share from 0 to below 1")
        matched = matching_names(pattern, known)
        if not matched:
            raise DropoutError(
                f'dropout "{pattern}" matches no value of floats in the main graph',
                notes=nearest_names(pattern, known),
                do="name what a node makes, by name or glob; `irpar inspect` lists them",
            )
        found |= dict.fromkeys((known[name] for name in matched), share)
    return found


def _is_float(value: Value) -> bool:
    found = tensor_type(value.type)
    return found is not None and found.dtype.is_float


def _own_share(node: Node) -> float:
    """The share that a Dropout drops; ONNX's default where it says none.

    Raises:
        DropoutError: it is no constant.
    """
    ratio = node.operands[1] if len(node.operands) > 1 else None
    if ratio is None:
        return 0.5
    if ratio.data is None:
        raise DropoutError("the ratio of a Dropout is computed", where=f"node {node.label}", do="give it as a constant")
    share = float(ratio.data.numpy())
    if not 0 <= share < 1:
        raise DropoutError(
            f"a Dropout drops a share of {share:g}",
            where=f"node {node.label}",
            do=f"give another share, from 0 to below 1: {option('dropout', {node.results[0].source_name: '0.1'})}",
        )
    return share


def _drop(module: Module, shares: Mapping[Value, float], begin: int) -> None:
    """Multiply each value by its mask, before all that reads it."""
    graph = module.graph
    seed = add_named_input(graph, SEED, TensorType(DType.I64, ()))
    count = add_named_input(graph, COUNT, TensorType(DType.I64, ()))
    module.add_state(SEED, kind="seed", data=np.asarray(begin, np.int64))
    ends = GradientWriter(graph, module.opsets)
    ends.phase = "forward"
    after = ends.add(count, ends.constant(1))
    graph.set_outputs([*graph.outputs, after], [*graph.output_names, COUNT + NEXT])
    module.add_state(COUNT, COUNT + NEXT, kind="counter")
    first = graph.first
    assert first is not None
    start = GradientWriter(graph, module.opsets, before=first)
    word = start.constant(_WORD - 1)
    key = mixed(
        start.op("BitwiseAnd", [start.add(mixed(start.op("BitwiseAnd", [seed, word]), start), count), word]), start
    )
    for value, share in shares.items():
        anchor = value.node.next if value.node is not None else first
        writer = GradientWriter(graph, module.opsets, before=anchor, like=value.node)
        uses = list(value.uses)
        dropped = masked(value, share, key, writer)
        for node, index in uses:
            node.set_operand(index, dropped)


def masked(value: Value, share: float, key: Value, w: GradientWriter) -> Value:
    """The value with a share of its elements 0, and the others divided by what is left.

    Raises:
        DropoutError: the sizes of the value are not known.
    """
    found = tensor_type(value.type)
    if found is None or not found.is_static:
        raise DropoutError(
            f"{value.source_name} is {value.type}: its elements cannot be counted",
            do=f"give sizes to symbolic dims ({option('bind', {'NAME': 'SIZE'})}), or drop elements of another value",
        )
    shape = found.static_shape
    own = zlib.crc32(value.source_name.encode())
    place = w.add(key, w.constant(own))
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :])
        numbers = np.arange(size, dtype=np.int64) * stride
        column = numbers.reshape([-1 if other == dim else 1 for other in range(len(shape))])
        place = w.add(place, w.constant(column, "places"))
    word = w.constant(_WORD - 1)
    random = mixed(w.op("BitwiseAnd", [place, word]), w)
    is_kept = w.op("GreaterOrEqual", [random, w.constant(round(share * _WORD))])
    return w.mul(value, w.where(is_kept, w.number(1 / (1 - share), value), w.number(0, value)))


def mixed(word: Value, w: GradientWriter) -> Value:
    """Other 32 bits for each 32 bits, in int64."""
    mask = w.constant(_WORD - 1)
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        word = w.op("BitwiseXor", [word, w.op("Div", [word, w.constant(2**shift)])])
        word = w.op("BitwiseAnd", [w.op("Mul", [word, w.constant(multiplier)]), mask])
    return w.op("BitwiseXor", [word, w.op("Div", [word, w.constant(2**15)])])
