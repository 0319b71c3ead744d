"""Programs over device, host and disk: their numbers, what they copy, and what they hold where."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import held_bytes, memories_of, peak, roots_of, value_bytes
from irpar.ir import Graph, Memory, Node, Value, verify
from irpar.pass_manager import Pass, PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.runtime.engines.arrays import Arrays, Moving
from irpar.runtime.errors import ProgramError, RunError
from irpar.runtime.executor import Executor
from irpar.runtime.log import CopyLog, CopyRecord
from irpar.runtime.memory import LIMIT, OutOfMemoryError, run_bytes
from irpar.runtime.rank_state import RankState
from irpar.runtime.spaces import InFlight
from irpar.runtime.storage.disk import Disk
from irpar.verification.inputs import random_inputs
from tests.scattered_places import PlaceOptimizer, ScatterPlaces, scattering, with_pass
from tests.training.programs import MESHES, batch, classifier

from .devices import strict_device
from .programs import module

ENGINES = ["ort", "numpy"]


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mesh"), [("mlp", "tp=2"), pytest.param("gpt", "dp=2,tp=2", marks=pytest.mark.slow)]
)
def test_scattered_programs_compute_what_the_original_does(family: str, mesh: str, tmp_path: Path) -> None:
    onnx.save(models.build(family), tmp_path / "model.onnx")
    partition = irpar.partition(tmp_path / "model.onnx", mesh, pipeline=scattering(1))
    assert {entry["from"] for entry in partition.plan.copies} == {"device", "host", "disk"}
    for engine in ENGINES:
        partition.verify(engine=engine).check()
        log = partition.executor(engine).log.copies
        assert log.differences(partition.plan.copies) == []
        assert log.copied_bytes == partition.plan.totals["copied_bytes"]
    partition.save(tmp_path / "out")
    with irpar.Partition.open(tmp_path / "out") as opened:
        opened.verify(engine="numpy").check()
        assert opened.executor("numpy").log.copies.differences(opened.plan.copies) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_all_families_scattered(family: str, seed: int) -> None:
    partition = irpar.partition(models.build(family), "tp=2", pipeline=scattering(seed))
    partition.verify(engine="numpy").check()
    assert partition.executor("numpy").log.copies.differences(partition.plan.copies) == []


@pytest.mark.parametrize(
    ("options", "mesh", "placing"),
    [
        *(
            pytest.param({"optimizer": "adamw", **precision}, mesh, placing, marks=pytest.mark.slow)
            for precision in ({}, {"precision": "bf16"})
            for mesh in ("d=1", "dp=2,tp=2")
            for placing in (PlaceOptimizer(), ScatterPlaces(0), ScatterPlaces(1))
        ),
    ],
)
def test_a_step_of_training_keeps_its_numbers(options: Mapping[str, str], mesh: str, placing: Pass) -> None:
    step = classifier(**options)
    for name, cut in MESHES.get(mesh, {}).items():
        step.shard(name, cut)
    made = irpar.partition(step, mesh), irpar.partition(step, mesh, pipeline=with_pass(placing))
    found = []
    for partition in made:
        with partition.session(engine="numpy") as session:
            losses = [session.run({**batch(number), "learning_rate": np.float32(0.01)})["loss"] for number in range(2)]
            found.append({**session.read_all(), "losses": np.array(losses)})
        assert partition.executor("numpy").log.copies.differences(partition.plan.copies) == []
    plain, placed = (max(rank["peak_bytes"] for rank in partition.plan.ranks) for partition in made)
    assert placed < plain
    expected, given = found
    for name, array in expected.items():
        np.testing.assert_allclose(given[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mlp", "gpt"])
def test_on_a_device_that_takes_no_arrays_of_the_host(family: str) -> None:
    partition = irpar.partition(models.build(family), "tp=1", pipeline=scattering(1))
    inputs = random_inputs(partition.executor("numpy").inputs, partition.module.graph)
    expected = partition.run(inputs, engine="numpy")
    with strict_device():
        executor = partition.executor("cupy")
        for _ in range(3):  # The third replays what is captured.
            found = executor.run(inputs)
    assert executor.log.copies.differences(partition.plan.copies) == []
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("text", ["step", pytest.param("loop", marks=pytest.mark.slow)])
def test_small_programs_on_such_a_device(text: str) -> None:
    made = partitioned({"step": HOST_STEP, "loop": LOOP}[text])
    given = {**GIVEN, "n": np.int64(3)}
    given = {name: array for name, array in given.items() if name in {spec["name"] for spec in made.plan.inputs}}
    expected = made.run(given, engine="numpy")
    with strict_device():
        executor = made.executor("cupy")
        for _ in range(3):  # The third replays what is captured.
            found = executor.run(given)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.slow
def test_ranks_that_share_a_process_have_no_device_apart() -> None:
    partition = irpar.partition(models.build("mlp"), "tp=2", pipeline=scattering(1))
    with strict_device(), pytest.raises(ProgramError, match="2 ranks in one process do not keep values apart"):
        partition.executor("cupy")


@pytest.mark.parametrize(
    ("family", "behind"),
    [
        ("mlp", "fuse-communication,extract-communication,memory-order,group-segments"),
        *(
            pytest.param("gpt", f"{behind},group-segments", marks=pytest.mark.slow)
            for behind in (
                "fuse-communication,extract-communication",
                "memory-order",
                "fuse-kernels",
                "cse,simplify-layout,dce,fold-constants",
                "split-bias,join-weights",
                "simplify-collectives,infer-types,inline-functions",
                "recompute{match=h.*}",
            )
        ),
        pytest.param("resnet", "channels-last,group-segments", marks=pytest.mark.slow),
    ],
)
def test_passes_behind_it_respect_where_things_are(family: str, behind: str, tmp_path: Path) -> None:
    onnx.save(models.build(family), tmp_path / "model.onnx")
    loaded = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(loaded, models.annotations(family, "dp", "tp"))
    before = [one for one in PassManager.parse(DEFAULT_PIPELINE).passes if one.name != "group-segments"]
    pipeline = PassManager([*before, ScatterPlaces(0), *PassManager.parse(behind).passes])
    partition = irpar.partition(loaded, "dp=2,tp=2", pipeline=pipeline)
    verify(partition.module)
    partition.verify(engine="numpy").check()
    log = partition.executor("numpy").log
    assert [*log.differences(partition.plan.collectives), *log.copies.differences(partition.plan.copies)] == []


# -- memory -----------------------------------------------------------------------------------------------------------


class Watch:
    """Notes what a rank holds of each memory while a node of its graph, or of a body, is computed on the device."""

    def __init__(self, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph = graph
        self.held: dict[Node, dict[Memory, int]] = {}
        self._graphs = list(graph.graphs())
        self._roots = {value: root for each in reversed(self._graphs) for value, root in roots_of(each).items()}
        self._state: RankState | None = None
        compute, kernel = RankState.compute, Arrays.kernel

        def watched_compute(state: RankState, step: Any) -> None:
            self._state = state if state.graph is graph else None
            compute(state, step)

        def watched_kernel(arrays: Arrays, node: Node, *given: Any) -> Any:
            run = kernel(arrays, node, *given)

            def watched(inputs: list[Any], environment: Mapping[Value, Any]) -> Sequence[Any]:
                results = run(inputs, environment)
                self._note(node, environment, results)
                return results

            return watched

        monkeypatch.setattr(RankState, "compute", watched_compute)
        monkeypatch.setattr(Arrays, "kernel", watched_kernel)

    def _note(self, node: Node, environment: Mapping[Value, Any], results: Sequence[Any]) -> None:
        if self._state is None or node.graph not in self._graphs:
            return
        held = {**self._state.held(), **environment, **dict(zip(node.results, results, strict=True))}
        sources = [value.node.inputs[0] for value, array in held.items() if isinstance(array, InFlight) and value.node]
        roots = {self._roots.get(value, value) for value in (*held, *sources)}
        found = self.held[node] = dict.fromkeys(memories_of(self.graph), 0)
        for value in roots:
            if not value.is_constant:
                found[value.memory] += value_bytes(value)


@pytest.mark.parametrize(
    ("family", "seed"), [("mlp", 0), *(pytest.param("gpt", seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_what_the_device_holds_is_what_the_plan_says(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = irpar.partition(models.build(family), "tp=1", pipeline=scattering(seed))
    graph = partition.module.graph
    inputs = random_inputs(partition.executor("numpy").inputs, graph)
    with monkeypatch.context() as patched:
        watch = Watch(graph, patched)
        with Executor(partition.module, partition.plan.mesh_of_ranks, engine="numpy") as executor:
            executor.run(inputs)
    assert len(watch.held) > 1
    predicted = {node: held for node, held in held_bytes(graph) if node is not None}
    unread = sum(value_bytes(value) for value in graph.inputs if not value.has_uses and value not in graph.outputs)
    for node, held in watch.held.items():
        assert predicted[node] <= held["device"] <= predicted[node] + unread, node.label
    most = max(held["device"] for held in watch.held.values())
    assert peak(graph).activation_bytes >= most - unread
    (rank,) = partition.plan.ranks
    assert rank["peak_bytes"] == peak(graph).total_bytes
    assert rank["host_bytes"] == peak(graph, memory="host").total_bytes > 0
    assert rank["disk_bytes"] == peak(graph, memory="disk").total_bytes > 0


def test_each_memory_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitioned(HOST_STEP)
    device, host = (run_bytes(made.parts, 1, writes_over=True, memory=memory) for memory in ("device", "host"))
    assert (device, host) == (64, 48)
    monkeypatch.setenv(LIMIT, str(max(device, host)))
    made.run(GIVEN, engine="numpy")
    monkeypatch.setenv(LIMIT, str(device - 1))
    with pytest.raises(OutOfMemoryError, match="needs about 64 bytes"):
        partitioned(HOST_STEP).run(GIVEN, engine="numpy")


# -- small programs ---------------------------------------------------------------------------------------------------

HOST_STEP = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[4], %h: f32[4] in host) -> (%y) opset 21 ranks [0] {
      %s = irpar.CopyStart(%x) {to="host", id=0} : inflight<f32[4]> in host
      %a = Exp(%x) : f32[4]
      %b = Neg(%a) : f32[4]
      %c = irpar.Wait(%s) {id=0} : f32[4] in host
      %g = Add(%h, %c) {| place=host} : f32[4] in host
      %d = irpar.Copy(%g) {to="device", id=1} : f32[4]
      %ab = Add(%a, %b) : f32[4]
      %y = Add(%ab, %d) : f32[4]
    }
"""
GIVEN = {"x": np.float32([1, 2, 3, 4]), "h": np.float32([5, 6, 7, 8])}


