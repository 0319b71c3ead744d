"""benchmarks/recompute_step.py on a small gpt."""

from pathlib import Path

import pytest

from .scripts import load_script


@pytest.mark.slow
def test_all_of_it_on_a_small_gpt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_script("recompute_step")
    for name, number in {"HIDDEN": 16, "HEADS": 2, "VOCABULARY": 64, "SECONDS": 2, "SETS": 4}.items():
        monkeypatch.setattr(bench, name, number)
    sizes = ("--layers", "2", "--tokens", "32", "--budget", "0.8")
    assert bench.main(["--plan", str(tmp_path), "--network", "cpu-ethernet", *sizes]) == 0
    for _ in range(2):
        assert bench.main(["--run", str(tmp_path), "--method", "sqrt"]) == 0
    capsys.readouterr()
    assert bench.main(["--report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| method", "| auto", "| sqrt", "| min-cut"]
    assert all(float(row[2]) <= 0.8 for row in rows[1:])
    assert [bool(row[4]) for row in rows[1:]] == [False, True, False]
    assert "2 steps of each in turn" in printed
    assert "the same losses, to the bit" in printed
