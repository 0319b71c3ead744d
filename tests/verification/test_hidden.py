"""Faults that are hidden: behind masks, in copies on other ranks, and before outputs that tell little."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.runtime.errors import ReplicaError
from irpar.runtime.executor import Executor
from irpar.runtime.groups.base import Call
from irpar.runtime.groups.results import execute
from irpar.runtime.groups.threads import ThreadGroup
from irpar.runtime.layout import check_replicas
from irpar.verification.comparison import compare_rounding
from tests.written import model_of_text

Blocks = list[np.ndarray[Any, Any]]

MASKED = """g (float[4,8] x, float[8,16] w, bool[4,16] m) => (float[4,16] y) <float f = {-3.4e38}> {
    h = MatMul(x, w)  y = Where(m, h, f) }"""
SUMMED = "g (float[4,8] x, float[8,16] w) => (float[4,16] y) {{ h = MatMul(x, w) {rest} }}"


def partitioned(folder: Path, text: str, cuts: dict[str, Any]) -> irpar.Partition:
    onnx.save(model_of_text(text, ("w",), {}, 21), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, cuts)
    return irpar.partition(module, "tp=2")


def doubled(group: ThreadGroup, calls: Sequence[Call]) -> Blocks:
    """What a collective gives, times two."""
    return [2 * block for block in execute(calls[0].collective, [call.operand for call in calls])]


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "rank 1"])
def test_a_mask_over_most_elements_hides_no_fault(
    ranks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = partitioned(tmp_path, MASKED, {"w": [None, ["tp"]], "y": [None, None]})
    inputs = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32), "m": np.zeros((4, 16), bool)}
    inputs["m"][:, ::3] = True
    assert made.verify(inputs).result == "equal"
    plain = Executor._computed

    def wrong(self: Executor, prepared: Any, state: Any, session: int) -> dict[str, Any]:
        blocks = plain(self, prepared, state, session)
        if state.rank not in ranks:
            return blocks
        return {name: np.where(np.abs(block) < 100, block + 1, block) for name, block in blocks.items()}

    monkeypatch.setattr(Executor, "_computed", wrong)
    assert made.verify(inputs).result == "different"


def test_masked_elements_are_told_whatever_their_share() -> None:
    expected = np.full(1000, -3.4e38, np.float32)
    expected[::10] = np.linspace(-1, 1, 100)
    got = expected.copy()
    got[::10] += 1e-3
    assert compare_rounding("y", expected, expected).is_equal
    assert not compare_rounding("y", got, expected).is_equal


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ([np.ones(2), np.ones(3)], [np.ones(2), np.zeros(3)], "of entry 1 the largest difference is 1"),
        ([np.ones(2)], [], "is a sequence of 1 on one and a sequence of 0 on the other"),
        (None, np.ones(2), "is an absent optional on one and a tensor on the other"),
    ],
)
def test_copies_of_what_is_no_tensor_are_compared(one: Any, other: Any, told: str) -> None:
    check_replicas("y", {0: one, 1: one}, None)
    with pytest.raises(ReplicaError, match=told):
        check_replicas("y", {0: one, 1: other}, None)


@pytest.mark.parametrize(
    "rest",
    [
        "z = Constant<value_float = 100.0>()  s = Sub(h, z)  y = Relu(s)",
        "z = Constant<value_float = 50.0>()  s = Neg(h)  t = Sub(s, z)  y = Sign(t)",
    ],
    ids=["all zero", "all equal"],
)
def test_a_flat_output_hides_no_fault(rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitioned(tmp_path, SUMMED.format(rest=rest), {"w": [["tp"], None]})
    assert made.verify().result == "equal"
    monkeypatch.setattr(ThreadGroup, "execute", doubled)
    found = made.verify()
    assert found.result == "different"
    assert "inside the model" in str(found)


def test_truth_values_hide_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SUMMED.format(rest="s = Neg(h)  y = Greater(s, h)").replace("float[4,16] y", "bool[4,16] y")
    made = partitioned(tmp_path, text, {"w": [["tp"], None]})
    assert made.verify().result == "equal"
    monkeypatch.setattr(ThreadGroup, "execute", doubled)
    assert made.verify().result == "different"


@pytest.mark.parametrize("reader", ["Greater(h, far)", "Softmax(h)"])
def test_what_a_collective_gives_is_compared_itself(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operand is right, and what reads its result gives the same of any number."""
    kind = "bool" if "Greater" in reader else "float"
    text = f"""g (float[4,8] x, float[8,1] w) => ({kind}[4,1] y) <float far = {{{{1000.0}}}}> {{{{
        h = MatMul(x, w)  y = {reader} }}}}""".format()
    made = partitioned(tmp_path, text, {"w": [["tp"], None]})
    assert made.verify().result == "equal"
    monkeypatch.setattr(ThreadGroup, "execute", doubled)
    found = made.verify()
    assert found.result == "different"
    assert "h: differs, made by MatMul" in str(found)


def test_what_a_local_program_makes_of_an_operand_is_not_taken_for_it(tmp_path: Path) -> None:
    """A sum of integers is reduced in float64, under the name of its operand."""
    text = """g (int64[4,8] x, float[1] w) => (int64[4] y) <int64[1] last = {1}> {
        z = Add(x, x)  y = ReduceSum<keepdims = 0>(z, last) }"""
    made = partitioned(tmp_path, text, {"x": [None, ["tp"]]})
    assert made.verify().result == "equal"
    assert made.bisect().first is None


def test_the_first_copy_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 holds is right: only the copy of rank 1 is not, from the sum on."""
    rest = "a = Relu(h)  y = Neg(a)"
    made = partitioned(
        tmp_path, SUMMED.format(rest=rest), {"x": [None, ["tp"]], "w": [["tp"], None], "y": [None, None]}
    )
    assert made.bisect().first is None

    def wrong(group: ThreadGroup, calls: Sequence[Call]) -> Blocks:
        first, *others = execute(calls[0].collective, [call.operand for call in calls])
        return [first, *(block + 1 for block in others)]

    monkeypatch.setattr(ThreadGroup, "execute", wrong)
    assert "should be equal on ranks 0 and 1" in str(made.verify())
    found = made.bisect()
    assert found.first is not None
    assert "h_1 should be equal on ranks 0 and 1, but the largest difference is 1" in str(found)
    assert found.node == "MatMul of %h"
