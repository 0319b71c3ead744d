"""Results inside segments of the array engines: in places of an arena that are decided once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.ir import Module
from irpar.onnx_io import to_module
from irpar.output.parts import Part, parts_of
from irpar.runtime.engines import arena_height
from irpar.runtime.engines.arena import Arena, Arenas, arena_layout
from irpar.runtime.engines.base import Constants, EngineSettings
from irpar.runtime.engines.numpy import NumpyEngine, NumpySegment
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs
from tests.runtime.devices import strict_device
from tests.runtime.engines.poison import poisoned
from tests.runtime.programs import module

REUSED = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[1024]) -> (%d, %v) opset 21 ranks [0] {
      %s = constant : i64[2] [32, 32]
      %a = Neg(%x) : f32[1024]
      %b = Exp(%a) : f32[1024]
      %c = Neg(%b) : f32[1024]
      %v = Reshape(%c, %s) : f32[32, 32]
      %e = Exp(%x) : f32[1024]
      %d = Add(%e, %c) : f32[1024]
    }
"""


def segment_of(loaded: Module | Part):
    (segment,) = build_program(loaded.graph).segments
    return segment


def compiled(loaded: Module) -> tuple[NumpySegment, Arena]:
    """The only segment of a program, and an arena for it."""
    engine = NumpyEngine(EngineSettings(loaded.opsets, 1))
    layout = engine.layout(build_program(loaded.graph), {})
    arena = Arenas(lambda rank, nbytes: poisoned(nbytes)).take(0, layout.nbytes, layout)
    assert arena is not None
    return engine.compile(segment_of(loaded), Constants(parts_of(loaded, loaded.mesh)[0])), arena


def test_memory_is_used_again_but_not_while_a_view_of_it_is_held():
    layout = arena_layout(segment_of(module(REUSED)))
    places = {value.name: slot.offset for value, slot in layout.slots.items()}
    # `c` must outlive all: the result `v` is a view of it.
    assert places == {"a": 0, "b": 4096, "c": 0, "e": 4096}
    assert layout.nbytes == 8192


GROWING = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[1024]) -> (%y) opset 21 ranks [0] {
      %s = constant : i64[1] [2048]
      %a = Neg(%x) : f32[1024]
      %b = Exp(%a) : f32[1024]
      %c = ReduceSum(%b) : f32[1]
      %y = Expand(%c, %s) : f32[2048]
    }
"""


@pytest.mark.parametrize(("allowed", "names", "nbytes"), [(8191, "abc", 8192), (8188, "abc", 8192), (8187, "ac", 4096)])
def test_an_arena_is_no_higher_than_what_lies_beside_it_lets_it_be(allowed, names, nbytes, monkeypatch):
    """At most 8,196 bytes are held at once; at the end 8,192 of them are the result, which lies outside."""
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", allowed)
    layout = arena_layout(segment_of(module(GROWING)), beside=True)
    assert "".join(sorted(value.name for value in layout.slots)) == names
    assert layout.nbytes == nbytes
    assert arena_layout(segment_of(module(GROWING))).nbytes == 8192


@pytest.mark.parametrize("family", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "unet"))])
def test_a_low_arena_gives_the_same_numbers(family, monkeypatch):
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", 1024)
    loaded = to_module(models.build(family))
    partition = irpar.partition(loaded, "x=1")
    segment = segment_of(partition.parts[0])
    full, low = arena_layout(segment), arena_layout(segment, beside=True)
    assert 0 < low.nbytes < full.nbytes
    assert low.slots.items() < full.slots.items()
    inputs = random_inputs(partition.executor("numpy").inputs, loaded.graph)
    with strict_device():
        found = partition.run(inputs, engine="cupy")
    for name, array in partition.run(inputs, engine="numpy").items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


def test_inputs_and_outputs_have_places_where_they_are_copied():
    layout = arena_layout(segment_of(module(REUSED)), with_ends=True)
    assert {value.name for value in layout.inputs} == {"x"}
    assert {value.name for value in layout.slots} == set("abced")
    assert layout.nbytes == 3 * 4096
    buffers = poisoned(layout.nbytes).buffers(layout)
    (x,), results = buffers.inputs.values(), {node.result.name: array for node, array in buffers.into.items()}
    assert not any(np.shares_memory(x, results[name]) for name in "abce")
    assert not np.shares_memory(results["d"], results["c"])


def test_results_are_arrays_of_their_own():
    segment, arena = compiled(module(REUSED))
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    first = segment.run([x], 0, arena)
    kept = [np.array(result) for result in first]
    segment.run([2 * x], 0, arena)
    for result, before in zip(first, kept, strict=True):
        np.testing.assert_array_equal(result, before)


def test_the_list_of_inputs_is_emptied():
    inputs = [np.zeros(1024, np.float32)]
    segment, _ = compiled(module(REUSED))
    segment.run(inputs)
    assert inputs == []


@pytest.mark.parametrize("family", models.FAMILIES)
def test_numbers_are_those_of_a_run_without(family):
    loaded = to_module(models.build(family))
    with Executor(loaded, Mesh({"x": 1}), engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, loaded.graph)
        executor._arenas = Arenas(lambda rank, nbytes: poisoned(nbytes))
        found = executor.run(inputs)
        executor._arenas.take = lambda rank, nbytes, layout: None
        expected = executor.run(inputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_runs_beside_each_other_have_an_arena_each():
    loaded = module(REUSED)
    with Executor(loaded, loaded.mesh, engine="numpy") as executor, ThreadPoolExecutor(4) as pool:

        def work(number: int) -> bool:
            x = np.full(1024, number / 8, np.float32)
            return all(np.allclose(executor.run({"x": x})["d"], np.exp(x) - np.exp(-x)) for _ in range(50))

        assert all(pool.map(work, range(8)))


def test_an_arena_is_used_by_the_next_run():
    loaded = module(REUSED)
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        made = []
        make = executor._engine.arena
        executor._arenas = Arenas(lambda rank, nbytes: made.append(nbytes) or make(rank, nbytes))
        for _ in range(3):
            executor.run({"x": np.zeros(1024, np.float32)})
        executor.run({"x": np.zeros(1024, np.float32)}, fetch=["a"])
    assert made == [8192, 4096]  # What is fetched has no place.


def test_what_is_declared_larger_than_it_is_stays_outside():
    text = """
        mesh @m = ["x"=1]
        graph local @g(%x: f32[1, 1, 4]) -> (%z) opset 13 ranks [0] {
          %y = MaxPool(%x) {ceil_mode = 1, kernel_shape = [1], strides = [2]} : f32[1, 1, 3]
          %n = Neg(%y) : f32[1, 1, 3]
          %z = Exp(%n) : f32[1, 1, 3]
        }
    """
    segment, arena = compiled(module(text))
    (result,) = segment.run([np.ones((1, 1, 4), np.float32)], 0, arena)
    np.testing.assert_allclose(result, np.exp(-np.ones((1, 1, result.shape[-1]))), rtol=1e-6)
