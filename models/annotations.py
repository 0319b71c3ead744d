"""Megatron-style shardings of the families: batch over one axis, attention heads and feed-forward over another.

The first linear layer of each pair is cut by columns and the second by rows, so that a block needs one all-reduce for
its attention and one for its MLP. Only inputs and weights are named, and the result of an mlp, which is a sum and would
be left in shares; everything else is for the partitioner to find.
"""

from collections.abc import Callable, Iterable
from typing import Any

from .bert import BertConfig
from .config import ModelConfig
from .control import ControlConfig
from .dlrm import DlrmConfig
from .gpt import GptConfig
from .llama import LlamaConfig
from .mlp import MlpConfig
from .moe import MoeConfig
from .recurrent import RecurrentConfig
from .registry import config_of
from .resnet import ResnetConfig
from .t5 import T5Config
from .unet import UnetConfig
from .vit import VitConfig

Annotations = dict[str, list[list[str] | None]]
"""Tensor name or glob -> per dim the mesh axes that cut it, major first, or None where it is not sharded."""

Cut = tuple[int, int]
"""Rank of a tensor, and the dim of it that is sharded."""
_COLUMNS: Cut = (2, 1)
_ROWS: Cut = (2, 0)
_VECTOR: Cut = (1, 0)
_EXPERTS: Cut = (3, 0)
_FILTERS: Cut = (4, 0)
_CHANNELS: Cut = (4, 1)


def annotations(
    name: str, dp_axis: str | None = "dp", tp_axis: str | None = "tp", *, preset: str = "tiny", **overrides: object
) -> Annotations:
    """Return the sharding of a model's inputs and weights, and of the result of an mlp.

    In the form of the "tensors" table of `--shardings`.

    Args:
        name: the family, as for `build`.
        dp_axis: mesh axis that shards the batch; None leaves it whole.
        tp_axis: mesh axis that cuts heads, feed-forward and vocabulary; None leaves them whole.
        preset: as given to `build`.
        overrides: as given to `build`: which weights exist depends on some of them (`fused_qkv`, `tied`, `layers`).

    Returns:
        Tensor names and globs, each of which matches at least one tensor of the model.

    Raises:
        ConfigError: as `build` does.
    """
    config = config_of(name, preset, **overrides)
    tensors: Annotations = {}
    if dp_axis is not None:
        tensors |= _inputs(config, dp_axis)
    if tp_axis is not None:
        tensors |= {weight: _cut(how, tp_axis) for weight, how in _weights(config).items()}
    if isinstance(config, MlpConfig):
        tensors["y"] = [None if dp_axis is None else [dp_axis], None]
    return tensors


def _inputs(config: ModelConfig, axis: str) -> Annotations:
    if isinstance(config, ControlConfig):
        return {"x": _cut((3 if config.kind == "scan" else 2, 0), axis)}
    return {name: _cut((rank, 0), axis) for name, rank in _BATCHED.get(type(config), {"input_ids": 2}).items()}


_BATCHED: dict[type[ModelConfig], dict[str, int]] = {
    MlpConfig: {"x": 2},
    BertConfig: {"input_ids": 2, "token_type_ids": 2, "attention_mask": 2},
    VitConfig: {"pixels": 4},
    ResnetConfig: {"pixels": 4},
    DlrmConfig: {"dense": 2, "sparse": 3},
    UnetConfig: {"sample": 4, "time": 1},
    T5Config: {"input_ids": 2, "attention_mask": 2, "decoder_input_ids": 2},
}
"""Inputs whose dim 0 is the batch, with their ranks, of families that take more than `input_ids`."""


def _cut(cut: Cut, axis: str) -> list[list[str] | None]:
    rank, place = cut
    return [[axis] if dim == place else None for dim in range(rank)]


def _weights(config: ModelConfig) -> dict[str, Cut]:
    tables: dict[type[ModelConfig], Callable[[Any], dict[str, Cut]]] = {
        MlpConfig: _mlp_weights,
        GptConfig: _gpt_weights,
        LlamaConfig: _llama_weights,
        BertConfig: _bert_weights,
        VitConfig: _vit_weights,
        T5Config: _t5_weights,
        MoeConfig: _moe_weights,
        ResnetConfig: _resnet_weights,
        DlrmConfig: _dlrm_weights,
        UnetConfig: _unet_weights,
        RecurrentConfig: _no_weights,
        ControlConfig: _control_weights,
    }
    return tables[type(config)](config)


def _pairs(first: Iterable[str], second: Iterable[str], *, bias: bool) -> dict[str, Cut]:
    """Layers cut by columns, their biases too, and those behind them cut by rows."""
    table: dict[str, Cut] = {}
    for name in first:
        table[f"{name}.weight"] = _COLUMNS
        if bias:
            table[f"{name}.bias"] = _VECTOR
    return table | {f"{name}.weight": _ROWS for name in second}


def _control_weights(config: ControlConfig) -> dict[str, Cut]:
    """The perceptrons of branches and trips in pairs; a step of a scan by columns, since its state comes back whole."""
    if config.kind == "scan":
        return _pairs(("cell.input", "cell.state", "head.fc"), (), bias=True)
    scopes = ("positive", "negative") if config.kind == "if" else ("block",)
    first = [f"{scope}.fc1" for scope in scopes]
    return _pairs([*first, "head.fc"], [f"{scope}.fc2" for scope in scopes], bias=True)


