"""What collectives are made of: which dtypes are strings, and attributes that fit nothing, in all groups alike."""

import ml_dtypes
import numpy as np
import pytest

from irpar.ops.collectives.arrays import is_text, nothing_like
from irpar.runtime.errors import MismatchError
from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.results import execute
from irpar.runtime.groups.threads import ThreadGroup
from irpar.runtime.groups.wire.control import NOBODY
from irpar.sharding import Axis, Mesh
from tests.runtime.groups.wire.test_wired import hosts

from .test_pairwise import run as run_pairwise
from .wired_threads import controls, run_threads

X = (Axis("x"),)
PAIR = Mesh({"x": 2})
TEXTS = [
    pytest.param(np.array(["a", "longer", "é"], object), id="object"),
    pytest.param(np.array(["a", "longer", "é"]), id="U"),
    pytest.param(np.array(["a", "longer", "é"], np.dtypes.StringDType()), id="StringDType"),
]


@pytest.mark.parametrize("array", TEXTS)
def test_all_arrays_of_strings_are_text(array: np.ndarray) -> None:
    assert is_text(array.dtype)
    assert nothing_like(array).tolist() == [""] * 3


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_numbers_are_no_text(dtype: type) -> None:
    assert not is_text(np.dtype(dtype))


@pytest.mark.parametrize("array", TEXTS)
def test_all_arrays_of_strings_are_gathered(array: np.ndarray) -> None:
    collective = Collective("AllGather", 0, X, sizes=(3, 2))
    calls = {rank: Call(rank, (rank,), collective, array[rank:]) for rank in range(2)}
    expected = ["a", "longer", "é", "longer", "é"]
    make = hosts(PAIR)

    def run(rank: int) -> list[str]:
        with make(rank) as group:
            return group.exchange({rank: calls[rank]})[rank].tolist()

    given, raised = run_threads(2, run)
    assert raised == {}
    assert given == [expected] * 2
    assert [result.tolist() for result in run_pairwise(PAIR, calls)[0].values()] == [expected] * 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kind": "Broadcast", "root": 2}, "root 2 is not in a group of 2"),
        ({"kind": "ReduceScatter", "dim": 1}, "ReduceScatter along dim 1 of a tensor of rank 1"),
        ({"kind": "AllToAll", "split_dim": 3}, "AllToAll along dim 3 of a tensor of rank 1"),
    ],
)
def test_attributes_that_fit_nothing(settings: dict, told: str) -> None:
    collective = Collective(id=0, axes=X, **settings)
    operand = np.ones(2, np.float32)
    with pytest.raises(ValueError, match=told):
        execute(collective, [operand] * 2)
    with pytest.raises(MismatchError, match=told) as caught:
        ThreadGroup(PAIR).exchange({rank: Call(rank, (rank,), collective, operand) for rank in range(2)})
    assert caught.value.do.startswith("correct the collective")


def test_ranks_of_two_programs_are_told_to_run_one() -> None:
    calls = {rank: Call(rank, (rank,), Collective("AllReduce", rank, X), np.ones(2)) for rank in range(2)}
    with pytest.raises(MismatchError, match="at different collectives") as caught:
        ThreadGroup(PAIR).exchange(calls)
    assert caught.value.do.startswith("let all ranks run the parts of one partition")


def test_a_run_that_failed_without_one_to_blame() -> None:
    first, second = controls(2)
    first.tell_failed(NOBODY, "the network is slow")
    assert second.learns_of_failure(5.0)
    assert second.failure == (NOBODY, "the network is slow")
    first.close()
    second.close()
