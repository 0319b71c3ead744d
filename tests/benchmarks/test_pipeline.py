"""benchmarks/pipeline.py on a small model."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.mark.slow
def test_all_steps_are_told() -> None:
    command = [sys.executable, str(SCRIPT), "--layers", "2", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = ("start of Python", "imports", "load and annotate", "passes", "plan", "write", "the process", "localize")
    assert all(f"  {word}" in done.stdout for word in words)
