"""Micro-batches: the numbers of the whole batch, of one device and of several, in every way to run a step."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import irpar
from irpar.annotations.mindspore import hsdp
from irpar.ir import clone_module
from irpar.ir.text.files import parse_module
from irpar.onnx_io import save
from irpar.output.checkpoint import Checkpoint
from irpar.pass_manager.default_pipeline import with_zero
from irpar.passes.accumulate import AccumulateError
from irpar.passes.zero import Zero
from irpar.passes.zero.views import gathers_in_trips
from irpar.sharding import Mesh
from irpar.training.micro_batches import BatchSizeError
from tests.budget import every
from tests.command_line import Capture, call, refused
from tests.partition_runs import GROUPS
from tests.test_explanations import check_explained
from tests.training.group_runs import run_in_group
from tests.training.programs import CLASSIFIER, data_file, same, samples, state_in, with_weights

SINGLE = """
graph @single(%x: f32[], %w: f32[3] from "w") -> (%y) opset 21 {
  %z = Mul(%x, %w) : f32[3]
  %y = ReduceSum(%z) {keepdims=0} : f32[]
}
"""

Array = np.ndarray[Any, Any]

COUNT, ROWS = 4, 8
CUTS = {"x": [None, "dp", None], "w": [None, "tp"], "u": ["tp", None]}
WHOLE = CLASSIFIER.replace("8, ", f"{COUNT * ROWS}, ")
"""The classifier with the batch of a step."""
NORMALISED = """
graph @normalised(%x: f32[8, 6], %w: f32[6, 3] from "w", %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %var: f32[3] from "var") -> (%y) opset 21 {
  %h = MatMul(%x, %w) : f32[8, 3]
  %y = BatchNormalization(%h, %g, %b, %mean, %var) {momentum=0.5} : f32[8, 3]
}
"""
WIDE = CLASSIFIER.replace("8, ", "512, ")
STATISTICS = {"mean": [0.0, 0.0, 0.0], "var": [1.0, 1.0, 1.0]}
BIASED = """
graph @biased(%x: f32[8, 6], %offset: f32[1, 6], %w: f32[6, 3] from "w") -> (%y) opset 21 {
  %i = Add(%x, %offset) : f32[8, 6]
  %y = MatMul(%i, %w) : f32[8, 3]
}
"""


def step_of(text: str = CLASSIFIER, count: int = COUNT, **options: Any) -> irpar.Module:
    """A step whose weights do not depend on the size of its batch."""
    module = parse_module(text)
    random = np.random.default_rng(7)
    numbers = {
        value.source: STATISTICS.get(value.source, random.standard_normal(value.tensor_type.static_shape))
        for value in module.graph.inputs
        if value.source is not None
    }
    given = {"optimizer": "momentum", "learning_rate": 0.1, "micro_batches": count, **options}
    return irpar.train_step(with_weights(text, **numbers), **given)


def batch(number: int = 0) -> dict[str, Array]:
    """The samples of a step."""
    first = number * ROWS
    return {name: array[first : first + COUNT * ROWS] for name, array in samples(COUNT * ROWS + 4 * ROWS).items()}


def in_parts(given: dict[str, Array]) -> dict[str, Array]:
    return {name: array.reshape(COUNT, ROWS, *array.shape[1:]) for name, array in given.items()}


def on(step: irpar.Module, mesh: str, zero: str = "") -> irpar.Partition:
    module = clone_module(step)
    known = {value.source_name for value in module.graph.inputs}
    for name, cut in CUTS.items() if mesh != "d=1" else ():
        if name in known:
            module.shard(name, cut)
    return irpar.partition(module, mesh, pipeline=with_zero(zero) if zero else None)


def trained(partition: irpar.Partition, count: int = 3, **also: Array) -> tuple[list[float], dict[str, Any]]:
    with partition.trainer(engine="numpy") as trainer:
        return [trainer.step({**batch(number), **also}) for number in range(count)], trainer.read_all()


def close(found: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)


# -- the same as one batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adamw", "clip_norm": 0.1},
        {"optimizer": "lamb"},
        pytest.param({"label_smoothing": 0.1}, marks=pytest.mark.slow),
        pytest.param({"ignore_index": 2}, marks=pytest.mark.slow),
        {"ignore_index": 2, "label_smoothing": 0.1, "clip_norm": 0.1},
        {"loss_scale": "dynamic"},
    ],
    ids=str,
)
def test_micro_batches_are_the_whole_batch(options: dict[str, Any]) -> None:
    expected = trained(on(step_of(WHOLE, 1, **options), "d=1"))
    for mesh in every(2, ("d=1", "dp=2,tp=2", "dp=3,tp=2", "dp=4,tp=1")):
        close(trained(on(step_of(**options), mesh)), expected)


def test_what_was_annotated_before_the_step_is_made() -> None:
    """Values that move into the loop, and inputs that get a dim more."""
    model, options = with_weights(CLASSIFIER), {"optimizer": "momentum", "learning_rate": 0.1, "micro_batches": COUNT}
    expected = trained(irpar.partition(irpar.train_step(model, **options), "d=1"))
    model.shard("a", [None, "tp"])
    model.shard("x", ["dp", None])
    partition = irpar.partition(irpar.train_step(model, **options), {"dp": 2, "tp": 2})
    (a,) = (value for value in partition.plan.values if value["name"] == "a")
    assert a["sharding"] == [None, ["tp"]]
    close(trained(partition), expected)


def test_micro_batches_count_by_their_targets() -> None:
    """One of them has no target that counts, which is no reason for a loss that is no number."""
    given = batch()
    given["target"][:ROWS] = 1
    given["target"][ROWS : 2 * ROWS : 2] = 1
    states = []
    for step in (step_of(WHOLE, 1, ignore_index=1), step_of(ignore_index=1)):
        with on(step, "d=1").trainer(engine="numpy") as trainer:
            states.append(([trainer.step(given)], trainer.read_all()))
    close(states[1], states[0])


def test_ignored_targets_leave_float16_its_range() -> None:
    """Gradients of a micro-batch are those of a mean, not of a sum over its targets, which overflows sooner."""
    step = step_of(WIDE, ignore_index=1, precision="fp16", loss_scale="dynamic")
    given = {"x": np.ones((COUNT * 512, 6), np.float32), "target": np.zeros(COUNT * 512, np.int64)}
    with on(step, "d=1").trainer(engine="numpy") as trainer:
        trainer.step(given)
        assert not trainer.results["skipped"]


@pytest.mark.parametrize("loss", ["mse", "output:y"])
def test_other_losses(loss: str) -> None:
    text = CLASSIFIER.replace("%y = Add(%k, %c)", "%s = Add(%k, %c)").replace(
        "}\n", "  %y = ReduceMean(%s) {keepdims=0} : f32[]\n}\n"
    )
    texts = (CLASSIFIER, WHOLE) if loss == "mse" else (text, text.replace("8, ", f"{COUNT * ROWS}, "))
    found = []
    for step in (step_of(texts[1], 1, loss=loss), step_of(texts[0], loss=loss)):
        with on(step, "d=1").trainer(engine="numpy") as trainer:
            given = {"x": batch()["x"]}
            if loss == "mse":
                given["target"] = given["x"][:, :3]
            found.append(([trainer.step(given)], trainer.read_all()))
    close(found[1], found[0])


def test_narrow_gradients_are_added_up_in_float32() -> None:
    step = step_of(precision="bf16")
    (scan,) = (node for node in step.graph if node.op_type == "Scan")
    sums = [value for value in scan.results if value.name.startswith("grad.")]
    assert len(sums) == 4
    assert {str(value.dtype) for value in sums} == {"f32"}


# -- what goes from trip to trip ----------------------------------------------------------------------------------


def test_running_statistics_are_those_of_steps_in_order() -> None:
    """With a learning rate of 0, four steps of one batch leave the same."""
    step = step_of(NORMALISED, loss="mse", optimizer="sgd", learning_rate=0)
    single = step_of(NORMALISED, 1, loss="mse", optimizer="sgd", learning_rate=0)
    given = {"x": batch()["x"], "target": batch()["x"][:, :3]}
    with on(single, "d=1").trainer(engine="numpy") as trainer:
        losses = [
            trainer.step({name: array[first : first + ROWS] for name, array in given.items()})
            for first in range(0, COUNT * ROWS, ROWS)
        ]
        expected = trainer.read_all()
    for mesh in ("d=1", "dp=2,tp=2"):
        with on(step, mesh).trainer(engine="numpy") as trainer:
            close(([trainer.step(given)], trainer.read_all()), ([float(np.mean(losses))], expected))


def test_dropout_draws_other_masks_in_each_micro_batch() -> None:
    """Those of as many steps of one batch; on every mesh."""
    options = {"dropout": {"a": 0.5}, "optimizer": "sgd", "learning_rate": 0}
    given = batch()
    with on(step_of(count=1, **options), "d=1").trainer(engine="numpy") as trainer:
        losses = [trainer.step({name: array[:ROWS] for name, array in given.items()}) for _ in range(COUNT)]
    assert len(set(losses)) == COUNT
    again = {name: np.stack([array[:ROWS]] * COUNT) for name, array in given.items()}
    for mesh in ("d=1", "dp=2,tp=2"):
        with on(step_of(**options), mesh).trainer(engine="numpy") as trainer:
            np.testing.assert_allclose(trainer.step(again), np.mean(losses), rtol=1e-6)
            assert trainer.read("dropout_step") == COUNT


def test_gradients_are_looked_at_once_a_step() -> None:
    """One micro-batch whose gradients are not finite leaves the update out, and halves the scale once."""
    step = step_of(loss_scale="dynamic")
    given = in_parts(batch())
    given["x"][2] = np.nan
    with on(step, "dp=2,tp=2").session(engine="numpy") as session:
        before = session.read_all()
        results = session.run({**given, "learning_rate": np.float32(0.1)})
        after = session.read_all()
    assert bool(results["skipped"])
    assert after["loss_scale"] == before["loss_scale"] / 2
    same({name: after[name] for name in ("w", "u")}, {name: before[name] for name in ("w", "u")})


def test_inputs_without_a_batch_are_whole_in_every_trip() -> None:
    step = step_of(BIASED, loss="mse")
    shapes = {value.source_name: value.tensor_type.shape for value in step.graph.inputs}
    assert (shapes["offset"], shapes["x"]) == ((1, 6), (COUNT, ROWS, 6))
    single = step_of(BIASED.replace("8, ", f"{COUNT * ROWS}, "), 1, loss="mse")
    given = {"x": batch()["x"], "target": batch()["x"][:, :3], "offset": np.ones((1, 6), np.float32)}
    found = []
    for each in (single, step):
        with on(each, "d=1").trainer(engine="numpy") as trainer:
            found.append(([trainer.step(given)], trainer.read_all()))
    close(found[1], found[0])
    text = BIASED.replace("%offset: f32[1, 6]", "%offset: f32[8, 6]")
    step = step_of(text, loss="mse", undivided=["off*"])
    assert {value.source_name: value.tensor_type.shape for value in step.graph.inputs}["offset"] == (8, 6)


# -- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_reduced_once_a_step(stage: int) -> None:
    """And what trips read of parameters is gathered before the loop."""
    zero = f"zero{{stage={stage}, threshold-kb=0}}" if stage else ""
    text = CLASSIFIER.replace("8, ", "256, ")  # Samples that cost more than parameters.
    plans = {
        count: irpar.partition(
            _sharded(step_of(text, count, optimizer="adamw"), count),
            "dp=4",
            pipeline=with_zero(zero) if zero else None,
        ).plan
        for count in (1, COUNT)
    }
    sent = {count: plan.totals["sent_bytes"] for count, plan in plans.items()}
    assert all(entry["times"] == 1 for entry in plans[COUNT].collectives)
    assert sent[COUNT] <= sent[1]


def _in_trips(partition: irpar.Partition) -> list[str]:
    """What each trip sends."""
    return [entry["kind"] for entry in partition.plan.collectives if entry["times"] == COUNT]


STAGE_3 = "zero{stage=3, threshold-kb=0}"
BOTH = {"reduce_gradients": "micro-batch", "gather_parameters": "micro-batch"}


@cache
def _once_a_step() -> tuple[irpar.Partition, tuple[list[float], dict[str, Any]]]:
    """A step that sends all it can once, and what it learns."""
    made = on(step_of(optimizer="adamw"), "dp=2,tp=1", STAGE_3)
    assert not _in_trips(made)
    return made, trained(made, 2)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"reduce_gradients": "micro-batch"}, marks=pytest.mark.slow),
        pytest.param({"gather_parameters": "micro-batch"}, marks=pytest.mark.slow),
        BOTH,
    ],
)
def test_what_each_micro_batch_sends(asked: dict[str, str]) -> None:
    once, expected = _once_a_step()
    each = on(step_of(optimizer="adamw", **asked), "dp=2,tp=1", STAGE_3)
    close(trained(each, 2), expected)
    sent = _in_trips(each)
    assert sent.count("reduce_scatter") == 4 * ("reduce_gradients" in asked)
    assert sent.count("all_gather") == 5 * ("gather_parameters" in asked)
    assert each.plan.ranks[0]["peak_bytes"] < once.plan.ranks[0]["peak_bytes"]
    facts = each.plan.training
    assert facts is not None
    told: Any = facts["micro_batches"]
    assert [told["reduce"], told["gather"]] == [asked.get(name, "step") for name in BOTH]
    assert facts["zero"]["regather"] == ("gather_parameters" in asked)


@pytest.mark.parametrize(
    ("share", "gathers"),
    [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(0.98, 0, marks=pytest.mark.slow), (0.5, 5)],
)
def test_micro_batches_send_what_memory_asks_for(share: float, gathers: int) -> None:
    once, expected = _once_a_step()
    most = once.plan.ranks[0]["peak_bytes"]
    limited = step_of(optimizer="adamw")
    limited.memory_limit = int(share * most)
    made = on(limited, "dp=2,tp=1", STAGE_3)
    close(trained(made, 2), expected)
    sent = _in_trips(made)
    assert (sent.count("reduce_scatter"), sent.count("all_gather")) == (4 * (share < 1), gathers)
    assert made.plan.ranks[0]["peak_bytes"] <= max(share, 0.85) * most
    facts = made.plan.training
    assert facts is not None
    told = facts["micro_batches"]
    assert told["reduce"] == ("step" if share == 1 else "micro-batch")
    assert told["gather"] == ("micro-batch" if gathers else "step")
    assert told["why"].count("a rank would otherwise hold about" if share < 1 else "a rank holds about") >= 1
    if share == 1:
        sizes = [sorted((each["kind"], each["sent_bytes"]) for each in part.plan.collectives) for part in (once, made)]
        assert sizes[0] == sizes[1]


def _sharded(step: irpar.Module, count: int) -> irpar.Module:
    lead = [None] if count > 1 else []
    step.shard("x", [*lead, "dp", None])
    step.shard("target", [*lead, "dp"])
    return step


def test_the_log_is_the_plan() -> None:
    for zero in ("", "zero{stage=2, threshold-kb=0}", "zero{stage=3, threshold-kb=0}"):
        made = on(step_of(optimizer="adamw"), "dp=2,tp=2", zero)
        check_explained(made.plan)
        executor = made.executor("numpy")
        executor.run({**in_parts(batch()), "learning_rate": np.float32(0.1)})
        assert executor.log.differences(made.plan.collectives) == []


@pytest.mark.parametrize("stage", every(2, [1, 2, 3]))
def test_every_stage_of_zero_learns_the_same(stage: int) -> None:
    step = step_of(optimizer="adamw")
    expected = trained(on(step, "d=1"))
    for mesh in every(2, ("dp=2,tp=2", "dp=4,tp=1", "dp=3,tp=2")):
        made = on(step, mesh, f"zero{{stage={stage}, threshold-kb=0}}")
        close(trained(made), expected)
        assert made.plan.training is not None
        assert not made.plan.training["zero"]["regather"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {**BOTH, "short_batches": True}], ids=["once", "each"])
@pytest.mark.parametrize("group", GROUPS[1:])
def test_every_group_computes_the_same_bits(
    group: str, options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of three steps; the last one of those that may be short has 16 samples."""
    on(step_of(optimizer="adamw", **options), "dp=2,tp=2", STAGE_3).save(tmp_path / "out")
    words = [tmp_path / "out", "--data", data_file(tmp_path, 80), "--steps", 3]
    for name in ("threads", group):
        run_in_group(capfd, name, *words, "--checkpoint", tmp_path / name)
    same(*(state_in(Checkpoint.open(tmp_path / name)) for name in (group, "threads")))


