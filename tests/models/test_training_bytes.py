"""What a step of a transformer sends: Megatron's all-reduces, two floats a token, and each gradient once over dp."""

import pytest

import irpar
from irpar.models import build
from tests.budget import every, pairs
from tests.models.test_partitioned_gradients import annotated

LAYERS, BATCH, SEQ, HIDDEN = 3, 4, 32, 64


@pytest.mark.parametrize(("family", "optimizer"), every(2, pairs(["gpt", "llama"], ["sgd", "adamw"])))
def test_a_step_of_a_transformer(family: str, optimizer: str) -> None:
    model = build(family, preset="tiny", layers=LAYERS)
    step = irpar.train_step(model, loss="cross_entropy", optimizer=optimizer)
    mesh = {"dp": 2, "tp": 2}
    plan = irpar.partition(annotated(step, family, mesh), mesh).plan
    tokens = BATCH * SEQ // 2
    over_tp = [entry for entry in plan.collectives if entry["axes"] == ["tp"]]
    large = [entry for entry in over_tp if entry["sent_bytes"] >= tokens * HIDDEN * 4]
    # Two in each direction of a layer, one for the gradient of the head's operand, and one where the embedding is cut.
    assert len(large) <= 4 * LAYERS + 2
    assert all(entry["sent_bytes"] == tokens * HIDDEN * 4 for entry in large)
    small = sum(entry["sent_bytes"] for entry in over_tp if entry not in large)
    assert small <= 2 * tokens * 4 + 64
    parameters = sum(
        _local_bytes(entry, mesh) for entry in plan.state if entry["kind"] == "parameter" and entry["output"]
    )
    over_dp = sum(entry["sent_bytes"] for entry in plan.collectives if "dp" in entry["axes"])
    assert over_dp <= parameters + 64  # 2 (n - 1) / n of the rank's own parameters, with n = 2.


def _local_bytes(entry: dict[str, object], mesh: dict[str, int]) -> int:
    count = 4
    for size, axes in zip(entry["shape"], entry["sharding"], strict=True):  # type: ignore[call-overload]
        parts = 1
        for axis in axes or ():
            parts *= mesh[axis]
        count *= -(-size // parts)
    return count
