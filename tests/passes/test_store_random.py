"""store at random: with meshes, ZeRO, recompute, micro-batches and fused collectives, the same numbers, as planned."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak_bytes
from irpar.ir import clone_module
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.recompute import Recompute
from irpar.passes.store import Store, StoreError
from irpar.passes.zero import Zero
from tests.budget import budget
from tests.training.programs import MESHES, batch, classifier, same

WHERE = st.sampled_from(("device", "host", "disk"))


@dataclass(frozen=True)
class Options:
    """What a step is made with, beside `store`."""

    mesh: str
    optimizer: str
    zero: int
    again: bool
    trips: int
    bucket: float

    def partition(self, *stores: Store) -> irpar.Partition:
        more = {"micro_batches": self.trips} if self.trips > 1 else {}
        module = clone_module(classifier(optimizer=self.optimizer, **more))
        known = {value.source_name for value in module.graph.inputs}
        for name, cut in MESHES[self.mesh].items():
            if name in known:
                is_sample = self.trips > 1 and name in ("x", "target")
                module.shard(name, [None, *cut] if is_sample else cut)
        axis = self.mesh.partition("=")[0]
        zero = Zero(self.zero, axes=(axis,), threshold_kb=0) if self.zero else None
        again = [Recompute(match=("a",))] if self.again else []
        pipeline = composed(zero, [*again, *stores])
        pipeline = pipeline.replace("fuse-communication", f"fuse-communication{{size-mb={self.bucket}}}", 1)
        return irpar.partition(module, self.mesh, pipeline=pipeline)

    def batch(self, number: int) -> dict[str, Any]:
        found = batch(number)
        if self.trips > 1:
            found = {name: np.stack([array] * self.trips) for name, array in found.items()}
        return {**found, "learning_rate": np.float32(0.1)}

    def steps(self, made: irpar.Partition) -> tuple[list[Any], dict[str, Any]]:
        """The losses of some steps and the state after them; copies are those of the plan, in each step."""
        executor = made.executor(engine="numpy")
        with made.session(engine="numpy") as session:
            losses = []
            for number in range(2):
                losses.append(session.run(self.batch(number))["loss"])
                log = executor.log
                assert log.differences(made.plan.collectives) == []
                assert log.copies.differences(made.plan.copies) == []
            state = session.read_all()
        executor.close()
        return losses, state


OPTIONS = st.builds(
    Options,
    mesh=st.sampled_from(tuple(MESHES)),
    optimizer=st.sampled_from(("momentum", "adam", "lamb")),
    zero=st.sampled_from((0, 1, 2, 3)),
    again=st.booleans(),
    trips=st.sampled_from((1, 3)),
    bucket=st.sampled_from((1e-4, 25.0)),
)
BY_HAND = st.builds(
    Store,
    weights=WHERE,
    state=WHERE,
    activations=WHERE,
    prefetch=st.integers(0, 3),
    pin_gb=st.sampled_from((0.0, 1e-7)),
    threshold_kb=st.sampled_from((0.0, 0.05)),
).filter(lambda store: {store.weights, store.state, store.activations} != {"device"})
TRIES = 3
CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large)


def _check(options: Options, store: Store) -> None:
    plain, made = options.partition(), options.partition(store)
    found, expected = options.steps(made), options.steps(plain)
    assert found[0] == expected[0]
    same(found[1], expected[1])


@given(OPTIONS, BY_HAND)
@settings(max_examples=budget(64, least=2), deadline=None, suppress_health_check=CHECKS)
def test_by_hand(options: Options, store: Store) -> None:
    _check(options, store)


@pytest.mark.slow
@given(OPTIONS, st.sampled_from((0.4, 0.6, 0.8)), st.sampled_from((0.0, 3e-7)))
@settings(max_examples=budget(64), deadline=None, suppress_health_check=CHECKS, report_multiple_bugs=False)
def test_within_a_limit(options: Options, share: float, host_gb: float) -> None:
    """A limit is kept, or a greater one that is named can be."""
    limit = share * peak_bytes(options.partition().module) / 1e9
    store = Store(auto=True, limit_gb=limit, host_gb=host_gb, seconds=0, threshold_kb=0)
    _check(options, _that_can_be(options, store))


def _that_can_be(options: Options, store: Store) -> Store:
    """That, or what its refusals say to ask for instead: a limit, or more of the host."""
    for _ in range(TRIES):
        advice = _advice(options, store)
        if advice is None:
            return store
        found = re.search(r"(limit|host)-gb=([\d.]+)", advice)
        assert found is not None, advice
        name, advised = f"{found[1]}_gb", float(found[2])
        assert advised > getattr(store, name)
        store = replace(store, **{name: advised})
    raise AssertionError(f"{options}: {store}")


def _advice(options: Options, store: Store) -> str | None:
    try:
        options.partition(store)
    except StoreError as error:
        return str(error.do)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d=1", "tp=2"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_all_families(family: str, mesh: str) -> None:
    for number, memory in enumerate(("host", "disk")):
        store = Store(weights=memory, activations=memory, prefetch=number + 1, threshold_kb=0)  # type: ignore[arg-type]
        made = irpar.partition(models.build(family), mesh, pipeline=composed(None, [store]))
        made.verify(engine="numpy").check()
        log = made.executor("numpy").log.copies
        assert log.differences(made.plan.copies) == []
        assert log.copied_bytes == made.plan.totals["copied_bytes"] > 0