def partitioned(text: str) -> irpar.Partition:
    return irpar.partition(module(text), pipeline="group-segments")


def test_a_started_copy_runs_beside_what_the_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, seen = threading.Event(), []
    moving, compute = Arrays.moving, RankState.compute

    def late(arrays: Arrays, value: Any, to: Memory) -> Moving:
        made = moving(arrays, value, to)

        def run() -> Any:
            if to == "host":
                seen.append(computed.wait(10))
            return made.run()

        return Moving(run, made.result)

    def told(state: RankState, step: Any) -> None:
        compute(state, step)
        computed.set()

    made = partitioned(HOST_STEP)
    executor = made.executor("numpy")
    monkeypatch.setattr(Arrays, "moving", late)
    monkeypatch.setattr(RankState, "compute", told)
    np.testing.assert_array_equal(executor.run(GIVEN)["y"], GIVEN["h"] + GIVEN["x"])
    assert seen == [True]


def test_a_copy_that_fails_stops_the_run_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arrays: Arrays, value: Any, to: Memory) -> Moving:
        def run() -> Any:
            raise OSError("no room")

        return Moving(run)

    monkeypatch.setattr(Arrays, "moving", broken)
    with pytest.raises(RunError, match=r"rank 0.*OSError: no room"):
        partitioned(HOST_STEP).run(GIVEN, engine="numpy")


