"""CUDA graphs of the engine cupy on a device: what is replayed gives what was launched."""

import cProfile
import gc
import io
import pstats
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.training_facts import facts_of
from irpar.onnx_io import to_module
from irpar.runtime.engines import cupy as engine
from irpar.runtime.engines.arena import Arena
from irpar.runtime.engines.cuda_graphs.recording import GraphMemory, Recording
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from irpar.training.trainer import Trainer
from irpar.verification.inputs import random_inputs
from tests.gpu import NEEDS_GPU, cupy
from tests.runtime.engines.compiled import Compiled
from tests.runtime.engines.test_cuda_graphs import CHAIN, LARGE, LOOP, SIZED, SPLIT, TOKENS, numbers
from tests.runtime.test_cupy_on_gpu import DeviceGroup
from tests.training.programs import batch, classifier

pytestmark = NEEDS_GPU

NODES = 400
REPLAY_SECONDS = 50e-6
"""Host time of a replayed segment, whatever the number of its nodes."""


@pytest.fixture(autouse=True)
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are not fused, so that they can be counted."""
    monkeypatch.setattr(engine, "fused", lambda segment, constants: (segment, frozenset()))


def compiled(text: str, *, keep_on_device: bool = True, lends: bool = False) -> Compiled:
    """A program of one segment on the device."""
    module = cupy()
    return Compiled(
        text,
        module.asarray,
        lambda array: array.get() if isinstance(array, module.ndarray) else array,
        keep_on_device=keep_on_device,
        captures=True,
        lends=lends,
    )


def chain(nodes: int) -> str:
    """Additions and subtractions in turn."""
    lines = [f"%y{place + 1} = {('Add', 'Sub')[place % 2]}(%y{place}, %one) : f32[1024]" for place in range(nodes)]
    return f"""
        graph @chain(%y0: f32[1024]) -> (%y{nodes}) opset 21 {{
          %one = constant : f32[1] [1]
          {chr(10).join(lines)}
        }}
    """


@pytest.mark.parametrize("on_device", [False, True])
def test_a_long_chain_is_replayed(on_device: bool) -> None:
    found = compiled(chain(NODES), keep_on_device=on_device)
    for run in range(5):
        found.check(numbers(1024, seed=run), on_device=on_device, tolerance=1e-5)
    assert found.captured == (1, NODES, 0)


def test_nodes_share_memory_beside_the_arena_which_goes_with_the_stream() -> None:
    module, size = cupy(), 1 << 20
    pool, arena = module.get_default_memory_pool(), Arena(module, module.empty(512, np.uint8))
    used = pool.used_bytes()
    stream = module.cuda.Stream(non_blocking=True)
    recording = Recording(module, stream, GraphMemory(module))
    for _ in range(3):
        with stream, recording.lending(arena, []):
            module.empty(size, np.uint8)
    assert pool.used_bytes() == used + size
    del recording
    gc.collect()
    assert pool.used_bytes() == used


def test_replays_take_little_time_of_the_host() -> None:
    found = compiled(chain(NODES))
    given = cupy().asarray(numbers(1024))

    def run() -> float:
        cupy().cuda.runtime.deviceSynchronize()
        begun = time.perf_counter()
        found.device.run([given])
        return time.perf_counter() - begun

    for _ in range(5):
        run()
    seconds = float(np.median([run() for _ in range(100)]))
    assert seconds < REPLAY_SECONDS, f"{seconds * 1e6:.1f} us\n{_profile(run)}"


def _profile(function: Callable[[], object]) -> str:
    """Where the time of a hundred calls goes."""
    profile, told = cProfile.Profile(), io.StringIO()
    for _ in range(100):
        profile.runcall(function)
    pstats.Stats(profile, stream=told).sort_stats("tottime").print_stats(16)
    return told.getvalue()


LOGITS = """
    graph @logits(%x: f16[2, 300, 768], %w: f16[5003, 768]) -> (%y) opset 21 {
      %a = Neg(%x) : f16[2, 300, 768]
      %t = Transpose(%w) {perm=[1, 0]} : f16[768, 5003]
      %y = MatMul(%a, %t) : f16[2, 300, 5003]
    }
