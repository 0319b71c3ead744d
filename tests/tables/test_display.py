"""Numbers, tables, commands and progress as they are printed."""

import io
import json
import re
import shlex
import sys

import pytest

from irpar.cli import main
from irpar.commands.progress_report import ProgressReport
from irpar.output.tables import indented
from irpar.pass_manager.progress import Progress
from irpar.tables import display
from irpar.tables.display import print_json, shortened
from irpar.units import bytes_text, count_text, flops_text, gigabytes_option, sharding_text, share_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (1024, "1.02 kB"), (999_499, "999 kB")),
        *((999_500, "1 MB"), (131_072, "131 kB"), (1_250_000, "1.25 MB"), (140 * 10**9, "140 GB"), (10**21, "1000 EB")),
    ],
)
def test_bytes(number, text):
    assert bytes_text(number) == text


def test_other_numbers():
    assert flops_text(32_727_040) == "32.7 MFLOP"
    assert share_text(1, 4) == "25.0%"
    assert [gigabytes_option(each) for each in (75_776, 1_123_456, 16_000_000_000)] == ["0.00007578", "0.001124", "16"]
    assert share_text(1, 0) == ""
    assert [count_text(number, "rank") for number in (0, 1, 2000)] == ["0 ranks", "1 rank", "2,000 ranks"]


@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        ([["dp"], None], [8, 64], "[8@dp, 64]"),
        ([["dp", "tp"], ["?"]], [8, 64], "[8@(dp,tp), 64?]"),
        ([["tp:(2)4", "?"]], None, "[_@tp:(2)4?]"),
        (None, [8, 64], "[8, 64]"),
        ([], [], "[]"),
    ],
)
def test_shardings_read_as_in_the_text_form(spec, shape, text):
    assert sharding_text(spec, shape) == text


def test_json_has_no_numbers_that_json_lacks(capsys):
    print_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": (1, None)}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": [1, None]}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(monkeypatch, stream, seconds, is_shown=True):
    """What is printed when a pass and the writing of weights are reported, `seconds` after the start."""
    now = [0.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("irpar.commands.progress_report.QUIET_SECONDS", 2.0)
    with ProgressReport(is_shown) as progress:
        now[0] = seconds
        progress.passes(Progress("start", "localize", 2, 5))
        now[0] += 100
        progress.bytes(2_000_000, 4_000_000)
    return stream.getvalue()


def test_quick_work_is_not_reported(monkeypatch):
    assert "localize" not in report(monkeypatch, io.StringIO(), 1.0)


def test_long_work_is_reported_line_by_line_where_there_is_no_terminal(monkeypatch):
    assert report(monkeypatch, io.StringIO(), 10.0) == "pass localize: 2 of 5\nwriting weights: 2 MB of 4 MB\n"


def test_a_terminal_gets_bars(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    printed = report(monkeypatch, Terminal(), 0.1)
    assert "localize" in printed
    assert "2 MB of 4 MB" in printed


def test_nothing_is_reported_with_json(monkeypatch):
    assert report(monkeypatch, Terminal(), 10.0, is_shown=False) == ""


def test_a_narrow_terminal_folds_names_and_no_titles_or_numbers(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    made = display.table("parameter", "difference", "allowed", "", right=("difference", "allowed"))
    made.add_row("h.0.attention.projection.weight", "1,000,000", "0.0001", "equal")
    display.output().print(made)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["parameter", "difference", "allowed"]
    assert lines[1].split()[1:] == ["1,000,000", "0.0001", "equal"]
    assert "".join(line.split()[0] for line in lines[1:]) == "h.0.attention.projection.weight"
    display.output().print("one two three four five six seven eight nine ten")
    assert all(len(line) <= 40 for line in capsys.readouterr().out.splitlines())


def test_where_there_is_no_terminal_lines_are_neither_folded_nor_padded(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    made = display.table("name", "why")
    made.add_row("w", "one reason " * 20)
    made.add_row("w", "")
    display.output().print(made)
    display.output().print(indented("a paragraph " * 20))
    title, row, short, paragraph = capsys.readouterr().out.splitlines()
    assert (title.split(), title.strip(), short) == (["name", "why"], title, "w")
    assert row.split() == ["w", *["one", "reason"] * 20]
    assert paragraph == "  " + " ".join(["a paragraph"] * 20)


def test_blanks_inside_and_before_stay(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    display.output().print("\n  a  b  \n\nc")
    assert capsys.readouterr().out == "\n  a  b\n\nc\n"


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_commands_are_printed_so_that_they_can_be_pasted(capsys, tmp_path, monkeypatch, is_terminal):
    made = tmp_path / "a folder"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    if is_terminal:
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr("sys.stdout", Terminal())
    code = main(["demo", "-o", str(made)])
    out = sys.stdout.getvalue() if is_terminal else capsys.readouterr().out
    lines = re.sub(r"\x1b\[\d*m", "", out).splitlines()
    assert code == 0
    assert is_terminal or not [line for line in lines if line != line.rstrip()]
    commands = [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]
    assert [command[-1] for command in commands] == [
        str(made / name) for name in ("gpt.onnx", "partition", "partition")
    ]
    (following,) = (line.partition(" Next: ")[2] for line in lines if " Next: " in line)
    explain, inspect = following.split(", ")
    assert shlex.split(explain) == ["irpar", "explain", str(made / "partition")]
    assert shlex.split(inspect) == ["irpar", "inspect", str(made / "gpt.onnx")]


def test_long_names_lose_their_middle() -> None:
    name = "/model/encoder/layers.11/self_attention/query_projection/MatMul_output_0_quantized"
    short = shortened(f"{name} needs it in full")
    assert short == f"{name[:19]}…{name[-28:]} needs it in full"
    assert shortened("w of MatMul") == "w of MatMul"
