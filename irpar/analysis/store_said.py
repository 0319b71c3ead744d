"""Where weights, state and activations are to lie, as a module says it.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; the default pipeline
gets a pass `store` for it.
"""

from dataclasses import dataclass

from irpar.ir import Module

from .said import read_said, write_said

SAID = "irpar.store_said"
"""The entry of a module's metadata."""

PATH = "irpar.offload_path"
"""The entry that says in which folder a run makes files for what it writes."""


@dataclass(frozen=True)
class StoreSaid:
    """What is said: options of the pass.

    Attributes:
        weights, state, activations: where they lie: device, host, disk or auto.
        host_gb, disk_gb: GB that may lie there, of a rank; 0: any number.
        limit_gb: GB that a rank may hold on its device; 0: what the device has, or the module says.
        path: the folder where a run makes files for what it writes; empty: where the system has temporary ones.
    """

    weights: str = "device"
    state: str = "device"
    activations: str = "device"
    host_gb: float = 0
    disk_gb: float = 0
    limit_gb: float = 0
    path: str = ""


def store_said(module: Module) -> StoreSaid | None:
    """What a module says; None: nothing.

    Raises:
        IrparError: its metadata cannot be read.
    """
    do = "take it out, and say anew what lies where (irpar.annotations.mindspore)"
    return read_said(module, SAID, StoreSaid, do)


def say_store(module: Module, said: StoreSaid | None) -> None:
    """Say it, or take back what was said."""
    if said is None:
        module.metadata.pop(SAID, None)
    else:
        write_said(module, SAID, said)