def test_what_lies_in_another_memory_is_not_touched() -> None:
    crossing = HOST_STEP.replace("Add(%ab, %d)", "Add(%ab, %h)")
    with pytest.raises(ProgramError, match=r"runs on the device and reads %h, which lies on the host"):
        partitioned(crossing).run(GIVEN, engine="numpy")


def test_and_a_value_knows_at_run_time_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that no check has seen still does not touch what lies elsewhere."""
    monkeypatch.setattr("irpar.runtime.local_ranks.check_spaces", lambda parts: None)
    crossing = HOST_STEP.replace("Add(%ab, %d)", "Add(%ab, %h)")
    with pytest.raises(RunError, match=r"what runs on the device reads %h, which lies on the host"):
        partitioned(crossing).run(GIVEN, engine="numpy")


def test_copies_and_their_sources_share_no_memory() -> None:
    made = partitioned(
        """
        mesh @m = ["x"=1]
        graph local @g(%x: f32[4]) -> (%h, %d) opset 21 ranks [0] {
          %h = irpar.Copy(%x) {to="host"} : f32[4] in host
          %d = irpar.Copy(%h) {to="device"} : f32[4]
        }
        """
    )
    found = made.run({"x": GIVEN["x"]}, engine="numpy")
    assert not np.may_share_memory(found["h"], found["d"])
    assert not np.may_share_memory(found["h"], GIVEN["x"])


LOOP = """
    mesh @m = ["x"=1]
    graph local @g(%h: f32[4] in host, %n: i64[]) -> (%y, %rows) opset 21 ranks [0] {
      %true = constant : bool[] true
      %first = irpar.Copy(%h) {to="device"} : f32[4]
      %y, %rows = Loop(%n, %true, %first) {body=graph @body(%i: i64[], %go: bool[], %v: f32[4]) -> (%go, %out, %sum) {
        %down = irpar.CopyStart(%v) {to="host", id=7} : inflight<f32[4]> in host
        %same = irpar.Wait(%down) {id=7} : f32[4] in host
        %sum = Add(%same, %h) {| place=host} : f32[4] in host
        %out = irpar.Copy(%sum) {to="device"} : f32[4]
      }} : f32[4], f32[_, 4] in host
    }
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_bodies_copy_in_each_trip(engine: str) -> None:
    made = partitioned(LOOP)
    assert [entry["times"] for entry in made.plan.copies] == [1, None, None]
    found = made.run({"h": GIVEN["h"], "n": np.int64(3)}, engine=engine)
    np.testing.assert_array_equal(found["y"], 4 * GIVEN["h"])
    np.testing.assert_array_equal(found["rows"], np.outer([2, 3, 4], GIVEN["h"]))
    log = made.executor(engine).log.copies
    assert [record.id for record in log] == [0, 1, 2, 1, 2, 1, 2]
    assert log.differences(made.plan.copies) == []


