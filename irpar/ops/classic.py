"""ai.onnx.ml: classifiers and regressors take a row at a time, so that rows may be sharded; the rest is elementwise."""

from collections.abc import Callable, Sequence

from irpar.ir import Dim, DType, Floats, Ints, Node, Strings, Tensor, TensorType, Type
from irpar.ir.dims import product_of

from .elementwise import per_element
from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    ints_attribute,
    result_shapes,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.classic import (
    decompose_feature_vectorizer,
    decompose_linear_regressor,
    decompose_normalizer,
    decompose_scaler,
    of_feature_extractor,
    of_imputer,
)
from .gradients.refused import CLASSIFIER
from .gradients.zero import zero
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

DOMAIN = "ai.onnx.ml"


def _length(node: Node, name: str) -> int:
    """The number of entries of a list attribute; 0 where it is missing."""
    found = node.attributes.get(name, ())
    if not isinstance(found, (Ints, Floats, Strings, tuple)):
        raise CannotTellError(name)
    return len(found)


# -- rows -----------------------------------------------------------------------------------------------------------


def _rule_rows(node: Node) -> FactorRule:
    """`([b,c])->([b],[b,n])`: rows pass, what is in one is whole."""
    rule = RuleBuilder()
    (size, *inside) = shape_of(node, 0)
    if not inside or any(not shape or shape[0] != size for shape in result_shapes(node)):
        raise CannotTellError("a single row")
    (rows,) = rule.dims([size])
    results = [[rows, *[()] * (len(shape) - 1)] for shape in result_shapes(node)]
    return rule.done([[rows, *rule.dims(inside, Kind.REPLICATE)]], results)


def _rows(node: Node) -> Dim:
    dims = dims_of(node, 0)
    if len(dims) != 2:
        raise CannotTellError("a single row")
    return dims[0]


def _classes(node: Node) -> tuple[DType, int]:
    """The dtype and the number of the labels of a classifier."""
    for name, dtype in {
        "classlabels_strings": DType.STR,
        "classlabels_ints": DType.I64,
        "classlabels_int64s": DType.I64,
    }.items():
        count = _length(node, name)
        if count:
            return dtype, count
    raise CannotTellError("the labels")


def _infer_classifier(node: Node) -> Sequence[Type]:
    dtype, count = _classes(node)
    rows = _rows(node)
    return [TensorType(dtype, (rows,)), TensorType(DType.F32, (rows, count))][: len(node.results)]


def _regressor(targets: Callable[[Node], int]) -> Callable[[Node], Sequence[Type]]:
    def infer(node: Node) -> Sequence[Type]:
        return [TensorType(DType.F32, (_rows(node), targets(node)))]

    return infer


def _infer_ensemble(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape((_rows(node), int_attribute(node, "n_targets")))]


def _cost_linear(node: Node) -> int:
    """Two operations for each coefficient and row."""
    return 2 * shape_of(node, 0)[0] * _length(node, "coefficients")


def _infer_normalizer(node: Node) -> Sequence[Type]:
    return [TensorType(DType.F32, tensor_of(node, 0).shape)]


def _rule_last(node: Node) -> FactorRule:
    """`([b,c])->([b,c])`: rows pass, c is whole: a row is normalised, or each column has a number of its own."""
    rule = RuleBuilder()
    *batch, size = shape_of(node, 0)
    dims = [*rule.dims(batch), *rule.dims([size], Kind.REPLICATE)]
    return rule.done([dims], [dims])


for _name in ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"):
    _cost = _cost_linear if _name == "LinearClassifier" else None
    _gradient = zero if _name.startswith("Tree") else CLASSIFIER
    define(OpDef(DOMAIN, _name, _infer_classifier, _rule_rows, _cost, gradient=_gradient))
define(
    OpDef(
        DOMAIN,
        "LinearRegressor",
        _regressor(lambda node: int_attribute(node, "targets", 1)),
        _rule_rows,
        _cost_linear,
        decompose=decompose_linear_regressor,
    )
)
define(OpDef(DOMAIN, "SVMRegressor", _regressor(lambda node: 1), _rule_rows, gradient=CLASSIFIER))
_trees = _regressor(lambda node: int_attribute(node, "n_targets"))
define(OpDef(DOMAIN, "TreeEnsembleRegressor", _trees, _rule_rows, gradient=zero))
define(OpDef(DOMAIN, "TreeEnsemble", _infer_ensemble, _rule_rows, gradient=zero))
define(OpDef(DOMAIN, "Normalizer", _infer_normalizer, _rule_last, per_element(3), decompose=decompose_normalizer))


