"""Weights of 4 bits and fused attention on a GPU: nothing of them runs on the host."""

from pathlib import Path

import numpy as np
import pytest

import irpar
from tests.gpu import NEEDS_GPU
from tests.passes.test_finer_blocks import mlp
from tests.test_microsoft_models import decoder

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_decoder_of_4_bits(is_packed: bool, tmp_path: Path) -> None:
    _check(decoder(tmp_path / "decoder.onnx", is_packed=is_packed))


def test_products_of_4_bits_with_zero_points(tmp_path: Path) -> None:
    _check(mlp(tmp_path / "m.onnx", 192, 64, points="packed"))


def _check(path: Path) -> None:
    partition = irpar.partition(irpar.load(path), {"tp": 1})
    random = np.random.default_rng(0)
    inputs = {spec["name"]: random.standard_normal(spec["shape"]).astype(np.float32) for spec in partition.plan.inputs}
    expected = partition.executor("ort").run(inputs)
    for name, array in partition.executor("cupy", strict=True).run(inputs).items():
        np.testing.assert_allclose(array, expected[name], 1e-3, 1e-3)
