"""benchmarks/memory_planner.py: its verdict."""

import pytest

from .scripts import load_script


@pytest.mark.parametrize(("step", "hard", "code"), [(1.0, 1.05, 0), (1.03, 1.0, 1), (1.0, 1.06, 1)])
def test_the_verdict(step: float, hard: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_script("memory_planner")
    monkeypatch.setattr(benchmark, "step_rows", lambda ratios: iter([str(ratios.append(step))]))
    monkeypatch.setattr(benchmark, "hard_rows", lambda _seconds, _number, ratios: iter([str(ratios.append(hard))]))
    assert benchmark.main([]) == code
