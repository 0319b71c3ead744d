"""What an Attention node is about, whatever the rank of its operands: sizes, and which keys a query may see."""

from dataclasses import dataclass, replace

import numpy as np

from irpar.ir import Builder, Dim, DType, Expr, Node, TensorType, Value
from irpar.ir.dims import exact_div
from irpar.sharding import Axis, Mesh, ceil_div

from .coords import block_start
from .facts import CannotTellError, dims_of, int_attribute, operand, shape_of

MEETS = "all keys for every query"
"""What comes together where places of the sequence are sharded."""


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of an Attention node, whatever the rank of its operands."""

    batch: Dim
    query_heads: Dim
    key_heads: Dim
    queries: Dim
    keys: Dim
    """Those of K and of the past together."""
    head: Dim
    value_head: Dim


def _divided(size: Dim, count: int) -> int | Expr:
    found = None if size is None else exact_div(size, count)
    if found is None:
        raise CannotTellError("the size of a head")
    return found


def attention_sizes(node: Node) -> AttentionSizes:
    """The sizes of an Attention, from operands of three dims or four, and a past that its keys follow.

    Raises:
        CannotTellError: its numbers of heads do not divide its widths.
    """
    q, k, v = (dims_of(node, place) for place in range(3))
    if len(q) == 4:
        sizes = AttentionSizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])
    else:
        query_heads, key_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
        head, value_head = _divided(q[2], query_heads), _divided(v[2], key_heads)
        sizes = AttentionSizes(q[0], query_heads, key_heads, q[1], k[1], head, value_head)
    if operand(node, 4) is None:
        return sizes
    past = dims_of(node, 4)[2]
    keys = None if past is None or sizes.keys is None else sizes.keys + past
    return replace(sizes, keys=keys)


def static(dim: Dim) -> int:
    """A size as a number.

    Raises:
        CannotTellError: it is not known yet.
    """
    if not isinstance(dim, int):
        raise CannotTellError("a symbolic dim")
    return dim


def reads_position(node: Node) -> bool:
    """True where a query's place in the sequence counts: causal masks and windows."""
    windows = (int_attribute(node, "left_window_size", -1), int_attribute(node, "right_window_size", -1))
    return bool(int_attribute(node, "is_causal", 0)) or max(windows) >= 0


def key_count(node: Node) -> int:
    """The keys of K, without those of the past."""
    return shape_of(node, 1)[-2]


def query_dim(node: Node) -> int:
    """The dim of queries in Q and in the result, and that of keys in K and V."""
    return len(shape_of(node, 0)) - 2


def head_dim(node: Node) -> int:
    """The dim of Q, K, V and the result that holds the heads."""
    return 1 if len(shape_of(node, 0)) == 4 else 2


# -- which keys a query may see -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Queries or keys of a device's block.

    Attributes:
        size: how many.
        whole: how many all devices have together.
        axes: that cut them.
        start: where the first of them stands among all, int64; None: where the device's own block starts.
    """

    size: int
    whole: int
    axes: tuple[Axis, ...]
    start: Value | None = None

    def positions(self, mesh: Mesh, builder: Builder, shape: tuple[int, ...], first: int = 0) -> Value:
        """Where they stand among all, counted from `first`: int64."""
        numbers = np.arange(first, first + self.size, dtype=np.int64).reshape(shape)
        found = builder.constant(numbers, "positions")
        parts = mesh.group_size(self.axes)
        if parts == 1:
            return found
        start = self.start or block_start(builder, mesh, self.axes, ceil_div(self.whole, parts))
        return builder.op("Add", [found, start], type=TensorType(DType.I64, shape))


def visible_keys(whole: Node, local: Node, queries: Places, keys: Places, mesh: Mesh, builder: Builder) -> Value | None:
    """Which keys each query may see by its position and by the number of valid keys; None: all.

    Query i stands at i + offset; the offset is the length of the past, or that of the valid keys without the queries.
    A causal mask shows keys up to there, a window those not further away than its sizes.

    Args:
        whole: the node in global view.
        local: its local copy.
        queries: of the device.
        keys: of the device, of K and of the past together.
        mesh: the mesh.
        builder: inserts.

    Returns:
        bool, to be broadcast to (batch, heads, queries, keys).
    """

    def op(op_type: str, a: Value, b: Value, dtype: DType) -> Value:
        shape = np.broadcast_shapes(a.shape, b.shape)
        return builder.op(op_type, [a, b], type=TensorType(dtype, tuple(shape)))

    def number(value: int) -> Value:
        return builder.constant(np.asarray(value, np.int64), f"number_{value}")

    past, valid = operand(whole, 4), operand(local, 6)
    if valid is None and not reads_position(whole):
        return None
    offset = 0 if past is None else past.shape[2]
    query = queries.positions(mesh, builder, (queries.size, 1), offset)
    key = keys.positions(mesh, builder, (1, keys.size))
    rules = []
    if valid is not None:
        shape = TensorType(DType.I64, (valid.shape[0], 1, 1, 1))
        target = builder.constant(np.asarray(shape.shape, np.int64), "shape")
        valid = builder.op("Reshape", [valid, target], type=shape)
        query = op("Add", query, op("Sub", valid, number(queries.whole), DType.I64), DType.I64)
        rules.append(op("Less", key, valid, DType.BOOL))
    left, right = (int_attribute(whole, f"{side}_window_size", -1) for side in ("left", "right"))
    if int_attribute(whole, "is_causal", 0):
        rules.append(op("LessOrEqual", key, query, DType.BOOL))
    if left >= 0:
        rules.append(op("GreaterOrEqual", key, op("Sub", query, number(left), DType.I64), DType.BOOL))
    if right >= 0:
        rules.append(op("LessOrEqual", key, op("Add", query, number(right), DType.I64), DType.BOOL))
    allowed = rules[0]
    for rule in rules[1:]:
        allowed = op("And", allowed, rule, DType.BOOL)
    return allowed


def masked(scores: Value, allowed: Value, builder: Builder) -> Value:
    """Scores, or a mask that is added to them, and minus infinity where a key may not be seen."""
    shape = tuple(np.broadcast_shapes(scores.shape, allowed.shape))
    nothing = builder.constant(np.asarray(-np.inf, scores.dtype.numpy), "nothing")
    return builder.op("Where", [allowed, scores, nothing], type=TensorType(scores.dtype, shape))
