"""What MindSpore says of its optimizer parallel, the pass zero does."""

from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar.analysis.optimizer_parallel import SAID, OptimizerParallel, optimizer_parallel_said
from irpar.annotations.mindspore import hsdp, set_auto_parallel_context, set_parallel_optimizer
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module, print_module
from irpar.onnx_io import save
from irpar.sharding import IrparError, Mesh
from tests.command_line import Capture, call
from tests.training.programs import CLASSIFIER, batch, classifier, same, with_weights


def step() -> Module:
    made = classifier(optimizer="adamw")
    made.shard("x", ["dp", None])
    return made


def zero_of(partition: irpar.Partition) -> dict[str, Any]:
    facts = partition.plan.training
    assert facts is not None
    return dict(facts["zero"])


@pytest.mark.parametrize(("level", "regather"), [("level1", False), ("level2", False), ("level3", True)])
def test_levels_shard_weights_and_gather_them_once_or_again(level: str, regather: bool) -> None:
    module = step()
    hsdp(module, threshold=0, optimizer_level=level)
    partition = irpar.partition(module, "dp=2")
    zero = zero_of(partition)
    assert (zero["stage"], zero["axes"], zero["regather"]) == (3, ["dp"], regather)
    held = {entry["name"]: entry["sharding"] for entry in partition.plan.state}
    assert held["w"] == held["w.m"] == [["dp"], None]
    kinds = [entry["kind"] for entry in partition.plan.collectives if entry["value"] != "loss"]
    gathers = [entry for entry in partition.plan.collectives if entry["kind"] == "all_gather"]
    assert "reduce_scatter" in kinds
    # u is read again: a gradient passes through it.
    assert len(gathers) == 4 + regather
    assert partition.verify()


def test_the_same_is_said_in_the_context() -> None:
    said, other = step(), step()
    hsdp(said, shard_size=2, threshold=0.5, optimizer_level="level3")
    config = {
        "parallel_optimizer_threshold": 0.5,
        "optimizer_weight_shard_size": 2,
        "optimizer_level": "level3",
    }
    set_auto_parallel_context(other, parallel_optimizer_config=config, enable_parallel_optimizer=True)
    expected = OptimizerParallel(3, True, 2, 0.512, ("dp",))
    assert optimizer_parallel_said(said) == optimizer_parallel_said(other) == expected
    for copy in (clone_module(said), parse_module(print_module(said).text, resources=print_module(said).resources)):
        assert optimizer_parallel_said(copy) == expected
    set_auto_parallel_context(other, enable_parallel_optimizer=False)
    assert irpar.partition(other, "dp=2").plan.training.get("zero") is None


def test_small_weights_and_those_that_are_named_stay() -> None:
    module = step()
    hsdp(module, threshold=0.05)
    assert set_parallel_optimizer(module, "u", False) == 1
    rows = {row["parameter"]: row["why"] for row in zero_of(irpar.partition(module, "dp=2"))["parameters"]}
    assert rows == {
        "b": "a rank holds 20 B of it, less than the threshold of 0.0512 kB",
        "c": "a rank holds 12 B of it, less than the threshold of 0.0512 kB",
        "u": "the module says that it stays as it is",
    }
    assert set_parallel_optimizer(module, "u", True) == 1
    rows = {row["parameter"]: row["why"] for row in zero_of(irpar.partition(module, "dp=2"))["parameters"]}
    assert rows["u"].startswith("uneven blocks")


@pytest.mark.parametrize(
    ("mesh", "axes", "group", "expected"),
    [
        ("dp=8", ("dp",), -1, ["dp"]),
        ("dp=8", ("dp",), 4, ["dp:(2)4"]),
        ("dp=8", ("dp",), 100, ["dp"]),
        ("pod=2,dp=4", ("pod", "dp"), 8, ["pod", "dp"]),
        ("pod=2,dp=4", ("pod", "dp"), 4, ["dp"]),
        ("pod=2,dp=4", ("pod", "dp"), 2, ["dp:(2)2"]),
        ("dp=8", ("dp",), 1, []),
    ],
)
def test_sizes_are_groups_of_neighbours(mesh: str, axes: tuple[str, ...], group: int, expected: list[str]) -> None:
    assert list(OptimizerParallel(3, group=group, axes=axes).axes_on(Mesh.of(mesh))) == expected


