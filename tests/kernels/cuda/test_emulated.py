"""CUDA kernels on a processor, against the generic ones in double precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irpar.kernels.faults import FAULTS

from . import cases
from .cases import Case, check, run
from .emulation import NEEDS_COMPILER, EmulatedGpu

pytestmark = [NEEDS_COMPILER, pytest.mark.slow]

FAMILIES = (
    *(cases.gathers, cases.scatters, cases.one_hots, cases.losses, cases.cross_entropies, cases.sums, cases.rotaries),
    *(cases.convolutions, cases.joined_heads, cases.pools_last, cases.norms_last),
)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("emulated"), multiprocessors=1)


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_cases(gpu: EmulatedGpu, family: Callable[[np.random.Generator], list[Case]]) -> None:
    for case in family(np.random.default_rng()):
        results = run(case, gpu, same, same)
        assert results is not None, str(case)
        check(case, results)


def test_results_go_where_they_are_to_go(gpu: EmulatedGpu) -> None:
    case = cases.gathers(np.random.default_rng(1))[0]
    out = gpu.empty((3, 5, 24), np.dtype(np.uint8))
    results = run(case, gpu, same, same, out)
    assert results is not None
    assert results[0] is out
    loss = cases.losses(np.random.default_rng(1))[0]
    outs = (None, gpu.empty((5, 3), np.dtype(np.float32)))
    results = run(loss, gpu, same, same, outs)
    assert results is not None
    assert results[1] is outs[1]


@pytest.mark.parametrize("name", ["Gather", "ScatterND", "SoftmaxCrossEntropyLoss"])
def test_an_index_outside_is_noted(gpu: EmulatedGpu, name: str) -> None:
    case = next(case for case in cases.all_cases(2) if case.op_type == name and case.operands[0].dtype == np.float32)
    operands = list(case.operands)
    for wrong in (case.operands[0].shape[0 if name != "SoftmaxCrossEntropyLoss" else 1], -1000):
        operands[1] = operands[1].copy()
        operands[1].reshape(-1)[-1] = wrong
        word = np.zeros(1, bool)
        with FAULTS.noted(lambda problem, word=word: word):
            assert case.kernel(gpu, operands, case.attributes, case.n_outputs) is not None
        assert word[0]
    assert case.kernel(gpu, case.operands, case.attributes, case.n_outputs) is None, "nothing is noted"


def test_what_is_not_for_them(gpu: EmulatedGpu) -> None:
    x, ids = np.zeros((4, 6), np.float32), np.zeros((2, 1), np.int64)
    others = [
        Case("Gather", 13, (x.T, ids)),
        Case("Gather", 13, (x, ids.astype(np.uint8))),
        Case("ScatterND", 18, (x, ids, np.zeros((2, 6), np.float32))),
        Case("ScatterND", 18, (x, np.zeros((2, 2), np.int64), np.zeros(2, np.float32)), {"reduction": "add"}),
        Case("OneHot", 11, (ids.astype(np.float32), np.array(3), np.zeros(2))),
        Case("SoftmaxCrossEntropyLoss", 13, (x[:, :, None] + np.zeros(2, np.float32), np.zeros((4, 2), np.int64))),
        Case("ReduceSum", 13, (x, np.array([1]))),
        Case("ReduceSum", 13, (np.zeros((64, 64), np.int32), np.array([0]))),
        Case("ReduceSum", 13, (np.zeros((64, 64), np.float32), None)),
    ]
    for case in others:
        assert run(case, gpu, same, same) is None, str(case)
