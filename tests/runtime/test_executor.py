"""Whole runs: partitioned programs against what they stand for."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from irpar.ir import Module
from irpar.output.parts import parts_of
from irpar.runtime.errors import InputError, MismatchError, ProgramError, ReplicaError, RunError
from irpar.runtime.executor import Executor
from irpar.runtime.log import Record
from irpar.runtime.tape import ComputeStep
from irpar.sharding import IrparError, Mesh

from .programs import MLP, mlp_input, mlp_reference, mlp_weights, module

ENGINES = ["ort", "numpy"]
engines = pytest.mark.parametrize("engine", ENGINES)


def mlp() -> Module:
    return module(MLP, **mlp_weights())


@engines
def test_mlp_on_four_ranks(engine: str) -> None:
    inputs = mlp_input()
    loaded = mlp()
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        assert len(executor.parts) == 2
        assert [str(spec) for spec in executor.inputs] == ["x f32[4, 6]"]
        outputs = executor.run(inputs, check_replicas=True)
        np.testing.assert_allclose(outputs["y"], mlp_reference(inputs["x"], mlp_weights()), rtol=1e-5)
        assert list(executor.log) == [Record(0, "all_reduce", "f32", 48, ("tp",))]
        again = executor.run(inputs)
        np.testing.assert_array_equal(again["y"], outputs["y"])
        assert len(executor.log) == 1


@engines
def test_any_value_can_be_fetched(engine: str) -> None:
    inputs, weights = mlp_input(), mlp_weights()
    loaded = mlp()
    hidden = inputs["x"] @ weights["w1"]
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        outputs = executor.run(inputs, fetch=["hidden", "w1", "x", "p"])
        np.testing.assert_allclose(outputs["hidden"], hidden, rtol=1e-5)
        np.testing.assert_array_equal(outputs["w1"], weights["w1"])
        np.testing.assert_array_equal(outputs["x"], inputs["x"])
        # %p is partial over tp; whole means summed.
        np.testing.assert_allclose(outputs["p"], outputs["y"], rtol=1e-5)
        assert list(executor.run(inputs)) == ["y"]
        with pytest.raises(InputError, match="nearest names: hidden"):
            executor.run(inputs, fetch=["hiden"])


UNEVEN = """
    mesh @m = ["x"=3]
    graph local @wide(%a: f32[2, 2] of [5@x, 2], %irpar.coords: i64[1]) -> (%n, %s, %g) opset 21 ranks [0, 1] {
      %k = constant : f32[2, 2] of [5@x, 2] whole data("#k", 0, 40)
      %b = Add(%a, %k) : f32[2, 2] of [5@x, 2] as "b"
      %c = Cast(%irpar.coords) {to=1} : f32[1]
      %n = Mul(%b, %c) : f32[2, 2] of [5@x, 2]
      %l = ReduceSum(%n) {keepdims=0} : f32[] of [] partial(sum: x)
      %s = irpar.AllReduce(%l) {axes=["x"], reduce="sum", id=0} : f32[] of []
      %g = irpar.AllGather(%b) {axes=["x"], dim=0, sizes=[2, 2, 1], id=1} : f32[5, 2] of [5, 2]
    }
    graph local @narrow(%a: f32[1, 2] of [5@x, 2], %irpar.coords: i64[1]) -> (%n, %s, %g) opset 21 ranks [2] {
      %k = constant : f32[1, 2] of [5@x, 2] whole data("#k", 0, 40)
      %b = Add(%a, %k) : f32[1, 2] of [5@x, 2] as "b"
      %c = Cast(%irpar.coords) {to=1} : f32[1]
      %n = Mul(%b, %c) : f32[1, 2] of [5@x, 2]
      %l = ReduceSum(%n) {keepdims=0} : f32[] of [] partial(sum: x)
      %s = irpar.AllReduce(%l) {axes=["x"], reduce="sum", id=0} : f32[] of []
      %g = irpar.AllGather(%b) {axes=["x"], dim=0, sizes=[2, 2, 1], id=1} : f32[5, 2] of [5, 2]
    }
