"""Gradients of reading and writing by index: what is read of a place twice is added there twice."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Node, TensorType, Value, tensor_type

from ..facts import CannotTellError, axis_attribute, int_attribute, needed, operand, text_attribute
from .writer import GradientWriter, Of


def _gradient(of: Of) -> Value:
    g = of[0]
    assert g is not None
    return g


# -- Gather ---------------------------------------------------------------------------------------------------------


def of_gather(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Rows of the gradient, added to the rows that they were read from; of one known row zeros around it.

    Of all rows in another order, which a constant tells, they are put back.
    """
    x, index, g = needed(node, 0), needed(node, 1), _gradient(of)
    axis = axis_attribute(node, len(w.dims(x)), 0)
    size = w.dims(x)[axis]
    if index.data is not None and index.data.size == 1 and isinstance(size, int):
        return w.each(lambda: _one_row(x, g, int(index.data.numpy().item()) % size if index.data else 0, axis, w))
    if index.data is not None and isinstance(size, int) and index.data.shape == (size,):
        places = index.data.numpy() % max(size, 1)
        if np.array_equal(np.sort(places), np.arange(size)):
            back = np.argsort(places).tolist()
            return w.each(lambda: w.op("Gather", [g, w.ints(back)], {"axis": axis}, type=x.type))
    return w.each(lambda: _rows(x, index, g, axis, w))


def _one_row(x: Value, g: Value, row: int, axis: int, w: GradientWriter) -> Value:
    dims = w.dims(x)
    size = dims[axis]
    assert isinstance(size, int)
    extra = len(w.dims(g)) - len(dims)  # The index may be a scalar, or have several dims of size 1.
    wide = w.unsqueeze(g, [axis]) if extra == -1 else w.squeeze(g, range(axis, axis + extra))
    return w.pad(wide, {axis: (row, size - 1 - row)}, type=x.type)


def _rows(x: Value, index: Value, g: Value, axis: int, w: GradientWriter) -> Value:
    rank, depth = len(w.dims(x)), len(w.dims(index))
    tuples = w.unsqueeze(w.cast(index, DType.I64), [depth])
    if axis == 0:
        return w.scattered("ScatterND", w.shape_of(x), tuples, g, type=x.type)
    # The axis goes first, and after the sum back to its place.
    order = [axis, *range(axis), *range(axis + 1, rank)]
    back = [order.index(dim) for dim in range(rank)]
    rows_first = w.transpose(g, [*range(axis, axis + depth), *range(axis), *range(axis + depth, rank + depth - 1)])
    shape = w.listed([w.size_of(x, dim) for dim in order])
    type_ = x.tensor_type.with_shape(tuple(w.dims(x)[dim] for dim in order))
    return w.transpose(w.scattered("ScatterND", shape, tuples, rows_first, type=type_), back)


