"""The source of the depthwise convolution, compiled for the host where there is a compiler."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from irpar.kernels import depthwise, lookup
from irpar.kernels.windows import Windows

COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder: Path = tmp_path_factory.mktemp("depthwise")
    numbers = ", ".join(f"long long {name}" for name in ("features", "multiplier", *depthwise.GEOMETRY))
    (folder / "loop.cc").write_text(
        f"typedef double T;\n"
        f'extern "C" void run(long long count, const T* x, const T* weight, {numbers}, T* out) {{\n'
        f"for (long long i = 0; i < count; ++i) {{ T& y = out[i]; {depthwise.SOURCE} }} }}\n"
    )
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", "loop.so", "loop.cc"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "loop.so"))


def test_source_is_the_convolution(compiled: ctypes.CDLL) -> None:
    draw, numbers = random.Random(1), np.random.default_rng(1)
    conv = lookup("", "Conv", 22)
    assert conv is not None
    for _ in range(100):
        rank = draw.randrange(1, 4)
        spatial, kernel, strides, dilations = (
            tuple(draw.randrange(*bounds) for _ in range(rank)) for bounds in ((5, 8), (1, 4), (1, 3), (1, 3))
        )
        pads = tuple(draw.randrange(0, 3) for _ in range(2 * rank))
        batch, channels, multiplier = draw.randrange(1, 3), draw.randrange(2, 4), draw.randrange(1, 3)
        x = numbers.standard_normal((batch, channels, *spatial))
        weight = numbers.standard_normal((channels * multiplier, 1, *kernel))
        attributes = {"group": channels, "strides": strides, "dilations": dilations, "pads": pads}
        (expected,) = conv(np, [x, weight], attributes, 1)
        windows = Windows.over(spatial, kernel, strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")
        assert depthwise.is_depthwise(x, weight, channels)
        result = np.full(expected.shape, np.nan)
        geometry = (len(weight), multiplier, *depthwise.geometry(spatial, windows))
        operands = (x.ctypes.data_as(ctypes.c_void_p), weight.ctypes.data_as(ctypes.c_void_p))
        out = result.ctypes.data_as(ctypes.c_void_p)
        compiled.run(ctypes.c_longlong(result.size), *operands, *map(ctypes.c_longlong, geometry), out)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