RESULTS = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[4], %h: f32[4] in host) -> (%h as "h", %g as "one", %g as "two", %x as "x") opset 21 ranks [0] {
      %g = Neg(%h) {| place=host} : f32[4] in host
    }
"""


def test_results_that_are_inputs_or_come_twice_are_read_back_where_they_lie(tmp_path: Path) -> None:
    partitioned(RESULTS).save(tmp_path / "out")
    verify(irpar.load(tmp_path / "out" / "part0" / "model.onnx"))
    with irpar.Partition.open(tmp_path / "out") as opened:
        found = opened.run(GIVEN, engine="numpy")
    for name, array in {**GIVEN, "one": -GIVEN["h"], "two": -GIVEN["h"]}.items():
        np.testing.assert_array_equal(found[name], array)


CALLS = """
    mesh @m = ["x"=1]
    function @my.F(%a: f32[4]) -> (%c) opset 21 {
      %k = constant : f32[] 2.0
      %b = Mul(%a, %k) : f32[4]
      %c = Neg(%b) : f32[4]
    }
    graph local @g(%h: f32[4] in host) -> (%y) opset 21, "my" 1 ranks [0] {
      %c = call @my.F(%h) {| place=host} : f32[4] in host
      %d = irpar.Copy(%c) {to="device"} : f32[4]
      %y = call @my.F(%d) : f32[4]
    }
