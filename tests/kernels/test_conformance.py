"""Every kernel against ONNX's own backend cases, on read-only operands."""

import pytest

from .conformance import EXCLUDED, Case, cases, problem

FEWEST_CASES = 1720
FEWEST_OPERATORS = 175


@pytest.fixture(scope="module")
def all_cases() -> list[Case]:
    return list(cases())


def test_cases_give_the_case_data(all_cases):
    checked = [case for case in all_cases if case.name not in EXCLUDED]
    found = {case.name: problem(case) for case in checked}
    failures = [f"{name}: {text}" for name, text in found.items() if text is not None]
    assert not failures, "\n".join(failures)
    assert len(checked) >= FEWEST_CASES
    assert len({call.kernel.op_type for case in checked for call in case.calls}) >= FEWEST_OPERATORS


def test_excluded_cases_do_fail(all_cases):
    found = {case.name: problem(case) for case in all_cases if case.name in EXCLUDED}
    assert found.keys() == EXCLUDED.keys()
    assert all(found.values())