# -- files and the command line -----------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path: Path) -> Path:
    save(with_weights(CLASSIFIER), tmp_path / "classifier.onnx")
    cuts = {"x": ["dp", None], "w": [None, "tp"], "u": ["tp", None], "target": ["dp"]}
    (tmp_path / "s.json").write_text(json.dumps({"tensors": cuts}))
    return tmp_path / "classifier.onnx"


def train(capsys: Capture, network: Path, *options: Any, out: str = "out") -> tuple[int, str, str]:
    given = ("--optimizer", "momentum", "--lr", "0.1", "--micro-batches", COUNT, "--no-cache")
    return call(capsys, "train", network, "-o", network.parent / out, *given, *options)


def test_a_run_of_the_command_line(network: Path, tmp_path: Path, capsys: Capture) -> None:
    """Annotations are those of the model; data, evaluation and checkpoints know micro-batches."""
    code, printed, err = train(capsys, network, "--mesh", "dp=2,tp=2", "--shardings", tmp_path / "s.json")
    assert code == 0, err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert {entry["name"]: entry["sharding"] for entry in plan["inputs"]}["target"] == [None, ["dp"]]
    told = plan["training"]["micro_batches"]
    when = {"reduce": "step", "gather": "step", "why": "", "short": False}
    assert told == {"count": COUNT, "inputs": ["x", "target"], **when}
    run = ("run", tmp_path / "out", "--data", data_file(tmp_path, 80), "--engine", "numpy")
    more = ("--checkpoint", tmp_path / "steps", "--eval-data", tmp_path / "data.npz")
    code, printed, err = call(capsys, *run, "--epochs", 2, *more)
    assert code == 0, err
    assert "4 steps on 4 ranks" in printed
    assert "evaluation after step 4" in printed
    code, printed, err = call(capsys, *run, "--steps", 5, *more, "--resume")
    assert "1 step after 4" in printed, err
    assert call(capsys, "verify", tmp_path / "out")[0] == 0


