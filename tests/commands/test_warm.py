"""irpar warm, on a stand-in for a device: every segment runs once; what cannot run, and no device, are told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.ir import DType, TensorType, Value, parse_module
from irpar.kernels import lookup, registry
from irpar.runtime import warm
from irpar.runtime.engines import cuda
from tests.command_line import Capture, call, refused
from tests.runtime.devices import strict_device


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    models.save(folder / "mlp.onnx", "mlp")
    module = irpar.load(folder / "mlp.onnx")
    irpar.annotate(module, models.annotations("mlp", "dp", "tp"))
    irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 2})).save(folder / "out")
    return folder / "out"


def test_every_segment_runs(partition: Path, capsys: Capture) -> None:
    parts = len(json.loads((partition / "plan.json").read_text())["parts"])
    with strict_device():
        code, printed, _ = call(capsys, "warm", partition, "--json")
        facts = json.loads(printed)
        assert code == 0
        assert facts["parts"] == parts
        assert facts["segments"] >= parts
        assert facts["left"] == facts["notes"] == []
        code, printed, _ = call(capsys, "warm", partition)
    assert code == 0
    assert f"{facts['segments']} segments of {parts} part" in printed
    assert "their kernels lie in" in printed


def test_what_the_host_computes_needs_no_device(tmp_path: Path, capsys: Capture) -> None:
    text = """\
mesh @m = ["x"=1]
graph local @g(%x: f32[4], %h: f32[4] in host) -> (%y) opset 21 ranks [0] {
  %g = Neg(%h) {| place=host} : f32[4] in host
  %d = irpar.Copy(%g) {to="device"} : f32[4]
  %y = Add(%x, %d) : f32[4]
}
"""
    irpar.partition(parse_module(text), pipeline="group-segments").save(tmp_path / "out")
    with strict_device():
        code, printed, _ = call(capsys, "warm", tmp_path / "out", "--json")
    assert (code, json.loads(printed)["segments"]) == (0, 1)


def test_what_only_a_run_tells_is_left(monkeypatch: pytest.MonkeyPatch, partition: Path, capsys: Capture) -> None:
    assert warm._zeros(Value("x", TensorType(DType.F32, (None, 4)))) is None
    assert warm._zeros(Value("x", TensorType(DType.STR, (4,)))) is None
    monkeypatch.setattr(warm, "_zeros", lambda value: None)
    with strict_device():
        code, printed, _ = call(capsys, "warm", partition)
    assert code == 0
    assert "0 segments of" in printed
    assert "not run: segment 0" in printed
    assert "only a run tells what %" in printed


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, partition: Path, capsys: Capture) -> None:
    def refuse(xp: object, *operands: object) -> None:
        raise ValueError("no such kernel")

    kernel = lookup("", "MatMul", 13)
    assert kernel is not None
    monkeypatch.setitem(registry._TABLE.entries, ("", "MatMul"), [replace(kernel, function=refuse)])
    with strict_device():
        code, printed, _ = call(capsys, "warm", partition)
    assert code == 0
    assert "MatMul failed: no such kernel" in printed


def test_the_folder_of_the_cache(partition: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/some/where")
    with strict_device():
        assert "/some/where" in call(capsys, "warm", partition)[1]


def test_no_device_is_told(partition: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    refused(capsys, "irpar warm needs CuPy, which is not installed", "warm", partition)
    refused(capsys, "or use irpar run with --engine ort, which needs nothing compiled", "warm", partition)
