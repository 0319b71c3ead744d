"""Write a model: `python -m irpar.models gpt --layers 2 -o gpt.onnx`."""

import argparse
import json
import sys
from pathlib import Path

from irpar.files.atomic import new_file
from irpar.sharding import IrparError

from .annotations import annotations
from .config import DTYPES, OPSETS, ConfigError
from .control import KINDS
from .moe import ROUTINGS
from .recurrent import CELLS
from .registry import FAMILIES, ModelSize, WeightMode, save
from .weights import data_path

# Option -> (configuration field, help text). Only options that were given become overrides, and a family without the
# field refuses it by name.
SIZES = {
    "--layers": ("layers", "blocks, or linear layers of an mlp"),
    "--width": ("width", "input features of an mlp"),
    "--hidden": ("hidden", "width of the hidden layers or of the residual stream"),
    "--heads": ("heads", "query heads"),
    "--kv-heads": ("kv_heads", "key and value heads (llama)"),
    "--ffn": ("ffn", "width inside the feed-forward part, or inside an expert"),
    "--vocab": ("vocab", "size of the vocabulary"),
    "--seq": ("seq", "tokens per row; the longest row with --dynamic"),
    "--target": ("target", "tokens per row of the decoder (t5)"),
    "--experts": ("experts", "experts of a block (moe)"),
    "--capacity": ("capacity", "tokens of a row that an expert takes (moe)"),
    "--image": ("image", "height and width of an image"),
    "--patch": ("patch", "height and width of a patch (vit)"),
    "--classes": ("classes", "classes of a classifier"),
    "--tables": ("tables", "embedding tables (dlrm)"),
    "--rows": ("rows", "rows of an embedding table (dlrm)"),
    "--levels": ("levels", "resolutions (unet)"),
    "--steps": ("steps", "trips of the loop, or steps of the scan (control)"),
    "--batch": ("batch", "rows of the input"),
    "--opset": ("opset", f"ONNX opset, {OPSETS[0]} to {OPSETS[-1]}"),
    "--ir-version": ("ir_version", "ONNX IR version; default: the lowest that the opset allows"),
    "--seed": ("seed", "seed of the random weights"),
}
CHOICES = {
    "--routing": ("routing", ROUTINGS, "how tokens reach experts (moe)"),
    "--cell": ("cell", tuple(CELLS), "kind of recurrent layer (recurrent)"),
    "--kind": ("kind", KINDS, "operator with bodies (control)"),
}
SWITCHES = {
    "--dynamic": ("dynamic", "symbolic batch and seq dims"),
    "--fused-qkv": ("fused_qkv", "one weight for q, k and v (gpt)"),
    "--tied": ("tied", "logits from the transposed token embedding (gpt)"),
    "--gemm": ("gemm", "Gemm instead of MatMul and Add (mlp)"),
    "--fused": ("fused", "Attention and RotaryEmbedding as single operators; opset 23 on (llama)"),
    "--bottleneck": ("bottleneck", "blocks of three convolutions (resnet)"),
    "--bidirectional": ("bidirectional", "read every row from both ends (recurrent)"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0, or 2 after a mistake in the arguments."""
    options = vars(_parser().parse_args(arguments))
    family, preset, output = options.pop("family"), options.pop("preset"), options.pop("output")
    mode = _weight_mode(options)
    shardings, dp_axis, tp_axis = (options.pop(key) for key in ("shardings", "dp_axis", "tp_axis"))
    overrides = {field: value for field, value in options.items() if value is not None}
    target = Path(output or f"{family}.onnx")
    try:
        tensors = annotations(family, dp_axis or None, tp_axis or None, preset=preset, **overrides)
        size = save(target, family, preset, weights=mode, **overrides)
        if shardings:
            with new_file(shardings, "the shardings") as fresh:
                fresh.write_text(json.dumps({"tensors": tensors}, indent=2) + "\n", encoding="utf-8")
    except (ConfigError, IrparError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(_summary(target, mode, size))
    return 0


def _parser() -> argparse.ArgumentParser:
    presets = "; ".join(f"{name}: {', '.join(family.presets)}" for name, family in FAMILIES.items())
    parser = argparse.ArgumentParser(prog="python -m irpar.models", description="Write an ONNX model.", epilog=presets)
    parser.add_argument("family", choices=FAMILIES, help="kind of model")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write; default: FAMILY.onnx")
    parser.add_argument("--preset", default="tiny", help="sizes to start from (see below); default: tiny")
    for option, (field, text) in SIZES.items():
        parser.add_argument(option, dest=field, type=int, metavar="N", help=text)
    parser.add_argument("--dtype", choices=DTYPES, help="element type of weights and activations")
    for option, (field, choices, text) in CHOICES.items():
        parser.add_argument(option, dest=field, choices=choices, help=text)
    for option, (field, text) in SWITCHES.items():
        parser.add_argument(option, dest=field, action="store_true", default=None, help=text)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--external", action="store_true", help="weights in FILE.data beside the model")
    weights.add_argument(
        "--weights",
        choices=("inline", "external", "none"),
        help="none: a sparse FILE.data of zeros that takes no disk, for huge shapes; default: inline",
    )
    parser.add_argument("--shardings", metavar="FILE", help="also write a Megatron-style --shardings file for irpar")
    parser.add_argument("--dp-axis", default="dp", help='axis that shards the batch, "" for none; default: dp')
    parser.add_argument("--tp-axis", default="tp", help='axis that shards the weights, "" for none; default: tp')
    return parser


def _weight_mode(options: dict[str, object]) -> WeightMode:
    external, weights = options.pop("external"), options.pop("weights")
    match weights:
        case "external" | "none":
            return weights
        case _:
            return "external" if external else "inline"


def _summary(target: Path, mode: WeightMode, size: ModelSize) -> str:
    weights = f"{size.parameters:,} parameters, {size.weight_bytes / 1e6:,.1f} MB"
    place = {
        "inline": "",
        "external": f" in {data_path(target)}",
        "none": f" in {data_path(target)} (a placeholder of zeros)",
    }[mode]
    return f"{target}: {size.nodes:,} nodes, {weights}{place}"


if __name__ == "__main__":
    sys.exit(main())
