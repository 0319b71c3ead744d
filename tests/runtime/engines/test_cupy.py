"""The engine cupy on a stand-in for a device: whole programs, fallbacks, notes, errors."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import irpar
from irpar import models
from irpar.analysis.memory.replaced import written_over
from irpar.analysis.training_facts import facts_of
from irpar.ir import Value
from irpar.onnx_io import to_module
from irpar.runtime.engines import cuda
from irpar.runtime.engines import cupy as cupy_engine
from irpar.runtime.engines.base import default_engine
from irpar.runtime.engines.cuda_graphs import piece
from irpar.runtime.engines.cuda_graphs.piece import Piece
from irpar.runtime.errors import EngineError, InputError, ProgramError, RunError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, ThreadGroup
from irpar.runtime.launch.environment import World
from irpar.runtime.memory import OutOfMemoryError
from irpar.sharding import ArgumentError, Mesh
from irpar.training.trainer import Trainer
from irpar.verification.inputs import random_inputs
from tests.budget import every, pairs
from tests.runtime.devices import strict_device
from tests.runtime.programs import MLP, mlp_weights, module
from tests.strict_device import STRICT, StrictArray
from tests.test_microsoft_models import decoder
from tests.training.programs import batch, classifier, same

FAMILIES = [
    *((family, {}) for family in sorted(models.FAMILIES) if family != "control"),
    *(("control", {"kind": kind}) for kind in ("if", "loop", "scan")),
    ("moe", {"routing": "gather"}),
    ("resnet", {"preset": "bottleneck"}),
    ("llama", {"preset": "fused", "dtype": "float16"}),
    ("gpt", {"dtype": "float16"}),
]


@pytest.mark.parametrize(("family", "settings"), every(2, FAMILIES), ids=str)
def test_families_run_on_the_device_as_on_the_host(family: str, settings: dict) -> None:
    loaded = to_module(models.build(family, **settings))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp", **settings))
    partition = irpar.partition(loaded, irpar.Mesh({"dp": 2, "tp": 2}))
    expected_by = partition.executor("numpy")
    inputs = random_inputs(expected_by.inputs, loaded.graph)
    expected = expected_by.run(inputs)
    with strict_device():
        executor = partition.executor("cupy")
        got = executor.run(inputs)
    assert executor.notes == ()
    assert list(executor.log) == list(expected_by.log)
    for name, array in expected.items():
        assert isinstance(got[name], np.ndarray)
        tolerance = 1e-2 if array.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance)


# -- where things are computed --------------------------------------------------------------------------------------


def run_text(
    text: str, inputs: dict[str, np.ndarray], *, strict: bool = False, **resources: np.ndarray
) -> tuple[dict, tuple]:
    """Results and notes of a program of one rank on the stand-in."""
    loaded = module(text, **resources)
    with strict_device(), Executor(loaded, Mesh({"x": 1}), engine="cupy", strict=strict) as executor:
        return executor.run(inputs), executor.notes


@pytest.mark.parametrize(
    ("dims", "reader", "on_device"),
    [("2", "ConstantOfShape", False), ("k", "ConstantOfShape", True), ("100", "Abs", True), ("2", "Abs", True)],
)
def test_where_a_node_is_computed_is_decided_by_types_and_readers(
    dims: str, reader: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host only small integers are computed whose numbers something there reads."""
    text = f"""
        graph @sizes(%n: i64[{dims}]) -> (%y, %z) opset 21 {{
          %m = Neg(%n) : i64[{dims}]
          %y = Neg(%m) : i64[{dims}]
          %z = {reader}(%y) : {"f32[a, b]" if reader == "ConstantOfShape" else f"i64[{dims}]"}
        }}
    """
    sizes: list[int] = []

    def negative(array: StrictArray, out: object = None) -> StrictArray:
        sizes.append(array.size)
        return original(array, out=out)

    original = STRICT.negative
    monkeypatch.setattr(STRICT, "negative", negative)
    n = np.arange(100 if dims == "100" else 2)
    results, notes = run_text(text, {"n": n})
    np.testing.assert_array_equal(results["y"], n)
    assert (sizes, notes) == ([len(n)] * 2 if on_device else [], ())


