"""ai.onnx.ml's operators on rows of floats: most of them in plain operators."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Floats, Node, Value

from ..facts import int_attribute, needed, text_attribute
from .writer import GradientWriter, NoGradientError, Of


def _floats(node: Node, name: str) -> "np.ndarray":  # type: ignore[type-arg]
    """A list attribute; empty where it is missing."""
    found = node.attributes.get(name, ())
    return np.asarray(found if isinstance(found, (Floats, tuple)) else (), np.float64)


def _as_result(value: Value, w: GradientWriter) -> Value:
    """In float32, as ai.onnx.ml gives it."""
    return w.cast(value, DType.F32)


def decompose_scaler(node: Node, w: GradientWriter) -> list[Value]:
    """(x - offset) * scale, in float32."""
    x = _as_result(needed(node, 0), w)
    offset, scale = (w.constant(_floats(node, name).astype(np.float32), name) for name in ("offset", "scale"))
    return [w.mul(w.sub(x, offset), scale)]


def of_imputer(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Where an element stays as it is."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    replaced = node.attributes.get("replaced_value_float", 0.0)
    assert isinstance(replaced, float)

    def kept() -> Value:
        found = w.op("IsNaN", [x]) if np.isnan(replaced) else w.compare("Equal", x, replaced)
        return w.where(found, 0.0, g)

    return w.each(kept)


def decompose_feature_vectorizer(node: Node, w: GradientWriter) -> list[Value]:
    """The columns of all operands side by side, in float32."""
    columns = [_as_result(needed(node, index), w) for index in range(len(node.operands))]
    return [columns[0] if len(columns) == 1 else w.op("Concat", columns, {"axis": 1})]


def of_feature_extractor(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each column gets the gradients of those that were picked of it."""
    x, places, g = needed(node, 0), needed(node, 1), of[0]
    assert g is not None
    rank = len(w.dims(x))

    def data() -> Value:
        order = [rank - 1, *range(rank - 1)]
        rows = w.transpose(g, order) if rank > 1 else w.squeeze(g, [0])
        index = w.reshape(places, [-1, 1])
        shape = w.listed([w.size_of(x, dim) for dim in order])
        made = w.scattered("ScatterND", shape, index, rows)
        made.type = x.tensor_type.with_shape([w.dims(x)[dim] for dim in order])
        return w.transpose(made, [*range(1, rank), 0])

    return w.each(data)


def decompose_linear_regressor(node: Node, w: GradientWriter) -> list[Value]:
    """The rows times the coefficients, and the intercepts.

    Raises:
        NoGradientError: the results are transformed.
    """
    if text_attribute(node, "post_transform", "NONE") != "NONE":
        raise NoGradientError("because its results are transformed")
    rows = _floats(node, "coefficients").reshape(int_attribute(node, "targets", 1), -1)
    weights = w.constant(rows.T.astype(np.float32), "coefficients")
    made, intercepts = w.op("MatMul", [_as_result(needed(node, 0), w), weights]), _floats(node, "intercepts")
    return [w.add(made, w.constant(intercepts.astype(np.float32), "intercepts")) if len(intercepts) else made]


def decompose_normalizer(node: Node, w: GradientWriter) -> list[Value]:
    """A row by its greatest element, or by a norm; a row of zeros stays.

    Raises:
        NoGradientError: rows of integers.
    """
    x, kind = needed(node, 0), text_attribute(node, "norm", "MAX")
    if not x.dtype.is_float:
        raise NoGradientError("because it normalises integers")
    operator = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[kind]
    size = w.op(operator, [x, w.ints([-1])], {"keepdims": 1})
    safe = w.where(w.compare("Equal", size, 0.0), 1.0, size)
    return [w.cast(w.div(x, safe), DType.F32)]
