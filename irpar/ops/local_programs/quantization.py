"""The local program of DynamicQuantizeLinear: its scale comes from the greatest and least of the blocks of all devices.

q, s, z = DynamicQuantizeLinear(x : [8, 256@tp])    each device takes the greatest and the least of its block;
                                                    all_reduce(max) of the greatest and of minus the least, two numbers;
                                                    s and z follow as ONNX defines them, and q = QuantizeLinear(x, s, z)
"""

from collections.abc import Sequence

from irpar.ir import DType, Node, Value

from ..facts import shape_of, tensor_of
from .program import Cuts, LocalProgram, ProgramWriter, Sent, Shape

_MOST = 255
"""The greatest code."""


def _dims(node: Node) -> Sequence[int] | None:
    shape = shape_of(node, 0)
    return range(len(shape)) if shape and tensor_of(node, 0).dtype is DType.F32 else None


def _sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> list[Sent]:
    return [Sent("all_reduce", 2, DType.F32.bits)]


def _write(program: ProgramWriter) -> list[Value]:
    data, rank = program.data, len(program.data.shape)
    zero, one = (program.constant(number, DType.F32) for number in (0, 1))
    greatest = program.reduced("ReduceMax", data, program.dims)
    least = program.op("Neg", [program.reduced("ReduceMin", data, program.dims)])
    both = program.op("Max", [program.joined([greatest, least], 0), zero])
    both = program.all_reduce(both, "max", [()] * rank, both.shape)
    flat = program.op("Reshape", [both, program.ints([2])], shape=(2,))
    most, minus = (_element(program, flat, place) for place in range(2))
    spread = program.op("Div", [program.op("Add", [most, minus]), program.constant(_MOST, DType.F32)])
    is_none = program.op("Equal", [spread, zero], dtype=DType.BOOL)
    scale = program.op("Where", [is_none, one, spread], dtype=DType.F32)
    place = program.op("Clip", [program.op("Div", [minus, scale]), zero, program.constant(_MOST, DType.F32)])
    point = program.cast(program.op("Round", [place]), DType.U8)
    return [program.op("QuantizeLinear", [data, scale, point], dtype=DType.U8), scale, point]


def _element(program: ProgramWriter, value: Value, place: int) -> Value:
    index = program.builder.constant(place, "place")
    return program.op("Gather", [value, index], {"axis": 0}, shape=())


DYNAMIC = LocalProgram(_sends, _write, _dims, reads_elements=False)
