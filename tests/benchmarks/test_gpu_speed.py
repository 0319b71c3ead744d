"""benchmarks/gpu/speed.py without a GPU: a case on numpy, operators alone, what is measured when, the report."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irpar
from benchmarks.gpu import machine, speed
from benchmarks.gpu.speeds import case_run, kernel_speeds, profile, rates, report, stopwatch
from benchmarks.gpu.speeds.cases import AUTOTUNED, CASES, QUICK, TINY, case_of
from benchmarks.gpu.speeds.device_clock import DeviceClock
from benchmarks.gpu.speeds.device_program import DeviceProgram
from benchmarks.gpu.speeds.single_operators import operators
from benchmarks.gpu.speeds.stopwatch import Subject, measure
from benchmarks.gpu.speeds.turns import BEGUN, Turns
from benchmarks.gpu.speeds.work import least_work
from tests.patience import patient


@pytest.fixture(autouse=True)
def short_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "RUNS", 3)
    monkeypatch.setattr(case_run, "find_spec", lambda name: None)
    monkeypatch.setattr(rates, "find_spec", lambda name: None)


def run_case(name: str) -> dict[str, Any]:
    """What a case keeps at its end."""
    kept: list[dict[str, Any]] = []
    case_run.run_case(TINY[name], "numpy", Turns(None), lambda made: kept.append(dict(made)))
    return kept[-1]


def options(*words: str) -> Any:
    return speed._options(["--engine", "numpy", *words])


# -- cases ------------------------------------------------------------------------------------------------------------


def test_a_case_and_its_report(tmp_path: Path) -> None:
    made = run_case("tiny-llama-bf16")
    assert made["problems"] == []
    assert made["times"].keys() == made["whole"].keys() == {"irpar"}
    assert made["nodes"] == 20
    report.merge(tmp_path, {**made, "date": "2026-01-02T03:04:05", "machine": {"device": "none"}})
    text = (tmp_path / "gpu_speed.md").read_text()
    assert "| tiny-llama-bf16 | " in text
    assert "## Problems and notes" not in text


def test_state_goes_on_from_run_to_run() -> None:
    case = TINY["tiny-train-f32"]
    program = DeviceProgram(irpar.train_step(irpar.load(case.model), optimizer="sgd", learning_rate=1.0), "numpy")
    program.give({**case.inputs, "learning_rate": np.asarray(0.5, np.float32)})
    losses = [float(program.results(program())["loss"]) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[3] + 0.1


def test_a_side_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise ValueError("no such operator")

    monkeypatch.setattr(case_run._CaseRun, "prepare_irpar", refuse)
    made = run_case("tiny-gpt-f32")
    assert made["problems"] == ["irpar: ValueError: no such operator"]
    assert made["times"] == {}
    assert "raise ValueError" in made["tracebacks"][0]


def test_least_work() -> None:
    case = TINY["tiny-gpt-f32"]
    program = DeviceProgram(irpar.load(case.model), "numpy")
    hidden, tokens, vocab = 32, 2 * 8, 64
    products = 2 * tokens * hidden * (12 * hidden + vocab)
    scores = 4 * 2 * hidden * (8 * 9 // 2)
    found = least_work(program.graph, case.masked_flops)
    assert found.flops == products + scores
    assert found.nbytes > 4 * (12 * hidden**2 + vocab * hidden + tokens * vocab)
    assert found.seconds(1.0, 1e30) == found.flops


def test_names() -> None:
    assert set(AUTOTUNED) <= CASES.keys()
    assert {case.name for case in QUICK} <= CASES.keys()
    assert all(case_of(name).name == name for name in CASES)
    assert not CASES.keys() & {speed.RATES, speed.KERNELS}


# -- operators and rates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "is_behind", "spun"), [(0, False, [1, 1, 1]), (2, False, [1, 2, 4, 1, 1]), (9, True, [1, 2, 4] * 3)]
)
def test_the_device_waits_longer_for_a_slow_host(late: int, is_behind: bool, spun: list[int]) -> None:
    waits: list[int] = []
    clock = DeviceClock("numpy")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    clock._cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Event=lambda: SimpleNamespace(**vars(event), done=len(waits) < late),
            runtime=SimpleNamespace(deviceSynchronize=lambda: None),
            get_elapsed_time=lambda begin, end: 40.0,
        ),
        int64=int,
    )
    clock._spin = lambda grid, block, arguments: waits.append(arguments[0])
    assert clock.seconds(lambda: None) == 0.002
    assert clock.is_behind == is_behind
    assert [round(wait / waits[0]) for wait in waits] == spun


def test_operators_and_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(DeviceClock, "seconds", lambda self, start, runs=0: [start(), 0.5][1])
    monkeypatch.setattr(kernel_speeds, "COUNT_OF_SMALL", 100)
    made = kernel_speeds.run_kernels("numpy", time.monotonic() + patient(60), lambda found: None)
    assert made["problems"] == []
    assert len(made["rows"]) == len(list(operators()))
    found = rates.run_rates("numpy", Turns(None))
    assert found["products"]["float16"] == {"irpar": 4 * rates.SMALL_SIDE**3}
    report.merge(tmp_path, {"name": "rates", **found})
    report.merge(tmp_path, {"name": "kernels", **made})
    assert "| MatMul f16 64x64 64x64 | 500000.0 |" in (tmp_path / "gpu_speed.md").read_text()


def test_no_operator_begins_when_time_is_over() -> None:
    made = kernel_speeds.run_kernels("numpy", time.monotonic() - 1, lambda found: None)
    assert made["rows"] == []
    assert made["problems"][0].startswith("out of time before MatMul f16")


def test_medians() -> None:
    calls: list[str] = []
    subjects = {name: Subject(lambda name=name: calls.append(name), lambda: None) for name in "ab"}  # type: ignore[misc]
    found = measure(subjects, 0.0)
    assert {name: times.runs for name, times in found.items()} == {"a": 3, "b": 3}
    assert calls[:6] == ["a"] * 3 + ["b"] * 3


def test_kernels_of_a_trace() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "dur": 30.0},
        {"cat": "kernel", "name": "gemm", "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "copy", "dur": 10.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 99.0},
    ]
    lines = profile.kernel_table("here", events, 1e-3)
    assert lines[0].startswith("here: 1000 us a run (profiled), the device busy 10 us in 0.6 kernels")
    assert lines[4] == "| gemm | 0.4 | 8.0 | 80.0% |"


# -- the whole --------------------------------------------------------------------------------------------------------


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "problems": [], "machine": {"sources": "s", "device": "d"}, **more}


def test_what_is_measured() -> None:
    facts = {"sources": "s", "device": "d"}
    known = {name: entry(name) for name in TINY if name != "tiny-gpt-f32"}
    known["tiny-bert-f32"]["problems"] = ["it failed"]
    known["tiny-resnet-f32"]["machine"] = {"sources": "others", "device": "d"}
    left = ["rates", "tiny-gpt-f32", "tiny-bert-f32", "tiny-resnet-f32", "kernels"]
    assert speed._wanted(options(), known, facts) == left
    assert len(speed._wanted(options("--again"), known, facts)) == len(TINY) + 2
    assert speed._wanted(options("--only", "tiny-decode-f32,rates"), known, facts) == ["tiny-decode-f32", "rates"]
    assert speed._wanted(options("--kernels"), known | {"rates": entry("rates")}, facts) == ["kernels"]
    with pytest.raises(KeyError, match="pigeons"):
        speed._wanted(options("--only", "pigeons"), known, facts)


def test_nothing_begins_that_cannot_end() -> None:
    def wave(wanted: list[str], seconds: float) -> list[str]:
        return speed._wave(wanted, options("--together", "2"), time.monotonic() + seconds)

    assert wave(["gpt2-train-f32", "rates", "llama-block-bf16", "kernels"], 70) == ["rates", "llama-block-bf16"]
    assert wave(["gpt2-train-f32", "kernels"], 200) == ["gpt2-train-f32"]
    assert wave(["kernels"], 200) == ["kernels"]
    assert wave(["kernels", "rates"], 45) == ["rates"]
    assert wave(["kernels"], 10) == []


def test_the_report(tmp_path: Path) -> None:
    times = {"waited": 2e-3, "in_a_row": 1e-3, "host": 3e-5, "runs": 15}
    case = entry(
        "gpt2-b1-s128-f16",
        rate="float16",
        nodes=500,
        work={"flops": 8e8, "nbytes": 1e6},
        times={"irpar": times, "compile": {**times, "waited": 4e-3}},
        whole={"irpar": 0.25},
        segments=[{"pieces": 1, "captured": 499, "eager": 1}, {}],
        errors={"irpar": 1e-3},
        allowed=1e-2,
        prepared_in={"irpar": 4.0},
        clocks={"clocks.sm": "1980 MHz"},
    )
    report.merge(tmp_path, entry("rates", products={"float16": {"irpar": 1e12}}, copy={"CuPy": 4e12}))
    report.merge(tmp_path, case)
    report.merge(tmp_path, case | {"problems": ["irpar and eager differ"]})
    text = (tmp_path / "gpu_speed.md").read_text()
    row = "| gpt2-b1-s128-f16 | 2.000 (1.000) |  | 4.000 (1.000) | 0.50 | 0.800 | 80% | 30 | 500 | 1, 499/500; not captured |"
    assert row in text
    assert "- gpt2-b1-s128-f16: irpar and eager differ" in text
    assert list(json.loads((tmp_path / "gpu_speed.json").read_text())["entries"]) == ["rates", "gpt2-b1-s128-f16"]


def test_who_is_alone(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "lock", tmp_path)
    turns.together()
    assert (tmp_path / BEGUN).exists()
    with turns.alone():
        pass


def test_a_process_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("still compiling")
    ended = SimpleNamespace(returncode=-9)
    found = speed._found(speed._Process("rates", ended, tmp_path, 0.0))  # type: ignore[arg-type]
    assert found["problems"] == ["the process did not end in time (-9), its last words: still compiling"]


def test_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert speed.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: nothing to measure on: CuPy is not installed")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_as_a_command(tmp_path: Path) -> None:
    words = ["--engine", "numpy", "--out", str(tmp_path), "--only", "rates,tiny-resnet-f32"]
    assert speed.main(words) == 0
    assert (tmp_path / "gpu_speed.json").is_file()
