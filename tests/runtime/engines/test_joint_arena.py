"""One arena for all segments of a program of the engine cupy, on a stand-in for a device."""

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.training_facts import facts_of
from irpar.passes.optimizer.names import LEARNING_RATE
from irpar.runtime.engines import control_flow
from irpar.runtime.engines import cupy as engine
from irpar.runtime.engines.arena import ArenaLayout, joint_layout
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from irpar.runtime.session import Session
from irpar.sharding import Mesh
from irpar.training.trainer import Trainer
from irpar.verification.inputs import random_inputs
from tests import strict_graphs
from tests.runtime.devices import strict_device
from tests.runtime.engines.poison import Poison
from tests.runtime.engines.test_cupy import DeviceGroup
from tests.runtime.programs import module
from tests.training.programs import batch, classifier, same

OVER_BORDERS = """
    mesh @m = ["x"=2]
    graph local @g(%x: f32[1024] of [1024], %k: f32[1024] of [1024]) -> (%y, %z) opset 21 ranks [0, 1] {
      %t = constant : i64[2] [32, 32]
      %a = Neg(%x) : f32[1024] of [1024]
      %r = Reshape(%a, %t) : f32[32, 32] of [32, 32]
      %b = Exp(%a) : f32[1024] of [1024] partial(sum: x)
      %s = irpar.AllReduce(%b) {axes=["x"], reduce="sum", id=0} : f32[1024] of [1024]
      %c = Neg(%s) : f32[1024] of [1024]
      %d = Add(%c, %k) : f32[1024] of [1024]
      %u = Reshape(%d, %t) : f32[32, 32] of [32, 32]
      %y = Add(%u, %r) : f32[32, 32] of [32, 32]
      %z = Neg(%d) : f32[1024] of [1024]
    }
"""


def layout_of(text: str) -> ArenaLayout:
    """Of a program without loops, whose inputs come from the host."""
    program = build_program(module(text).graph)
    taken = {value for collective in program.instructions for value in collective.reads}
    between = {value for value in taken if any(user.op_type == "AllReduce" for user in value.users)}
    return joint_layout(program.segments, {*program.outputs, *between}, None, program.graph.inputs)


def test_what_later_segments_read_has_a_place_until_then() -> None:
    layout = layout_of(OVER_BORDERS)
    # `a` is held for its view `r`; `k` arrives with the second segment, when nothing reads `x` any more.
    assert {value.name: slot.offset for value, slot in layout.slots.items()} == {"a": 4096, "c": 8192, "d": 12288}
    assert {value.name: slot.offset for value, slot in layout.inputs.items()} == {"x": 0, "k": 0}
    assert {value.name for value in layout.carried} == {"r"}
    assert layout.nbytes == 16384


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({"optimizer": "momentum"}, True),
        ({"optimizer": "adamw", "precision": "fp16", "loss_scale": "dynamic"}, False),
    ],
    ids=["fused", "fp16"],
)
def test_steps_read_nothing_that_is_gone(
    options: dict[str, str], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing is to read any more is no number from then on, in graphs and their replays too."""
    if not is_fused:  # Kernels that are fused round once.
        monkeypatch.setattr(engine, "fused", lambda segment, constants: (segment, frozenset()))
    partition = irpar.partition(classifier(**options), "d=1")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(5)]
        expected = trainer.read_all()
    assert partition.module is not None
    facts, mesh = facts_of(partition.module.metadata), partition.module.mesh
    assert facts is not None
    poison, launched = Poison(monkeypatch), strict_graphs.Graph.launches
    with strict_device(), Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        trainer = Trainer(executor, facts)
        assert [trainer.step(batch(number)) for number in range(5)] == losses
        same(trainer.read_all(), expected)
    assert poison.gone
    assert strict_graphs.Graph.launches > launched


SIZES = {
    **{family: {"hidden": 32, "seq": 16} for family in ("gpt", "llama", "moe")},
    **{family: {} for family in ("t5", "dlrm", "recurrent")},
    "unet": {"image": 8, "width": 8, "levels": 2},
    "resnet": {"image": 16, "width": 8, "blocks": (1, 1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_families_are_trained_as_by_numpy(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = irpar.train_step(models.build(family, **SIZES[family]), loss="mse", optimizer="adamw")
    with irpar.partition(step, "d=1") as partition:
        assert partition.module is not None
        with partition.executor("numpy") as executor, Session(executor) as session:
            specs = [spec for spec in executor.inputs if spec.name not in session.states]
            drawn = (random_inputs(specs, partition.module.graph, seed=seed) for seed in range(4))
            given = [{**inputs, LEARNING_RATE: np.float32(1e-3)} for inputs in drawn]
            expected = [session.run(inputs) for inputs in given]
        Poison(monkeypatch)
        with strict_device(), partition.executor("cupy") as executor, Session(executor) as session:
            for inputs, wanted in zip(given, expected, strict=True):
                found = session.run(inputs)
                for name, array in wanted.items():
                    np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


SCANNED = """
    graph @g(%x: f32[6, 4], %h: f32[4]) -> (%last, %y) opset 21 {
      %n = Neg(%h) : f32[4]
      %end, %all, %back, %twice, %wide = Scan(%n, %x) {
        num_scan_inputs=1, scan_output_directions=[0, 1, 0, 0], scan_output_axes=[0, 0, 0, 1], body=graph @step(%s: f32[4], %i: f32[4]) -> (%t, %t, %u, %u, %u) {
          %t = Add(%s, %i) : f32[4]
          %u = Tanh(%t) : f32[4]
        }
      } : f32[4], f32[6, 4], f32[6, 4], f32[6, 4], f32[4, 6]
      %turned = Transpose(%wide) {perm=[1, 0]} : f32[6, 4]
      %a = Add(%all, %back) : f32[6, 4]
      %b = Mul(%twice, %turned) : f32[6, 4]
      %y = Sub(%a, %b) : f32[6, 4]
      %last = Neg(%end) : f32[4]
    }
"""


def test_rows_of_a_scan_are_written_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked: list[int] = []
    monkeypatch.setattr(
        control_flow,
        "_stack",
        lambda row, axis, *given, stack=control_flow._stack: stacked.append(axis) or stack(row, axis, *given),
    )
    loaded = module(SCANNED)
    poison, launched = Poison(monkeypatch), strict_graphs.Graph.launches
    with (
        strict_device(),
        Executor(loaded, Mesh({"x": 1}), engine="cupy", group=DeviceGroup(Mesh({"x": 1}))) as executor,
    ):
        for seed in range(4):
            random = np.random.default_rng(seed)
            x, h = random.standard_normal((6, 4)).astype(np.float32), random.standard_normal(4).astype(np.float32)
            found = executor.run({"x": x, "h": h})
            sums = np.cumsum(np.concatenate([-h[None], x]), 0, np.float32)[1:]
            np.testing.assert_allclose(found["last"], -sums[-1], rtol=1e-5)
            tanh = np.tanh(sums)
            np.testing.assert_allclose(found["y"], sums + tanh[::-1] - tanh * tanh, rtol=1e-4, atol=1e-6)
    assert poison.gone
    assert strict_graphs.Graph.launches > launched
    # One value has one place: its second stack, and one along another dim, are put together at the end.
    assert set(stacked) == {0, 1}
    assert stacked.count(0) == stacked.count(1)
