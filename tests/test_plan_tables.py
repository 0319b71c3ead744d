"""Tables about a plan: what is alike in all layers is one line."""

import pytest

from irpar.plan_tables import merged, pattern


@pytest.mark.parametrize("name", ["h.{}.fc1.weight", "b{}.fc1.weight", "block{}/fc1.weight", "l_{}x.fc1.weight", "{}"])
def test_layers_are_alike_however_their_numbers_stand_in_names(name: str) -> None:
    texts = [f"MatMul {name.format(layer)} sums over x:(1)2" for layer in (0, 11)]
    assert len(set(map(pattern, texts))) == 1
    assert merged(texts) == f"MatMul {name.format('*')} sums over x:(1)2"


def test_what_differs_in_more_than_numbers_stays_apart() -> None:
    assert pattern("b0.fc") != pattern("c0.fc")
    assert pattern("cut over x:(1)2") != pattern("cut over x:(2)2")


def test_a_single_text_keeps_its_numbers() -> None:
    assert merged(["b0.fc1 in s.yaml, line 3"]) == "b0.fc1"
