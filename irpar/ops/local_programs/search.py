"""Local programs of ArgMax, ArgMin, Hardmax, TopK, CumSum and CumProd over a dim that devices hold in blocks."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import DType, Node, TensorType, Value
from irpar.sharding import ceil_div

from ..coords import block_index
from ..facts import axis_attribute, axis_of, int_attribute, needed_ints, result_shape, shape_of, tensor_of
from ..neutral import neutral
from .program import FLOATS, Cuts, LocalProgram, ProgramWriter, Sent, Shape, widened, with_size

_PLACE = DType.I32
"""In which places are sent: half the bytes of ONNX's int64."""
_NUMBERS = (*FLOATS, DType.I32, DType.I64)
"""What ONNX Runtime takes the greatest of and sums."""


def _axis(node: Node, default: int) -> tuple[int] | None:
    if tensor_of(node, 0).dtype not in _NUMBERS:
        return None
    return (axis_attribute(node, len(shape_of(node, 0)), default),)


def _rows(shape: Shape | None, cuts: Cuts) -> int:
    """How many there are along the axis, the only dim that is sharded."""
    return prod(size for dim, size in enumerate(shape or ()) if dim not in cuts)


# -- ArgMax, ArgMin, Hardmax ----------------------------------------------------------------------------------------


def _arg_dims(node: Node) -> Sequence[int] | None:
    return _axis(node, 0)


def _hardmax_dims(node: Node) -> Sequence[int] | None:
    return _axis(node, -1) if node.version >= 13 else None