"""


@engines
def test_uneven_blocks_in_two_programs(engine: str) -> None:
    k = np.arange(10, dtype=np.float32).reshape(5, 2)
    a = np.ones((5, 2), np.float32)
    loaded = module(UNEVEN, k=k)
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        outputs = executor.run({"a": a}, fetch=["b"], check_replicas=True)
        bytes_of = {record.id: record.bytes for record in executor.log}
    expected = (a + k) * np.array([0, 0, 1, 1, 2], np.float32)[:, None]
    np.testing.assert_array_equal(outputs["n"], expected)
    np.testing.assert_array_equal(outputs["s"], expected.sum())
    np.testing.assert_array_equal(outputs["g"], a + k)
    np.testing.assert_array_equal(outputs["b"], a + k)
    assert bytes_of == {0: 4, 1: 16}


EMPTY = """
    mesh @m = ["x"=3]
    graph local @some(%a: f32[1, 2] of [2@x, 2]) -> (%y) opset 21 ranks [0, 1] {
      %r = Relu(%a) : f32[1, 2] of [2@x, 2]
      %y = irpar.AllGather(%r) {axes=["x"], dim=0, sizes=[1, 1, 0], id=0} : f32[2, 2] of [2, 2]
    }
    graph local @none(%a: f32[0, 2] of [2@x, 2]) -> (%y) opset 21 ranks [2] {
      %r = Relu(%a) : f32[0, 2] of [2@x, 2]
      %y = irpar.AllGather(%r) {axes=["x"], dim=0, sizes=[1, 1, 0], id=0} : f32[2, 2] of [2, 2]
    }
"""


@engines
def test_empty_blocks(engine: str) -> None:
    loaded = module(EMPTY)
    a = np.array([[-1, 2], [3, -4]], np.float32)
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        np.testing.assert_array_equal(executor.run({"a": a})["y"], np.maximum(a, 0))


FAILING = """
    mesh @m = ["tp"=2]
    graph local @g(%table: f32[2] of [4@tp], %i: i64[1] of [1]) -> (%y) opset 21 ranks [0, 1] {
      %t = Gather(%table, %i) {axis=0} : f32[1] of [1] partial(sum: tp) from "/embed/Gather"
      %y = irpar.AllReduce(%t) {axes=["tp"], reduce="sum", id=0} : f32[1] of [1]
    }
"""


@engines
def test_a_failing_rank_stops_the_run_with_its_error(engine: str) -> None:
    loaded = module(FAILING.replace("%i: i64[1] of [1]", "%i: i64[1] of [2@tp]"))
    table = np.arange(4, dtype=np.float32)
    before = set(threading.enumerate())  # Some of an earlier test may end meanwhile.
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        with pytest.raises(RunError) as caught:
            executor.run({"table": table, "i": np.array([0, 5])})
        text = str(caught.value)
        assert "rank 1 (tp=1): Gather failed" in text
        assert "do: check the numbers in the inputs" in text
        assert "/embed/Gather" in text
        # The executor is as good as new.
        np.testing.assert_array_equal(executor.run({"table": table, "i": np.array([0, 1])})["y"], [3.0])
    assert set(threading.enumerate()) <= before


def test_programs_that_do_not_meet_stop_with_both_ops() -> None:
    text = EMPTY.replace(
        """sizes=[1, 1, 0], id=0} : f32[2, 2] of [2, 2]
    }
    graph local @none""",
        """sizes=[1, 1, 0], id=4} : f32[2, 2] of [2, 2]
    }
    graph local @none""",
    )
    loaded = module(text)
    with Executor(loaded, loaded.mesh, engine="numpy") as executor, pytest.raises(MismatchError) as caught:
        executor.run({"a": np.zeros((2, 2), np.float32)})
    assert "rank 2 (x=2) is at AllGather id=0" in str(caught.value)
    assert "rank 0 (x=0) is at AllGather id=4" in str(caught.value)


DIVERGING = """
    mesh @m = ["x"=2]
    graph local @g(%irpar.coords: i64[1]) -> (%y) opset 21 ranks [0, 1] {
      %y = Cast(%irpar.coords) {to=1} : f32[1] of [1]
    }
