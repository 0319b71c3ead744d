"""Symbolic dims: canonical form, folding, binding, text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.ir import Expr, parse_dim, symbol
from irpar.ir.dims import (
    DimSyntaxError,
    ceildiv,
    exact_div,
    floordiv,
    maximum,
    minimum,
    modulo,
    parse_dim_at,
    product_of,
)

a, b = symbol("batch"), symbol("seq")


def test_equal_polynomials_are_equal() -> None:
    assert (a + b) * (a - b) == a * a - b * b
    assert hash(a + b) == hash(b + a)
    assert a - a == 0
    assert a * 0 + 3 == 3
    assert 2 - a == -a + 2
    assert a != b


def test_calls_fold_where_they_can() -> None:
    assert floordiv(a * 6, 3) == a * 2
    assert ceildiv(a * b, b) == a
    assert modulo(a * 4, 2) == 0
    assert exact_div(a * a + a, a) == a + 1
    assert exact_div(a, b) is None
    assert exact_div(a, 0) is None
    assert exact_div(a + b, a + b) == 1
    assert minimum(a, a) == a == maximum(a, a)
    assert (floordiv(-7, 2), ceildiv(-7, 2), modulo(-7, 2)) == (-4, -3, 1)


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (a * b, "batch*seq"),
        (a * 2 + 1, "2*batch+1"),
        (-a + b * 3 - 2, "-batch+3*seq-2"),
        (ceildiv(a, 2), "ceil(batch/2)"),
        (floordiv(a + 1, b), "floor((batch+1)/seq)"),
        (maximum(a, b) * 2, "2*max(batch, seq)"),
        (minimum(a, 3), "min(batch, 3)"),
        (modulo(a, b), "mod(batch, seq)"),
        (symbol("a b") + symbol("_"), "'_'+'a b'"),
        (symbol("it's"), r"'it\u0027s'"),
    ],
)
def test_text(dim: Expr, text: str) -> None:
    assert str(dim) == text
    assert parse_dim(text) == dim


expressions = st.recursive(
    st.integers(-5, 5) | st.builds(symbol, st.text(max_size=3) | st.sampled_from(["a", "b", "ceil"])),
    lambda inner: (
        st.builds(
            lambda function, x, y: function(x, y),
            st.sampled_from([lambda x, y: x + y, lambda x, y: x * y, minimum, maximum]),
            inner,
            inner,
        )
        | st.builds(
            lambda function, x, y: function(x, y), st.sampled_from([floordiv, ceildiv, modulo]), inner, st.just(a)
        )
    ),
    max_leaves=5,
)


@given(expressions)
def test_every_expression_reads_back(dim: "int | Expr") -> None:
    assert parse_dim(str(dim)) == dim


@given(expressions, st.integers(1, 9))
def test_binding_and_reading_agree(dim: "int | Expr", size: int) -> None:
    if isinstance(dim, Expr):
        sizes = dict.fromkeys(dim.symbols(), size)
        assert isinstance(dim.bind(sizes), int)
        assert dim.bind({}) == dim


def test_bind() -> None:
    assert (a * b + ceildiv(a, 2)).bind({"batch": 5}) == b * 5 + 3  # type: ignore[union-attr]
    assert (floordiv(a, b) + 1).bind({"batch": 9, "seq": 2}) == 5  # type: ignore[union-attr]


def test_symbols() -> None:
    assert (a * b + floordiv(symbol("x"), symbol("y"))).symbols() == {"batch", "seq", "x", "y"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("a+", 2),
        ("2a", 1),
        ("f(a, b)", 0),
        ("ceil(a, b)", 6),
        ("floor(a/0)", 0),
        ("'a", 0),
        ("a b", 1),
        ("²", 0),
    ],
)
def test_what_cannot_be_read(text: str, position: int) -> None:
    with pytest.raises(DimSyntaxError) as caught:
        parse_dim(text)
    assert caught.value.position == position


def test_deep_nesting_is_refused() -> None:
    assert parse_dim("(" * 40 + "a" + ")" * 40) == symbol("a")
    with pytest.raises(DimSyntaxError, match="deeper than 50"):
        parse_dim("(" * 5000)


def test_reading_at_a_place() -> None:
    assert parse_dim_at("f32[batch*2@dp]", 4) == (a * 2, 11)


def test_product() -> None:
    assert product_of((2, a, 3)) == a * 6
    assert product_of((2, None)) is None
    assert product_of(()) == 1
