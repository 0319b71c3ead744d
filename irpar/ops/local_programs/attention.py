"""The local program of Attention over keys that are sharded: maxima and sums of scores reduced, results partial.

y = Attention(q : [1, 8, 1, 64], k : [1, 8, 4096@sp, 64], v : [1, 8, 4096@sp, 64])
                                     each device scores its 1024 keys; all_reduce(max) of [1, 8, 1, 1]; exponentials;
                                     all_reduce(sum) of the same; products with its values: a partial sum [1, 8, 1, 64]
"""

import math
from collections.abc import Sequence

from irpar.ir import DType, Node, Value
from irpar.sharding import Axis

from ..attention_sizes import Places, attention_sizes, head_dim, key_count, masked, query_dim, static, visible_keys
from ..facts import float_attribute, needed, operand, shape_of, tensor_of
from .program import FLOATS, Cuts, LocalProgram, ProgramWriter, Sent, Shape, widened


def key_dims(node: Node) -> Sequence[int] | None:
    """Those of K; none where there is a past."""
    return (query_dim(node),) if operand(node, 4) is None and is_covered(node) else None


def is_covered(node: Node) -> bool:
    """Whether keys may be sharded: not where scores are a result, or where a mask is shorter than the keys."""
    mask = operand(node, 3)
    is_short = mask is not None and mask.shape[-1:] not in ((), (1,), (static(attention_sizes(node).keys),))
    return not is_short and len(node.results) in (1, 3) and tensor_of(node, 0).dtype in FLOATS