# -- elements -------------------------------------------------------------------------------------------------------


def _rule_elements(node: Node) -> FactorRule:
    """Every dim passes."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    return rule.done([dims], [dims])


def _rule_columns(node: Node) -> FactorRule:
    """One number for all elements: every dim passes; a number for each column: columns are whole."""
    attributes = ("offset", "scale") if node.op_type == "Scaler" else ("imputed_value_floats", "imputed_value_int64s")
    return _rule_last(node) if max(_length(node, name) for name in attributes) > 1 else _rule_elements(node)


_VALUES = {"values_int64s": DType.I64, "values_strings": DType.STR, "values_floats": DType.F32}


def _infer_label_encoder(node: Node) -> Sequence[Type]:
    values = node.attributes.get("values_tensor")
    if isinstance(values, Tensor):
        return [TensorType(values.dtype, tensor_of(node, 0).shape)]
    found = [dtype for name, dtype in _VALUES.items() if name in node.attributes]
    if len(found) != 1:
        raise CannotTellError("the values")
    return [TensorType(found[0], tensor_of(node, 0).shape)]


def _infer_category_mapper(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    return [TensorType(DType.I64 if data.dtype is DType.STR else DType.STR, data.shape)]


define(OpDef(DOMAIN, "Binarizer", same_type, _rule_elements, per_element(1), gradient=zero))
define(OpDef(DOMAIN, "LabelEncoder", _infer_label_encoder, _rule_elements, gradient=zero))
define(OpDef(DOMAIN, "CategoryMapper", _infer_category_mapper, _rule_elements, gradient=zero))
define(OpDef(DOMAIN, "Scaler", _infer_normalizer, _rule_columns, per_element(2), decompose=decompose_scaler))
define(OpDef(DOMAIN, "Imputer", same_type, _rule_columns, per_element(1), gradient=of_imputer))


def _infer_one_hot_encoder(node: Node) -> Sequence[Type]:
    count = max(_length(node, "cats_int64s"), _length(node, "cats_strings"))
    return [TensorType(DType.F32, (*dims_of(node, 0), count))]


def _rule_one_hot_encoder(node: Node) -> FactorRule:
    """`([b,c])->([b,c,n])`: every dim passes."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    return rule.done([dims], [[*dims, ()]])


define(OpDef(DOMAIN, "OneHotEncoder", _infer_one_hot_encoder, _rule_one_hot_encoder, gradient=zero))


# -- columns picked and joined --------------------------------------------------------------------------------------


def _infer_feature_extractor(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    count = product_of(dims_of(node, 1))
    return [tensor_of(node, 0).with_shape((1, count) if len(dims) == 1 else (*dims[:-1], count))]


def _rule_feature_extractor(node: Node) -> FactorRule:
    """`([b,c],[m,n])->([b,(mn)])`: rows and the picked columns pass; the data's columns are whole."""
    rule = RuleBuilder()
    *batch, size = shape_of(node, 0)
    picked = shape_of(node, 1)
    rows = rule.dims(batch)
    (column,) = rule.dims([size], Kind.REPLICATE)
    places = rule.dims(picked)
    result: list[DimFactors] = [*(rows or [()]), tuple(factor for dim in places for factor in dim)]
    return rule.done([[*rows, column], places], [result])


def _infer_feature_vectorizer(node: Node) -> Sequence[Type]:
    sizes = ints_attribute(node, "inputdimensions") or ()
    return [TensorType(DType.F32, (_rows(node), sum(sizes)))]


def _rule_feature_vectorizer(node: Node) -> FactorRule:
    """`([b,c],[b,d])->([b,n])`: rows pass, columns are put side by side."""
    shapes = shapes_of(node)
    rule = RuleBuilder()
    if any(shape is None or len(shape) != 2 for shape in shapes):
        raise CannotTellError("a single row")
    (rows,) = rule.dims(shape_of(node, 0)[:1])
    return rule.done([[rows, ()]] * len(shapes), [[rows, ()]])


define(
    OpDef(
        DOMAIN,
        "ArrayFeatureExtractor",
        _infer_feature_extractor,
        _rule_feature_extractor,
        gradient=of_feature_extractor,
    )
)
define(
    OpDef(
        DOMAIN,
        "FeatureVectorizer",
        _infer_feature_vectorizer,
        _rule_feature_vectorizer,
        decompose=decompose_feature_vectorizer,
    )
)
