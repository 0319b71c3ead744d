"""Operators on strings: elementwise, or a row at a time."""

from collections.abc import Sequence

from irpar.ir import DType, Node, TensorType, Type

from .elementwise import infer_broadcast, infer_comparison, rule_broadcast
from .facts import CannotTellError, dims_of, ints_attribute, result_shape, shape_of
from .gradients.zero import zero
from .op_def import OpDef
from .registry import define
from .rule import FactorRule, Kind, RuleBuilder

define(OpDef("", "StringConcat", infer_broadcast, rule_broadcast, gradient=zero))
define(OpDef("", "RegexFullMatch", infer_comparison, rule_broadcast, gradient=zero))


def _infer_tf_idf(node: Node) -> Sequence[Type]:
    places = ints_attribute(node, "ngram_indexes")
    if not places:
        raise CannotTellError("the n-grams")
    return [TensorType(DType.F32, (*dims_of(node, 0)[:-1], max(places) + 1))]


def _rule_tf_idf(node: Node) -> FactorRule:
    """`([b,w])->([b,n])`: rows pass; an n-gram is several words of one row."""
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    batch, words = rule.dims(shape[:-1]), rule.dims(shape[-1:], Kind.REPLICATE)
    return rule.done([[*batch, *words]], [[*batch, *[()] * (len(result_shape(node)) - len(batch))]])


define(OpDef("", "TfIdfVectorizer", _infer_tf_idf, _rule_tf_idf, gradient=zero))
