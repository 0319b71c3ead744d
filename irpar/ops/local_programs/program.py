"""Local programs: how operators run on blocks of what their rules need whole, with communication of their own.

y = Softmax(x : [8, 256@tp])      each device takes the maximum of its block; all_reduce(max) of [8, 1]; exponentials;
                                  their sum; all_reduce(sum) of [8, 1]; quotients. Twice 8 numbers are sent, no rows
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import DOMAIN, Builder, DType, Node, TensorType, Value
from irpar.sharding import Axis, Reduction, Sharding, local_shape

from ..coords import block_index, start_of_block
from ..facts import int_attribute, needed
from ..rule import FactorRule

FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
"""What statistics are taken of."""

Shape = tuple[int, ...]
Cuts = Mapping[int, int]
"""Dim to the number of blocks, for those along which a local program works and which are sharded."""


def widened(dtype: DType) -> DType:
    """What is computed and sent for a type: narrow floats as f32, as ONNX Runtime computes them."""
    return DType.F32 if dtype in (DType.F16, DType.BF16) else dtype


def with_size(shape: Sequence[int], dim: int, size: int) -> Shape:
    """A shape with another size along one dim."""
    return tuple(size if at == dim else length for at, length in enumerate(shape))


@dataclass(frozen=True)
class Sent:
    """A collective of a local program, before it is made.

    Attributes:
        kind: as plan.json calls it.
        elements: of the operand that one device holds, of uneven blocks the largest.
        bits: of an element.
        dim: it runs over the axes that cut this dim; None: over those of all dims together.
    """

    kind: str
    elements: int
    bits: int
    dim: int | None = None

    @property
    def bytes(self) -> int:
        """Of the operand."""
        return -(-self.elements * self.bits // 8)


@dataclass(frozen=True)
class LocalProgram:
    """The local program of an operator, for factors that its rule needs whole.

    Attributes:
        sends: its collectives for a node, given the (largest) block of each operand, and into how many blocks each of
            the dims is sharded.
        write: writes it; gives one value for each result of the node, or None where it only changed operands and
            attributes of the local node, which stays.
        dims: the dims of an operand along which it works; the factors that stand there may be cut. None: this node has
            none. Factors that are reduced may be among them: results are then partial, and the program does what must
            come before.
        operand: the number of the operand that has these dims, or what tells it of a node.
        rule: the rule that it follows, where that is not the one of the operator: it cuts what that one cannot, as
            places of queries and of keys by the same axes. Only how a node runs is chosen by it; completion follows
            the rule of the operator.
        manner: how it works, in words, where that has a name: "in a ring".
        reads_elements: whether what it sends, or along which dims it works, may depend on elements of constant operands
            or on who reads its results, not on types and attributes alone; nodes are then never taken to be alike.
    """

    sends: "Callable[[Node, Sequence[Shape | None], Cuts], Sequence[Sent]]"
    write: "Callable[[ProgramWriter], Sequence[Value] | None]"
    dims: Callable[[Node], Sequence[int] | None]
    operand: "int | Callable[[Node], int]" = 0
    rule: Callable[[Node], FactorRule | None] | None = None
    manner: str = ""
    reads_elements: bool = True

    def operand_of(self, node: Node) -> int:
        """The number of the operand that has the dims along which it works."""
        return self.operand if isinstance(self.operand, int) else self.operand(node)


class ProgramWriter:
    """Writes the local program of one node.

    Args:
        program: of the operator.
        whole: the node in global view: whole types, and shardings.
        local: its local copy.
        builder: inserts before it.
        axes: the mesh axes that cut the factors along which the program works.
        ranks: that run the local graph.
        rule: the rule of the node.
        factors: per factor of the rule the axes that cut it.

    Attributes:
        made: the collectives, for whoever numbers and explains them.
    """

    def __init__(
        self,
        program: LocalProgram,
        whole: Node,
        local: Node,
        builder: Builder,
        axes: Sequence[Axis],
        ranks: Sequence[int],
        rule: FactorRule,
        factors: Sequence[Sequence[Axis]],
    ) -> None:
        self.whole = whole
        self.local = local
        self.builder = builder
        self.axes = tuple(axes)
        self.dims = tuple(program.dims(whole) or ())
        self.rule = rule
        self.factors = factors
        self.data = needed(local, program.operand_of(whole))
        self.origin = needed(whole, program.operand_of(whole))
        assert self.origin.sharding is not None
        self.lies = self.origin.sharding
        self.mesh = self.lies.mesh
        self.parts = self.mesh.group_size(self.axes)
        self.ranks = tuple(ranks)
        self.made: list[Node] = []

    # -- what is computed on one device -----------------------------------------------------------------------------

    def op(
        self,
        op_type: str,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: DType | None = None,
    ) -> Value:
        """A node; its result is as the first operand but for what is given."""
        first = operands[0]
        assert first is not None
        type_ = TensorType(dtype or first.dtype, tuple(first.shape if shape is None else shape))
        return self.builder.op(op_type, operands, attributes, type=type_)

    def constant(self, number: float, dtype: DType) -> Value:
        """A scalar."""
        return self.builder.constant(np.asarray(number, dtype.numpy), "number")

    def ints(self, numbers: Sequence[int]) -> Value:
        """A list of int64."""
        return self.builder.constant(np.asarray(list(numbers), np.int64), "numbers")

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in another type."""
        if value.dtype is dtype:
            return value
        return self.op("Cast", [value], {"to": dtype.value}, dtype=dtype)

    def wide(self, value: Value) -> Value:
        """The value in the type in which it is computed."""
        return self.cast(value, widened(value.dtype))

    def start(self, dim: int) -> Value:
        """Where the device's block of the operand starts along a dim."""
        found = start_of_block(self.lies, dim, self.origin.shape[dim], self.builder)
        assert found is not None, "a local program works along a dim that is sharded"
        return found

    def of_place(self, table: "np.ndarray[Any, Any]", dim: int, name: str) -> Value:
        """The row of a table that has one for each block of the operand along a dim."""
        known = self.builder.constant(table, name)
        place = block_index(self.builder, self.mesh, self.lies.axes[dim])
        return self.op("Gather", [known, place], {"axis": 0}, shape=table.shape[1:])

    def joined(self, values: Sequence[Value], dim: int) -> Value:
        """Values side by side along a dim."""
        if len(values) == 1:
            return values[0]
        total = sum(value.shape[dim] for value in values)
        return self.op("Concat", values, {"axis": dim}, shape=with_size(values[0].shape, dim, total))

    def filled(self, like: Value, dim: int, size: int, number: "np.ndarray[Any, Any] | int") -> Value:
        """A value like another but for its size along a dim, every element a number."""
        # ONNX Runtime expands no bfloat16.
        dtype = DType.F32 if like.dtype is DType.BF16 else like.dtype
        known = self.builder.constant(np.asarray(number, dtype.numpy), "filler")
        shape = with_size(like.shape, dim, size)
        return self.cast(self.op("Expand", [known, self.ints(shape)], shape=shape, dtype=dtype), like.dtype)

    def as_reduced(self, value: Value) -> Value:
        """A value whose `dims` have size 1 as a reduction gives it: without them, unless its `keepdims` says so."""
        if int_attribute(self.whole, "keepdims", 1):
            return value
        shape = tuple(size for dim, size in enumerate(value.shape) if dim not in self.dims)
        return self.op("Squeeze", [value, self.ints(self.dims)], shape=shape)

    def reduced(self, op_type: str, value: Value, dims: Sequence[int]) -> Value:
        """A reduction of the block; its dims stay with size 1."""
        shape = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
        since = 13 if op_type == "ReduceSum" else 18
        if self.builder.opsets.get("", since) >= since:
            return self.op(op_type, [value, self.ints(dims)], {"keepdims": 1}, shape=shape)
        return self.op(op_type, [value], {"keepdims": 1, "axes": tuple(dims)}, shape=shape)

    # -- what is sent -----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        value: Value,
        reduce: Reduction,
        cut: Sequence[Sequence[Axis]] | None = None,
        shape: Sequence[int] | None = None,
        *,
        over: Sequence[Axis] | None = None,
        pending: Sequence[Axis] = (),
    ) -> Value:
        """The reduction of a value over the devices that hold blocks of what the program works along.

        Args:
            value: what this device has.
            reduce: how values combine.
            cut: per dim of the value the axes that cut it; None: it is as the operand, but that `dims` have size 1.
            shape: of the value for all devices together.
            over: some of the axes that the program works along; None: all.
            pending: the axes over which it stays partial.
        """
        over = self.axes if over is None else over
        if cut is None:
            cut = [() if dim in self.dims else axes for dim, axes in enumerate(self.lies.axes)]
        if shape is None:
            shape = [1 if dim in self.dims else size for dim, size in enumerate(self.origin.shape)]
        after, shape = Sharding.of_axes(self.mesh, cut), tuple(shape)
        value.sharding, value.global_shape = after.with_partial((*over, *pending), reduce), shape
        after = after.with_partial(pending, reduce)
        return self._collective("AllReduce", value, {"reduce": reduce}, value.shape, after, shape, over)

    def all_gather(self, value: Value, dim: int) -> Value:
        """The blocks of all devices side by side along a dim, of which each holds as much."""
        cut = list(self.lies.axes)
        before = Sharding.of_axes(self.mesh, [self.axes if at == dim else axes for at, axes in enumerate(cut)])
        after = Sharding.of_axes(self.mesh, [() if at == dim else axes for at, axes in enumerate(cut)])
        total = value.shape[dim] * self.parts
        whole = with_size(self.origin.shape, dim, total)
        value.sharding, value.global_shape = before, whole
        return self._collective("AllGather", value, {"dim": dim}, with_size(value.shape, dim, total), after, whole)

    def permute(self, value: Value, dim: int, pairs: Sequence[tuple[int, int]], of: Value | None = None) -> Value:
        """What the first device of each pair has along a dim, on the second; zeros where nothing comes.

        Args:
            value: what this device has.
            dim: along which the blocks lie.
            pairs: (sender, receiver), positions along the axes that cut the dim.
            of: the value in global view as which it lies; None: the operand along which the program works.
        """
        origin = self.origin if of is None else of
        lies = origin.sharding
        assert lies is not None
        block = local_shape(lies, origin.shape, self.mesh.coords(self.ranks[0]))
        kept = [at == dim or value.shape[at] == block[at] for at in range(len(block))]
        axes = [cut if keep else () for cut, keep in zip(lies.axes, kept, strict=True)]
        sizes = zip(origin.shape, value.shape, kept, strict=True)
        whole = [size if keep else mine for size, mine, keep in sizes]
        whole[dim] = value.shape[dim] * lies.dim_parts(dim)
        after, shape = Sharding.of_axes(self.mesh, axes), tuple(whole)
        is_new = value.sharding is None and value.node in self.builder.made
        if not is_new and (value.sharding, value.global_shape) != (after, shape):
            value = self.op("Identity", [value])  # What is there already says how it is sharded by itself.
        value.sharding, value.global_shape = after, shape
        flat = [position for pair in pairs for position in pair]
        return self._collective(
            "CollectivePermute", value, {"pairs": flat}, value.shape, after, shape, lies.axes[dim], origin
        )

    def _collective(
        self,
        op_type: str,
        value: Value,
        attributes: dict[str, Any],
        shape: Shape,
        after: Sharding,
        whole: Shape,
        axes: Sequence[Axis] | None = None,
        origin: Value | None = None,
    ) -> Value:
        attributes |= {"axes": [str(axis) for axis in (self.axes if axes is None else axes)], "id": 0}
        type_ = TensorType(value.dtype, shape)
        result = self.builder.op(op_type, [value], attributes, type=type_, domain=DOMAIN)
        result.sharding, result.global_shape = after, whole
        result.source = (origin or self.origin).source
        if value.node in self.builder.made:
            value.source = result.source
        assert result.node is not None
        self.made.append(result.node)
        return result
