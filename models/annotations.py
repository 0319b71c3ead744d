"""Megatron-style shardings of the families: batch over one axis, attention heads and feed-forward over another.

The first linear layer of each pair is cut by columns and the second by rows, so that a block needs one all-reduce for
its attention and one for its MLP. Only inputs and weights are named; everything else is for the partitioner to find.
"""

from collections.abc import Callable
from typing import Any

from .config import ModelConfig
from .gpt import GptConfig
from .llama import LlamaConfig
from .mlp import MlpConfig
from .registry import config_of

Annotations = dict[str, list[list[str] | None]]
"""Tensor name or glob -> per dim the mesh axes that cut it, major first, or None where it is not cut."""

_COLUMNS, _ROWS, _VECTOR = "columns", "rows", "vector"


def annotations(
    name: str, dp_axis: str | None = "dp", tp_axis: str | None = "tp", *, preset: str = "tiny", **overrides: object
) -> Annotations:
    """Return the sharding of a model's inputs and weights, in the form of the "tensors" table of `--shardings`.

    Args:
        name: the family, as for `build`.
        dp_axis: mesh axis that cuts the batch; None leaves it whole.
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
    return tensors


def _inputs(config: ModelConfig, axis: str) -> Annotations:
    return {"x" if isinstance(config, MlpConfig) else "input_ids": [[axis], None]}


def _cut(how: str, axis: str) -> list[list[str] | None]:
    cuts: Annotations = {_COLUMNS: [None, [axis]], _ROWS: [[axis], None], _VECTOR: [[axis]]}
    return cuts[how]


def _weights(config: ModelConfig) -> dict[str, str]:
    tables: dict[type[ModelConfig], Callable[[Any], dict[str, str]]] = {
        MlpConfig: _mlp_weights,
        GptConfig: _gpt_weights,
        LlamaConfig: _llama_weights,
    }
    return tables[type(config)](config)


def _mlp_weights(config: MlpConfig) -> dict[str, str]:
    """Odd layers by columns, even by rows; a bias after a layer cut by rows is added to the sum and stays whole."""
    table: dict[str, str] = {}
    for layer in range(1, config.layers + 1):
        if layer % 2:
            table |= {f"fc{layer}.weight": _COLUMNS, f"fc{layer}.bias": _VECTOR}
        else:
            table[f"fc{layer}.weight"] = _ROWS
    return table


def _gpt_weights(config: GptConfig) -> dict[str, str]:
    """A fused c_attn is cut by columns too, where the cuts do not meet those of its Split: that costs communication."""
    table: dict[str, str] = {}
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


def _llama_weights(config: LlamaConfig) -> dict[str, str]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    table = {f"layers.*.{projection}.weight": _COLUMNS for projection in columns}
    table |= {f"layers.*.{projection}.weight": _ROWS for projection in rows}
    return table | {"lm_head.weight": _COLUMNS}