def of_gather_elements(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each element added to where it was read."""
    x, index, g = needed(node, 0), needed(node, 1), _gradient(of)
    axis = axis_attribute(node, len(w.dims(x)), 0)
    return w.each(lambda: w.scattered("ScatterElements", w.shape_of(x), index, g, {"axis": axis}, type=x.type))


def of_gather_nd(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each slice added to where it was read; batch dims are more indices."""
    x, index, g = needed(node, 0), needed(node, 1), _gradient(of)
    batch = int_attribute(node, "batch_dims", 0)
    tuples = _with_batch(index, batch, w) if batch else index
    return w.each(lambda: w.scattered("ScatterND", w.shape_of(x), tuples, g, type=x.type))


def _with_batch(index: Value, batch: int, w: GradientWriter) -> Value:
    """Tuples that begin with their place along the batch dims.

    Raises:
        CannotTellError: the sizes of the indices are not known.
    """
    found = tensor_type(index.type)
    if found is None or not found.is_static:
        raise CannotTellError("the sizes of the indices")
    shape = found.static_shape[:-1]
    columns = [
        np.broadcast_to(np.arange(shape[dim]).reshape([-1 if at == dim else 1 for at in range(len(shape))]), shape)
        for dim in range(batch)
    ]
    places = w.constant(np.stack(columns, axis=-1).astype(np.int64), "places")
    return w.op("Concat", [places, w.cast(index, DType.I64)], {"axis": len(shape)})


# -- scatters -------------------------------------------------------------------------------------------------------


class _Scatter:
    """A ScatterElements or ScatterND, and the gathering that goes the other way."""

    def __init__(self, node: Node, w: GradientWriter) -> None:
        self.data, self.index, self.updates = (needed(node, place) for place in range(3))
        self.w = w
        self.is_nd = node.op_type == "ScatterND"
        self.axis = 0 if self.is_nd else axis_attribute(node, len(w.dims(self.data)), 0)

    def read(self, value: Value) -> Value:
        """What stands where updates were written."""
        if self.is_nd:
            return self.w.op("GatherND", [value, self.index])
        return self.w.op("GatherElements", [value, self.index], {"axis": self.axis})

    def write(self, into: Value, updates: Value, reduction: str = "none") -> Value:
        """Updates written at the places of this one."""
        attributes: dict[str, object] = {} if self.is_nd else {"axis": self.axis}
        if reduction != "none":
            attributes["reduction"] = reduction
        operator = "ScatterND" if self.is_nd else "ScatterElements"
        return self.w.op(operator, [into, self.index, updates], attributes)


def of_scatter(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """By how updates combine with the data: what they replace gets nothing; the greatest and smallest share."""
    scatter, g = _Scatter(node, w), _gradient(of)
    reduction = text_attribute(node, "reduction", "none")
    if reduction == "none":
        return w.each(lambda: scatter.write(g, w.zeros(scatter.updates)), None, lambda: scatter.read(g))
    if reduction == "add":
        return w.each(lambda: g, None, lambda: scatter.read(g))
    if reduction == "mul":
        return _of_products(scatter, g, w)
    return _of_extremes(scatter, node.result, g, w)


def _of_products(scatter: _Scatter, g: Value, w: GradientWriter) -> Sequence[Value | None]:
    """The product of the others at that place; of one zero the product of what is left."""
    data, updates = scatter.data, scatter.updates
    is_zero = w.compare("Equal", updates, 0)
    others = w.where(is_zero, 1.0, updates)

    def of_updates() -> Value:
        left = scatter.read(w.mul(g, scatter.write(data, others, "mul")))
        zeros = scatter.read(scatter.write(w.zeros(data), w.cast(is_zero, g.dtype), "add"))
        alone = w.where(w.compare("Equal", zeros, 1), left, 0.0)
        return w.where(is_zero, alone, w.div(w.where(w.compare("Equal", zeros, 0), left, 0.0), others))

    return w.each(lambda: w.mul(g, scatter.write(w.filled(1, data), updates, "mul")), None, of_updates)


def _of_extremes(scatter: _Scatter, y: Value, g: Value, w: GradientWriter) -> Sequence[Value | None]:
    """Data and updates that are the extreme at their place share its gradient."""
    data_is = w.cast(w.compare("Equal", scatter.data, y), g.dtype)
    update_is = w.cast(w.compare("Equal", scatter.updates, scatter.read(y)), g.dtype)
    share = w.share(g, scatter.write(w.widened(data_is), w.widened(update_is), "add"))
    return w.each(lambda: w.mul(share, data_is), None, lambda: w.mul(scatter.read(share), update_is))


def of_tensor_scatter(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The data gets zeros where it was replaced, the update what stands there."""
    data, update, starts, g = needed(node, 0), needed(node, 1), operand(node, 2), _gradient(of)
    rank = len(w.dims(data))
    axis = axis_attribute(node, rank, -2)

    def of_update() -> Value:
        steps = w.op("Range", [w.constant(0), w.squeeze(w.size_of(update, axis), [0]), w.constant(1)])
        places = w.unsqueeze(steps, [dim for dim in range(rank) if dim != axis])
        if starts is not None:
            places = w.op("Add", [places, w.unsqueeze(starts, range(1, rank))])
        if text_attribute(node, "mode", "linear") == "circular":
            places = w.op("Mod", [places, w.size_of(data, axis)])
        index = w.op("Expand", [places, w.shape_of(update)])
        return w.op("GatherElements", [g, index], {"axis": axis}, type=update.type)

    operands = [g, w.zeros(update), *([] if starts is None else [starts])]
    return w.each(lambda: w.op("TensorScatter", operands, node.attributes), of_update)


# -- others ---------------------------------------------------------------------------------------------------------


def of_one_hot(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Off and on: the sums of the gradient where each stands."""
    index, depth, values, g = needed(node, 0), needed(node, 1), needed(node, 2), _gradient(of)

    def of_values() -> Value:
        ends = w.constant(np.asarray([0, 1]).astype(values.dtype.numpy), "off_on")
        hot = w.op("OneHot", [index, depth, ends], node.attributes)
        on = w.op("ReduceSum", [w.mul(g, hot)], {"keepdims": 0})
        off = w.sub(w.op("ReduceSum", [g], {"keepdims": 0}), on)
        return w.op("Concat", [w.unsqueeze(off, [0]), w.unsqueeze(on, [0])], {"axis": 0})

    return w.each(None, None, of_values)


def of_reverse_sequence(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Reversed back."""
    g = _gradient(of)
    return w.each(lambda: w.op("ReverseSequence", [g, needed(node, 1)], node.attributes))


def of_compress(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The slices back at the places that were chosen."""
    x, condition, g = needed(node, 0), needed(node, 1), _gradient(of)

    def data() -> Value:
        count = w.dims(g)[axis_attribute(node, len(w.dims(x)), 0)]
        found = w.op("NonZero", [condition], type=TensorType(DType.I64, (1, count)))
        chosen = w.squeeze(found, [0])
        if "axis" in node.attributes:
            return _rows(x, chosen, g, axis_attribute(node, len(w.dims(x))), w)
        flat = w.reshape(w.zeros(x), [-1])
        return w.shaped_as(w.op("ScatterND", [flat, w.unsqueeze(chosen, [1]), g], type=flat.type), x)

    return w.each(data)
