"""Export small PyTorch models with both of PyTorch's ONNX exporters.

    python tools/export_pytorch.py --out tests/fixtures

For each of gpt and llama, for the TorchScript and the dynamo exporter, with fixed and with dynamic batch and seq dims:

    <model>_<exporter>_<fixed|dynamic>.onnx             the export
    <model>_<exporter>_<fixed|dynamic>.shardings.json   Megatron-style shardings by the names that the exporter gave
    <model>.npz                                         input_ids and the logits that PyTorch computes

Needs torch, onnx and onnxscript.
"""

import argparse
import itertools
import json
import tempfile
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from pytorch_models import Gpt, Llama, Size
from torch import Tensor, nn

BATCH, SEQ = 4, 32
SIZE_LIMIT = 200_000  # bytes of one fixture; they are kept in the repository

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Gpt(Size(ffn=128)),
    "llama": lambda: Llama(Size(heads=8, kv_heads=4)),
}

# Which dim of a parameter, as PyTorch stores it (Linear: [out, in]), is cut by the tensor-parallel axis.
COLUMNS, ROWS = 0, 1
CUTS: dict[str, dict[str, int]] = {
    "gpt": {
        "h.*.attn.[qkv].weight": COLUMNS,
        "h.*.attn.[qkv].bias": COLUMNS,
        "h.*.attn.proj.weight": ROWS,
        "h.*.fc1.weight": COLUMNS,
        "h.*.fc1.bias": COLUMNS,
        "h.*.fc2.weight": ROWS,
        "lm_head.weight": COLUMNS,
    },
    "llama": {
        "layers.*.self_attn.[qkv]_proj.weight": COLUMNS,
        "layers.*.self_attn.o_proj.weight": ROWS,
        "layers.*.mlp.gate_proj.weight": COLUMNS,
        "layers.*.mlp.up_proj.weight": COLUMNS,
        "layers.*.mlp.down_proj.weight": ROWS,
        "lm_head.weight": COLUMNS,
    },
}


def seeded_model(name: str) -> nn.Module:
    """Build a model whose parameters are all random (gains and biases too), so that no two are equal."""
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            is_gain = parameter.dim() == 1 and parameter_name.endswith("weight")
            scale = (
                0.2
                if parameter.dim() == 1
                else 1.0
                if parameter_name.endswith(("wte.weight", "tokens.weight"))
                else 0.18
            )
            parameter.normal_(mean=1.0 if is_gain else 0.0, std=scale)
    return module


def export_torchscript(module: nn.Module, ids: Tensor, dynamic: bool, path: Path) -> None:
    """Export with the TorchScript-based exporter, opset 17."""
    axes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "logits")} if dynamic else None
    torch.onnx.export(
        module,
        (ids,),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        opset_version=17,
        dynamic_axes=axes,
        dynamo=False,
    )


def export_dynamo(module: nn.Module, ids: Tensor, dynamic: bool, path: Path) -> None:
    """Export with the exporter that is based on torch.export, opset 20."""
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=Size.longest)} if dynamic else None
    torch.onnx.export(
        module,
        (ids,),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        opset_version=20,
        dynamic_shapes={"input_ids": dims} if dims else None,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


EXPORTERS: dict[str, Callable[[nn.Module, Tensor, bool, Path], None]] = {
    "torchscript": export_torchscript,
    "dynamo": export_dynamo,
}


def without_traces(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove stack traces and printed graphs: they hold paths of the exporting machine. Scopes are kept."""
    holders = [model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output]
    for holder in holders:
        holder.ClearField("doc_string")
        kept = [entry for entry in holder.metadata_props if "trace" not in entry.key and "fx_node" not in entry.key]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)
    return model


def shardings(name: str, module: nn.Module, model: onnx.ModelProto) -> dict[str, list[list[str] | None]]:
    """Return the shardings of an export's initializers, found by comparing their values with the parameters'.

    Exporters rename some weights and store some transposed; the values tell which is which.

    Raises:
        RuntimeError: a parameter that is to be cut is in no initializer, or an initializer equals both a matrix and
            its transpose.
    """
    tensors: dict[str, list[list[str] | None]] = {"input_ids": [["dp"], None]}
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for parameter_name, parameter in module.named_parameters():
        for pattern, cut in CUTS[name].items():
            if fnmatchcase(parameter_name, pattern):
                found = _sharded_copies(parameter.detach().numpy(), cut, initializers)
                if not found:
                    raise RuntimeError(f"no initializer holds the parameter {parameter_name}")
                tensors |= found
    return tensors


def _sharded_copies(
    parameter: np.ndarray, cut: int, initializers: dict[str, np.ndarray]
) -> dict[str, list[list[str] | None]]:
    """Return the shardings of all initializers that equal the parameter, as it is or transposed."""
    found: dict[str, list[list[str] | None]] = {}
    for name, values in initializers.items():
        same = np.array_equal(values, parameter)
        transposed = parameter.ndim == 2 and np.array_equal(values, parameter.T)
        if same and transposed:
            raise RuntimeError(f"{name} equals its own transpose")
        if same or transposed:
            axis = 1 - cut if transposed else cut
            found[name] = [["tp"] if i == axis else None for i in range(values.ndim)]
    return found


def export(name: str, exporter: str, dynamic: bool, folder: Path) -> None:
    """Write one export and its shardings to `folder`."""
    stem = f"{name}_{exporter}_{'dynamic' if dynamic else 'fixed'}"
    module = seeded_model(name)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        path = Path(scratch, "model.onnx")
        EXPORTERS[exporter](module, example_ids(), dynamic, path)
        model = without_traces(onnx.load(path))
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString(deterministic=True)
    if len(data) > SIZE_LIMIT:
        raise RuntimeError(f"{stem}.onnx has {len(data)} bytes, more than {SIZE_LIMIT}: make the model smaller")
    (folder / f"{stem}.onnx").write_bytes(data)
    text = json.dumps({"tensors": shardings(name, module, model)}, indent=2)
    (folder / f"{stem}.shardings.json").write_text(text + "\n")
    print(f"{stem}.onnx: {len(model.graph.node)} nodes, {len(data):,} bytes")


def example_ids() -> Tensor:
    """Return the input that a model is exported and computed with, int64 [BATCH, SEQ]."""
    return torch.randint(0, Size.vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Write all exports."""
    parser = argparse.ArgumentParser(description="Export small PyTorch models to ONNX with both exporters.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        ids = example_ids()
        with torch.no_grad():
            logits = seeded_model(name)(ids)
        np.savez(folder / f"{name}.npz", input_ids=ids.numpy(), logits=logits.numpy())
        for exporter, dynamic in itertools.product(EXPORTERS, (False, True)):
            export(name, exporter, dynamic, folder)


if __name__ == "__main__":
    main()
