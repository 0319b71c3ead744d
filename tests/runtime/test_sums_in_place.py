"""Sums that a loop carries are one block, which each trip writes: in the plan, and where the engines hold arrays."""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import irpar
from irpar.analysis.memory.liveness import peak
from irpar.analysis.memory.sums import sums_in, sums_of
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.onnx_io import save
from irpar.runtime.engines import bodies
from irpar.runtime.engines.bodies import Body
from irpar.runtime.engines.device_arrays import DeviceArrays, Held
from irpar.runtime.engines.numpy import NumpySegment
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.runtime.devices import strict_device
from tests.strict_device import StrictArray
from tests.training.programs import with_weights

Array = np.ndarray[Any, Any]

SUM = """
graph @g(%xs: f32[3, 64], %w: f32[64]) -> (%y, %trips) opset 21 {
  %zero = constant : f32[] 0.0
  %n = constant : i64[1] [64]
  %zeros = Expand(%zero, %n) : f32[64]
  %start = START(%zeros) : f32[64]
  %y, %trips = Scan(%start, %xs) {body=graph(%sum: f32[64], %x: f32[64]) -> (%added, %trip) {
    %h = Mul(%x, %w) : f32[64]
    %added = Add(%sum, %h) : f32[64]
    %trip = TRIP : f32[64]
  }, num_scan_inputs=1} : f32[64], f32[3, 64]
}
"""
IN_PLACE = SUM.replace("START", "Identity").replace("TRIP", "Neg(%h)")
BLOCK = 64 * 4
"""Bytes of a sum."""


def test_liveness_counts_one_block() -> None:
    """At Mul: xs, w, trips, the sum; x and h in the body."""
    graph = parse_module(IN_PLACE).graph
    assert peak(graph).activation_bytes == (3 + 1 + 3 + 1 + 2) * BLOCK
    (scan,) = (node for node in graph if node.op_type == "Scan")
    (found,) = sums_of(scan)
    assert (found.before.name, found.after.name, found.final.name) == ("sum", "added", "y")
    assert found.start is not None
    assert found.start.name == "zeros"
    (body,) = scan.nested_graphs()
    assert sums_in(body) == (found,)
    assert sums_in(graph) == ()


@pytest.mark.parametrize(
    "text",
    [
        SUM.replace("START", "Identity").replace("TRIP", "Neg(%sum)"),
        SUM.replace("START", "Identity").replace("TRIP", "Neg(%added)"),
        IN_PLACE.replace("Add(%sum, %h)", "Mul(%sum, %h)"),
        IN_PLACE.replace("Add(%sum, %h)", "Add(%sum, %sum)"),
        IN_PLACE.replace("f32", "f16"),
    ],
)
def test_what_trips_read_otherwise_stays_as_it_is(text: str) -> None:
    graph = parse_module(text).graph
    assert not [found for node in graph for found in sums_of(node)]


