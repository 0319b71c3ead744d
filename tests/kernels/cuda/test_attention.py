"""Attention's CUDA kernels on an emulated device, against float64; what they leave to irpar's own kernel."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.budget import budget

from .attention_cases import Case, attributes_of, check, expected, found, operands
from .emulation import NEEDS_COMPILER, EmulatedGpu

CAUSAL = {"is_causal": 1}
ONE_OF_EACH = [
    pytest.param(Case(queries=75, keys=131, heads=4, head=64, attributes=CAUSAL), marks=pytest.mark.slow),
    Case(queries=75, keys=131, heads=4, attributes=CAUSAL),
    pytest.param(Case(dtype="f32", queries=20, keys=70, mask=("f16", "h"), layout="rows"), marks=pytest.mark.slow),
    Case(dtype="tf32", queries=20, keys=70, mask=("f16", "h"), layout="rows"),
    pytest.param(
        Case(dtype="bf16", heads=4, queries=1, keys=1, past=299, results=3, attributes=CAUSAL), marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@NEEDS_COMPILER
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_one_of_each_kernel(case: Case, folder: Path) -> None:
    given = operands(case)
    check(case, found(EmulatedGpu(folder), case, given), given)


def random_cases(count: int, rng: random.Random) -> Iterator[Case]:
    for _ in range(count):
        dtype = rng.choice(["f32", "tf32", "f16", "bf16"])
        attributes: dict[str, Any] = {}
        if rng.random() < 0.4:
            attributes["is_causal"] = 1
        for side in ("left", "right"):
            if rng.random() < 0.2:
                attributes[f"{side}_window_size"] = rng.choice([0, 3, 40])
        if rng.random() < 0.2:
            attributes["softcap"] = 3.0
        if rng.random() < 0.3:
            attributes["scale"] = rng.choice([0.3, -0.2, 0.0])
        # Few queries are multiplied exactly in any case; what is compared has no bits to drop, a cache would have.
        key_heads, past = rng.choice([1, 2]), 0 if dtype == "tf32" else rng.choice([0, 0, 37, 200])
        keys = rng.choice([1, 5, 40, 75, 131, 200])
        mask = rng.choice([None, ("bool", ""), ("f32", "h"), ("f16", "bh"), ("bf16", "bhq"), ("bool", "k")])
        is_short = mask is not None and "k" not in mask[1] and past + keys > 2 and rng.random() < 0.3
        yield Case(
            dtype=dtype,
            batch=rng.choice([1, 2]),
            heads=key_heads * rng.choice([1, 2, 4]),
            key_heads=key_heads,
            queries=rng.choice([9, 40, 75] if dtype == "tf32" else [1, 2, 3, 8, 9, 40, 75, 131, 160]),
            keys=keys,
            past=past,
            head=rng.choice([32, 40, 64, 64, 80, 128, 256]),
            value_head=rng.choice([0, 0, 0, 24, 64]),
            mask=mask,
            mask_keys=(past + keys) // 2 + 1 if is_short else 0,
            valid=past == 0 and rng.random() < 0.2,
            layout=rng.choice(["heads", "rows", "strided", "odd"]),
            attributes=attributes,
            results=1 if dtype == "tf32" else rng.choice([1, 3]),
        )


@NEEDS_COMPILER
@pytest.mark.slow
def test_random_calls(folder: Path) -> None:
    rng = random.Random(22)
    for place, case in enumerate(random_cases(budget(60), rng)):
        given = operands(case, place)
        gpu = EmulatedGpu(folder, rng.choice([2, 8]), arch=rng.choice([80, 90]))
        gpu.shared_bytes = rng.choice([99, 227]) * 1024
        check(case, found(gpu, case, given), given)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 20])
def test_results_go_where_they_are_wanted(folder: Path, queries: int) -> None:
    case = Case(heads=4, queries=queries, keys=queries, past=60, results=3, attributes=CAUSAL)
    given, gpu = operands(case), EmulatedGpu(folder)
    outs = [np.empty(x.shape, np.float16) for x in expected(case, given)]
    results = found(gpu, case, given, tuple(outs))
    check(case, results, given)
    check(case, tuple(outs), given)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [2, 9, 132])
def test_ranges_are_joined_in_one_order(folder: Path, multiprocessors: int) -> None:
    case = Case(dtype="f16", heads=8, key_heads=2, queries=1, keys=1, past=300, head=128, results=3)
    given = operands(case)
    first, second = (
        found(EmulatedGpu(folder, multiprocessors, is_backwards=is_backwards), case, given)
        for is_backwards in (False, True)
    )
    assert first is not None
    assert second is not None
    check(case, first, given)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 20])
def test_numbers_that_are_no_numbers_stay_where_they_are(folder: Path, queries: int) -> None:
    case = Case(queries=queries, keys=100, results=1)
    given = operands(case)
    given[0][0, 0, 0] = np.nan
    (result,) = found(EmulatedGpu(folder), case, given) or ()
    (wanted,) = expected(case, given)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(results=4), "scores"),
        (Case(attributes={"softmax_precision": 10}), "a narrow softmax"),
        (Case(head=36), "a head that 8 does not divide"),
        (Case(head=264), "a long head"),
        (Case(heads=3, key_heads=2), "heads without groups"),
        (Case(keys=0), "no keys"),
    ],
    ids=str,
)
def test_what_is_left_to_others(case: Case, why: str, tmp_path: Path) -> None:
    assert found(EmulatedGpu(tmp_path), case, operands(case)) is None


def test_other_dtypes_are_left_to_others(tmp_path: Path) -> None:
    case = Case()
    given = operands(case)
    wide = [None if x is None else x.astype(np.float64) for x in given]
    assert found(EmulatedGpu(tmp_path), case, wide) is None
    assert found(EmulatedGpu(tmp_path), case, [*given[:2], wide[2]]) is None
    masked = replace(case, mask=("f32", ""))
    given = operands(masked)
    given[3] = given[3].astype(np.float64)
    assert found(EmulatedGpu(tmp_path), masked, given) is None
    assert attributes_of(masked) == {}
