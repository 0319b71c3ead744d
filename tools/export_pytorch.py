"""Export small PyTorch models with both of PyTorch's ONNX exporters.

    python tools/export_pytorch.py --out tests/fixtures [--only NAME]... [--dtype float64]

For each model of `pytorch_exports`, for the TorchScript and the dynamo exporter where it can, with fixed and for some
with dynamic dims:

    <model>_<exporter>_<fixed|dynamic>.onnx             the export
    <model>_<exporter>_<fixed|dynamic>.shardings.json   Megatron-style shardings by the names that the exporter gave
    <model>.npz                                         inputs, and the results that PyTorch computes

With --dtype the models are of that element type, and their files <model>-<dtype>_...

Needs torch, onnx and onnxscript. Models of the transformers library (hf-*) are skipped where that is missing.
"""

import argparse
import dataclasses
import importlib.util
import logging
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_exports.entry import Entry
    from torch import Tensor

NEEDED = ("torch", "onnx", "onnxscript")
DTYPES = ("float16", "bfloat16", "float32", "float64")


def entries() -> "tuple[Entry, ...]":
    """Return all models that can be exported here; says which cannot."""
    from pytorch_exports import table

    if importlib.util.find_spec("transformers") is None:
        print("skipped: all hf-* models, because transformers is not installed", file=sys.stderr)
        return table.ENTRIES
    from pytorch_exports import transformers_table

    return (*table.ENTRIES, *transformers_table.ENTRIES)


def of_dtype(entry: "Entry", name: str) -> "Entry":
    """Return a model of another element type, floating-point inputs included."""
    import torch

    dtype = getattr(torch, name)

    def inputs() -> "dict[str, Tensor]":
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in entry.inputs().items()}

    return dataclasses.replace(entry, name=f"{entry.name}-{name}", dtype=dtype, inputs=inputs)


def write_as(dtype: str, entry: "Entry", folder: Path) -> None:
    """Write the files of a model of another element type; says which cannot be: ONNX lacks some operators of it."""
    import onnx
    import torch
    from pytorch_exports.writing import write

    if entry.dtype != torch.float32:
        return  # The same model is in the table in float32.
    try:
        write(of_dtype(entry, dtype), folder)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        print(f"{entry.name}-{dtype}: not exported, {error}")


def main() -> None:
    """Write all exports, or those that --only names."""
    parser = argparse.ArgumentParser(description="Export small PyTorch models to ONNX with both exporters.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument("--only", action="append", metavar="NAME", help="name or glob of models; all if not given")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations; default: that of the table")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: {', '.join(missing)} not installed\n  do: pip install torch onnx onnxscript transformers")
    from pytorch_exports.writing import write

    # torch, its exporters and transformers warn about themselves.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [entry for entry in entries() if any(fnmatchcase(entry.name, one) for one in options.only or ("*",))]
    if not chosen:
        sys.exit(f"error: no model is named {' or '.join(options.only)}")
    for entry in chosen:
        if options.dtype:
            write_as(options.dtype, entry, options.out)
        else:
            write(entry, options.out)


if __name__ == "__main__":
    main()
