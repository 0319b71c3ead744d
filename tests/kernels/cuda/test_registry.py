"""CUDA kernels by operator and version, and what they are given."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from irpar.kernels import Kept, cuda
from irpar.kernels.cuda import registry
from irpar.kernels.cuda.families import OPERATORS
from irpar.kernels.registry import Array, HostArray

GPU: Any = object()
X = np.ones((2, 3), np.float32)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda.supported()  # What is loaded later enters the table that it meets.
    monkeypatch.setattr(registry._TABLE, "entries", {})
    return


def called(kernel: registry.CudaKernel | None, *arguments: Any, **keywords: Any) -> Any:
    assert kernel is not None
    return kernel(GPU, *arguments, **keywords)


@pytest.mark.usefixtures("table")
def test_look_up_is_by_version() -> None:
    @registry.cuda_kernel("Twice", since=3, domain="test")
    def third(gpu: Any, x: Array) -> Array:
        return x * 3

    @registry.cuda_kernel("Twice", since=5, domain="test")
    def fifth(gpu: Any, x: Array) -> Array:
        return x * 5

    assert cuda.supported() == [("test", "Twice")]
    assert cuda.lookup("test", "Twice", 2) is None
    assert not cuda.has_kernel("test", "Twice", 2)
    assert cuda.has_kernel("test", "Twice", 3)
    for version, times in ((3, 3), (4, 3), (5, 5), (9, 5)):
        (y,) = called(cuda.lookup("test", "Twice", version), [X], {}, 1)
        assert y[0, 0] == times
    with pytest.raises(ValueError, match="two kernels for Twice since version 5"):
        registry.cuda_kernel("Twice", since=5, domain="test")(fifth)


@pytest.mark.usefixtures("table")
def test_functions_get_what_they_ask_for_and_may_pass() -> None:
    seen: list[Any] = []

    @registry.cuda_kernel("Take", since=1)
    def take(
        gpu: Any,
        x: Array,
        axes: HostArray | None = None,
        *,
        times: int,
        n_outputs: int,
        outs: Any = None,
        kept: Kept | None = None,
    ) -> tuple[Array, ...] | None:
        seen.append((gpu, axes, n_outputs, outs, kept))
        return (x,) * times if times else None

    kernel, kept = cuda.lookup("ai.onnx", "Take", 1), Kept()
    assert kernel is not None
    assert kernel.signature.host == {1}
    assert called(kernel, [X, None], {"times": 2}, 2, (X, None), kept) == (X, X)
    assert called(kernel, [X], {"times": 1}, 1, X) == (X,)
    assert called(kernel, [X], {"times": 0}, 1) is None
    assert seen == [(GPU, None, 2, (X, None), kept), (GPU, None, 1, (X,), None), (GPU, None, 1, None, None)]
    seen.clear()
    assert called(kernel, [X], {"times": 1, "other": 1}, 1) is None
    assert called(kernel, [X], {}, 1) is None
    assert called(kernel, [None], {"times": 1}, 1) is None
    assert called(kernel, [X, X, X], {"times": 1}, 1) is None
    assert not seen
    assert called(kernel, [X], {"times": 1}, 2) is None


@pytest.mark.usefixtures("table")
def test_operands_of_any_number_are_all_there() -> None:
    @registry.cuda_kernel("Join", since=1)
    def join(gpu: Any, *operands: Array, out: Array | None = None) -> Array:
        return len(operands)

    kernel = cuda.lookup("", "Join", 1)
    assert called(kernel, [X, X], {}, 1) == (2,)
    assert called(kernel, [X, None], {}, 1) is None
    assert called(kernel, [], {}, 1) is None


def test_each_family_has_what_is_said_of_it() -> None:
    for module in pkgutil.iter_modules(cuda.__path__):
        import_module(f"{cuda.__name__}.{module.name}")
    found = {}
    for (domain, op_type), (first, *_) in registry._TABLE.entries.items():
        package, _, family = first.function.__module__.rpartition(".")
        if package == cuda.__name__:
            found[domain, op_type] = family, first.since
    assert found == OPERATORS, "say it in kernels/cuda/families.py"
