"""Finding CuPy and a CUDA device, without importing the one or starting the other where that is not needed."""

import ctypes
import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from irpar.process import import_native
from irpar.sharding import IrparError, option

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
INSTALL = "pip install 'irpar[cuda13]' (or 'irpar[cuda12]' for a driver of CUDA 12)"


class NoDeviceError(IrparError):
    """There is no CuPy, or no device that it can use."""


@cache
def has_driver() -> bool:
    """Whether the CUDA driver's library is here."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


@cache
def device_count() -> int:
    """How many devices CuPy finds, if it is installed; cheap where there is no CuPy or no driver."""
    if find_spec("cupy") is None or not has_driver():
        return 0
    try:
        return int(import_native("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # A CuPy that does not fit the driver cannot be used, whatever it raises.
        return 0


def is_bound() -> bool:
    """Whether this process is shown one device of its machine's, as a launcher does that gives each process its own."""
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and device_count() == 1


def free_bytes(device: int) -> int:
    """Memory of a device that is not in use: what nobody has, and what CuPy keeps to give it out again."""
    cupy = import_native("cupy")
    with cupy.cuda.Device(device):
        return int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())


def import_cupy(who: str, instead: str | None = None) -> Any:
    """CuPy, with a device to use.

    Args:
        who: what needs it, as the message begins.
        instead: what does without it; the engine ort where it is None.

    Raises:
        NoDeviceError: CuPy is not installed or cannot be imported, or there is no device.
    """
    instead = instead or option("engine", "ort")
    if find_spec("cupy") is None:
        raise NoDeviceError(f"{who} needs CuPy, which is not installed", do=f"{INSTALL}, or use {instead}")
    try:
        cupy = import_native("cupy")
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise NoDeviceError(
            f"{who} needs CuPy, which cannot be imported: {text[0]}", do=f"{INSTALL}, or use {instead}"
        ) from error
    if not has_driver() or not cupy.cuda.is_available():
        raise NoDeviceError(
            f"{who} needs a CUDA device, and CuPy finds none",
            do="run it on a machine with an NVIDIA GPU and its driver (nvidia-smi lists the devices; "
            f"CUDA_VISIBLE_DEVICES may hide them), or use {instead}",
        )
    return cupy