def test_a_beginning_that_is_no_number_is_held_beside_it() -> None:
    for text in (
        IN_PLACE.replace("Identity(%zeros)", "Exp(%zeros)"),
        IN_PLACE.replace("Neg(%h)", "Mul(%h, %zeros)"),
        IN_PLACE.replace("Scan(%start", "Scan(%w"),
    ):
        (found,) = (found for node in parse_module(text).graph for found in sums_of(node))
        assert found.start is None


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Where each trip of a loop leaves what it adds up, by name, in one call of the body after the other."""
    found: dict[str, list[int]] = {}

    def note(value: Any, array: Any) -> None:
        if not isinstance(array, Held):
            place = array.data.ptr if isinstance(array, StrictArray) else array.__array_interface__["data"][0]
            found.setdefault(value.name, []).append(place)

    take, run = Body.take, NumpySegment.run

    def noting_take(body: Body, arguments: list[Any], environment: Any, rooms: Sequence[Any] = ()) -> list[Any]:
        results = take(body, arguments, environment, rooms)
        for value, array in zip(body.outputs, results, strict=True):
            if value in body._sums:
                note(value, array)
        return results

    def noting_run(segment: NumpySegment, *arguments: Any) -> list[Any]:
        results = run(segment, *arguments)
        for value, array in zip(segment._body.outputs, results, strict=True):
            if value in segment._over:
                note(value, array)
        return results

    monkeypatch.setattr(bodies.Body, "take", noting_take)
    monkeypatch.setattr(NumpySegment, "run", noting_run)
    return found


def expected(text: str, inputs: dict[str, Array], tmp_path: Any) -> list[Array]:
    save(parse_module(text), tmp_path / "g.onnx")
    onnx.checker.check_model(tmp_path / "g.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def inputs_of() -> dict[str, Array]:
    random = np.random.default_rng(5)
    return {
        "xs": random.standard_normal((3, 64), np.float32),
        "w": random.standard_normal(64, np.float32),
    }


@pytest.mark.parametrize("engine", ["numpy", "cupy"])
@pytest.mark.parametrize("start", ["%start", "%w"])
def test_trips_write_one_block(engine: str, start: str, blocks: dict[str, list[int]], tmp_path: Any) -> None:
    """Which is no block of anyone else, though the sum begins as an input; also where a CUDA graph holds all trips."""
    text = IN_PLACE.replace("Scan(%start", f"Scan({start}")
    given = inputs_of()
    kept = {name: array.copy() for name, array in given.items()}
    with strict_device(host_elements=0), Executor(parse_module(text), Mesh({"x": 1}), engine=engine) as executor:
        results = [executor.run(given) for _ in range(3)]
    for result in results:
        for found, wanted in zip(result.values(), expected(text, kept, tmp_path), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for name, array in kept.items():
        np.testing.assert_array_equal(given[name], array)
    runs, rest = divmod(len(blocks["added"]), 3)
    assert rest == 0
    assert runs == (2 if engine == "cupy" and start == "%start" else 3)  # A graph is captured in the second.
    assert all(len(set(blocks["added"][3 * run : 3 * run + 3])) == 1 for run in range(runs))


def test_what_is_fetched_of_what_a_sum_begins_as_stays() -> None:
    with Executor(parse_module(IN_PLACE), Mesh({"x": 1}), engine="numpy") as executor:
        results = executor.run(inputs_of(), fetch=["start", "zeros"])
    assert not results["start"].any()
    assert not results["zeros"].any()


# -- steps of training --------------------------------------------------------------------------------------------

WIDTH = 256
STEP = f"""
graph @step(%x: f64[8, {WIDTH}], %w: f64[{WIDTH}, {WIDTH}] from "w", %u: f64[{WIDTH}, {WIDTH}] from "u") -> (%y) opset 21 {{
  %h = MatMul(%x, %w) : f64[8, {WIDTH}]
  %a = Tanh(%h) : f64[8, {WIDTH}]
  %y = MatMul(%a, %u) : f64[8, {WIDTH}]
}}
"""
WEIGHT = WIDTH * WIDTH * 8
SMALL = 1 << 10
"""Scratch of the engine numpy: sums of a few numbers."""
CUTS = {"x": [None, "dp", None], "w": [None, "tp"], "u": ["tp", None]}


def step_of(micro_batches: int = 4) -> Module:
    random = np.random.default_rng(3)
    weights = {name: random.standard_normal((WIDTH, WIDTH)) / 16 for name in ("w", "u")}
    text = STEP if micro_batches > 1 else STEP.replace("f64[8,", "f64[32,")
    return irpar.train_step(
        with_weights(text, **weights), loss="mse", optimizer="sgd", learning_rate=0.1, micro_batches=micro_batches
    )


def on(step: Module, mesh: str) -> irpar.Partition:
    for name, cut in CUTS.items():
        if mesh != "d=1":
            step.shard(name, [axis if axis is not None and axis in mesh else None for axis in cut])
    return irpar.partition(step, mesh)


def batch() -> dict[str, Array]:
    random = np.random.default_rng(4)
    return {name: random.standard_normal((32, WIDTH)) for name in ("x", "target")}


@pytest.mark.parametrize(("engine", "mesh"), [("numpy", "d=1"), ("numpy", "dp=2,tp=2"), ("cupy", "d=1")])
def test_steps_add_up_gradients_in_one_block(engine: str, mesh: str, blocks: dict[str, list[int]]) -> None:
    """On dp=2,tp=2 trips communicate; the numbers are those of the whole batch."""
    with on(step_of(1), "d=1").trainer(engine="numpy") as trainer:
        losses, state = [trainer.step(batch()) for _ in range(3)], trainer.read_all()
    with strict_device(), on(step_of(), mesh).trainer(engine=engine) as trainer:
        found = [trainer.step(batch())]
        blocks.clear()
        np.testing.assert_allclose([*found, *(trainer.step(batch()) for _ in range(2))], losses, rtol=1e-10)
        for name, array in trainer.read_all().items():
            np.testing.assert_allclose(array, state[name], rtol=1e-10, atol=1e-12)
    # Of w and u each rank has a block, which four trips write: in a step, or as a CUDA graph holds it.
    in_place = [places for places in map(Counter, blocks.values()) if set(places.values()) <= {4, 8}]
    assert len(in_place) >= 2
    assert all(len(places) <= 2 * Mesh.parse(mesh).size for places in in_place)


PRODUCT = """
graph @g(%xs: f32[3, 5, 8], %gs: f32[3, 5, 7]) -> (%y) opset 21 {
  %zeros = constant : f32[8, 7] ZEROS
  %start = Identity(%zeros) : f32[8, 7]
  %y = Scan(%start, %xs, %gs) {body=graph(%sum: f32[8, 7], %x: f32[5, 8], %g: f32[5, 7]) -> (%added) {
    %turned = Transpose(%x) {perm=[1, 0]} : f32[8, 5]
    %h = MatMul(%turned, %g) : f32[8, 7]
    %added = Add(%sum, %h) : f32[8, 7]
  }, num_scan_inputs=2} : f32[8, 7]
}
""".replace("ZEROS", str([[0.0] * 7] * 8))


@pytest.mark.parametrize("overs", [True, False])
def test_a_device_brings_what_no_kernel_writes_over_a_sum(
    overs: bool, blocks: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product takes the sum as its residual; where it may not write over that it is copied there."""
    found = []
    with strict_device(host_elements=0):
        if not overs:
            monkeypatch.setattr(DeviceArrays, "may_add_over", lambda self, node: False)
        with Executor(parse_module(PRODUCT), Mesh({"x": 1}), engine="cupy") as executor:
            random = np.random.default_rng(2)
            for _ in range(3):
                given = {n: random.standard_normal((3, 5, k), np.float32) for n, k in (("xs", 8), ("gs", 7))}
                found.append((executor.run(given)["y"], np.einsum("tri,trj->ij", given["xs"], given["gs"])))
    for got, wanted in found:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(set(blocks["added"][:3])) == 1


