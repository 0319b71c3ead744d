"""Tests of a file run in one process of several, and in one of several runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import APART, LONG, WITH_CASES, in_part, place, together
from tests.patience import patient

ROOT = Path(__file__).parents[1]


def test_the_files_that_are_named_exist() -> None:
    assert [file for file in {*APART, *LONG, *WITH_CASES} - {"cases of ONNX"} if not (ROOT / file).exists()] == []


def test_long_files_come_first() -> None:
    assert (
        place(f"{LONG[0]}::test_any[x::y]") < place(f"{LONG[1]}::test_any") < place("tests/test_distribution.py::any")
    )
    assert {together(f"{file}::test_any") for file in WITH_CASES} == {"cases of ONNX"}
    assert together("tests/test_traps.py::test_any") == "tests/test_traps.py"
    assert {together(f"{file}::test_any[x::y]") for file in APART} == {f"{file}::test_any[x::y]" for file in APART}
    assert place("tests/test_random_attributes.py::test_any[0]") < len(LONG)


def test_parts_are_all_together_and_have_whole_files() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    nodes = {f"{file}::test_{name}" for file in files for name in "ab"}
    parts = [in_part(nodes, f"{part}/3") for part in (1, 2, 3)]
    assert set.union(*parts) == nodes
    assert sum(map(len, parts)) == len(nodes)
    assert min(map(len, parts)) > len(nodes) / 4
    for part in parts:
        assert not {together(node) for node in part} & {together(node) for node in nodes - part}
        assert sum(f"{file}::test_a" in part for file in LONG[3:9]) == 2
    assert in_part(nodes, "1/1") == nodes


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1/0", "3", "1/3/5", "-1/3", "a/b"])
def test_no_such_part(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"such as 3/8"):
        in_part([], text)


@pytest.mark.slow
def test_each_file_stays_in_one_process(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_any(n): pass\n"
        )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.conftest", "--numprocesses", "2"]
    of_all = {name: value for name, value in os.environ.items() if name != "IRPAR_TEST_PART"}
    told = subprocess.run(
        [*command, "--dist", "loadfile", str(tmp_path)],
        cwd=ROOT,
        env=of_all,
        capture_output=True,
        text=True,
        timeout=patient(120),
    ).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED .*?(test_\w+\.py)", told)
    assert len(ran) == 60, told
    assert len(set(ran)) == 3, told
