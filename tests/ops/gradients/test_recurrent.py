"""Gradients of RNN, GRU and LSTM: what is not drawn in the samples of their rules."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ops.draws import floats
from tests.ops.gradients.proof import check_sample, decomposed, feeds_of, module_of, run
from tests.ops.rule_proof import Sample

BATCH, STEPS, INPUTS, HIDDEN = 2, 4, 3, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layer(op: str, *, lengths: bool = False, states: bool = False, peepholes: bool = False, **given: Any) -> Sample:
    """A layer with a bias; with lengths of its sequences, first states and peepholes where asked for."""
    directions = 2 if given.get("direction") == "bidirectional" else 1
    first = (BATCH, directions, HIDDEN) if given.get("layout") else (directions, BATCH, HIDDEN)
    wide = GATES[op] * HIDDEN
    operands = [
        floats(*((BATCH, STEPS, INPUTS) if given.get("layout") else (STEPS, BATCH, INPUTS))),
        floats(directions, wide, INPUTS, low=-1, high=1),
        floats(directions, wide, HIDDEN, low=-1, high=1),
        floats(directions, 2 * wide, low=-1, high=1),
        np.asarray([STEPS, 2], np.int32) if lengths else None,
        floats(*first) if states else None,
        *([floats(*first) if states else None, floats(directions, 3 * HIDDEN) if peepholes else None] * (op == "LSTM")),
    ]
    return Sample(op, tuple(operands), {"hidden_size": HIDDEN, **given}, version=22, results=3 if op == "LSTM" else 2)


def _layers() -> Iterator[Sample]:
    for op in GATES:
        for direction in ("forward", "reverse", "bidirectional"):
            yield layer(op, direction=direction, lengths=True, states=True)
        yield layer(op, layout=1, direction="bidirectional", lengths=True, states=True)
        yield layer(op, clip=0.5)
    for late in (0, 1):
        yield layer("GRU", linear_before_reset=late, direction="reverse")
    yield layer("LSTM", peepholes=True, direction="bidirectional", states=True)
    yield layer("LSTM", peepholes=True, input_forget=1, lengths=True)
    given: dict[str, Any] = {"activation_alpha": [0.3, 0.4, 0.5], "activation_beta": [0.45, 0.7]}
    yield layer("LSTM", activations=["HardSigmoid", "ScaledTanh", "LeakyRelu"], **given)
    yield layer("GRU", activations=["Sigmoid", "Softsign"])
    yield layer("RNN", activations=["Affine", "Elu"], direction="bidirectional", activation_alpha=[0.3, 0.6])


@pytest.mark.parametrize("sample", list(_layers()), ids=str)
def test_layer(sample: Sample) -> None:
    module = module_of(sample)
    found = decomposed(module)
    assert found is not None
    feeds = feeds_of(sample)
    for made, expected in zip(run(found, feeds).values(), run(module, feeds).values(), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-12, atol=1e-12)
    check_sample(sample)


def test_lengths_and_batch_of_symbols() -> None:
    symbols = {(0, 0): "steps", (0, 1): "batch", (4, 0): "batch", (5, 1): "batch", (6, 1): "batch"}
    check_sample(layer("LSTM", direction="bidirectional", lengths=True, states=True), symbols=symbols)