def _sends_best(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    """Each device's best of each row, and their places."""
    return _sends_with_places(node, _rows(blocks[0], cuts))


def _sends_with_places(node: Node, count: int) -> list[Sent]:
    return [Sent("all_gather", count, bits) for bits in (widened(tensor_of(node, 0).dtype).bits, _PLACE.bits)]


def _best_place(program: ProgramWriter, op_type: str, *, last: int = 0) -> Value:
    """The place of the greatest or least in the whole axis, which stays with size 1: int64.

    Blocks follow each other in order, so that the first (or last) of equal ones is that of the first (or last) block.
    """
    (axis,) = program.dims
    data = program.wide(program.data)
    best = program.reduced("ReduceMax" if op_type == "ArgMax" else "ReduceMin", data, program.dims)
    search = {"axis": axis, "keepdims": 1, "select_last_index": last}
    place = program.op(op_type, [data], search, shape=best.shape, dtype=DType.I64)
    place = program.cast(program.op("Add", [place, program.start(axis)]), _PLACE)
    bests, places = program.all_gather(best, axis), program.all_gather(place, axis)
    winner = program.op(op_type, [bests], search, shape=best.shape, dtype=DType.I64)
    found = program.op("GatherElements", [places, winner], {"axis": axis}, shape=best.shape)
    return program.cast(found, DType.I64)


def _arg(program: ProgramWriter) -> list[Value]:
    node = program.whole
    found = _best_place(program, node.op_type, last=int_attribute(node, "select_last_index", 0))
    return [program.as_reduced(found)]


def _hardmax(program: ProgramWriter) -> list[Value]:
    """1 where the greatest is, for each row the first."""
    (axis,) = program.dims
    here = program.op("Sub", [_best_place(program, "ArgMax"), program.start(axis)])
    size = program.data.shape[axis]
    trailing = [1] * (len(program.data.shape) - axis - 1)
    places = program.builder.constant(np.arange(size, dtype=np.int64).reshape([size, *trailing]), "places")
    hit = program.op("Equal", [here, places], shape=program.data.shape, dtype=DType.BOOL)
    return [program.cast(hit, program.data.dtype)]


# -- TopK -----------------------------------------------------------------------------------------------------------


def _top_k_dims(node: Node) -> Sequence[int] | None:
    return _axis(node, -1) if node.version >= 11 else None


def _candidates(node: Node, axis: int, parts: int) -> int:
    """How many elements of its block each device names: k, or all."""
    return min(result_shape(node)[axis], ceil_div(shape_of(node, 0)[axis], parts))


def _sends_candidates(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    ((axis, parts),) = cuts.items()
    return _sends_with_places(node, _rows(blocks[0], cuts) * _candidates(node, axis, parts))


def _top_k(program: ProgramWriter) -> list[Value]:
    """The best of each block, then the best of these. Equal ones come in the order of their places, as ONNX says."""
    (axis,) = program.dims
    node, dtype = program.whole, program.data.dtype
    largest = int_attribute(node, "largest", 1)
    data = program.wide(program.data)
    count = _candidates(node, axis, program.parts)
    mine = min(count, data.shape[axis])
    values, places = _searched_block(program, data, mine, {"axis": axis, "largest": largest, "sorted": 1})
    places = program.cast(program.op("Add", [places, program.start(axis)]), _PLACE)
    if mine < count:  # A shorter block has less to offer than the others.
        worst = neutral("max" if largest else "min", data.dtype)
        values = program.joined([values, program.filled(values, axis, count - mine, worst)], axis)
        none = program.filled(places, axis, count - mine, program.origin.shape[axis])
        places = program.joined([places, none], axis)
    all_values, all_places = program.all_gather(values, axis), program.all_gather(places, axis)
    search = {"axis": axis, "largest": largest, "sorted": int_attribute(node, "sorted", 1)}
    best, winners = _searched_block(program, all_values, result_shape(node)[axis], search)
    found = program.op("GatherElements", [all_places, winners], {"axis": axis}, shape=winners.shape)
    return [program.cast(best, dtype), program.cast(found, DType.I64)][: len(node.results)]


def _searched_block(program: ProgramWriter, data: Value, count: int, search: dict[str, int]) -> tuple[Value, Value]:
    shape = with_size(data.shape, search["axis"], count)
    node = program.builder.node("TopK", [data, program.ints([count])], search, results=2)
    values, places = node.results
    values.type, places.type = TensorType(data.dtype, shape), TensorType(DType.I64, shape)
    return values, places


# -- CumSum, CumProd ------------------------------------------------------------------------------------------------


def _cumulative_dims(node: Node) -> Sequence[int] | None:
    if tensor_of(node, 0).dtype not in (DType.F32, DType.F64, DType.I32, DType.I64):
        return None
    return (axis_of(needed_ints(node, 1)[0], len(shape_of(node, 0))),)


def _sends_totals(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    return [Sent("all_gather", _rows(blocks[0], cuts), tensor_of(node, 0).dtype.bits)]


def _cumulative(program: ProgramWriter) -> list[Value]:
    """The block's own sums, and before them the totals of the blocks before it (Blelloch, 1990, section 1.3)."""
    (axis,) = program.dims
    node, dtype = program.whole, program.data.dtype
    is_sum = node.op_type == "CumSum"
    reduce, combine = ("ReduceSum", "Add") if is_sum else ("ReduceProd", "Mul")
    totals = program.all_gather(program.reduced(reduce, program.data, program.dims), axis)
    trailing = [1] * (len(program.data.shape) - axis - 1)
    order = program.builder.constant(np.arange(program.parts).reshape([program.parts, *trailing]), "order")
    place = block_index(program.builder, program.mesh, program.axes)
    is_before = "Greater" if int_attribute(node, "reverse", 0) else "Less"
    before = program.op(is_before, [order, place], dtype=DType.BOOL)
    nothing = program.builder.constant(neutral("sum" if is_sum else "prod", dtype), "number")
    counted = program.op("Where", [before, totals, nothing], shape=totals.shape, dtype=dtype)
    offset = program.reduced(reduce, counted, program.dims)
    own = program.op(node.op_type, list(program.local.operands), node.attributes)
    return [program.op(combine, [own, offset])]


LOCAL_PROGRAMS: dict[str, LocalProgram] = {
    "ArgMax": LocalProgram(_sends_best, _arg, _arg_dims),
    "ArgMin": LocalProgram(_sends_best, _arg, _arg_dims),
    "Hardmax": LocalProgram(_sends_best, _hardmax, _hardmax_dims),
    "TopK": LocalProgram(_sends_candidates, _top_k, _top_k_dims),
    "CumSum": LocalProgram(_sends_totals, _cumulative, _cumulative_dims),
    "CumProd": LocalProgram(_sends_totals, _cumulative, _cumulative_dims),
}
"""Operator to its local program."""