def statistics(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    """The greatest score and the sum of each query and head."""
    query = blocks[0] or ()
    heads = query[1] if head_dim(node) == 1 else query[2] // static(attention_sizes(node).head)
    rows = query[0] * heads * query[query_dim(node)]
    return [Sent("all_reduce", rows, widened(tensor_of(node, 0).dtype).bits)] * 2


def split_heads(program: ProgramWriter, value: Value, size: int) -> Value:
    """(batch, heads, sequence, size)."""
    if len(value.shape) == 4:
        return value
    batch, places, width = value.shape
    shape = (batch, places, width // size, size)
    value = program.op("Reshape", [value, program.ints(shape)], shape=shape)
    return turned(program, value, (0, 2, 1, 3))


def by_heads(program: ProgramWriter, value: Value, size: int) -> Value:
    """(batch, heads, sequence, size), as the computation needs it."""
    return program.wide(split_heads(program, value, size))


def caches(program: ProgramWriter) -> list[Value]:
    """The keys and values that are results, where there is no past: those of the device."""
    of = attention_sizes(program.whole)
    pairs = ((1, of.head), (2, of.value_head))
    found = [split_heads(program, needed(program.local, place), static(size)) for place, size in pairs]
    return found[: len(program.whole.results) - 1]


def turned(program: ProgramWriter, value: Value, order: Sequence[int]) -> Value:
    """Its dims in another order."""
    shape = tuple(value.shape[dim] for dim in order)
    return program.op("Transpose", [value], {"perm": tuple(order)}, shape=shape)


def scaled_query(program: ProgramWriter) -> Value:
    """(batch, query heads, queries, size), times what scales the scores."""
    size = static(attention_sizes(program.whole).head)
    query = by_heads(program, needed(program.local, 0), size)
    scale = float_attribute(program.whole, "scale", 1 / math.sqrt(size))
    return program.op("Mul", [query, program.constant(scale, query.dtype)])


def scores_of(program: ProgramWriter, query: Value, key: Value) -> Value:
    """(batch, query heads, queries, keys); query heads that share a key head are rows of one product."""
    (batch, heads, queries, size), (_, key_heads, keys, _) = query.shape, key.shape
    rows = (batch, key_heads, heads // key_heads * queries, size)
    grouped = program.op("Reshape", [query, program.ints(rows)], shape=rows)
    product = program.op("MatMul", [grouped, turned(program, key, (0, 1, 3, 2))], shape=(*rows[:3], keys))
    shape = (batch, heads, queries, keys)
    scores = program.op("Reshape", [product, program.ints(shape)], shape=shape)
    softcap = float_attribute(program.whole, "softcap", 0.0)
    if softcap:
        cap = program.constant(softcap, scores.dtype)
        scores = program.op("Mul", [program.op("Tanh", [program.op("Div", [scores, cap])]), cap])
    return scores


def with_masks(program: ProgramWriter, scores: Value, mask: Value | None, keys: Places) -> Value:
    """Scores of the device's queries, and minus infinity where a key may not be seen.

    Args:
        program: writes.
        scores: (batch, heads, queries, keys).
        mask: as the operator has it, for these queries and keys; None: there is none.
        keys: which ones.
    """
    whole, local, dim = program.whole, program.local, query_dim(program.local)
    if mask is not None and mask.dtype is DType.BOOL:
        scores = masked(scores, mask, program.builder)
    elif mask is not None:
        scores = program.op("Add", [scores, program.cast(mask, scores.dtype)])
    lies = needed(whole, 0).sharding
    assert lies is not None
    queries = Places(shape_of(local, 0)[dim], shape_of(whole, 0)[dim], lies.axes[dim])
    allowed = visible_keys(whole, local, queries, keys, program.mesh, program.builder)
    return scores if allowed is None else masked(scores, allowed, program.builder)


def _rows(program: ProgramWriter) -> tuple[Sequence[Sequence[Axis]], tuple[int, ...]]:
    """How a number for each query and head lies, and the shape of all of them."""
    node = program.whole
    lies, of = needed(node, 0).sharding, attention_sizes(node)
    assert lies is not None
    cut = [lies.axes[0], lies.axes[head_dim(node)], lies.axes[query_dim(node)], ()]
    return cut, (static(of.batch), static(of.query_heads), static(of.queries), 1)


def _attention(program: ProgramWriter) -> list[Value]:
    of = attention_sizes(program.whole)
    key = split_heads(program, needed(program.local, 1), static(of.head))
    value = split_heads(program, needed(program.local, 2), static(of.value_head))
    keys = Places(key_count(program.local), key_count(program.whole), program.lies.axes[query_dim(program.local)])
    return [attended(program, key, value, keys), *caches(program)]


def attended(program: ProgramWriter, key: Value, value: Value, keys: Places) -> Value:
    """Softmax over all devices' keys as in `.normalization`, and the products with the device's own values.

    Args:
        program: writes.
        key: (batch, key heads, keys, size).
        value: the same.
        keys: which ones the device has.
    """
    key, value = program.wide(key), program.wide(value)
    scores = with_masks(program, scores_of(program, scaled_query(program), key), operand(program.local, 3), keys)
    rows = _rows(program)
    most = program.all_reduce(program.reduced("ReduceMax", scores, (3,)), "max", *rows)
    # A query that may see no key has a sum of zeros, and gets zeros.
    zero, one = (program.constant(number, scores.dtype) for number in (0, 1))
    unseen = program.op("IsInf", [most], {"detect_positive": 0}, dtype=DType.BOOL)
    most = program.op("Where", [unseen, zero, most], shape=most.shape, dtype=scores.dtype)
    exponentials = program.op("Exp", [program.op("Sub", [scores, most])])
    total = program.all_reduce(program.reduced("ReduceSum", exponentials, (3,)), "sum", *rows)
    total = program.op("Where", [unseen, one, total], shape=total.shape, dtype=scores.dtype)
    weights = program.op("Div", [exponentials, total])
    return as_result(program, weighted(program, weights, value))


def weighted(program: ProgramWriter, weights: Value, value: Value) -> Value:
    """(batch, query heads, queries, size of values): the values by their weights."""
    (batch, heads, queries, keys), (_, key_heads, _, size) = weights.shape, value.shape
    rows = (batch, key_heads, heads // key_heads * queries, keys)
    grouped = program.op("Reshape", [weights, program.ints(rows)], shape=rows)
    product = program.op("MatMul", [grouped, value], shape=(*rows[:3], size))
    shape = (batch, heads, queries, size)
    return program.op("Reshape", [product, program.ints(shape)], shape=shape)


def as_result(program: ProgramWriter, value: Value) -> Value:
    """What was computed by heads, as the operator gives it."""
    result = program.local.results[0]
    if head_dim(program.whole) == 2:
        value = turned(program, value, (0, 2, 1, 3))
        value = program.op("Reshape", [value, program.ints(result.shape)], shape=result.shape)
    return program.cast(value, result.dtype)


LOCAL_PROGRAM = LocalProgram(statistics, _attention, key_dims, operand=1)
"""Along the keys, which are reduced."""
