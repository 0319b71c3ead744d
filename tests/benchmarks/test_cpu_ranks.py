"""benchmarks/cpu_ranks.py: what it measures is there, in the right units."""

import numpy as np

from irpar.ir import parse_module
from irpar.runtime.executor import Executor
from irpar.runtime.groups import ThreadGroup
from irpar.sharding import Mesh

from .scripts import load_script

script = load_script("cpu_ranks")


def test_every_group_without_others_is_started_as_it_is() -> None:
    assert script.groups()[:2] == ["threads", "processes"]
    assert script.start("threads", 2) == []
    assert script.start("processes", 8)[-3:] == ["launch", "-n", "8"]


def test_all_reduces_are_of_all_ranks() -> None:
    class Counted(ThreadGroup):
        calls = 0

        def exchange(self, waiting):
            self.calls += 1
            results = super().exchange(waiting)
            assert all((result == 2).all() and result.nbytes == 64 for result in results.values())
            return results

    group = Counted(Mesh({"tp": 2}))
    assert script.all_reduce(group, group.mesh, 64, 5) > 0
    assert group.calls == 5 + script.WARM


def test_the_best_of_all_rounds_counts() -> None:
    best = {"a": 1.0}
    script.keep_best(best, {"a": 2.0, "b": 3.0})
    script.keep_best(best, {"a": 0.5})
    assert best == {"a": 0.5, "b": 3.0}


def test_the_report_has_units() -> None:
    assert script.figure(13e-6, 1 << 10) == "13.0 us, 0.08 GB/s"
    assert script.figure(16e-3, 64 << 20) == "16.0 ms, 4.19 GB/s"
    facts = {"cores": 2, "load": (0.5, 1, 1), "python": "3", "onnxruntime": "1", "numpy": np.__version__}
    reduced = {"threads": dict.fromkeys(script.SIZES, 1.0)}
    chain = {script.BY_HAND: 0.002, "threads": 0.005}
    figures = {"steps": {"a": 0.0123}, "chain": chain, "all_reduce": reduced}
    told = script.report({"model": "gpt", "runs": 15, "rounds": 3, **figures, "facts": facts})
    assert "| a | 12.3 |" in told
    assert "| threads | 5.0 | 2.5 |" in told
    assert "| threads | 1,000.0 ms" in told


def test_the_chain_by_hand_is_that_of_the_ranks(monkeypatch) -> None:
    monkeypatch.setattr(script, "CHAIN", 6)
    seen = []
    monkeypatch.setattr(script, "median", lambda run, runs: seen.append(run()) or 1.0)
    assert script.by_hand(1) == 1.0
    module = parse_module(script.chain_text())
    x = np.ones(16, np.float32)
    with Executor(module, module.mesh) as executor:
        (found,) = executor.run({"x": x}).values()
        assert len(executor.log) == 6
    np.testing.assert_array_equal(seen[0], found)
