"""Einstein summation on a device, by matrix products, against numpy's."""

import random
from unittest.mock import patch

import numpy as np
import pytest

from irpar.kernels import einsum
from tests.strict_device import STRICT, StrictArray


def found(equation: str, operands: list[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    given = None if out is None else StrictArray(out)
    result = einsum.einsum(STRICT, equation, [StrictArray(x) for x in operands], given)
    assert isinstance(result, StrictArray)
    return result._array


def check(equation: str, operands: list[np.ndarray]) -> None:
    wanted = np.einsum(equation, *operands)
    result = found(equation, operands, np.full(wanted.shape, np.nan))
    assert result.shape == wanted.shape
    np.testing.assert_allclose(result, wanted, rtol=1e-10, atol=1e-10)
    assert not any(np.may_share_memory(result, x) for x in operands)


@pytest.mark.parametrize(
    "equation",
    [
        *(
            "ij,jk->ik",
            "bqhd,bkhd->bhqk",
            "bhqk,bkhd->bqhd",
            "ab,ab->a",
            "ab,cd->acbd",
            "ij,kj->ki",
            "i,j->ij",
            "i,i->",
        ),
        *(
            "ij,jk",
            "ba,cb",
            "...ij,jk->...ik",
            "i...,i...->...",
            "ii,ij->j",
            "ij,kl->jk",
            "ii->i",
            "ii",
            "ij->ji",
            "ij->",
        ),
        *("ij,jk,kl->il", "abc,cd,de,ea->b", "i,i,i->i", "b...i,...ij,j->...b", "iij,jkk->ki", "...,...", "...->..."),
    ],
)
def test_equations(equation: str) -> None:
    numbers = np.random.default_rng(3)
    terms = equation.partition("->")[0].split(",")
    sizes = {label: 2 + place for place, label in enumerate(sorted(set(equation) - set(",->.")))}
    check(equation, [numbers.standard_normal(_shape(term, sizes)) for term in terms])


def _shape(term: str, sizes: dict[str, int]) -> list[int]:
    before, dots, behind = term.partition("...")
    return [*(sizes[x] for x in before), *([6, 1] if dots else []), *(sizes[x] for x in behind)]


def test_random_equations() -> None:
    draw = random.Random(0)
    for number in range(300):
        labels = "abcde"[: draw.randrange(1, 6)]
        sizes = {label: draw.choice([1, 2, 3]) for label in labels}
        terms = ["".join(draw.choice(labels) for _ in range(draw.randrange(4))) for _ in range(draw.randrange(1, 5))]
        used = sorted(set("".join(terms)))
        result = "".join(draw.sample(used, draw.randrange(len(used) + 1)))
        numbers = np.random.default_rng(number)
        # A dim of one element goes with any other.
        ones = [draw.random() < 0.1 and len(set(term)) == len(term) for term in terms]
        shapes = [[1 if one else sizes[x] for x in term] for term, one in zip(terms, ones, strict=True)]
        check(",".join(terms) + "->" + result, [numbers.standard_normal(shape) for shape in shapes])


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,kj->ki", "bqhd,bkhd->bhqk", "ij,jk,kl->il"])
def test_what_comes_about_in_order_is_written_where_it_belongs(equation: str) -> None:
    sizes = {label: 2 + place for place, label in enumerate("bhijklqd")}
    terms, _, result = equation.partition("->")
    operands = [np.random.default_rng(1).standard_normal([sizes[x] for x in term]) for term in terms.split(",")]
    out = np.full([sizes[x] for x in result], np.nan)
    found(equation, operands, out)
    np.testing.assert_allclose(out, np.einsum(equation, *operands), rtol=1e-10)


def test_two_operands_are_one_product() -> None:
    with patch.object(einsum, "product", wraps=einsum.product) as multiplied:
        found("bqhd,bkhd->bhqk", [np.ones((2, 3, 4, 5)), np.ones((2, 6, 4, 5))])
    assert multiplied.call_count == 1


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij->ij", [(2,)]),
        ("i,j->ij", [(2,)]),
        ("i->j", [(2,)]),
        ("i->ii", [(2,)]),
        ("ii->i", [(2, 3)]),
        ("i,i->i", [(2,), (3,)]),
    ],
)
def test_equations_that_do_not_fit_are_refused(equation: str, shapes: list) -> None:
    with pytest.raises(ValueError, match=r"equation|sizes"):
        found(equation, [np.ones(shape) for shape in shapes])


def test_what_is_summed_over_is_copied_only_where_its_parts_take_more() -> None:
    """The gradient of a convolution's weight: of each image, and then of all."""
    numbers = np.random.default_rng(5)
    columns, gradient = (numbers.standard_normal((4, channels, 64)).astype(np.float32) for channels in (9, 8))
    operands = [columns.transpose(1, 0, 2), gradient.transpose(0, 2, 1)]
    with patch.object(einsum, "product", wraps=einsum.product) as product:
        for dtype in (np.float32, np.float16):
            given = [x.astype(dtype, copy=False) for x in operands]
            exact = np.einsum("cns,nsf->cf", *(x.astype(np.float64) for x in given))
            result = found("cns,nsf->cf", given, np.full((9, 8), np.nan, dtype))
            assert result.dtype == dtype
            np.testing.assert_allclose(result, exact, rtol=0, atol=2e-5 if dtype == np.float32 else 2e-2)
        for call in product.call_args_list:
            assert [x.shape for x in call.args[1:3]] == [(4, 9, 64), (4, 64, 8)]
        assert np.shares_memory(product.call_args_list[0].args[1]._array, columns)
        found("cns,nsf->cf", [x[..., :2] if x is operands[0] else x[:, :2] for x in operands])
        assert product.call_args.args[1].shape == (9, 8)