FLOAT8 = """
    graph @small(%x: f32[100]) -> (%y) opset 21 {
      %c = Cast(%x) {to=17} : f8e4m3fn[100] from "/narrow"
      %d = Cast(%c) {to=1} : f32[100] from "/widen"
      %y = Add(%d, %x) : f32[100]
    }
"""


def test_dtypes_that_the_device_lacks_are_computed_on_the_host_with_one_note() -> None:
    x = np.linspace(-3, 3, 100, dtype=np.float32)
    results, notes = run_text(FLOAT8, {"x": x})
    np.testing.assert_array_equal(results["y"], x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) + x)
    assert notes == ("Cast runs on the host: there are no device arrays of f8e4m3fn (node /widen)",)


def test_strict_refuses_the_host() -> None:
    with pytest.raises(
        EngineError, match="cannot run Cast on the device: there are no device arrays of f8e4m3fn"
    ) as raised:
        run_text(FLOAT8, {"x": np.zeros(100, np.float32)}, strict=True)
    assert raised.value.where == "node /widen"
    assert "strict=True" in (raised.value.do or "")


def test_a_kernel_that_the_device_refuses_runs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("no such kernel")

    monkeypatch.setattr(STRICT, "tanh", refuse)
    text = """
        graph @one(%x: f32[100]) -> (%y) opset 21 {
          %t = Tanh(%x) : f32[100] from "/tanh"
          %y = Exp(%t) : f32[100]
        }
    """
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    results, notes = run_text(text, {"x": x})
    np.testing.assert_allclose(results["y"], np.exp(np.tanh(x)), rtol=1e-6)
    assert notes == ("irpar.Fused runs on the host: Tanh: no such kernel (node /tanh)",)
    with pytest.raises(RunError, match=r"cannot run irpar.Fused on the device: Tanh: no such kernel"):
        run_text(text, {"x": x}, strict=True)


def test_an_operand_that_cannot_be_is_told_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        graph @one(%x: f32[100], %i: i64[70]) -> (%y) opset 21 {
          %y = Gather(%x, %i) : f32[70] from "/pick"
        }
    """
    with pytest.raises(RunError, match="an index is outside") as raised:
        run_text(text, {"x": np.zeros(100, np.float32), "i": np.full(70, 100)})
    assert raised.value.where == "node /pick"


def test_operators_without_a_kernel_run_alone_in_onnx_runtime() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Inverse", ["r"], ["i"], "/inverse", domain="com.microsoft"),
        helper.make_node("MatMul", ["i", "r"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [10, 10]) for name in "xyri"]
    graph = helper.make_graph(nodes, "inverse", ends[:1], ends[1:2], value_info=ends[2:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    loaded = to_module(helper.make_model(graph, opset_imports=opsets))
    x = np.eye(10, dtype=np.float32) * 2 + 0.1
    with strict_device(), Executor(loaded, Mesh({"x": 1}), engine="cupy") as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], np.eye(10), atol=1e-5)
        assert executor.notes == ("com.microsoft.Inverse runs on the host: irpar has no kernel of it (node /inverse)",)
    with strict_device(), pytest.raises(EngineError, match="irpar has no kernel of it"):
        Executor(loaded, Mesh({"x": 1}), engine="cupy", strict=True)


def test_what_onnx_can_say_runs_on_the_device(tmp_path: Path) -> None:
    """Weights of 4 bits, and attention of groups of heads behind a cache."""
    partition = irpar.partition(irpar.load(decoder(tmp_path / "decoder.onnx")), {"tp": 1})
    random = np.random.default_rng(0)
    inputs = {spec["name"]: random.standard_normal(spec["shape"]).astype(np.float32) for spec in partition.plan.inputs}
    expected = partition.executor("ort").run(inputs)
    with strict_device(), partition.executor("cupy", strict=True) as executor:
        for name, array in executor.run(inputs).items():
            np.testing.assert_allclose(array, expected[name], 1e-3, 1e-3)


def test_shapes_are_computed_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    plain = STRICT.cuda.runtime.memcpyAsync

    def count(target: int, source: int, size: int, kind: int, stream: int) -> None:
        copied.append(kind)
        plain(target, source, size, kind, stream)

    monkeypatch.setattr(STRICT.cuda.runtime, "memcpyAsync", count)
    text = """
        graph @shapes(%x: f32[4, 100]) -> (%y) opset 21 {
          %s = Shape(%x) : i64[2]
          %d = Mul(%s, %s) : i64[2]
          %q = Div(%d, %s) : i64[2]
          %y = Tile(%x, %q) : f32[16, 10000]
        }
    """
    x = np.ones((4, 100), np.float32)
    results, _ = run_text(text, {"x": x})
    assert results["y"].shape == (16, 10000)
    # x goes up, y comes down, and nothing else.
    assert copied == [1, 2]


def test_small_floats_of_inputs_are_computed_on_the_device() -> None:
    text = """
        graph @one(%x: f32[2]) -> (%y) opset 21 {
          %y = Exp(%x) : f32[2]
        }
    """
    with pytest.MonkeyPatch.context() as patch:
        seen: list[object] = []
        plain = STRICT.exp
        patch.setattr(STRICT, "exp", lambda x, out: seen.append(x) or plain(x, out=out))
        run_text(text, {"x": np.zeros(2, np.float32)})
    assert len(seen) == 1


# -- errors ---------------------------------------------------------------------------------------------------------


class DeviceMemoryError(MemoryError):
    """What stands for CuPy's OutOfMemoryError."""


