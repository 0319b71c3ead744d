"""The bias of a Gemm taken out, and what products cost."""

import numpy as np
import pytest

from irpar.ir import rewrite
from irpar.ops import Kind, factor_rule, flops

from .rule_proof import Constant, Sample, run, same
from .samples import floats, ints


@pytest.mark.parametrize("beta", [None, 1.0, 0.5, 0.0])
@pytest.mark.parametrize("shape", [(4,), (5, 1), (5, 4), (1, 4), ()])
def test_a_gemm_with_c_becomes_a_product_and_a_sum(beta: float | None, shape: tuple[int, ...]) -> None:
    from irpar.passes.split_bias import bias_apart

    attributes = {"transB": 1, "alpha": 2.0, **({} if beta is None else {"beta": beta})}
    sample = Sample("Gemm", (floats(5, 6), floats(4, 6), Constant(floats(*shape))), attributes)
    expected = sample.whole
    graph = sample.node.graph
    assert graph is not None
    assert rewrite(graph, {"": 21}, {"Gemm": bias_apart}) == 1
    product = next(iter(graph))
    assert product.identity == ("", "Gemm")
    assert len(product.operands) == 2
    assert same(sample, run(graph, sample.feeds(graph), 21))
    assert sample.whole is expected
    rule = factor_rule(product)
    assert rule is not None
    assert Kind.REDUCE in rule.kinds
    assert rewrite(graph, {"": 21}, {"Gemm": bias_apart}) == 0


def test_an_int_gemm_with_a_broken_beta_stays() -> None:
    from irpar.passes.split_bias import bias_apart

    operands = ints(5, 6, dtype=np.int32), ints(6, 4, dtype=np.int32), ints(4, dtype=np.int32)
    node = Sample("Gemm", operands, {"beta": 0.5}).node
    assert node.graph is not None
    assert rewrite(node.graph, {"": 21}, {"Gemm": bias_apart}) == 0


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (Sample("MatMul", (floats(3, 1, 5, 6), floats(4, 6, 7))), 2 * 3 * 4 * 5 * 6 * 7),
        (Sample("MatMul", (floats(6), floats(4, 6, 7))), 2 * 4 * 6 * 7),
        (Sample("MatMul", (floats(6), floats(6))), 2 * 6),
        (Sample("Gemm", (floats(6, 5), floats(6, 4)), {"transA": 1}), 2 * 5 * 6 * 4),
        (Sample("Gemm", (floats(5, 6), floats(6, 4), floats(4))), 2 * 5 * 6 * 4 + 5 * 4),
        (Sample("Gemm", (floats(5, 6), floats(6, 4), floats(4)), {"alpha": 0.5}), 2 * 5 * 6 * 4 + 2 * 5 * 4),
        (Sample("Einsum", (floats(3, 5, 6), floats(3, 6, 4)), {"equation": "bij,bjk->bik"}), 2 * 3 * 5 * 6 * 4),
        (Sample("Einsum", (floats(5), floats(4)), {"equation": "i,j->ij"}), 5 * 4),
    ],
    ids=str,
)
def test_cost(sample: Sample, expected: int) -> None:
    assert flops(sample.node) == expected


def test_the_rule_of_a_product_reads_like_an_einsum() -> None:
    rule = factor_rule(Sample("MatMul", (floats(3, 5, 6), floats(6, 4))).node)
    assert str(rule) == "([i,j,l],[l,k])->([i,j,k]) reduce(l) sum"


@pytest.mark.parametrize("equation", ["...ij->ji", "ii->i"])
def test_an_equation_that_is_not_covered_has_no_rule(equation: str) -> None:
    node = Sample("Einsum", (floats(5, 5),), {"equation": equation}).node
    assert factor_rule(node) is None
    assert flops(node) == 0
