"""The model that a plan is of: its files, and whether they are as they were."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from irpar.analysis.cost.device import graph_seconds
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import graph_flops
from irpar.analysis.memory.liveness import peak, value_bytes
from irpar.files.regular_file import open_file
from irpar.ir import ExternalTensor, Module

from .plan_reading import PlanError
from .plan_record import Plan as Plan


def source_of(module: Module) -> dict[str, Any]:
    """What plan.json says of the model file: name, sha256 of the .onnx file, external files with size and mtime."""
    external = []
    for path, name in files_of(module).items():
        known = path.stat() if path.exists() else None
        external.append(
            {"file": name, "size": known.st_size if known else None, "mtime": known.st_mtime if known else None}
        )
    if module.source is None:
        return {"model": None, "sha256": None, "external": external}
    return {"model": str(module.source.absolute()), "sha256": sha256_of(module.source), "external": external}


def files_of(module: Module) -> dict[Path, str]:
    """The files of external data in which numbers of a module lie, and how the model calls them."""
    files: dict[Path, str] = {}
    for graph in module.all_graphs():
        constants = [value.data for value in graph.constants]
        for data in (*constants, *(state.data for state in graph.states.values())):
            for tensor in data.bases if data is not None else ():
                if isinstance(tensor, ExternalTensor):
                    files.setdefault(tensor.path, tensor.name)
    return files


def check_unchanged(source: Mapping[str, Any], files: Mapping[Path, str]) -> None:
    """Refuse to read at run time from external data that was written after its model was partitioned.

    Args:
        source: from `source_of`, of the model.
        files: from `files_of`, of the programs.

    Raises:
        PlanError: a file has another size, or another time, than it had.
    """
    known = {entry["file"]: entry for entry in source["external"]}
    for path, name in files.items():
        entry, found = known.get(name), path.stat() if path.exists() else None
        if entry is None or found is None or entry["mtime"] is None:
            continue
        if (found.st_size, found.st_mtime) != (entry["size"], entry["mtime"]):
            raise _written_to(path)


class ReadFiles:
    """The files that a run reads weights from, as they were when it first opened them.

    Args:
        files: from `files_of`.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._known = {path: path.stat() for path in files if path.exists()}

    def check(self) -> None:
        """Refuse another run once one was written to; where another file has its name, the run still has the first.

        Raises:
            PlanError: naming it.
        """
        for path, known in self._known.items():
            try:
                now = path.stat()
            except OSError:
                continue
            is_same = (now.st_dev, now.st_ino) == (known.st_dev, known.st_ino)
            if is_same and (now.st_size, now.st_mtime_ns) != (known.st_size, known.st_mtime_ns):
                raise _written_to(path)


def _written_to(path: Path) -> PlanError:
    return PlanError(
        "the file was written to after its model was partitioned: its weights may be others now",
        where=str(path),
        do="load and partition the model again",
    )


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as plan.json has it.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def original_of(module: Module) -> dict[str, Any]:
    """Memory and FLOPs of the whole model on one device (after the normalising passes); seconds by its network."""
    whole = peak(module.graph)
    states = module.graph.states
    device = network_of(module.network).device
    return {
        "peak_bytes": whole.total_bytes,
        "weight_bytes": whole.constant_bytes,
        "flops": graph_flops(module.graph),
        **({"state_bytes": sum(map(value_bytes, states))} if states else {}),
        **({} if device is None else {"step_seconds": graph_seconds(module.graph, device)}),
    }
