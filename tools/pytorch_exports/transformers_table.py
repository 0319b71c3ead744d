"""Models of the transformers library, of tiny configurations; needs transformers, downloads nothing."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn

from .entry import COLUMNS, ROWS, Entry
from .table import BATCH, images, integers, padded_ids


class FromTokens(nn.Module):
    """A model of transformers as a function of token ids and their mask to logits."""

    def __init__(self, model: nn.Module, **settings: bool) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`int64 [B,S]`, `int64 [B,S]` (1: a token, 0: padding) to logits."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.settings).logits


class FromPairs(nn.Module):
    """An encoder-decoder as a function of token ids of both sides to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """`int64 [B,S]`, `int64 [B,T] -> [B,T,V]`."""
        return self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


class FromPixels(nn.Module):
    """A model of images as a function to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`[B,3,H,W]` to logits."""
        return self.model(pixel_values=pixel_values).logits


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, bos_token_id=None, eos_token_id=None, n_embd=32, n_layer=2, n_head=4, n_inner=64
    )
    return FromTokens(transformers.GPT2LMHeadModel(config), use_cache=False)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
    return FromTokens(transformers.LlamaForCausalLM(config), use_cache=False)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return FromTokens(transformers.BertForSequenceClassification(config))


def _t5() -> nn.Module:
    config = transformers.T5Config(  # type: ignore[call-arg]
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    config._attn_implementation = "eager"  # the dynamo exporter fails on a view of sdpa's result
    return FromPairs(transformers.T5ForConditionalGeneration(config))


def _vit() -> nn.Module:
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_labels=8,
    )
    return FromPixels(transformers.ViTForImageClassification(config))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    model = transformers.MixtralForCausalLM(config)
    # The other ways to compute experts are loops over what NonZero finds, or operators of torch alone.
    model.set_experts_implementation("batched_mm")
    return FromTokens(model, use_cache=False)


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": images()["images"]}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": integers(BATCH, 16), "decoder_input_ids": integers(BATCH, 12, seed=2)}


def _entry(name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Tensor]], **rest: Any) -> Entry:
    cuts = {f"model.{pattern}": cut for pattern, cut in rest.pop("cuts").items()}
    return Entry(f"hf-{name}", build, inputs, cuts, **rest)


_LLAMA_ATTENTION = {
    "model.layers.*.self_attn.[qkv]_proj.weight": COLUMNS,
    "model.layers.*.self_attn.o_proj.weight": ROWS,
}

ENTRIES: tuple[Entry, ...] = (
    _entry(
        "gpt2",
        _gpt2,
        padded_ids,
        cuts={  # Conv1D stores [in, out]
            "transformer.h.*.attn.c_attn.weight": 1,
            "transformer.h.*.attn.c_attn.bias": 0,
            "transformer.h.*.attn.c_proj.weight": 0,
            "transformer.h.*.mlp.c_fc.weight": 1,
            "transformer.h.*.mlp.c_fc.bias": 0,
            "transformer.h.*.mlp.c_proj.weight": 0,
            "transformer.wte.weight": COLUMNS,
        },
    ),
    _entry(
        "llama",
        _llama,
        padded_ids,
        symbols={"input_ids": ("batch", "seq"), "attention_mask": ("batch", "seq")},
        longest={"seq": 32},
        cuts=_LLAMA_ATTENTION
        | {
            "model.layers.*.mlp.gate_proj.weight": COLUMNS,
            "model.layers.*.mlp.up_proj.weight": COLUMNS,
            "model.layers.*.mlp.down_proj.weight": ROWS,
            "lm_head.weight": COLUMNS,
        },
    ),
    _entry(
        "bert",
        _bert,
        padded_ids,
        cuts={
            "bert.encoder.layer.*.attention.self.*": COLUMNS,
            "bert.encoder.layer.*.attention.output.dense.weight": ROWS,
            "bert.encoder.layer.*.intermediate.dense.*": COLUMNS,
            "bert.encoder.layer.*.output.dense.weight": ROWS,
        },
    ),
    _entry(
        "t5",
        _t5,
        _pairs,
        cuts={
            "*.block.*.*Attention.[qkv].weight": COLUMNS,
            "*.block.*.*Attention.o.weight": ROWS,
            "*.DenseReluDense.wi.weight": COLUMNS,
            "*.DenseReluDense.wo.weight": ROWS,
            "shared.weight": COLUMNS,
        },
    ),
    _entry(
        "vit",
        _vit,
        _pixels,
        cuts={
            "vit.layers.*.attention.[qkv]_proj.*": COLUMNS,
            "vit.layers.*.attention.o_proj.weight": ROWS,
            "vit.layers.*.mlp.fc1.*": COLUMNS,
            "vit.layers.*.mlp.fc2.weight": ROWS,
        },
    ),
    _entry(
        "mixtral",
        _mixtral,
        padded_ids,
        cuts=_LLAMA_ATTENTION
        | {
            "model.layers.*.mlp.experts.gate_up_proj": 1,
            "model.layers.*.mlp.experts.down_proj": 2,
            "lm_head.weight": COLUMNS,
        },
    ),
)