def full_above(size: int) -> Callable[..., object]:
    """An `empty` of a device with so many bytes."""

    def empty(shape: tuple[int, ...], dtype: object) -> object:
        array = np.empty(shape, dtype)  # type: ignore[call-overload]
        if array.nbytes > size:
            raise DeviceMemoryError(f"Out of memory allocating {array.nbytes:,} bytes (allocated so far: 0 bytes).")
        return StrictArray(array)

    return empty


def test_memory_that_lacks_is_told_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        graph @one(%x: f32[100]) -> (%y) opset 21 {
          %y = Exp(%x) : f32[100] from "/exp"
        }
    """
    x = {"x": np.zeros(100, np.float32)}

    def fail(*_: object, **__: object) -> None:
        raise DeviceMemoryError("Out of memory allocating 400 bytes (allocated so far: 0 bytes).")

    with monkeypatch.context() as patch:
        patch.setattr(STRICT, "exp", fail)
        with pytest.raises(
            RunError, match=r"irpar.Fused failed on the device: out of memory allocating 400 bytes"
        ) as raised:
            run_text(text, x)
        assert raised.value.where == "node /exp"
        assert "smaller batch" in (raised.value.do or "")
    monkeypatch.setattr(STRICT, "empty", full_above(300))
    with pytest.raises(EngineError, match="an arena of 848 bytes has no room on the device") as no_arena:
        run_text(text, x)
    assert no_arena.value.where == "rank 0"
    with pytest.raises(RunError, match="copying what the segment reads or produces failed on the device"):
        run_text(text.replace("100", "k"), x)


def test_weights_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = module(MLP, **mlp_weights())
    monkeypatch.setattr(STRICT, "empty", full_above(95))
    monkeypatch.setattr(cupy_engine, "HOST_ELEMENTS", 0)
    with strict_device(0), pytest.raises(EngineError, match="uploading 96 bytes failed on the device") as raised:
        Executor(loaded, loaded.mesh, engine="cupy")
    assert raised.value.where == "constant %w1"


@pytest.mark.parametrize(
    ("spec", "driver", "told"),
    [(None, True, "needs CuPy, which is not installed"), (object(), False, "needs a CUDA device")],
)
def test_no_cupy_and_no_device_are_told(monkeypatch: pytest.MonkeyPatch, spec: object, driver: bool, told: str) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: spec)
    monkeypatch.setattr(cuda, "import_native", lambda name: STRICT)
    monkeypatch.setattr(cuda, "has_driver", lambda: driver)
    loaded = module(MLP, **mlp_weights())
    with pytest.raises(cuda.NoDeviceError, match=told) as raised:
        Executor(loaded, loaded.mesh, engine="cupy")
    assert 'engine="ort"' in (raised.value.do or "")


@pytest.mark.parametrize(
    ("devices", "free", "world", "shown", "chosen"),
    [
        (0, 10**9, None, "", "ort"),
        (1, 10**9, None, "", "cupy"),
        (1, 299, None, "", "ort"),
        (2, 299, World(1, 2, 1, 2), "", "cupy"),
        (1, 299, World(1, 2, 1, 2), "", "ort"),
        (1, 299, World(1, 2, 1, 2), "3", "cupy"),
        (1, 299, World(1, 2), "", "cupy"),
        (1, 199, World(1, 2), "", "ort"),
    ],
)
def test_the_default_is_cupy_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, devices: int, free: int, world: World | None, shown: str, chosen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(cuda, "device_count", lambda: devices)
    monkeypatch.setattr(cuda, "free_bytes", lambda device: free)
    assert default_engine([200, 100], world) == chosen


def test_a_run_that_cannot_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = module(MLP, **mlp_weights())
    with strict_device(free=100), pytest.raises(OutOfMemoryError, match="bytes of device memory, there are 100"):
        Executor(loaded, loaded.mesh, engine="cupy")
    monkeypatch.setenv("IRPAR_MEMORY_LIMIT", "none")
    with strict_device(free=100):
        Executor(loaded, loaded.mesh, engine="cupy").close()


# -- device arrays at the edges -------------------------------------------------------------------------------------


class DeviceGroup(ThreadGroup):
    """Threads that take device arrays: brought to the host and back."""

    takes_device_arrays = True

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, object]:  # type: ignore[override]
        """Also sees that all operands lie on the device."""
        for call in waiting.values():
            assert isinstance(call.operand, StrictArray)
        on_host = {rank: replace(call, operand=call.operand._array) for rank, call in waiting.items()}
        return {rank: StrictArray(found) for rank, found in super().exchange(on_host).items()}


@pytest.mark.parametrize(("devices", "family"), pairs([1, 2, 4], ["gpt", "moe"]))
def test_segments_give_device_arrays_to_groups_that_take_them(
    family: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STRICT.cuda.runtime, "getDeviceCount", lambda: devices)
    used: set[int] = set()
    plain = STRICT.cuda.Device
    monkeypatch.setattr(STRICT.cuda, "Device", lambda number: used.add(number) or plain(number))
    loaded = to_module(models.build(family))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp"))
    partition = irpar.partition(loaded, irpar.Mesh({"dp": 2, "tp": 2}))
    expected_by = partition.executor("numpy")
    inputs = random_inputs(expected_by.inputs, loaded.graph)
    assert partition.module is not None
    mesh = partition.module.mesh
    with strict_device(), Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        got = executor.run(inputs, check_replicas=True)
    assert used == set(range(devices))
    for name, array in expected_by.run(inputs).items():
        assert isinstance(got[name], np.ndarray)
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("options", [{}, {"precision": "fp16", "loss_scale": "dynamic"}], ids=["f32", "fp16"])
def test_state_is_replaced_on_the_device(stays: bool, options: dict[str, str]) -> None:
    """Device arrays that stay with their rank are written over; others are the segment's own."""
    partition = irpar.partition(classifier(optimizer="adamw", **options), "d=1")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(4)]
        expected = trainer.read_all()
    assert partition.module is not None
    mesh = partition.module.mesh
    group = DeviceGroup(mesh) if stays else ThreadGroup(mesh)
    facts = facts_of(partition.module.metadata)
    assert facts is not None
    with strict_device(), Executor(partition.module, mesh, engine="cupy", group=group) as executor:
        trainer = Trainer(executor, facts)
        # Between the nodes of a kernel float16 is not rounded.
        near = [pytest.approx(loss, rel=1e-3) for loss in losses] if options else losses
        assert [trainer.step(batch(number)) for number in range(3)] == near[:3]
        before = dict(executor._held.blocks(1, 0))
        assert trainer.step(batch(3)) == near[3]
        after = executor._held.blocks(1, 0)
        over = {value.source_name for value in written_over(executor.parts[0].graph).values()}
        assert {"w.m", "w.v"} <= over
        for name in over if stays else ():
            assert np.shares_memory(after[name]._array, before[name]._array), name
        found = trainer.read_all()
        if not options:
            same(found, expected)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-2, atol=1e-3, err_msg=name)