def test_the_plan_and_the_run_hold_two_gradients_and_a_term() -> None:
    """The sums of w and u, and what one trip adds to one of them."""
    made = on(step_of(), "d=1")
    memory = made.plan.ranks[0]["memory"]
    assert memory["gradients"] + memory["buffers"] <= 3 * WEIGHT
    with made.trainer(engine="numpy") as trainer:
        given = batch()
        trainer.step(given)
        tracemalloc.start()
        trainer.step(given)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert 2 * WEIGHT < most < 3.5 * WEIGHT


def test_engines_that_copy_sums_are_said_to(run_needs: Callable[[irpar.Partition, str], int]) -> None:
    """ONNX Runtime holds three copies more of each sum meanwhile, of w, of u, and of the loss; so does a device on tp=2."""
    made = on(step_of(), "d=1")
    assert run_needs(made, "ort") - run_needs(made, "numpy") >= 2 * 3 * WEIGHT - SMALL
    assert run_needs(made, "cupy") - run_needs(made, "numpy") < WEIGHT
    made = on(step_of(), "dp=2,tp=2")  # Each of 4 ranks adds up a quarter of w and of u.
    assert run_needs(made, "cupy") - run_needs(made, "numpy") >= 2 * 3 * WEIGHT - SMALL


@pytest.fixture
def run_needs() -> Callable[[irpar.Partition, str], int]:
    from irpar.runtime.engines.base import ENGINES
    from irpar.runtime.engines.cupy import CupyEngine
    from irpar.runtime.engines.numpy import NumpyEngine
    from irpar.runtime.engines.ort import OrtEngine
    from irpar.runtime.memory import run_bytes

    engines = {"numpy": NumpyEngine, "ort": OrtEngine, "cupy": CupyEngine}
    assert engines.keys() <= ENGINES.keys()

    def needs(made: irpar.Partition, engine: str) -> int:
        kind = engines[engine]
        return run_bytes(made.parts, 1, kind.writes_over, kind.keeps, adds_in_place=kind.adds_in_place)

    return needs
