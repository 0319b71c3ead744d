"""What one collective tells that does what several did."""

import pytest

from irpar.analysis.explanation.joined_reasons import few_texts


def sums(*names: str, of: str = 'annotated "a.*.w"') -> list[str]:
    return [f"MatMul of %y_{name} sums over tp, which shards %{name} ({of})" for name in names]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (sums("a", "b", "c", "d"), sums("a", "b", "c", "d")),
        ([*sums("a", "a", "b", "b"), "", *sums("c")], sums("a", "b", "c")),
        (sums("a", "b", "c", "d", "e"), [*sums("a", "b"), "and others like these"]),
        ([*sums("a", "b", "c"), *sums("d", "e", of='annotated "b.*.w"')],
         [*sums("a", "b"), *sums("d", "e", of='annotated "b.*.w"'), "and others like these"]),
        ([f"Relu layer_{n}/relu reads it" for n in range(9)],
         ["Relu layer_0/relu reads it", "Relu layer_1/relu reads it", "and others like these"]),
        ([*"abcdef"], [*"abcdef"]),
    ],
)  # fmt: skip
def test_of_many_reasons_that_differ_in_names_alone_two_are_told(given: list[str], told: list[str]) -> None:
    assert few_texts(given) == "; ".join(told)
