"""Tests that need a CUDA device: `pytest -m gpu`."""

from typing import Any

import pytest

from irpar.runtime.engines.cuda import device_count

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_count(), reason="needs CuPy and a CUDA device"),
    # What CuPy and its libraries warn of is theirs.
    pytest.mark.filterwarnings("default"),
]
"""Marks of a module: `pytestmark = NEEDS_GPU`."""


def cupy() -> Any:
    """CuPy; for the bodies of such tests."""
    return pytest.importorskip("cupy")
