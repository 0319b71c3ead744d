"""The engine `cupy` on a stand-in for CuPy."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from irpar.runtime import warm
from irpar.runtime.engines import cupy as cupy_engine
from tests.strict_device import STRICT


@contextmanager
def strict_device(host_elements: int | None = None, free: int = 2**40) -> Iterator[None]:
    """In here the engine `cupy` runs on the stand-in; `host_elements` is how much it may compute on the host, `free` its memory."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cupy_engine, warm):
            patch.setattr(module, "import_cupy", lambda who, instead=None: STRICT)
        patch.setattr(cupy_engine, "free_bytes", lambda device: free)
        if host_elements is not None:
            patch.setattr(cupy_engine, "HOST_ELEMENTS", host_elements)
        yield
