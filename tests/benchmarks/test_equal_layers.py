"""benchmarks/equal_layers.py on small models."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equal_layers.py"


@pytest.mark.slow
def test_layers_are_timed_in_inference_and_in_a_step() -> None:
    command = [sys.executable, str(SCRIPT), "--most", "24", "--repeat", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:-5] for row in rows] == [
        ["inference", "4"],
        ["inference", "24"],
        ["training", "step", "4"],
        ["training", "step", "24"],
    ]
    assert all(float(row[-1]) > 1 for row in rows[1::2])