def test_a_size_that_shards_nothing_leaves_the_pipeline_as_it_is() -> None:
    module = step()
    hsdp(module, shard_size=1, threshold=0)
    assert "zero" not in irpar.partition(module, "dp=2").plan.pipeline


def test_a_saved_step_says_it_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    model = with_weights(CLASSIFIER)
    hsdp(model, threshold=0, optimizer_level="level3")
    save(model, tmp_path / "classifier.onnx")
    (tmp_path / "s.json").write_text('{"tensors": {"x": ["dp", null]}}')
    words = ("--mesh", "dp=2", "--shardings", tmp_path / "s.json", "--no-cache")
    code, printed, err = call(capsys, "train", tmp_path / "classifier.onnx", "-o", tmp_path / "out", *words)
    assert code == 0, err
    assert "zero: parameters, their state and gradients of 4 tensors sharded over dp" in printed


def test_a_parameter_that_is_annotated_over_dp_is_zero_3_by_itself() -> None:
    module, plain = step(), step()
    module.shard("w", ["dp", None])
    partition = irpar.partition(module, "dp=2")
    held = {entry["name"]: entry["sharding"] for entry in partition.plan.state}
    assert held["w"] == held["w.m"] == held["w.v"] == [["dp"], None]
    of_w = [entry["kind"] for entry in partition.plan.collectives if entry["value"] in ("w", "grad.w")]
    assert sorted(of_w) == ["all_gather", "reduce_scatter"]
    states = []
    for made in (partition, irpar.partition(plain, "dp=2")):
        with made.trainer(engine="numpy") as trainer:
            for number in range(3):
                trainer.step(batch(number))
            states.append(trainer.read_all())
    same(*states)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shard_size": 0}, "the shard size is 0"),
        ({"shard_size": 2.0}, "the shard size is 2.0"),
        ({"threshold": -1}, "the threshold is -1"),
        ({"threshold": "64"}, "the threshold is '64'"),
        ({"optimizer_level": "level4"}, "there is no optimizer level 'level4'"),
        ({"optimizer_level": 3}, "there is no optimizer level 3"),
        ({"axes": "dp"}, "the axes are 'dp'"),
        ({"axes": ()}, r"the axes are \(\)"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    module = step()
    with pytest.raises(IrparError, match=message):
        hsdp(module, **given)
    assert SAID not in module.metadata


def test_entries_and_weights_that_there_are_not() -> None:
    module = step()
    with pytest.raises(IrparError, match="no entry 'optimizer_levels'") as raised:
        set_auto_parallel_context(module, parallel_optimizer_config={"optimizer_levels": "level1"})
    assert "optimizer_level" in raised.value.do
    with pytest.raises(IrparError, match="no dict"):
        set_auto_parallel_context(module, parallel_optimizer_config=64)
    with pytest.raises(IrparError, match="enable_parallel_optimizer is 1"):
        set_auto_parallel_context(module, enable_parallel_optimizer=1)
    with pytest.raises(IrparError, match='"x" matches no weight'):
        set_parallel_optimizer(module, "x", False)
    with pytest.raises(IrparError, match='no tensor matches "nope"') as raised:
        set_parallel_optimizer(module, "nope", False)
    assert raised.value.where == 'set_parallel_optimizer("nope", False)'
    with pytest.raises(IrparError, match="parallel_optimizer is 0"):
        set_parallel_optimizer(module, "w", 0)  # type: ignore[arg-type]


def test_what_cannot_be_says_what_would_do() -> None:
    module = step()
    hsdp(module, shard_size=3)
    with pytest.raises(IrparError, match=r"groups of 3 ranks do not fit the 4 of dp"):
        irpar.partition(module, {"dp": 4, "tp": 2})
    hsdp(module, axes=["ep"])
    with pytest.raises(IrparError, match="zero cannot shard over ep"):
        irpar.partition(module, "dp=2")
    model = with_weights(CLASSIFIER)
    hsdp(model)
    model.shard("x", ["dp", None])
    with pytest.raises(IrparError, match="it is no training step") as raised:
        irpar.partition(model, "dp=2")
    assert "irpar train" in raised.value.do
    module.metadata[SAID] = "{"
    with pytest.raises(IrparError, match=f"the metadata {SAID} of the module cannot be read"):
        irpar.partition(module, "dp=2")