def test_state_of_one_rank_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads too: what comes and goes is the batch, the learning rate and the loss."""
    copied: list[int] = []
    plain = STRICT.cuda.runtime.memcpyAsync

    def count(target: int, source: int, size: int, kind: int, stream: int) -> None:
        copied.extend([size] if kind != 3 else [])
        plain(target, source, size, kind, stream)

    partition = irpar.partition(classifier(optimizer="adamw"), "d=1")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(5)]
        expected = trainer.read_all()
    with strict_device(), partition.trainer(engine="cupy") as trainer:
        assert [trainer.step(batch(number)) for number in range(4)] == losses[:4]
        monkeypatch.setattr(STRICT.cuda.runtime, "memcpyAsync", count)
        assert trainer.step(batch(4)) == losses[4]
        same(trainer.read_all(), expected)
        given = sum(array.nbytes for array in batch().values())
        monkeypatch.undo()
    state = sum(array.nbytes for array in expected.values())
    assert sum(copied) <= given + 64 + state  # Reading it all is the end of it.
    partition.close()


@pytest.mark.parametrize("results", ["owned", "borrowed"])
def test_results_stay_on_the_device(results: str) -> None:
    """Arrays of the device may then be given too; what state was is not what comes of it."""
    loaded = module("""
        graph @counted(%x: f32[4, 8], state statistic %m: f32[4, 8]) -> (%y, %k replaces %m, %same) opset 21 {
          %a = Add(%x, %m) : f32[4, 8]
          %y = Tanh(%a) : f32[4, 8]
          %k = Neg(%a) : f32[4, 8]
          %same = Identity(%k) : f32[4, 8]
        }
    """)
    partition = irpar.partition(loaded, "d=1")
    found = []
    with strict_device(), partition:
        session = partition.session(engine="cupy", results=results)
        m = np.zeros((4, 8), np.float32)
        for run in range(5):
            x = np.full((4, 8), run, np.float32)
            got = session.run({"x": StrictArray(x) if run % 2 else x})
            assert got.keys() == {"y", "same"}
            np.testing.assert_array_equal(got["y"]._array, np.tanh(x + m))
            m = -(x + m)
            np.testing.assert_array_equal(got["same"]._array, m)
            found.append((got, m))
        np.testing.assert_array_equal(session.read("m"), m)
        if results == "owned":
            for got, expected in found:
                np.testing.assert_array_equal(got["same"]._array, expected)
        with pytest.raises(InputError, match=r"x is f64\[4, 8\]"):
            session.run({"x": StrictArray(np.zeros((4, 8)))})


def test_results_stay_only_on_a_device_of_one_rank() -> None:
    partition = irpar.partition(to_module(models.build("mlp")), "d=1")
    with partition, pytest.raises(ProgramError, match="not with numpy and 1"):
        partition.executor("numpy", results="owned")
    with pytest.raises(ArgumentError, match="results is"):
        partition.run({}, results="lent")  # type: ignore[arg-type]


def test_a_capture_takes_no_room_for_what_replaces_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a moment: of AdamW's state that would be three times the parameters."""
    taken: list[Value] = []
    over: list[Value] = []
    room, with_states = Piece._room_of, piece.with_states
    monkeypatch.setattr(Piece, "_room_of", lambda piece, node, value: taken.append(value) or room(piece, node, value))
    monkeypatch.setattr(
        piece, "with_states", lambda into, nodes, states: over.extend(states) or with_states(into, nodes, states)
    )
    partition = irpar.partition(classifier(optimizer="adamw"), "d=1")
    with strict_device(), partition.trainer(engine="cupy") as trainer:
        for number in range(4):
            trainer.step(batch(number))
    assert over
    assert {*over}.isdisjoint(taken)
    partition.close()


@pytest.mark.parametrize("taken", [True, False])
def test_kernels_around_and_in_bodies(taken: bool) -> None:
    """A body reads what a kernel computes among other things, and has kernels of its own."""
    text = """
        graph @one(%x: f32[100], %c: bool[]) -> (%y) opset 21 {
          %a = Tanh(%x) : f32[100]
          %b = Exp(%a) : f32[100]
          %d = Neg(%b) : f32[100]
          %i = If(%c) {then_branch=graph @then() -> (%t) {
            %s = Add(%b, %x) : f32[100]
            %t = Sqrt(%s) : f32[100]
          }, else_branch=graph @else() -> (%e) {
            %e = Abs(%a) : f32[100]
          }} : f32[100]
          %y = Add(%i, %d) : f32[100]
        }
    """
    x = np.linspace(0.1, 1, 100, dtype=np.float32)
    a = np.tanh(x)
    results, notes = run_text(text, {"x": x, "c": np.array(taken)})
    np.testing.assert_allclose(results["y"], (np.sqrt(np.exp(a) + x) if taken else a) - np.exp(a), rtol=1e-5)
    assert notes == ()
