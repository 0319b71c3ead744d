"""What gradients of operators are written with: nodes whose results have types as soon as they are made.

y = Mul(a : [8, 64], b : [64])     a gets Mul(dy, b); b gets ReduceSum(Mul(dy, a), [0]), since it was broadcast
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import UNKNOWN, Builder, Dim, DType, Graph, Node, TensorType, Type, Value, tensor_type
from irpar.ir.graph import Phase

from ..facts import CannotTellError
from ..op_def import definition

OLDEST_OPSET = 18
"""Of ONNX's operators: the first in which all reductions take their axes as an operand."""

NARROW = (DType.F16, DType.BF16)
"""Floats in which sums, squares and counts overflow or lose digits."""

Of = Sequence[Value | None]
"""Gradients: of the results of a node, or of its operands; None where there is none."""


class NoGradientError(Exception):
    """A node has no gradient that irpar can write; the message says why, as part of a sentence."""


def fits(number: "float | np.ndarray[Any, Any]", dtype: DType) -> bool:
    """Whether no number that is finite becomes infinite in a dtype."""
    with np.errstate(over="ignore"):
        made = np.asarray(number).astype(dtype.numpy).astype(np.float64)
    return bool((np.isfinite(made) | ~np.isfinite(number)).all())


class GradientWriter(Builder):
    """Inserts the nodes of a backward pass behind all others of a graph; or those of a forward pass before a node.

    Args:
        graph: where to insert.
        opsets: domain to version for the new nodes; ONNX's own of 18 or later.
        like: the node whose gradient is written.
        before: the node before which; None: behind all others.
        needs: for each operand of it whether its gradient is asked for; None: of all.
        infer: finds result types where the definition of an operator does not.

    Attributes:
        needs: see above.
    """

    def __init__(
        self,
        graph: Graph,
        opsets: Mapping[str, int],
        *,
        before: Node | None = None,
        like: Node | None = None,
        needs: Sequence[bool] | None = None,
        infer: Callable[[Node], Sequence[Type]] | None = None,
    ) -> None:
        super().__init__(graph, opsets, before=before, like=like)
        self.infer = infer
        self.phase: Phase = "backward" if before is None else "forward"
        count = len(like.operands) if like is not None else 0
        self.needs: tuple[bool, ...] = tuple(needs) if needs is not None else (True,) * count

    def node(
        self,
        op_type: str,
        operands: Of,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        results: int | Sequence[Value] = 1,
    ) -> Node:
        """See `Builder.node`; the results get the types that the operator's definition finds for them."""
        made = super().node(op_type, operands, attributes, domain=domain, results=self._named(results))
        made.phase = self.phase
        if any(value.type == UNKNOWN for value in made.results):
            self._set_types(made)
        return made

    def _named(self, results: int | Sequence[Value]) -> Sequence[Value]:
        """Results that have a name: models have no value that is called so."""
        found = [Value() for _ in range(results)] if isinstance(results, int) else results
        for value in found:
            value.name = value.name or self.phase
        return found

    def _set_types(self, made: Node) -> None:
        known = definition(made)
        types = known.infer(made) if known is not None and known.infer is not None else None
        if types is None and self.infer is not None:
            types = self.infer(made)
        for value, type_ in zip(made.results, types or (), strict=bool(types)):
            if value.type == UNKNOWN:
                value.type = type_

    # -- numbers ----------------------------------------------------------------------------------------------------

    def number(self, number: float, like: Value) -> Value:
        """A scalar of another value's dtype.

        Raises:
            NoGradientError: it is too large for that.
        """
        if not fits(number, like.dtype):
            raise NoGradientError(f"it takes the number {number:g}, which is infinite as {like.dtype}")
        return self.constant(np.asarray(number).astype(like.dtype.numpy), "number")

    def bound(self, number: float, like: Value) -> Value:
        """A scalar of another value's dtype that is compared with it: of that dtype's greatest, where it is beyond."""
        if not fits(number, like.dtype):
            number = math.copysign(float(ml_dtypes.finfo(like.dtype.numpy).max), number)
        return self.number(number, like)

    def ints(self, numbers: Sequence[int]) -> Value:
        """A list of int64."""
        return self.constant(np.asarray(list(numbers), np.int64), "numbers")

    def filled(self, number: float, like: Value) -> Value:
        """A tensor of another one's type, every element a number."""
        return self.op("Expand", [self.number(number, like), self.shape_of(like)], type=like.type)

    def zeros(self, like: Value) -> Value:
        """A tensor of zeros of another one's type."""
        return self.filled(0, like)

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _operands(self, values: Sequence[Value | float]) -> list[Value]:
        like = next(value for value in values if isinstance(value, Value))
        return [value if isinstance(value, Value) else self.number(value, like) for value in values]

    def add(self, left: Value | float, right: Value | float) -> Value:
        """left + right."""
        return self.op("Add", self._operands([left, right]))

    def sub(self, left: Value | float, right: Value | float) -> Value:
        """left - right."""
        return self.op("Sub", self._operands([left, right]))

    def mul(self, left: Value | float, right: Value | float) -> Value:
        """left * right."""
        return self.op("Mul", self._operands([left, right]))

    def div(self, left: Value | float, right: Value | float) -> Value:
        """left / right."""
        return self.op("Div", self._operands([left, right]))

    def neg(self, value: Value) -> Value:
        """-value."""
        return self.op("Neg", [value])

    def where(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        """yes where the condition holds, else no; at least one of them a value."""
        return self.op("Where", [condition, *self._operands([yes, no])])

    def share(self, value: Value, count: "float | np.ndarray[Any, Any] | Value") -> Value:
        """value / count; where the dtype of the value is too narrow for the count, divided in float32.

        A mean of 65520 numbers of float16 has a count that is infinite there.
        """
        if not isinstance(count, Value) and fits(count, value.dtype):
            return self.op("Div", [value, self.constant(np.asarray(count).astype(value.dtype.numpy), "count")])
        wide = self.widened(value)
        if not isinstance(count, Value):
            count = self.constant(np.asarray(count).astype(wide.dtype.numpy), "count")
        return self.cast(self.div(wide, self.cast(count, wide.dtype)), value.dtype)

    def compare(self, op_type: str, left: Value | float, right: Value | float) -> Value:
        """A comparison (Greater, Equal, LessOrEqual ...)."""
        like = next(value for value in (left, right) if isinstance(value, Value))
        return self.op(op_type, [v if isinstance(v, Value) else self.bound(v, like) for v in (left, right)])

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in another dtype."""
        return value if value.dtype is dtype else self.op("Cast", [value], {"to": dtype.value})

    def widened(self, value: Value) -> Value:
        """Narrow floats as float32: squares of float16 are infinite from 256 on, sums of many are inexact."""
        return self.cast(value, self.wide(value.dtype))

    @staticmethod
    def wide(dtype: DType) -> DType:
        """The dtype in which sums and squares of one are computed."""
        return DType.F32 if dtype in NARROW else dtype

    def sum(self, value: Value, axes: Sequence[int], keep: bool = True) -> Value:
        """The sum over axes; over none the value itself."""
        if not axes:
            return value
        return self.op("ReduceSum", [value, self.ints(axes)], {"keepdims": int(keep)})

    def einsum(self, operands: Sequence[Value], equation: str, *, type: Type = UNKNOWN) -> Value:
        """An Einsum; of bfloat16, of which ONNX has none, in float32."""
        dtype = operands[0].dtype
        if dtype is not DType.BF16:
            return self.op("Einsum", operands, {"equation": equation}, type=type)
        found = tensor_type(type)
        wide = UNKNOWN if found is None else TensorType(DType.F32, found.shape)
        made = self.op("Einsum", [self.cast(each, DType.F32) for each in operands], {"equation": equation}, type=wide)
        return self.cast(made, dtype)

    # -- shapes -----------------------------------------------------------------------------------------------------

    def dims(self, value: Value) -> tuple[Dim, ...]:
        """The dims of a tensor, symbols included.

        Raises:
            CannotTellError: its rank is not known.
        """
        found = tensor_type(value.type)
        if found is None or found.shape is None:
            raise CannotTellError(f"the rank of %{value.name}")
        return found.shape

    def shape_of(self, value: Value) -> Value:
        """The sizes of a tensor as int64[rank]: numbers where they are known, else found when the model runs."""
        found = tensor_type(value.type)
        if found is not None and found.is_static:
            return self.ints(found.static_shape)
        return self.op("Shape", [value])

    def size_of(self, value: Value, dim: int) -> Value:
        """The size of a tensor along a dim as int64[1]."""
        size = self.dims(value)[dim]
        if isinstance(size, int):
            return self.ints([size])
        rank = len(self.dims(value))
        return self.op("Shape", [value], {"start": dim % rank, "end": dim % rank + 1})

    def listed(self, sizes: Sequence[Value]) -> Value:
        """Sizes, as from `size_of`, in one list; numbers where all are known."""
        numbers = [size.data for size in sizes]
        if all(data is not None for data in numbers):
            return self.ints([int(number) for data in numbers if data is not None for number in data.numpy()])
        return self.op("Concat", sizes, {"axis": 0})

    def reshaped(self, value: Value, sizes: "Sequence[int | tuple[Value, int]]") -> Value:
        """The value with dims of these sizes: numbers (one may be -1), or that of a dim of another value."""
        given = [self.ints([size]) if isinstance(size, int) else self.size_of(*size) for size in sizes]
        dims = [size if isinstance(size, int) else self.dims(size[0])[size[1]] for size in sizes]
        type_ = value.tensor_type.with_shape(tuple(None if dim == -1 else dim for dim in dims))
        target = self.listed(given)
        return self.reshape(value, target, UNKNOWN if target.data is not None else type_)

    def reshape(self, value: Value, shape: Value | Sequence[int], type: Type = UNKNOWN) -> Value:
        """The value with another shape: numbers, or what `shape_of` gives."""
        target = shape if isinstance(shape, Value) else self.ints(shape)
        return self.op("Reshape", [value, target], {"allowzero": 1}, type=type)

    def shaped_as(self, value: Value, other: Value) -> Value:
        """The value reshaped to the shape of another, unless it is known to have that."""
        if value.type == other.type and value.is_static:
            return value
        type_ = tensor_type(other.type)
        assert type_ is not None
        return self.reshape(value, self.shape_of(other), TensorType(value.dtype, type_.shape))

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Dims in another order."""
        if list(order) == sorted(order):
            return value
        return self.op("Transpose", [value], {"perm": tuple(order)})

    def swapped(self, value: Value) -> Value:
        """The last two dims swapped."""
        rank = len(self.dims(value))
        return self.transpose(value, (*range(rank - 2), rank - 1, rank - 2))

    def scattered(
        self,
        op_type: str,
        shape: Value,
        index: Value,
        updates: Value,
        attributes: Mapping[str, Any] | None = None,
        *,
        type: Type = UNKNOWN,
    ) -> Value:
        """Zeros with updates added by ScatterND or ScatterElements; narrow floats are added up as float32."""
        dtype = updates.dtype
        wide = self.wide(dtype)
        zeros = self.op("Expand", [self.constant(np.zeros((), wide.numpy), "number"), shape])
        made = self.op(op_type, [zeros, index, self.cast(updates, wide)], {**(attributes or {}), "reduction": "add"})
        found = tensor_type(type)
        if found is not None:
            made.type = TensorType(wide, found.shape)
        return self.cast(made, dtype)

    def pad(
        self,
        value: Value,
        pads: "Mapping[int, tuple[int | Value, int | Value]]",
        filler: Value | None = None,
        *,
        type: Type = UNKNOWN,
    ) -> Value:
        """The value with zeros, or a filler, before and after along some axes: numbers, or int64[1].

        All dims are named: of a Pad that names some, ONNX Runtime's optimizer makes another one where it moves a
        Transpose past it (1.32).
        """
        rank = len(self.dims(value))
        flat = [pads.get(dim, (0, 0))[side] for side in (0, 1) for dim in range(rank)]
        listed = self.listed([self.ints([number]) if isinstance(number, int) else number for number in flat])
        return self.op("Pad", [value, listed, *([] if filler is None else [filler])], type=type)

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Dims of size 1 more; axes of the result."""
        return self.op("Unsqueeze", [value, self.ints(axes)]) if axes else value

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Dims of size 1 fewer."""
        return self.op("Squeeze", [value, self.ints(axes)]) if axes else value

    def sum_to(self, value: Value, like: Value) -> Value:
        """The sum over what broadcasting repeated: a value of the shape of `like`, which broadcast to it.

        Which dims these are is found when the model runs, where the types do not tell.
        """
        given, wanted = tensor_type(value.type), tensor_type(like.type)
        assert wanted is not None
        if given is None or given.shape is None or wanted.shape is None:
            return self._sum_to_computed(value, like)
        more = len(given.shape) - len(wanted.shape)
        axes = list(range(more))
        for dim, (before, after) in enumerate(zip(given.shape[more:], wanted.shape, strict=True), more):
            if after == 1 and before != 1:
                axes.append(dim)
            elif after is None or after != before:
                return self._sum_to_computed(value, like)
        if not axes:
            return value
        if axes == list(range(more)):
            return self.sum(value, axes, keep=False)
        return self.shaped_as(self.sum(value, axes), like)

    def _sum_to_computed(self, value: Value, like: Value) -> Value:
        """The same, where dims of size 1 are found when the model runs: those are summed, and all that are missing."""
        ranks = [self.op("Shape", [self.op("Shape", [each])]) for each in (value, like)]
        ones = self.op("Expand", [self.ints([1]), self.op("Sub", ranks)])
        padded = self.op("Concat", [ones, self.op("Shape", [like])], {"axis": 0})
        return self.reshape(self._summed_where_one(value, padded), self.op("Shape", [like]), like.type)

    def _summed_where_one(self, value: Value, sizes: Value) -> Value:
        """The sum over the dims for which a list of sizes has 1; they stay."""
        single = self.op("NonZero", [self.op("Equal", [sizes, self.ints([1])])])
        axes = self.op("Squeeze", [single, self.ints([0])])
        return self.op("ReduceSum", [value, axes], {"keepdims": 1, "noop_with_empty_axes": 1})

    def fit_to(self, value: Value, like: Value) -> Value:
        """The sum over dims of which the other has size 1, repeated along those of which the value has; of one rank.

        Which dims these are is found when the model runs, where the types do not tell.
        """
        pairs = list(enumerate(zip(self.dims(value), self.dims(like), strict=True)))
        value = self.sum(value, [dim for dim, (more, one) in pairs if one == 1 and more != 1])
        if all(more is not None and one in (1, more) for _, (more, one) in pairs):
            return value
        if any(more is None or more not in (1, one) for _, (more, one) in pairs if not isinstance(one, int)):
            value = self._summed_where_one(value, self.op("Shape", [like]))
        return self.op("Expand", [value, self.shape_of(like)], type=like.type)

    def broadcast_to(self, value: Value, like: Value) -> Value:
        """The value repeated to the shape of another."""
        if value.type == like.type and value.is_static:
            return value
        return self.op("Expand", [value, self.shape_of(like)], type=like.type)

    def inside(self, graph: Graph) -> "GradientWriter":
        """Writes in a graph that a node of this one will hold."""
        made = GradientWriter(graph, self.opsets, like=self.like, infer=self.infer)
        made.phase = self.phase
        return made

    # -- answers ----------------------------------------------------------------------------------------------------

    def each(self, *gradients: Callable[[], Value | None] | None) -> list[Value | None]:
        """One gradient for each operand, made only where it is asked for; those that are left out have none."""
        made = [
            make() if make is not None and wanted else None for make, wanted in zip(gradients, self.needs, strict=False)
        ]
        return [*made, *[None] * (len(self.needs) - len(made))]


def safe_result(node: Node, index: int = 0) -> Value:
    """A result as gradients read it: without the NaNs that the model itself takes out again.

    y = Softmax(x); z = Where(IsNaN(y), 0, y)      the gradient of Softmax reads z: where a row of y is NaN, nothing
                                                   flows into it, and 0 * NaN would be NaN
    """
    value = node.results[index]
    tests = {user.result for user in value.users if user.identity == ("", "IsNaN")}
    others = [user for user in value.users if user.identity != ("", "IsNaN")]
    if len(others) == 1 and others[0].identity == ("", "Where"):
        condition, _, no = others[0].operands
        if condition in tests and no is value and others[0].result.type == value.type:
            return others[0].result
    return value