"""


@pytest.mark.parametrize("pipeline", ["group-segments", "inline-functions,group-segments"])
def test_what_is_in_a_function_is_where_its_call_is(pipeline: str) -> None:
    made = irpar.partition(module(CALLS), pipeline=pipeline)
    verify(made.module)
    np.testing.assert_array_equal(made.run({"h": GIVEN["h"]}, engine="numpy")["y"], 4 * GIVEN["h"])
    places = [entry.get("place", "device") for entry in made.plan.parts[0]["segments"]]
    assert places == ["host", "device"]


STATE = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[4], state moment %v: f32[4] in MEMORY) -> (%y, %w replaces %v) opset 21 ranks [0] {
      %d = irpar.Copy(%v) {to="device"} : f32[4]
      %y = Add(%x, %d) : f32[4]
      %w = irpar.Copy(%y) {to="MEMORY"} : f32[4] in MEMORY
    }
"""


@pytest.mark.parametrize("memory", ["host", "disk"])
def test_state_stays_in_its_memory_from_run_to_run(memory: str, tmp_path: Path) -> None:
    made = partitioned(STATE.replace("MEMORY", memory))
    with made.session(engine="numpy") as session:
        for time in range(1, 4):
            np.testing.assert_array_equal(session.run({"x": GIVEN["x"]})["y"], time * GIVEN["x"])
        np.testing.assert_array_equal(session.read("v"), 3 * GIVEN["x"])
    assert [entry["memory"] for entry in made.plan.state] == [memory]


READ_ONLY = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[4], state parameter %w: f32[4] in disk = [1.0, 2.0, 3.0, 4.0]) -> (%y) opset 21 ranks [0] {
      %d = irpar.Copy(%w) {to="device"} : f32[4]
      %y = Mul(%x, %d) : f32[4]
    }
"""


def test_state_on_disk_is_written_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    begin = Disk.begin_write

    def counted(disk: Disk, array: Any, rank: int) -> Any:
        written.append(array)
        return begin(disk, array, rank)

    monkeypatch.setattr(Disk, "begin_write", counted)
    with partitioned(READ_ONLY).session(engine="numpy") as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run({"x": GIVEN["x"]})["y"], GIVEN["x"] * [1, 2, 3, 4])
        assert written == []  # What the program begins with needs no array for that.
        session.write("w", GIVEN["h"])
        for _ in range(2):
            np.testing.assert_array_equal(session.run({"x": GIVEN["x"]})["y"], GIVEN["x"] * GIVEN["h"])
        assert len(written) == 1
        np.testing.assert_array_equal(session.read("w"), GIVEN["h"])


# -- the log ----------------------------------------------------------------------------------------------------------

PLAN = [
    {"id": 0, "from": "host", "to": "device", "bytes": 16, "times": 1},
    {"id": 1, "from": "device", "to": "disk", "bytes": 8, "times": 2},
]


def test_differences_from_the_plan_are_told() -> None:
    log = CopyLog()
    for rank, record in (
        (0, CopyRecord(0, "host", "device", 12)),
        (1, CopyRecord(0, "host", "device", 16)),
        (0, CopyRecord(1, "device", "disk", 8)),
        (0, CopyRecord(1, "device", "disk", 8)),
    ):
        log.add_record(rank, record)
    assert log.differences(PLAN) == []
    assert log.copied_bytes == 32
    log.add_record(0, CopyRecord(1, "device", "host", 8))
    assert log.differences(PLAN) == [
        "copy id=1: the plan has ('device', 'disk', 8), executed was ('device', 'host', 8)",
        "copy id=1 was executed 3 times, the plan has 2",
    ]
    assert log.differences([]) == ["copy id=0 was executed but is not in the plan"] + 3 * [
        "copy id=1 was executed but is not in the plan"
    ]
