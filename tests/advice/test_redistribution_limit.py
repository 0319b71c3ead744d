"""--max-redistribution-mb: an unexpected large move is an error that names its cause, and nothing is written."""

import json
import re
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import irpar
from irpar.advice import redistribution_advice
from irpar.advice.redistribution_limit import LargeRedistributionError
from tests.command_line import call
from tests.written import Specs, model_of_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """x times w; 64 kB of f32 are its weight."""
    text = "g (float[512, 64] x, float[64, 256] w) => (float[512, 256] y) { y = MatMul(x, w) }"
    onnx.save(model_of_text(text, ["w"]), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def torn(path: Path) -> irpar.Module:
    """The weight lies by columns, and the rows of what comes out over the same axis."""
    module = irpar.load(path)
    module.shard("w", [None, "tp"])
    module.shard("x", ["tp", None])
    module.shard("y", ["tp", None])
    return module


def test_the_error_names_the_tensor_both_sides_and_the_way_out(path: Path) -> None:
    with pytest.raises(LargeRedistributionError) as raised:
        irpar.partition(torn(path), "tp=4", max_redistribution_mb=0)
    plan = irpar.partition(torn(path), "tp=4").plan
    (entry,) = plan.collectives
    text = str(raised.value)
    assert f"sends {entry['sent_bytes'] / 1000:.3g} kB a device" in text
    conflict = entry["conflict"]
    assert conflict["value"] in text
    allowed = f"--max-redistribution-mb {entry['sent_bytes'] / 1e6!r}"
    for told in (conflict["because"], conflict["needed_because"], allowed):
        assert told
        assert told in text


def test_what_is_allowed_passes(path: Path) -> None:
    sent = irpar.partition(torn(path), "tp=4").plan.totals["sent_bytes"]
    irpar.partition(torn(path), "tp=4", max_redistribution_mb=sent / 1e6)
    with pytest.raises(LargeRedistributionError):
        irpar.partition(torn(path), "tp=4", max_redistribution_mb=(sent - 1) / 1e6)


def test_reductions_of_partial_sums_are_no_redistributions(path: Path) -> None:
    module = irpar.load(path)
    module.shard("w", ["tp", None])
    plan = irpar.partition(module, "tp=4", max_redistribution_mb=0).plan
    assert [entry["kind"] for entry in plan.collectives] == ["all_reduce"]


def test_what_is_gathered_for_an_operator_without_a_rule_counts(tmp_path: Path) -> None:
    text = "g (float[64, 4] x) => (int64[2, k] z) { z = NonZero(x) }"
    onnx.save(model_of_text(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("x", ["tp", None])
    with pytest.raises(LargeRedistributionError, match=r"x f32\[64, 4\], 1.02 kB: all_gather over tp") as raised:
        irpar.partition(module, "tp=4", max_redistribution_mb=0)
    assert 'leave out the annotation "x"' in str(raised.value)
    assert "NonZero" in str(raised.value)


def test_the_steps_of_one_redistribution_count_together(tmp_path: Path) -> None:
    onnx.save(model_of_text("g (float[16, 16] x) => (float[16, 16] y) { y = Relu(x) }"), tmp_path / "model.onnx")

    def cut() -> irpar.Module:
        module = irpar.load(tmp_path / "model.onnx")
        module.shard("x", ["a", "b"])
        module.shard("y", ["b", None])
        return module

    sent = [entry["sent_bytes"] for entry in irpar.partition(cut(), "a=2,b=4").plan.collectives]
    assert len(sent) > 1
    with pytest.raises(LargeRedistributionError, match=", then "):
        irpar.partition(cut(), "a=2,b=4", max_redistribution_mb=(sum(sent) - 1) / 1e6)
    irpar.partition(cut(), "a=2,b=4", max_redistribution_mb=sum(sent) / 1e6)


def test_a_limit_that_is_none_is_refused(path: Path) -> None:
    for wrong in (-1, float("nan")):
        with pytest.raises(irpar.IrparError, match="0 or more"):
            irpar.partition(torn(path), "tp=4", max_redistribution_mb=wrong)


def test_the_command_writes_nothing(capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path) -> None:
    shardings = tmp_path / "s.yaml"
    shardings.write_text("mesh: {tp: 4}\ntensors:\n  w: [null, tp]\n  x: [tp, null]\n  y: [tp, null]\n")
    words = ["partition", path, "-o", tmp_path / "out", "--shardings", shardings, "--max-redistribution-mb"]
    code, _, err = call(capsys, *words, "0.001")
    assert code == 2
    assert 'annotated "w" in s.yaml, line 3' in err or 'annotated "x" in s.yaml, line 4' in err
    assert not (tmp_path / "out").exists()
    code, _, _ = call(capsys, *words, "1")
    assert code == 0
    assert (tmp_path / "out" / "plan.json").exists()


WAY = re.compile(r'annotate "([^"]*)" as (\[.*?\])(?= and | \()|leave out the annotation "([^"]*)"')


def followed(advice: str, specs: Specs) -> Specs:
    """The annotations, changed as one way out says."""
    changed = dict(specs)
    for name, spec, left_out in WAY.findall(advice):
        if left_out:
            del changed[left_out]
        else:
            changed[name] = json.loads(re.sub(r"[a-z]\w*", lambda w: w[0] if w[0] == "null" else f'"{w[0]}"', spec))
    return changed


def partitioned(path: Path, specs: Specs, most_mb: float | None) -> irpar.Partition:
    module = irpar.load(path)
    irpar.annotate(module, specs)
    return irpar.partition(module, "tp=4", max_redistribution_mb=most_mb)


def ways_out(path: Path, specs: Specs, most_mb: float) -> list[str]:
    """What the error says to do, but for allowing more."""
    with pytest.raises(LargeRedistributionError) as raised:
        partitioned(path, specs, most_mb)
    return raised.value.do.split(", or allow more")[0].split(", or ")


def test_each_way_out_that_is_told_is_one(path: Path) -> None:
    specs: Specs = {"w": [None, "tp"], "x": ["tp", None], "y": ["tp", None]}
    ways = ways_out(path, specs, 0.001)
    assert len(ways) == 2
    for way in ways:
        assert "(tried: a device then sends" in way
        partitioned(path, followed(way, specs), 0.001)


@pytest.mark.parametrize("said", ["b*.w", None])
def test_the_same_move_of_all_layers_is_spared_by_one_way_out(tmp_path: Path, said: str | None) -> None:
    """Three layers: their rows are sharded, and their weights by columns; with a glob, and each by its name."""
    names = [f"b{n}.w" for n in range(3)]
    text = "g (float[64, 64] x, float[64, 64] {}, float[64, 64] {}, float[64, 64] {}) => (float[64, 64] y)"
    body = "{{ a = MatMul(x, {}) b = MatMul(a, {}) y = MatMul(b, {}) }}"
    path = tmp_path / "layers.onnx"
    onnx.save(model_of_text((text + body).format(*(f'"{name}"' for name in names * 2)), names), path)
    rows: Specs = {"x": ["tp", None], "y": ["tp", None]}
    specs: Specs = rows | {name: [None, "tp"] for name in ([said] if said else names)}
    first, *_ = ways_out(path, specs, 0)
    if said:
        assert first.startswith(f'annotate "{said}" as [null, null] (')
    assert "remain above" not in first
    partitioned(path, followed(first, specs), 0)


def test_what_no_other_annotation_spares_is_said_to_be_so(tmp_path: Path) -> None:
    text = "g (float[64, 64] x) => (float[64, 64] y) { a = Softmax<axis=0>(x) y = Softmax<axis=1>(a) }"
    onnx.save(model_of_text(text), tmp_path / "model.onnx")
    specs: Specs = {"x": [None, "tp"], "y": ["tp", None]}
    sent = partitioned(tmp_path / "model.onnx", specs, None).plan.collectives[0]["sent_bytes"]
    with pytest.raises(LargeRedistributionError) as raised:
        partitioned(tmp_path / "model.onnx", specs, 0)
    assert f"--max-redistribution-mb {sent / 1e6!r}" in raised.value.do
    partitioned(tmp_path / "model.onnx", specs, sent / 1e6)


def test_a_large_model_is_not_planned_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redistribution_advice, "_MOST_NODES", 0)
    with pytest.raises(LargeRedistributionError, match="too large a model to try") as raised:
        irpar.partition(torn(path), "tp=4", max_redistribution_mb=0)
    assert "may avoid it" in raised.value.do


def test_a_way_out_that_sends_more_in_all_is_not_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each spares the large move, and costs as much elsewhere."""
    planned = redistribution_advice.Advisor._planned

    def dearer(
        self: redistribution_advice.Advisor, changes: redistribution_advice._Changes
    ) -> redistribution_advice._Plan | None:
        plan = planned(self, changes)
        return None if plan is None else replace(plan, sent_bytes=10**9)

    monkeypatch.setattr(redistribution_advice.Advisor, "_planned", dearer)
    with pytest.raises(LargeRedistributionError) as raised:
        irpar.partition(torn(path), "tp=4", max_redistribution_mb=0)
    assert "tried: " not in raised.value.do
    assert "that were tried none makes it smaller and sends less in all" in raised.value.do


def test_the_annotation_further_on_that_causes_the_move_is_what_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = "g (float[8, 16] x) => (float[8, 32] y) { a = Concat<axis=1>(x, x) y = Relu(a) }"
    onnx.save(model_of_text(text), path)
    specs: Specs = {"x": ["tp", None], "y": [None, None]}
    first, *_ = ways_out(path, specs, 0)
    assert first.startswith('annotate "y" as [[tp], null] (tried: a device then sends 0 B')
    partitioned(path, followed(first, specs), 0)
