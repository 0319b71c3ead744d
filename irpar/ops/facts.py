"""What operator definitions read of a node: attributes, shapes and constant operands.

Each reader raises `CannotTellError` where the node does not say; `define` turns that into the answer None.
"""

from collections.abc import Iterable, Sequence

from irpar.ir import (
    ArrayTensor,
    Dim,
    DType,
    Ints,
    LazyTensor,
    Node,
    RefAttribute,
    Shape,
    Tensor,
    TensorType,
    Type,
    Value,
    dtype_of_onnx,
    tensor_type,
)

from .effects import redistributes


class CannotTellError(Exception):
    """A definition has no answer for this node: something is not constant, not known, or not covered."""


def int_attribute(node: Node, name: str, default: int | None = None) -> int:
    """An int attribute, or its default.

    Raises:
        CannotTellError: it is missing and has no default, or stands for an attribute of a call.
    """
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise CannotTellError(name)
    return value


def float_attribute(node: Node, name: str, default: float) -> float:
    """A float attribute, or its default.

    Raises:
        CannotTellError: it stands for an attribute of a call.
    """
    value = node.attributes.get(name, default)
    if not isinstance(value, (int, float)):
        raise CannotTellError(name)
    return float(value)


def ints_attribute(node: Node, name: str) -> tuple[int, ...] | None:
    """A list of ints, or None where the attribute is missing.

    Raises:
        CannotTellError: it stands for an attribute of a call.
    """
    value = node.attributes.get(name)
    if value is None:
        return None
    if not isinstance(value, Ints):
        raise CannotTellError(name)
    return value


def text_attribute(node: Node, name: str, default: str = "") -> str:
    """A string attribute, or its default.

    Raises:
        CannotTellError: it stands for an attribute of a call.
    """
    value = node.attributes.get(name, default)
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise CannotTellError(name)
    return value


def refers_to_call(node: Node) -> bool:
    """True where an attribute stands for an attribute of a call, so that the node is not fully known."""
    return any(isinstance(value, RefAttribute) for value in node.attributes.values())


def is_told(node: Node) -> bool:
    """True where all operands and results are tensors of known types, and no attribute stands for one of a call."""
    types = (tensor_type(value.type) for value in (*node.inputs, *node.results))
    return not refers_to_call(node) and None not in types


def is_at_hand(data: Tensor | None, most: int) -> bool:
    """True for at most so many numbers, no strings, that are in memory: no file is read for them."""
    return isinstance(data, ArrayTensor | LazyTensor) and data.dtype is not DType.STR and data.size <= most


def operand(node: Node, index: int) -> Value | None:
    """An operand, or None where it is left out."""
    return node.operands[index] if index < len(node.operands) else None


def needed(node: Node, index: int) -> Value:
    """An operand that must be there.

    Raises:
        CannotTellError: it is left out.
    """
    value = operand(node, index)
    if value is None:
        raise CannotTellError(f"operand {index} is left out")
    return value


def tensor_of(node: Node, index: int) -> TensorType:
    """The type of a tensor operand.

    Raises:
        CannotTellError: it is left out, or no tensor.
    """
    found = tensor_type(needed(node, index).type)
    if found is None:
        raise CannotTellError(f"operand {index} is no tensor")
    return found


def dims_of(node: Node, index: int) -> Shape:
    """The dims of a tensor operand, symbolic or unknown ones included.

    Raises:
        CannotTellError: the operand or its rank is not known.
    """
    shape = tensor_of(node, index).shape
    if shape is None:
        raise CannotTellError(f"rank of operand {index}")
    return shape


def shape_of(node: Node, index: int) -> tuple[int, ...]:
    """The static shape of an operand.

    Raises:
        CannotTellError: it is not static.
    """
    found = tensor_of(node, index)
    if not found.is_static:
        raise CannotTellError(f"shape of operand {index}")
    return found.static_shape


def shapes_of(node: Node) -> list[tuple[int, ...] | None]:
    """The static shape of every operand; None for one that is left out."""
    return [None if value is None else shape_of(node, index) for index, value in enumerate(node.operands)]


def result_shape(node: Node, index: int = 0) -> tuple[int, ...]:
    """The static shape of a result.

    Raises:
        CannotTellError: it is not static.
    """
    found = tensor_type(node.results[index].type)
    if found is None or not found.is_static:
        raise CannotTellError(f"shape of result {index}")
    return found.static_shape


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    """The static shape of every result."""
    return [result_shape(node, index) for index in range(len(node.results))]


