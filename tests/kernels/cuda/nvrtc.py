"""NVIDIA's compiler of the running process, where its library is: what compiles programs on a device, which none needs."""

import ctypes
from functools import cache
from typing import Any

import pytest

from irpar.kernels.cuda import Program


@cache
def library() -> Any:
    """The library; None where there is none."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


NEEDS_NVRTC = pytest.mark.skipif(library() is None, reason="needs NVRTC")


def compile_at_run_time(program: Program, arch: int) -> None:
    """Compile a program for an architecture, as CuPy does.

    Raises:
        AssertionError: with what the compiler says.
    """
    nvrtc, made = library(), ctypes.c_void_p()
    options = [option.encode() for option in (*program.options(arch), "-ftz=true")]
    if not program.features:
        options.append(f"-arch=sm_{arch}".encode())
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(made), program.source.encode(), b"program.cu", 0, None, None) == 0
    try:
        code = nvrtc.nvrtcCompileProgram(made, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(made, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(made, log)
        assert code == 0, f"{program.defines}\n{log.value.decode()}"
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(made))