def _mlp_weights(config: MlpConfig) -> dict[str, Cut]:
    """Odd layers by columns, even by rows; a bias after a layer cut by rows is added to the sum and stays whole."""
    table: dict[str, Cut] = {}
    for layer in range(1, config.layers + 1):
        if layer % 2:
            table |= {f"fc{layer}.weight": _COLUMNS, f"fc{layer}.bias": _VECTOR}
        else:
            table[f"fc{layer}.weight"] = _ROWS
    return table


def _gpt_weights(config: GptConfig) -> dict[str, Cut]:
    """A fused c_attn is sharded by columns too: each device gets its columns of q, of k and of v."""
    table: dict[str, Cut] = {}
    for projection in ("c_attn",) if config.fused_qkv else ("q", "k", "v"):
        table |= {f"h.*.attn.{projection}.weight": _COLUMNS, f"h.*.attn.{projection}.bias": _VECTOR}
    table |= {
        "h.*.attn.proj.weight": _ROWS,
        "h.*.mlp.c_fc.weight": _COLUMNS,
        "h.*.mlp.c_fc.bias": _VECTOR,
        "h.*.mlp.proj.weight": _ROWS,
    }
    # A tied embedding [vocab, hidden] is cut by vocabulary, which cuts the logits by vocabulary; an untied one is left
    # free: cut by vocabulary it would need an all-reduce of its own.
    return table | ({"wte.weight": _ROWS} if config.tied else {"lm_head.weight": _COLUMNS})


def _llama_weights(config: LlamaConfig) -> dict[str, Cut]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    table = _pairs((f"layers.*.{name}" for name in columns), (f"layers.*.{name}" for name in rows), bias=False)
    return table | {"lm_head.weight": _COLUMNS}


def _bert_weights(config: BertConfig) -> dict[str, Cut]:
    columns = ("attention.query", "attention.key", "attention.value", "ffn.intermediate")
    rows = ("attention.output", "ffn.output")
    return _pairs((f"encoder.*.{name}" for name in columns), (f"encoder.*.{name}" for name in rows), bias=True)


def _vit_weights(config: VitConfig) -> dict[str, Cut]:
    columns, rows = ("attn.q", "attn.k", "attn.v", "mlp.fc1"), ("attn.proj", "mlp.fc2")
    return _pairs((f"blocks.*.{name}" for name in columns), (f"blocks.*.{name}" for name in rows), bias=True)


def _t5_weights(config: T5Config) -> dict[str, Cut]:
    """Heads of the relative position bias go with those of q, k and v."""
    columns = ("self.q", "self.k", "self.v", "ffn.wi_0", "ffn.wi_1")
    table = _pairs(
        (*(f"*.block.*.{name}" for name in columns), *(f"decoder.block.*.cross.{name}" for name in "qkv")),
        ("*.block.*.self.o", "decoder.block.*.cross.o", "*.block.*.ffn.wo"),
        bias=False,
    )
    return table | {"*.relative_attention_bias.weight": _COLUMNS, "lm_head.weight": _COLUMNS}


def _moe_weights(config: MoeConfig) -> dict[str, Cut]:
    """Attention by heads; of the experts each device has some whole ones. The router needs the scores of all."""
    heads = _pairs((f"h.*.attn.{name}" for name in "qkv"), ("h.*.attn.proj",), bias=True)
    experts = {f"h.*.moe.experts.{name}.weight": _EXPERTS for name in ("fc", "proj")}
    return heads | experts | {"lm_head.weight": _COLUMNS}


def _resnet_weights(config: ResnetConfig) -> dict[str, Cut]:
    """Of the last two convolutions of a block the first by output, the second by input channels; the stem by output.

    What the stem gives is gathered once, since all blocks read whole channels.
    """
    first, second = ("2", "3") if config.bottleneck else ("1", "2")
    table = {"stem.conv.weight": _FILTERS, f"layer*.{first}.conv.weight": _FILTERS}
    for part in ("weight", "bias", "running_mean", "running_var"):
        table |= {f"stem.bn.{part}": _VECTOR, f"layer*.{first}.bn.{part}": _VECTOR}
    return table | {f"layer*.{second}.conv.weight": _CHANNELS}


def _dlrm_weights(config: DlrmConfig) -> dict[str, Cut]:
    """Tables by width, so that the products of features are sums over the axis."""
    table = _pairs(("bottom.0", "top.0"), ("bottom.1", "top.1"), bias=True)
    return table | {"tables.*.weight": _COLUMNS}


def _unet_weights(config: UnetConfig) -> dict[str, Cut]:
    """The first convolution of a block by output channels, with all that is added to them; the second by input.

    Convolutions between levels are sharded by input channels, which all devices have: each costs an all-reduce.
    """
    table: dict[str, Cut] = {}
    for block in ("down.*.block", "middle", "up.*.block") if config.levels > 1 else ("middle",):
        table |= {f"{block}.conv1.weight": _FILTERS, f"{block}.conv1.bias": _VECTOR}
        table |= {f"{block}.time.weight": _COLUMNS, f"{block}.time.bias": _VECTOR}
        table |= {f"{block}.norm2.weight": _VECTOR, f"{block}.norm2.bias": _VECTOR, f"{block}.conv2.weight": _CHANNELS}
    if config.levels > 1:
        table |= {"down.*.shrink.weight": _CHANNELS}
    # The weight of a ConvTranspose has its input channels first.
    cuts = (_FILTERS if config.grows_by_transpose(level) else _CHANNELS for level in range(config.levels - 1))
    return table | {f"up.{level}.grow.weight": cut for level, cut in enumerate(cuts)}


def _no_weights(config: ModelConfig) -> dict[str, Cut]:
    """Nothing: a step of a recurrent layer needs the whole state of the one before."""
    return {}
