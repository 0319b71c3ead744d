"""Tests of a file run in one process of several."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import LONG, WITH_CASES, place, together
from tests.patience import patient

ROOT = Path(__file__).parents[1]


def test_the_files_that_are_named_exist() -> None:
    assert [file for file in {*LONG, *WITH_CASES} - {"cases of ONNX"} if not (ROOT / file).exists()] == []


def test_long_files_come_first() -> None:
    assert (
        place(f"{LONG[0]}::test_any[x::y]") < place(f"{LONG[1]}::test_any") < place("tests/test_distribution.py::any")
    )
    assert {together(f"{file}::test_any") for file in WITH_CASES} == {"cases of ONNX"}
    assert together("tests/test_traps.py::test_any") == "tests/test_traps.py"


@pytest.mark.slow
def test_each_file_stays_in_one_process(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_any(n): pass\n"
        )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.conftest", "--numprocesses", "2"]
    told = subprocess.run(
        [*command, "--dist", "loadfile", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=patient(120)
    ).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED .*?(test_\w+\.py)", told)
    assert len(ran) == 60, told
    assert len(set(ran)) == 3, told