def data_of(value: Value) -> Tensor | None:
    """The numbers of a constant, also of one that collectives bring to where it is read; None of any other value.

    In global view what changes how a value is sharded leaves its numbers.
    """
    origin = origin_of(value)
    # The block of a constant that a part was loaded with is not what is gathered of it.
    return origin.data if origin.type == value.type else None


def origin_of(value: Value) -> Value:
    """What collectives bring to where it is read."""
    while value.node is not None and redistributes(value.node):
        (value,) = value.node.inputs
    return value


def replicated_data(value: Value) -> Tensor | None:
    """The numbers of a constant that ranks have in full; None of any other value, and of a block of a constant."""
    return value.data if value.data is not None and value.data.type == value.type else None


def ints_operand(node: Node, index: int) -> tuple[int, ...] | None:
    """The ints of a constant operand, or None where it is left out.

    Raises:
        CannotTellError: it is not constant.
    """
    value = operand(node, index)
    if value is None:
        return None
    data = data_of(value)
    if data is None:
        raise CannotTellError(f"operand {index} is not constant")
    return tuple(int(number) for number in data.numpy().ravel())


def needed_ints(node: Node, index: int) -> tuple[int, ...]:
    """The ints of a constant operand that must be there.

    Raises:
        CannotTellError: it is left out or not constant.
    """
    found = ints_operand(node, index)
    if found is None:
        raise CannotTellError(f"operand {index} is left out")
    return found


def ints_of(node: Node, name: str, index: int, since: int) -> tuple[int, ...] | None:
    """Ints that are an attribute before opset version `since` and an operand from there on; None where left out."""
    return ints_attribute(node, name) if node.version < since else ints_operand(node, index)


def computed_count(node: Node, index: int) -> int | None:
    """How many ints an operand lists that is computed when the model runs; None where they are known, or left out.

    Raises:
        CannotTellError: nobody knows how many.
    """
    value = operand(node, index)
    if value is None or data_of(value) is not None:
        return None
    dims = dims_of(node, index)
    count = dims[0] if dims else 1
    if not isinstance(count, int):
        raise CannotTellError(f"how many numbers operand {index} has")
    return count


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        CannotTellError: the tensor has no such axis.
    """
    if not -rank <= axis < rank:
        raise CannotTellError(f"axis {axis} of rank {rank}")
    return axis % rank


def axes_of(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in order.

    Raises:
        CannotTellError: the tensor has no such axis, or one is named twice.
    """
    found = sorted(axis_of(axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise CannotTellError("an axis twice")
    return tuple(found)


def axis_attribute(node: Node, rank: int, default: int | None = None, name: str = "axis") -> int:
    """The attribute `axis`, counted from the front."""
    return axis_of(int_attribute(node, name, default), rank)


def dtype_attribute(node: Node, name: str, default: int | None = None) -> DType:
    """The element type that an int attribute names by ONNX's number.

    Raises:
        CannotTellError: it is missing, or irpar has no such type.
    """
    found = dtype_of_onnx(int_attribute(node, name, default))
    if found is None:
        raise CannotTellError(name)
    return found


def broadcast_dims(shapes: Sequence[Shape]) -> Shape:
    """NumPy broadcasting of dims, symbolic ones included.

    Of two dims that are not known to be equal the one that is a number above 1 is taken, since the other can only be
    equal to it or 1.

    Raises:
        CannotTellError: numbers that do not broadcast, or two different symbols.
    """
    rank = max(map(len, shapes), default=0)
    columns = [[shape[len(shape) - back] for shape in shapes if len(shape) >= back] for back in range(rank, 0, -1)]
    return tuple(_broadcast_column(column) for column in columns)


def _broadcast_column(column: list[Dim]) -> Dim:
    different = {dim for dim in column if dim != 1}
    if len(different) <= 1:
        return different.pop() if different else 1
    numbers = [dim for dim in different if isinstance(dim, int)]
    if len(numbers) != 1:
        raise CannotTellError(f"{column} do not broadcast")
    return numbers[0]


def same_type(node: Node) -> list[Type]:
    """Every result has the type of the first operand."""
    return [needed(node, 0).type] * len(node.results)
