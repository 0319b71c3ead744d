"""irpar shards an ONNX model over a device mesh into per-device ONNX models with explicit communication, and runs them.

>>> import irpar
>>> module = irpar.load("gpt.onnx")                                      # doctest: +SKIP
>>> module.shard("h.*.mlp.c_fc.weight", [None, "tp"])                    # doctest: +SKIP
>>> partition = irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 4}))  # doctest: +SKIP
>>> partition.verify().check()                                           # doctest: +SKIP
>>> partition.save("out/")                                               # doctest: +SKIP
"""

TYPE_CHECKING = False  # as type checkers know it; the module typing is not imported for it
if TYPE_CHECKING:
    from typing import Any

    from irpar.pass_manager import Pass, PassManager, PassResult

    from .api import Partition, annotate, load, partition
    from .differentiation import gradients
    from .ir import Module
    from .overview import inspect, suggest
    from .sharding import IrparError, Mesh, Sharding
    from .training.step import train_step

    __version__: str

__all__ = [
    "IrparError",
    "Mesh",
    "Module",
    "Partition",
    "Pass",
    "PassManager",
    "PassResult",
    "Sharding",
    "annotate",
    "gradients",
    "inspect",
    "load",
    "partition",
    "suggest",
    "train_step",
]

_HOMES = {
    "IrparError": "sharding",
    "Mesh": "sharding",
    "Sharding": "sharding",
    "Module": "ir",
    "Pass": "pass_manager",
    "PassManager": "pass_manager",
    "PassResult": "pass_manager",
    "Partition": "api",
    "annotate": "api",
    "load": "api",
    "partition": "api",
    "gradients": "differentiation",
    "inspect": "overview",
    "suggest": "overview",
    "train_step": "training.step",
}


def __getattr__(name: str) -> "Any":
    """Import what is asked for, so that `import irpar` alone stays quick."""
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'irpar' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    """What there is to use, imported or not: the modules inside are not offered."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("irpar")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"
