"""Writing the files of one model: exports, shardings, and PyTorch's numbers."""

import itertools
import json
from pathlib import Path

import numpy as np
import torch

from .entry import Entry, seeded
from .exporters import EXPORTERS, exported
from .shardings import shardings

SIZE_LIMIT = 200_000
"""Bytes of one fixture; they are kept in the repository. Twice that in float64."""


def write(entry: Entry, folder: Path) -> None:
    """Write all files of a model to `folder`; says what was written, and what could not be and why.

    Raises:
        RuntimeError: a file is larger than `SIZE_LIMIT`, or a parameter that is to be cut is not found.
    """
    _write_numbers(entry, folder)
    for exporter, dynamic in itertools.product(EXPORTERS, (False, True) if entry.symbols else (False,)):
        stem = f"{entry.name}_{exporter}_{'dynamic' if dynamic else 'fixed'}"
        if exporter in entry.missing:
            print(f"{stem}: not exported, {entry.missing[exporter]}")
            continue
        model = exported(entry, exporter, dynamic)
        data = model.SerializeToString(deterministic=True)
        limit = SIZE_LIMIT * (2 if entry.dtype == torch.float64 else 1)
        if len(data) > limit:
            raise RuntimeError(f"{stem}.onnx has {len(data)} bytes, more than {limit}: make the model smaller")
        text = json.dumps({"tensors": shardings(entry, seeded(entry.build, entry.dtype), model)}, indent=2)
        (folder / f"{stem}.onnx").write_bytes(data)
        (folder / f"{stem}.shardings.json").write_text(text + "\n")
        print(f"{stem}.onnx: {len(model.graph.node)} nodes, {len(data):,} bytes")


def _write_numbers(entry: Entry, folder: Path) -> None:
    inputs = entry.inputs()
    with torch.no_grad():
        results = seeded(entry.build, entry.dtype)(*inputs.values())
    results = results if isinstance(results, tuple) else (results,)
    tensors = inputs | dict(zip(entry.outputs, results, strict=True))
    np.savez(folder / f"{entry.name}.npz", **{name: value.numpy() for name, value in tensors.items()})