"""


@pytest.mark.parametrize("lends", [False, True], ids=["owned", "borrowed"])
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_products_that_leave_lie_where_they_are_written_fast(on_device: bool, lends: bool) -> None:
    """Borrowed ones stay there, others are copied once; what goes to the host is read from there."""
    found = compiled(LOGITS, keep_on_device=on_device, lends=lends)
    x, w = numbers(2, 300, 768).astype(np.float16), numbers(5003, 768, seed=1).astype(np.float16)
    arena = found.engine.arena(0, max(1, found.device.arena_bytes))
    results = []
    for run in range(4):
        given = (x + np.float16(run) / 8, w)
        (y,) = found.run(*given, on_device=on_device, arena=arena)
        wanted = -(given[0].astype(np.float32) @ w.astype(np.float32).T)
        results.append((y, wanted))
        array = y.get() if on_device else y
        np.testing.assert_allclose(array, wanted, rtol=1e-2, atol=0.3)
        if on_device and run:
            assert y.strides[-2] == (5008 if lends else 5003) * 2
            np.testing.assert_array_equal(found.engine.edge(0).host(y), array)
    if on_device and not lends:
        for y, wanted in results:
            np.testing.assert_allclose(y.get(), wanted, rtol=1e-2, atol=0.3)


def test_large_inputs_are_read_where_they_lie_until_they_move() -> None:
    found = compiled(LARGE)
    arrays = [cupy().asarray(numbers(70000, seed=place)) for place in range(8)]
    names = [value.name for value in found.segment.inputs]
    results = []
    for run, place in enumerate([0, 0, 0, 1, 1, 0, 2, 3, 4, 5, 6, 7, 7]):
        arrays[place] += 1
        given = {"x": arrays[place], "s": cupy().asarray(numbers(3, seed=run))}
        expected = -(arrays[place].get() + numbers(3, seed=run).sum())
        made = dict(zip(found.segment.outputs, found.device.run([given[name] for name in names]), strict=True))
        results.append((expected, made[found.segment.graph.outputs[0]]))
    for expected, y in results:
        np.testing.assert_allclose(y.get(), expected, rtol=1e-5, atol=1e-5)


def test_what_the_callers_streams_do_comes_before_and_after() -> None:
    """A replay goes to the stream that is current, whichever that is."""
    found = compiled(chain(40))
    streams = [cupy().cuda.Stream(non_blocking=True) for _ in range(3)]
    for run in range(30):
        x = numbers(1024, seed=run)
        with streams[run % 7 % 3] as stream:
            given = cupy().asarray(x)
            given += 1
            (y,) = found.device.run([given])
            y -= 1
            np.testing.assert_allclose(y.get(stream=stream), found.expected(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_masks_and_lengths_are_read_anew(on_device: bool) -> None:
    found = compiled(TOKENS, keep_on_device=on_device)
    for run in range(6):
        random = np.random.default_rng(run)
        ids, mask = random.integers(0, 4, (2, 3)), random.random((2, 3)) < 0.5
        found.check(ids, mask, np.asarray(run + 1), on_device=on_device, tolerance=1e-6)
    assert found.captured == (1, 6, 0)


def test_shapes_that_change_are_captured_again() -> None:
    found = compiled(CHAIN)
    for run, size in enumerate([3, 3, 5, 5, 3, 5, 7, 7, 3]):
        found.check(numbers(size, 8, seed=run), on_device=True, tolerance=1e-5)
    assert found.captured == (1, 4, 0)


def test_numbers_that_the_host_reads_are_part_of_the_key() -> None:
    found = compiled(SIZED, keep_on_device=False)
    for run, size in enumerate([1, 1, 2, 2, 1, 2]):
        found.check(numbers(4, 8, seed=run), np.array([size]), tolerance=1e-5)


def test_loops_whose_trips_the_host_knows_are_captured() -> None:
    found = compiled(LOOP, keep_on_device=False)
    for run, trips in enumerate([2, 2, 3, 2, 3, 3]):
        found.check(numbers(8, seed=run), np.asarray(trips), tolerance=1e-5)
    assert found.captured == (1, 5, 0)


def test_a_size_that_numbers_decide_splits_the_graph() -> None:
    found = compiled(SPLIT)
    for run in range(6):
        found.check(numbers(12, seed=run), on_device=True, tolerance=1e-5)
    assert found.captured == (2, 7, 1)
    (note,) = found.engine.notes
    assert note.startswith("NonZero splits CUDA graphs")


@pytest.mark.parametrize("family", ["mlp", "gpt", "llama"])
def test_models_are_replayed_as_they_were_run(family: str) -> None:
    loaded = to_module(models.build(family))
    with Executor(loaded, Mesh({"x": 1}), engine="cupy") as executor, Executor(loaded, Mesh({"x": 1})) as on_ort:
        for seed in range(4):
            inputs = random_inputs(executor.inputs, loaded.graph, seed=seed)
            found = executor.run(inputs)
            for name, array in on_ort.run(inputs).items():
                np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-3)
        assert executor.notes == ()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_step_of_training_that_is_replayed_is_the_step_that_was_run(optimizer: str) -> None:
    """To the bit; the state is written over where it lies."""
    partition = irpar.partition(classifier(optimizer=optimizer), "d=1")
    assert partition.module is not None
    mesh = partition.module.mesh
    facts = facts_of(partition.module.metadata)
    assert facts is not None

    def run(captures: bool) -> tuple[list[Any], dict[str, Any]]:
        assert partition.module is not None
        with Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
            executor._engine.captures = captures  # type: ignore[attr-defined]
            trainer = Trainer(executor, facts)
            return [trainer.step(batch(number)) for number in range(6)], trainer.read_all()

    (eager, expected), (replayed, found) = run(False), run(True)
    assert replayed == eager
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_ranks_in_threads_capture_and_replay_at_once() -> None:
    """Each on its own stream; what one captures does not disturb the others."""
    text = chain(40)
    found = compiled(text, keep_on_device=False)
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for number in range(30):
                x = numbers(1024, seed=rank * 100 + number)
                (y,) = found.device.run([x], rank=rank)
                np.testing.assert_allclose(y, found.expected(x)[0], rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
