"""Gradients of Einsum where a letter has size 1 in one operand and another in the next."""

import pytest

from tests.ops.gradients.proof import check_sample
from tests.ops.rule_proof import Sample
from tests.ops.samples import floats

BROADCAST = [
    ("bi,bi->b", (2, 3), (2, 1)),
    ("ij,i->j", (2, 3), (1,)),
    ("i,i->", (3,), (1,)),
    ("ij,ij->j", (3, 2), (1, 2)),
    ("...i,...i->...", (2, 3), (2, 1)),
    ("ij,ij->ij", (3, 1), (1, 2)),
]


def sample(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> Sample:
    return Sample("Einsum", (floats(*left), floats(*right)), {"equation": equation}, version=12)


@pytest.mark.parametrize(("equation", "left", "right"), BROADCAST)
def test_a_size_of_one_is_repeated(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check_sample(sample(equation, left, right))
    terms, result = equation.split("->")
    turned = ",".join(reversed(terms.split(",")))
    check_sample(sample(f"{turned}->{result}", right, left))


@pytest.mark.parametrize(("equation", "left", "right"), BROADCAST[:5])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_sizes_that_are_known_when_the_model_runs(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], places: tuple[int, ...]
) -> None:
    symbols = {(place, dim): f"{'ab'[place]}{dim}" for place in places for dim in range(len((left, right)[place]))}
    check_sample(sample(equation, left, right), symbols=symbols)


def test_three_operands() -> None:
    operands = (floats(2, 1), floats(3, 4), floats(1, 4))
    check_sample(Sample("Einsum", operands, {"equation": "ij,jk,ik->i"}, version=12))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ii->i", [(3, 3)]),
        ("bii->b", [(2, 3, 3)]),
        ("iij,jkk->ik", [(3, 3, 2), (2, 4, 4)]),
        ("...iii->...i", [(2, 3, 3, 3)]),
    ],
)
def test_diagonals(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = tuple(floats(*shape) for shape in shapes)
    check_sample(Sample("Einsum", operands, {"equation": equation}, version=12))
