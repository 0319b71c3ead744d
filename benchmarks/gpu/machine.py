"""What the check runs on: versions of everything, and whether there is a device at all."""

import hashlib
import importlib
import importlib.metadata
import os
import platform
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_INSTALL = 'pip install "irpar[cuda13]" (or "irpar[cuda12]", for a driver of CUDA 12)'


class MissingError(Exception):
    """There is nothing to check on; the text says what is missing and what to do."""


def check_device() -> None:
    """Refuse a machine without CuPy or without a device.

    Raises:
        MissingError: saying which.
    """
    if find_spec("cupy") is None:
        raise MissingError(f"CuPy is not installed\n  do: {_INSTALL}, on a machine with an NVIDIA GPU")
    try:
        cupy = importlib.import_module("cupy")
        has_device = cupy.cuda.is_available()
    except Exception as error:
        raise MissingError(f"CuPy cannot be used: {str(error).splitlines()[:1]}\n  do: {_INSTALL}") from error
    if not has_device:
        raise MissingError(
            "CuPy finds no CUDA device\n  do: run it where there is an NVIDIA GPU with its driver; nvidia-smi lists "
            "the devices, CUDA_VISIBLE_DEVICES may hide them"
        )


def facts(engine: str) -> dict[str, Any]:
    """Versions by name; None where something is not there."""
    import irpar

    made: dict[str, Any] = {
        "irpar": irpar.__version__ if hasattr(irpar, "__version__") else _version("irpar"),
        "commit": _commit(),
        "sources": _digest(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: _version(name) for name in ("numpy", "ml_dtypes", "onnx", "onnxruntime", "torch")},
    }
    return made | (_device_facts() if engine == "cupy" else {"device": f"none: the engine is {engine}"})


def _device_facts() -> dict[str, Any]:
    cupy = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory_bytes": int(properties["totalGlobalMem"]),
        "devices": runtime.getDeviceCount(),
        "driver": _driver(),
        "cuda_driver": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        "cublas": _or_none(lambda: str(cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()))),
        "nccl": _nccl(),
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _nccl() -> str:
    """The version of NCCL, or why there is none."""
    try:
        version = importlib.import_module("cupy.cuda.nccl").get_version()
    except Exception as error:
        return f"none: {error}"
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _driver() -> str | None:
    done = _or_none(
        lambda: subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    )
    return done.stdout.split("\n")[0].strip() if done is not None else None


def clocks() -> dict[str, str]:
    """Clocks, power and temperature of the device as they are; nothing where nvidia-smi does not tell."""
    names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    done = _or_none(
        lambda: subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    )
    return {} if done is None else dict(zip(names, done.stdout.splitlines()[0].split(", "), strict=False))


def _commit() -> str | None:
    """The commit of the clone, and whether files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    return _or_none(lambda: git("rev-parse", "HEAD") + (", changed" if git("status", "--porcelain", "-uno") else ""))


def _digest() -> str:
    """Names irpar's sources where there is no commit: the first digits of a sha256 of all their names and contents."""
    digest = hashlib.sha256()
    for top in ("irpar", "kernels", "models", "passes"):
        # os.walk does not follow links, which a clone may hold instead of an installation.
        listed = (Path(folder, name) for folder, _, names in os.walk(ROOT / top) for name in names)
        for path in sorted(path for path in listed if path.suffix in (".py", ".cu", ".cuh")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return f"sha256 {digest.hexdigest()[:16]}"


def _version(name: str) -> str | None:
    return _or_none(lambda: importlib.metadata.version(name))


def _or_none(read: Any) -> Any:
    """What a function gives; None where it fails: a fact that cannot be had stops nothing."""
    try:
        return read()
    except Exception:
        return None