def test_each_sample_is_in_one_micro_batch(tmp_path: Path) -> None:
    """A run over data is that of the same samples given by hand."""
    from irpar.training.loop import LoopOptions, run_loop

    step = step_of()
    options = LoopOptions(data_file(tmp_path, 80), 2, is_shuffled=False, schedule={"learning_rate": 0.1})
    for mesh in ("d=1", "dp=2,tp=2"):
        made = on(step, mesh)
        with made.trainer(engine="numpy") as trainer:
            run_loop(trainer, {spec["name"]: spec for spec in made.plan.inputs}, options)
            found = trainer.read_all()
        with made.trainer(engine="numpy") as trainer:
            for first in (0, COUNT * ROWS):
                trainer.step({name: array[first : first + COUNT * ROWS] for name, array in samples(80).items()})
            same(found, trainer.read_all())


def test_one_model_for_onnx_runtime(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = train(capsys, network, out="step.onnx")
    assert code == 0, err
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    results = session.run(None, {**in_parts(batch()), "learning_rate": np.asarray(0.1, np.float32)})
    found = dict(zip([output.name for output in session.get_outputs()], results, strict=True))
    step = irpar.train_step(network, optimizer="momentum", learning_rate=0.1, micro_batches=COUNT)
    with on(step, "d=1").trainer(engine="numpy") as trainer:
        loss = trainer.step(batch())
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(found["w.next"], trainer.read("w"), rtol=1e-5, atol=1e-6)


def test_shares_that_no_rank_holds_are_not_sent(network: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ("train", network, "-o", tmp_path / "out", "--micro-batches", COUNT, "--mesh", "dp=2,tp=2")
    words = (*given, "--shardings", tmp_path / "s.json", "--no-cache")
    reduce = ("--reduce-gradients", "micro-batch")
    refused(capsys, "--reduce-gradients micro-batch is about gradients of which ranks hold shares", *words, *reduce)
    for zero in ((), ("--zero", 2)):
        asked = (*words, *zero, "--gather-parameters", "step")
        refused(capsys, "--gather-parameters step is about parameters that --zero 3 shards", *asked)


def test_shares_that_the_model_itself_asks_for_are_shares(network: Path, tmp_path: Path, capsys: Capture) -> None:
    module = irpar.load(network)
    hsdp(module, threshold=0, optimizer_level="level3")
    save(module, tmp_path / "said.onnx")
    gather = ("--gather-parameters", "micro-batch")
    code, _, err = train(
        capsys, tmp_path / "said.onnx", "--mesh", "dp=2", "--dataset-sharding", "data_parallel", *gather
    )
    assert code == 0, err
    sent = json.loads((tmp_path / "out" / "plan.json").read_text())["collectives"]
    assert any(entry["kind"] == "all_gather" and entry["times"] == COUNT for entry in sent)


@pytest.mark.slow
@pytest.mark.parametrize("is_annotated", [True, False])
def test_shares_of_gradients_are_reduced_in_trips(
    is_annotated: bool, network: Path, tmp_path: Path, capsys: Capture
) -> None:
    cuts = json.loads((tmp_path / "s.json").read_text())["tensors"] | ({"w": [["dp"], ["tp"]]} if is_annotated else {})
    (tmp_path / "s.json").write_text(json.dumps({"tensors": cuts}))
    zero = () if is_annotated else ("--zero", 1, "--zero-threshold-kb", 0)
    words = ("--reduce-gradients", "micro-batch", "--mesh", "dp=2,tp=2", "--shardings", tmp_path / "s.json", *zero)
    code, _, err = train(capsys, network, *words)
    assert code == 0, err
    sent = json.loads((tmp_path / "out" / "plan.json").read_text())["collectives"]
    assert any(entry["kind"] == "reduce_scatter" and entry["times"] == COUNT for entry in sent)


def test_samples_are_sharded_over_all_ranks(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = train(capsys, network, "--mesh", "dp=4", "--dataset-sharding", "data_parallel")
    assert code == 0, err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert {entry["name"]: entry["sharding"] for entry in plan["inputs"]}["x"] == [None, ["dp"], None]


# -- refused ------------------------------------------------------------------------------------------------------


def test_numbers_that_make_no_micro_batches() -> None:
    for count in (0, -1):
        with pytest.raises(AccumulateError, match=f"{count} micro-batches"):
            step_of(count=count)


def test_other_numbers_of_samples() -> None:
    with on(step_of(), "d=1").trainer(engine="numpy") as trainer, pytest.raises(BatchSizeError) as caught:
        trainer.step({name: array[:30] for name, array in batch().items()})
    assert "30 samples, and a step takes 4 micro-batches of 8" in str(caught.value)
    assert caught.value.do == "give 32 samples, or make the step for others: bind, micro_batches, short_batches"


def test_too_few_samples(network: Path, tmp_path: Path, capsys: Capture) -> None:
    assert train(capsys, network, "--mesh", "one")[0] == 0
    data = data_file(tmp_path, 20)
    refused(
        capsys,
        "there are 20 samples, and a step of 4 micro-batches takes 32",
        "run",
        tmp_path / "out",
        "--data",
        data,
        "--steps",
        1,
    )


def test_too_few_samples_to_evaluate_on(network: Path, tmp_path: Path, capsys: Capture) -> None:
    assert train(capsys, network, "--mesh", "one")[0] == 0
    data = data_file(tmp_path, 32)
    np.savez(tmp_path / "few.npz", **samples(3))
    words = ("run", tmp_path / "out", "--data", data, "--steps", 1, "--eval-data", tmp_path / "few.npz")
    refused(capsys, "there are 3 samples, and an evaluation at a time takes 8", *words)


def test_samples_that_make_no_batch_of_an_evaluation_are_told(network: Path, tmp_path: Path, capsys: Capture) -> None:
    assert train(capsys, network, "--mesh", "one")[0] == 0
    np.savez(tmp_path / "some.npz", **samples(19))
    words = ("run", tmp_path / "out", "--data", data_file(tmp_path, 32), "--steps", 1)
    code, printed, err = call(capsys, *words, "--eval-data", tmp_path / "some.npz")
    assert code == 0, err
    assert "evaluation takes 8 samples at a time: the last 3 of 19 are left out" in printed


def test_what_all_micro_batches_read_is_told(tmp_path: Path, capsys: Capture) -> None:
    save(with_weights(BIASED, w=np.ones((6, 3))), tmp_path / "biased.onnx")
    code, printed, err = train(capsys, tmp_path / "biased.onnx", "--mesh", "one")
    assert code == 0, err
    assert "each of the 4 micro-batches reads offset whole" in printed


def test_models_without_a_batch() -> None:
    with pytest.raises(AccumulateError, match="no input has a first dim"):
        step_of(SINGLE, loss="output:y")


def test_names_that_would_mean_nothing_are_refused() -> None:
    with pytest.raises(irpar.IrparError, match="names what micro-batches share, and there is one alone") as caught:
        irpar.train_step(with_weights(CLASSIFIER), undivided=["x"])
    assert caught.value.do == "give micro_batches=4, or leave it out"


# -- fewer samples than a step takes --------------------------------------------------------------------------------

SHORT = 27
"""Samples of which the last micro-batch has three, or where there are fewer none."""


def _learnt(
    step: irpar.Module, mesh: str, given: dict[str, Array], zero: str = ""
) -> tuple[list[float], dict[str, Any]]:
    with on(step, mesh, zero).trainer(engine="numpy") as trainer:
        return [trainer.step(given), trainer.step(given)], trainer.read_all()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param({}, SHORT, marks=pytest.mark.slow),
        ({"ignore_index": 2, "label_smoothing": 0.1, "clip_norm": 0.1}, SHORT),
        pytest.param({"loss": "mse"}, SHORT, marks=pytest.mark.slow),
        ({"loss": "bce"}, 5),
    ],
)
def test_a_short_batch_is_the_batch_without_what_pads_it(options: dict[str, Any], count: int) -> None:
    given = {name: array[:count] for name, array in batch().items()}
    if "loss" in options:
        given["target"] = (given["x"][:, :3] > 0).astype(np.float32)
    text = CLASSIFIER.replace("f32", "f64")
    given = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in given.items()}
    expected = _learnt(step_of(text.replace("8, ", f"{count}, "), 1, **options), "d=1", given)
    step = step_of(text, short_batches=True, **options)
    for mesh, zero in (("d=1", ""), ("dp=2,tp=2", STAGE_3)):
        losses, state = _learnt(step, mesh, given, zero)
        np.testing.assert_allclose(losses, expected[0], rtol=1e-10)
        for name, array in expected[1].items():
            np.testing.assert_allclose(state[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


def test_a_run_takes_what_is_left_of_the_data(network: Path, tmp_path: Path, capsys: Capture) -> None:
    """50 samples make steps of 32 and 18; the second one is resumed into."""
    code, _, err = train(capsys, network, "--mesh", "dp=2,tp=2", "--short-batches")
    assert code == 0, err
    run = ["run", tmp_path / "out", "--data", data_file(tmp_path, 50), "--in-order", "--engine", "numpy"]
    for also in (["--steps", 1], ["--epochs", 1, "--resume"]):
        code, _, err = call(capsys, *run, "--checkpoint", tmp_path / "steps", *also)
        assert code == 0, err
    with on(
        irpar.train_step(network, optimizer="momentum", learning_rate=0.1, micro_batches=COUNT, short_batches=True),
        "d=1",
    ).trainer(engine="numpy") as trainer:
        for first, last in ((0, 32), (32, 50)):
            trainer.step({name: array[first:last] for name, array in samples(50).items()})
        found = state_in(Checkpoint.open(tmp_path / "steps"))
        for name, array in trainer.read_all().items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (NORMALISED, {"loss": "mse"}, "samples of a batch meet in BatchNormalization"),
        (CLASSIFIER.replace("Tanh(%i)", "Softmax(%i) {axis=0}"), {}, "samples of a batch meet in Softmax"),
        (CLASSIFIER, {"loss": "output:y"}, "the model computes its loss itself"),
        (CLASSIFIER, {"count": 1}, "short_batches=True is about the last of several micro-batches"),
    ],
)
def test_steps_that_cannot_have_fewer_samples(text: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(irpar.IrparError, match=said) as caught:
        step_of(text, short_batches=True, **options)
    assert caught.value.do


def test_statistics_of_the_model_let_samples_be_independent() -> None:
    step_of(NORMALISED, loss="mse", short_batches=True, freeze_statistics=True)


def test_numbers_of_samples_that_cannot_be() -> None:
    given = batch()
    with on(step_of(short_batches=True), "d=1").trainer(engine="numpy") as trainer:
        for count in (0, 33):
            with pytest.raises(BatchSizeError, match=f"{count} samples"):
                trainer.step(given, samples=count)
        with pytest.raises(BatchSizeError, match="target has 3, x has 4"):
            trainer.step({"x": given["x"][:4], "target": given["target"][:3]})
        with pytest.raises(BatchSizeError, match="0 samples count, and a step takes 32"):
            trainer.step({**given, "sample_count": np.int64(0)})
        with pytest.raises(BatchSizeError, match="both say how many count"):
            trainer.step({**given, "sample_count": np.int64(3)}, samples=3)
        few = trainer.step({**given, "sample_count": np.int64(3)})
    with on(step_of(short_batches=True), "d=1").trainer(engine="numpy") as trainer:
        assert trainer.step(given, samples=3) == few
    with on(step_of(), "d=1").trainer(engine="numpy") as trainer, pytest.raises(BatchSizeError, match="takes all"):
        trainer.step(given, samples=3)


def test_gathers_of_trips_that_would_lower_nothing_are_left_before_the_loop() -> None:
    module = clone_module(step_of(optimizer="adamw"))
    module.shard("x", [None, "dp", None])
    module.set_mesh(Mesh.parse("dp=2"))
    Zero(3, threshold_kb=0).run(module)
    module.memory_limit = 1000
    in_trips, (told,) = gathers_in_trips(module, lambda _: None)
    assert not in_trips
    assert told.endswith("and may hold 1 kB; in each micro-batch it would hold no less")


def test_limits_of_memory_that_cannot_be(network: Path, tmp_path: Path, capsys: Capture) -> None:
    shown = "--memory-limit-gb"
    for limit, out, said in ((0, "out", f"{shown} 0"), ("inf", "out", f"{shown} inf"), (1, "one.onnx", "the order")):
        words = ["train", network, "-o", tmp_path / out, "--micro-batches", 2, "--memory-limit-gb", limit]
        refused(capsys, said, *words)


def test_a_run_with_short_steps_is_not_gone_on_with_without(network: Path, tmp_path: Path, capsys: Capture) -> None:
    data, steps = data_file(tmp_path, 80), tmp_path / "steps"
    for also in (["--short-batches"], ["--force"]):
        code, _, err = train(capsys, network, *also)
        assert code == 0, err
        words = ["run", tmp_path / "out", "--data", data, "--steps", 2, "--engine", "numpy", "--checkpoint", steps]
        if also == ["--force"]:
            refused(capsys, "a short step at the end of an epoch", *words, "--resume")
        else:
            assert call(capsys, *words)[0] == 0


@pytest.mark.parametrize("count", [1, COUNT])
def test_onnx_runtime_learns_from_classes_in_float64(count: int) -> None:
    """It has no OneHot of float64."""
    step = step_of(CLASSIFIER.replace("f32", "f64"), count)
    given = {"x": batch()["x"].astype(np.float64), "target": batch()["target"]}
    given = given if count > 1 else {name: array[:ROWS] for name, array in given.items()}
    losses = []
    for engine in ("ort", "numpy"):
        with on(step, "d=1").trainer(engine=engine) as trainer:
            losses.append([trainer.step(given) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
