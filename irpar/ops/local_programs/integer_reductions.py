"""Local programs of sums and products of integers over dims that are sharded.

y = ReduceSum(x : i32[8, 256@tp])   each device sums its block in double precision, and these sums are reduced; the
                                    whole becomes i32, where it is beyond i32 the nearest that i32 has

That is how ONNX Runtime reduces integers. Sums of blocks in i32 would not do: one may be beyond i32 though the whole is
not, and what goes beyond by adding up would come out at the other end.
"""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.sharding import Reduction

from ..facts import tensor_of
from .program import Cuts, LocalProgram, ProgramWriter, Sent, Shape

Dims = Callable[[Node], Sequence[int] | None]

INTEGERS = (DType.I32, DType.I64, DType.U32, DType.U64)
"""What is summed so."""


def _reduced(program: ProgramWriter) -> list[Value]:
    op_type, dtype = program.whole.op_type, program.data.dtype
    terms = program.cast(program.data, DType.F64)
    if op_type == "ReduceL1":
        terms = program.op("Abs", [terms])
    elif op_type == "ReduceSumSquare":
        terms = program.op("Mul", [terms, terms])
    how: tuple[str, Reduction] = ("ReduceProd", "prod") if op_type == "ReduceProd" else ("ReduceSum", "sum")
    total = program.all_reduce(program.reduced(how[0], terms, program.dims), how[1])
    if op_type == "ReduceMean":
        count = prod(program.origin.shape[dim] for dim in program.dims)
        total = program.op("Div", [total, program.constant(count, DType.F64)])
    return [program.as_reduced(_saturated(program, total, dtype))]


def _saturated(program: ProgramWriter, value: Value, dtype: DType) -> Value:
    """The value as an integer, or the nearest that there is."""
    limits = np.iinfo(dtype.numpy)
    beyond = float(limits.max) + (0 if dtype.bits > 32 else 1)  # 2**31 or the like, exact in double precision
    most = np.nextafter(beyond, 0)
    bounds = [program.constant(bound, DType.F64) for bound in (limits.min, most)]
    inside = program.cast(program.op("Clip", [value, *bounds]), dtype)
    fits = program.op("Less", [value, program.constant(beyond, DType.F64)], dtype=DType.BOOL)
    largest = program.constant(limits.max, dtype)
    return program.op("Where", [fits, inside, largest], shape=inside.shape, dtype=dtype)


def integer_reduction(dims: Dims) -> LocalProgram:
    """The local program of a reduction of integers; `dims` are those that a node reduces."""

    def dims_of(node: Node) -> Sequence[int] | None:
        return dims(node) if tensor_of(node, 0).dtype in INTEGERS else None

    def sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
        kept = [size for dim, size in enumerate(blocks[0] or ()) if dim not in (dims(node) or ())]
        return [Sent("all_reduce", prod(kept), DType.F64.bits)]

    return LocalProgram(sends, _reduced, dims_of)
