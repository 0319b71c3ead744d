"""TensorScatter: a cache of which some places of a sequence are written, for each batch element from its own on."""

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Value

from .block_indices import is_within, number
from .coords import start_of_block
from .facts import axis_attribute, needed, operand, same_type, shape_of, tensor_of, text_attribute
from .gradients import indexing as gradients
from .local import typed_like
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

_CHOSEN_AS = {DType.BF16: DType.F32, **dict.fromkeys((DType.I8, DType.U8, DType.I16, DType.U16), DType.I32)}
"""Of which not every engine has a Where: what is chosen between is wider."""
_CHOSEN = frozenset({DType.F16, DType.F32, DType.F64, DType.I32, DType.I64, *_CHOSEN_AS})


def _rule(node: Node) -> FactorRule:
    """All dims of the cache pass; the places of the update are whole, and each device writes those of its block."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -2)
    kind = Kind.PASS if tensor_of(node, 0).dtype in _CHOSEN else Kind.REPLICATE
    rule = RuleBuilder()
    dims = [rule.dims([size], kind if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    update: list[DimFactors] = [() if dim == axis else factors for dim, factors in enumerate(dims)]
    starts = [[dims[0]]] if operand(node, 2) is not None else []
    return rule.done([dims, update, *starts], [dims])


def _localize(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Write what falls into the block.

    cache : [1, 8, 4096@sp, 64], update : [1, 8, 1, 64] at 2500, over sp=4: the third device writes its place 452, the
    others write their last or their first as it is
    """
    size = shape_of(whole_node, 0)
    axis = axis_attribute(whole_node, len(size), -2)
    start = start_of_block(needed(whole_node, 0).sharding, axis, size[axis], builder)
    if start is None:
        return None
    written = _Written(local, axis, size[axis], start, builder)
    return [written.run() if written.is_one_run else written.everywhere()]


class _Written:
    """Writes one node for a block.

    Args:
        local: the node.
        axis: the dim of the sequence.
        size: places of all blocks.
        start: the first of the block.
        builder: inserts before the node.
    """

    def __init__(self, local: Node, axis: int, size: int, start: Value, builder: Builder) -> None:
        self.local, self.axis, self.size, self.start, self.builder = local, axis, size, start, builder
        self.past, self.update = needed(local, 0), needed(local, 1)
        self.rows, self.count = self.past.shape[axis], self.update.shape[axis]
        self.is_circular = text_attribute(local, "mode", "linear") == "circular"
        given = operand(local, 2)
        batch = self.update.shape[0]
        self.first = builder.constant(np.zeros(batch, np.int64), "first") if given is None else given

    @property
    def is_one_run(self) -> bool:
        """Whether what falls into the block stands side by side, and is no more than it holds."""
        return self.count <= self.rows and not (self.is_circular and self.count > 1)

    def run(self) -> Value:
        """As many places side by side as the update has: of those that it does not write what they hold."""
        first = self._op("Mod", self.first, number(self.builder, self.size)) if self.is_circular else self.first
        most = number(self.builder, self.rows - self.count)
        begin = self._op("Max", self._op("Min", self._op("Sub", first, self.start), most), number(self.builder, 0))
        steps = self.builder.constant(np.arange(self.count, dtype=np.int64)[None], "steps")
        place = self._op("Add", self._column(begin), steps)
        of_update = self._op("Sub", self._op("Add", place, self.start), self._column(first))
        is_new = is_within(of_update, self.count, self.builder)
        new = self.update if self.count == 1 else self._along(self.update, self._or_first(of_update, is_new))
        chosen = self._chosen(is_new, new, self._along(self.past, place))
        attributes = {"axis": self.axis, "mode": "linear"}
        return typed_like(self.local.result, "TensorScatter", [self.past, chosen, begin], attributes, self.builder)

    def everywhere(self) -> Value:
        """Each place of the block: what is written there, or what it holds."""
        own = self.builder.constant(np.arange(self.rows, dtype=np.int64)[None], "places")
        of_update = self._op("Sub", self._op("Add", own, self.start), self._column(self.first))
        if self.is_circular:
            of_update = self._op("Mod", of_update, number(self.builder, self.size))
        is_new = is_within(of_update, self.count, self.builder)
        new = self._along(self.update, self._or_first(of_update, is_new))
        return self._chosen(is_new, new, self.past)

    def _op(self, op_type: str, left: Value, right: Value) -> Value:
        """A node of two i64 operands."""
        shape = np.broadcast_shapes(left.shape, right.shape)
        return self.builder.op(op_type, [left, right], type=TensorType(DType.I64, shape))

    def _column(self, rows: Value) -> Value:
        shape = (rows.shape[0], 1)
        return self.builder.op("Reshape", [rows, number(self.builder, shape)], type=TensorType(DType.I64, shape))

    def _or_first(self, place: Value, is_there: Value) -> Value:
        return self.builder.op("Where", [is_there, place, number(self.builder, 0)], type=place.type)

    def _in_dims(self, rows: Value) -> Value:
        """Numbers [batch, places] as they stand in the cache: [batch, 1, .., places, .., 1]."""
        shape = [1] * len(self.past.shape)
        shape[0], shape[self.axis] = rows.shape
        type_ = TensorType(rows.dtype, tuple(shape))
        return self.builder.op("Reshape", [rows, number(self.builder, shape)], type=type_)

    def _along(self, data: Value, place: Value) -> Value:
        """The elements of some places of each batch element."""
        shape = tuple(place.shape[1] if dim == self.axis else size for dim, size in enumerate(data.shape))
        index_type = TensorType(DType.I64, shape)
        index = self.builder.op("Expand", [self._in_dims(place), number(self.builder, shape)], type=index_type)
        type_ = TensorType(data.dtype, shape)
        return self.builder.op("GatherElements", [data, index], {"axis": self.axis}, type=type_)

    def _chosen(self, is_new: Value, new: Value, old: Value) -> Value:
        """What is new, and what was there."""
        kind = _CHOSEN_AS.get(old.dtype, old.dtype)
        operands = [self._in_dims(is_new), self._cast(new, kind), self._cast(old, kind)]
        chosen = self.builder.op("Where", operands, type=TensorType(kind, old.shape))
        return self._cast(chosen, old.dtype)

    def _cast(self, value: Value, kind: DType) -> Value:
        if value.dtype is kind:
            return value
        return self.builder.op("Cast", [value], {"to": kind.value}, type=TensorType(kind, value.shape))


define(OpDef("", "TensorScatter", same_type, _rule, localize=_localize, gradient=gradients.of_tensor_scatter))