"""


@engines
def test_replicas_that_differ_are_found_on_demand(engine: str) -> None:
    loaded = module(DIVERGING)
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        assert executor.run({})["y"].tolist() == [0.0]
        with pytest.raises(ReplicaError, match="ranks 0 and 1, but the largest difference is 1"):
            executor.run({}, check_replicas=True)


def test_inputs_that_do_not_fit_are_all_told() -> None:
    loaded = mlp()
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        with pytest.raises(InputError) as caught:
            executor.run({"xs": np.zeros(3)})
        assert "x is missing" in str(caught.value)
        assert "there is no input xs; did you mean x?" in str(caught.value)
        assert "expected: x f32[4, 6]" in str(caught.value)
        with pytest.raises(InputError, match=r"x is f64\[4, 6\], expected f32"):
            executor.run({"x": np.zeros((4, 6))})
        with pytest.raises(InputError, match=r"x has shape \[6, 4\], expected \[4, 6\]"):
            executor.run({"x": np.zeros((6, 4), np.float32)})


THROUGH = """
    mesh @m = ["x"=2]
    graph local @g(%a: f32[1] of [2@x]) -> (%a as "same", %k, %v) opset 21 ranks [0, 1] {
      %k = constant : f32[2] of [2] [1.0, 2.0]
      %v = Reshape(%a, %s) : f32[1, 1] of [2@x, 1]
      %s = constant : i64[2] [1, 1]
    }
"""


@engines
def test_outputs_that_are_inputs_or_constants_are_copies(engine: str) -> None:
    text = THROUGH.replace("      %s = constant : i64[2] [1, 1]\n", "").replace(
        "      %v =", "      %s = constant : i64[2] [1, 1]\n      %v ="
    )
    loaded = module(text)
    a = np.array([3, 4], np.float32)
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        outputs = executor.run({"a": a})
        assert {name: array.tolist() for name, array in outputs.items()} == {
            "same": [3.0, 4.0],
            "k": [1.0, 2.0],
            "v": [[3.0], [4.0]],
        }
        for array in outputs.values():
            array[...] = 0
        assert a.tolist() == [3.0, 4.0]
        assert executor.run({"a": a})["k"].tolist() == [1.0, 2.0]


@engines
def test_a_global_graph_runs_on_one_device(engine: str) -> None:
    loaded = module("""
        graph @g(%x: f32['n', 2], %y: f32['n', 2]) -> (%z) opset 21 {
          %z = Add(%x, %y) : f32['n', 2]
        }
    """)
    x = np.ones((3, 2), np.float32)
    with Executor(loaded, Mesh({"x": 1}), engine=engine) as executor:
        np.testing.assert_array_equal(executor.run({"x": x, "y": x})["z"], x + x)
        with pytest.raises(InputError, match="y has n = 2, but x has n = 3"):
            executor.run({"x": x, "y": x[:2]})
    with pytest.raises(ProgramError, match="global view"):
        Executor(loaded, Mesh({"x": 2}), engine=engine)


def test_every_rank_needs_a_program() -> None:
    loaded = module(EMPTY)
    parts = parts_of(loaded, loaded.mesh)
    with pytest.raises(IrparError, match=r"the parts run ranks \[0, 1\], where ranks \[0, 1, 2\]"):
        Executor(loaded, loaded.mesh, engine="numpy", parts=parts[:1])


def test_unknown_engine() -> None:
    loaded = mlp()
    with pytest.raises(IrparError, match='no engine "torch"'):
        Executor(loaded, loaded.mesh, engine="torch")


def test_a_folder_that_is_no_partition(tmp_path: Path) -> None:
    with pytest.raises(IrparError, match="cannot read the plan"):
        Executor.open(tmp_path)


def test_what_was_fetched_once_is_let_go() -> None:
    loaded = mlp()
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        executor.run(mlp_input())
        executor.run(mlp_input(), fetch=["hidden"])
        gc.collect()
        known = _count(ComputeStep)
        for name in ["active", "hidden"] * 3:
            executor.run(mlp_input(), fetch=[name])
        gc.collect()
        assert known > 0
        assert _count(ComputeStep) <= known


@engines
def test_what_is_closed_is_let_go_at_once(engine: str) -> None:
    """Its weights may be mapped files: they must not wait for the garbage collector."""
    loaded = mlp()
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        executor.run(mlp_input())
    known = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert known() is None
    finally:
        gc.enable()


def _count(kind: type) -> int:
    return sum(type(known) is kind for known in gc.get_objects())
