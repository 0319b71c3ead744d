"""Sample nodes of quantised operators, losses, optimizer steps, strings and recurrences of newer kinds."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .draws import floats, ints, scalar, words
from .rule_proof import Constant, Sample


def _quantised() -> Iterator[Sample]:
    zero = Constant(np.asarray(3, np.uint8))
    for domain, version in (("", 21), ("com.microsoft", 1)):
        where: dict[str, Any] = {"domain": domain, "version": version}
        yield Sample("QuantizeLinear", (floats(5, 4), scalar(0.1, np.float32), zero), **where)
        vector = (floats(5, 4, 3), floats(4, low=0.1), ints(4, low=0, dtype=np.uint8))
        yield Sample("QuantizeLinear", vector, {"axis": 1}, **where)
        signed = Constant(np.asarray(0, np.int8))
        yield Sample("DequantizeLinear", (ints(5, 4, dtype=np.int8), scalar(0.1, np.float32), signed), **where)
        vector = (ints(5, 4, dtype=np.int8), floats(5), ints(5, dtype=np.int8))
        yield Sample("DequantizeLinear", vector, {"axis": 0}, **where)
    yield Sample("QuantizeLinear", (floats(5, 4), scalar(0.1, np.float32)))
    yield Sample("DequantizeLinear", (ints(5, 4, dtype=np.int8), scalar(0.1, np.float32)))
    # blocks of 4 along an axis of 12, and of 7, which leaves a shorter block
    blocks = {"axis": 1, "block_size": 4}
    yield Sample("DequantizeLinear", (ints(5, 12, dtype=np.int8), floats(5, 3), ints(5, 3, dtype=np.int8)), blocks)
    yield Sample("DequantizeLinear", (ints(12, 5, dtype=np.int8), floats(3, 5)), {"axis": 0, "block_size": 4})
    yield Sample("DequantizeLinear", (ints(12, dtype=np.int8), floats(3)), {"axis": 0, "block_size": 4})
    yield Sample("DequantizeLinear", (ints(5, 7, dtype=np.int8), floats(5, 2)), blocks)
    yield Sample("QuantizeLinear", (floats(5, 12), floats(5, 3, low=0.1), ints(5, 3, dtype=np.int8)), blocks)
    yield Sample("DynamicQuantizeLinear", (floats(5, 4),), results=3)


def _products() -> Iterator[Sample]:
    left, right = ints(5, 6, dtype=np.uint8, low=0), ints(6, 4, dtype=np.uint8, low=0)
    yield Sample("MatMulInteger", (left, right))
    yield Sample("MatMulInteger", (left, right, Constant(np.asarray(3, np.uint8)), ints(4, low=0, dtype=np.uint8)))
    scale, zero = Constant(np.asarray(0.1, np.float32)), Constant(np.asarray(3, np.uint8))
    last = (Constant(np.asarray(0.3, np.float32)), zero)
    yield Sample("QLinearMatMul", (left, scale, zero, right, scale, zero, *last))
    columns = (floats(4, low=0.1, high=0.3), ints(4, low=0, dtype=np.uint8))
    yield Sample("QLinearMatMul", (ints(3, 5, 6, dtype=np.uint8, low=0), scale, zero, right, *columns, *last))


def _microsoft_products() -> Iterator[Sample]:
    where: dict[str, Any] = {"domain": "com.microsoft", "version": 1}
    yield Sample("MatMulInteger16", (ints(5, 6, dtype=np.int16), ints(6, 4, dtype=np.int16)), **where)


def _losses() -> Iterator[Sample]:
    def labels(*shape: int) -> Any:
        return ints(*shape, low=0, high=6)

    for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        for reduction in ("none", "sum", "mean"):
            attributes = {"reduction": reduction}
            yield Sample(name, (floats(5, 6), labels(5)), attributes)
            yield Sample(name, (floats(5, 6, 4), labels(5, 4), floats(6, low=0.2)), attributes)
            yield Sample(name, (floats(5, 6, 4), labels(5, 4)), {**attributes, "ignore_index": 3})
        yield Sample(name, (floats(5, 6), labels(5)))
    yield Sample("SoftmaxCrossEntropyLoss", (floats(5, 6, 4), labels(5, 4)), {"reduction": "none"}, results=2)
    yield Sample("SoftmaxCrossEntropyLoss", (floats(5, 6, 4), labels(5, 4)), {"reduction": "sum"}, results=2)


def _steps() -> Iterator[Sample]:
    where: dict[str, Any] = {"domain": "ai.onnx.preview.training", "version": 1}
    rate, count = np.asarray(0.1, np.float32), np.asarray(3)
    shapes = ((5, 4), (6,))
    some = {"norm_coefficient": 0.1}
    for name, kept, attributes in (
        ("Adagrad", 1, {**some, "decay_factor": 0.1, "epsilon": 1e-3}),
        ("Momentum", 1, {**some, "alpha": 0.9, "beta": 0.8, "mode": "nesterov"}),
        ("Adam", 2, {**some, "alpha": 0.9, "beta": 0.8, "epsilon": 1e-3}),
    ):
        for used in (shapes[:1], shapes):
            parts = [floats(*shape, low=0.1 if part > 1 else -2) for part in range(2 + kept) for shape in used]
            operands = (rate, count, *parts)
            yield Sample(name, operands, attributes, results=len(used) * (1 + kept), **where)


def _updates() -> Iterator[Sample]:
    for name, (moments, numbers) in {"Sgd": (0, 1), "Momentum": (1, 2), "Adam": (2, 5), "AdamW": (2, 5)}.items():
        kept = [floats(5, 4, low=0.1) for _ in range(moments)]
        for count in (numbers, numbers + 1):  # The last one is of weight decay.
            operands = (
                floats(5, 4),
                floats(5, 4),
                *kept,
                *[np.asarray(0.1 * (at + 1), np.float32) for at in range(count)],
            )
            yield Sample(name, operands, results=1 + moments, domain="irpar", version=1)
    operands = (floats(5, 4), floats(5, 4), floats(5, 4), np.asarray(0.1, np.float32), np.asarray(0.9, np.float32))
    yield Sample("Momentum", operands, {"nesterov": 1}, results=2, domain="irpar", version=1)


def _strings() -> Iterator[Sample]:
    yield Sample("StringConcat", (words(5, 4), words(4)))
    yield Sample("RegexFullMatch", (words(5, 4),), {"pattern": "[ab]"})
    grams = {
        "mode": "TFIDF",
        "min_gram_length": 1,
        "max_gram_length": 2,
        "max_skip_count": 1,
        "ngram_counts": [0, 3],
        "ngram_indexes": [0, 1, 2, 3, 4],
        "pool_int64s": [0, 1, 2, 0, 1, 1, 2],
        "weights": [1.0, 0.5, 2.0, 1.5, 3.0],
    }
    yield Sample("TfIdfVectorizer", (ints(5, 6, low=0, high=3),), grams)
    yield Sample("TfIdfVectorizer", (ints(6, low=0, high=3),), grams)


def _stateful() -> Iterator[Sample]:
    for domain, version in (("", 27), ("com.microsoft", 1)):
        where: dict[str, Any] = {"domain": domain, "version": version, "results": 2}
        conv = (floats(3, 5, 6), floats(5, 1, 3))
        yield Sample("CausalConvWithState", conv, {"activation": "silu"}, **where)
        yield Sample("CausalConvWithState", (*conv, floats(5), floats(3, 5, 2)), **where)
        for rule, queries, keys, size, value_size in (
            ("linear", 4, 4, 3, 4),
            ("gated", 4, 2, 3, 6),
            ("delta", 8, 4, 2, 4),
            ("gated_delta", 6, 6, 3, 2),
        ):
            heads = {"q_num_heads": queries, "kv_num_heads": keys, "update_rule": rule}
            operands = (
                floats(3, 5, queries * size, high=1),
                floats(3, 5, keys * size, high=1),
                floats(3, 5, keys * value_size),
                floats(3, keys, size, value_size),
                floats(3, 5, keys * (size if rule == "gated" else 1), low=-1, high=0) if "gated" in rule else None,
                floats(3, 5, 1 if rule == "delta" else keys, low=0, high=1) if "delta" in rule else None,
            )
            yield Sample("LinearAttention", operands, heads, **where)


OTHERS = [
    *_quantised(),
    *_products(),
    *_microsoft_products(),
    *_losses(),
    *_steps(),
    *_updates(),
    *_strings(),
    *_stateful(),
]
