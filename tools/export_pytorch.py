"""Export small PyTorch models with both of PyTorch's ONNX exporters.

    python tools/export_pytorch.py --out tests/fixtures [--only NAME]...

For each model of `pytorch_exports`, for the TorchScript and the dynamo exporter where it can, with fixed and for some
with dynamic dims:

    <model>_<exporter>_<fixed|dynamic>.onnx             the export
    <model>_<exporter>_<fixed|dynamic>.shardings.json   Megatron-style shardings by the names that the exporter gave
    <model>.npz                                         inputs, and the results that PyTorch computes

Needs torch, onnx and onnxscript. Models of the transformers library (hf-*) are skipped where that is missing.
"""

import argparse
import importlib.util
import logging
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_exports.entry import Entry

NEEDED = ("torch", "onnx", "onnxscript")


def entries() -> "tuple[Entry, ...]":
    """Return all models that can be exported here; says which cannot."""
    from pytorch_exports import table

    if importlib.util.find_spec("transformers") is None:
        print("skipped: all hf-* models, because transformers is not installed", file=sys.stderr)
        return table.ENTRIES
    from pytorch_exports import transformers_table

    return (*table.ENTRIES, *transformers_table.ENTRIES)


def main() -> None:
    """Write all exports, or those that --only names."""
    parser = argparse.ArgumentParser(description="Export small PyTorch models to ONNX with both exporters.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument("--only", action="append", metavar="NAME", help="name or glob of models; all if not given")
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
        write(entry, options.out)


if __name__ == "__main__":
    main()
