"""PyTorch's side: the models of irpar.models as plain modules, whose parameters are called as the ONNX model's weights.

Modules are made without memory (`with torch.device("meta")`) and given the weights of the ONNX model by `load`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
"""Of all norms."""


class MatMul(nn.Linear):
    """A linear layer whose weight the ONNX model has as [in, out]."""


class BatchNorm(nn.Module):
    """BatchNormalization with the statistics of the model."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(channels)) for _ in range(2))
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """`[N,C,H,W] -> [N,C,H,W]`."""
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=EPSILON)


class RmsNorm(nn.Module):
    """RMSNormalization over the last dim."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """`[..,D] -> [..,D]`."""
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON)


def load(module: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> nn.Module:
    """Give a module the weights of its ONNX model.

    Args:
        module: made on the device "meta".
        weights: by name, where the module is to be.
        dtype: of floats; None: as they are.
    """
    transposed = {f"{name}.weight" for name, one in module.named_modules() if isinstance(one, MatMul)}
    state = {
        name: (weights[name].t().contiguous() if name in transposed else weights[name].clone()).to(dtype)
        for name in module.state_dict()
    }
    module.load_state_dict(state, assign=True)
    return module


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


class GptAttention(nn.Module):
    """Causal self-attention with one weight for queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.proj = MatMul(hidden, 3 * hidden), MatMul(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        query, key, value = (_split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, -1))
        return self.proj(_merge_heads(functional.scaled_dot_product_attention(query, key, value, is_causal=True)))


class GptMlp(nn.Module):
    """Two linear layers with a tanh-Gelu between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.proj = MatMul(hidden, 4 * hidden), MatMul(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        return self.proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class GptBlock(nn.Module):
    """A pre-LayerNorm block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(hidden, EPSILON) for _ in range(2))
        self.attn, self.mlp = GptAttention(hidden, heads), GptMlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """`models.build("gpt", fused_qkv=True, tied=True)`."""

    def __init__(self, *, layers: int, hidden: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.h = nn.ModuleList(GptBlock(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, EPSILON)
        self.scale = 1 / math.sqrt(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of token ids."""
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x) * self.scale, self.wte.weight)


# -- Llama ------------------------------------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; causal without a cache, of one token after a cache."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        width = kv_heads * (hidden // heads)
        self.q_proj, self.o_proj = (MatMul(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (MatMul(hidden, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Any:
        """`[B,S,D] -> [B,S,D]`, and the keys and values where there are past ones."""
        query = _rotate(_split_heads(self.q_proj(x), self.heads), cos, sin)
        key = _rotate(_split_heads(self.k_proj(x), self.kv_heads), cos, sin)
        value = _split_heads(self.v_proj(x), self.kv_heads)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        is_grouped = self.heads != self.kv_heads
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=past is None, enable_gqa=is_grouped
        )
        made = self.o_proj(_merge_heads(found))
        return made if past is None else (made, key, value)


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (MatMul(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = MatMul(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """A pre-RMSNorm block."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (RmsNorm(hidden) for _ in range(2))
        self.self_attn, self.mlp = LlamaAttention(hidden, heads, kv_heads), LlamaMlp(hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """One token after a cache, which comes back with it."""
        attended, key, value = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class Llama(nn.Module):
    """`models.build("llama")`; `cos` and `sin` are its rotary tables."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, cos: Tensor, sin: Tensor
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = RmsNorm(hidden)
        self.lm_head = MatMul(hidden, vocab, bias=False)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of token ids."""
        x = self.embed_tokens(ids)
        cos, sin = (table[: ids.shape[1]] for table in (self.cos, self.sin))
        for block in self.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))


class LlamaStep(nn.Module):
    """`decode_block.build`: one token of a block after a cache."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, hidden: int, heads: int, kv_heads: int, ffn: int, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = LlamaBlock(hidden, heads, kv_heads, ffn)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's result, and the keys and values with the token's own."""
        cos, sin = (table[position_ids].unsqueeze(1) for table in (self.cos, self.sin))
        return self.block.decode(x, cos, sin, (past_key, past_value))


# -- BERT -------------------------------------------------------------------------------------------------------------


class BertAttention(nn.Module):
    """Self-attention over what a mask leaves."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (MatMul(hidden, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(hidden, EPSILON)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        query, key, value = (_split_heads(each(x), self.heads) for each in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.norm(x + self.output(_merge_heads(found)))


class BertFfn(nn.Module):
    """Two linear layers with an exact Gelu between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.intermediate, self.output = MatMul(hidden, 4 * hidden), MatMul(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden, EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        return self.norm(x + self.output(functional.gelu(self.intermediate(x))))


class BertBlock(nn.Module):
    """A post-LayerNorm block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention, self.ffn = BertAttention(hidden, heads), BertFfn(hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        return self.ffn(self.attention(x, bias))


class BertEmbeddings(nn.Module):
    """Tokens, token types and positions."""

    def __init__(self, hidden: int, vocab: int, seq: int, token_types: int) -> None:
        super().__init__()
        self.word, self.token_type = nn.Embedding(vocab, hidden), nn.Embedding(token_types, hidden)
        self.position = nn.Embedding(seq, hidden)
        self.norm = nn.LayerNorm(hidden, EPSILON)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        """`[B,S] -> [B,S,D]`."""
        return self.norm(self.word(ids) + self.token_type(types) + self.position.weight[: ids.shape[1]])


class BertPooler(nn.Module):
    """A layer over the first token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = MatMul(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,D]`."""
        return torch.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    """`models.build("bert")`."""

    def __init__(self, *, layers: int, hidden: int, heads: int, vocab: int, seq: int, token_types: int = 2) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(hidden, vocab, seq, token_types)
        self.encoder = nn.ModuleList(BertBlock(hidden, heads) for _ in range(layers))
        self.pooler = BertPooler(hidden)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states, and what the first token gives."""
        x = self.embeddings(ids, types)
        bias = (1 - mask[:, None, None].to(x.dtype)) * -1e4
        for block in self.encoder:
            x = block(x, bias)
        return x, self.pooler(x)


# -- ResNet -----------------------------------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    """A convolution without a bias, and BatchNormalization."""

    def __init__(self, fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, bias=False)
        self.bn = BatchNorm(fan_out)

    def forward(self, x: Tensor) -> Tensor:
        """`[N,C,H,W] -> [N,K,H/s,W/s]`."""
        return self.bn(self.conv(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        for name, layer in (
            ("1", ConvNorm(fan_in, width, 1)),
            ("2", ConvNorm(width, width, 3, stride)),
            ("3", ConvNorm(width, wide, 1)),
        ):
            self.add_module(name, layer)
        self.shortcut = ConvNorm(fan_in, wide, 1, stride) if stride != 1 or fan_in != wide else None

    def forward(self, x: Tensor) -> Tensor:
        """`[N,C,H,W] -> [N,4W,H/s,W/s]`."""
        first, second, third = (self.get_submodule(name) for name in "123")
        inner = third(functional.relu(second(functional.relu(first(x)))))
        return functional.relu(inner + (x if self.shortcut is None else self.shortcut(x)))


class Resnet(nn.Module):
    """`models.build("resnet", bottleneck=True)`."""

    def __init__(self, *, width: int, blocks: tuple[int, ...], classes: int, channels: int = 3) -> None:
        super().__init__()
        self.stem = ConvNorm(channels, width, 7, 2)
        fan_in, self.stages = width, len(blocks)
        for stage, count in enumerate(blocks):
            layers = nn.ModuleList()
            for index in range(count):
                layers.append(Bottleneck(fan_in, width * 2**stage, 2 if stage and not index else 1))
                fan_in = 4 * width * 2**stage
            self.add_module(f"layer{stage + 1}", layers)
        self.fc = nn.Linear(fan_in, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of images."""
        x = functional.max_pool2d(functional.relu(self.stem(pixels)), 3, 2, 1)
        for stage in range(self.stages):
            for block in self.get_submodule(f"layer{stage + 1}"):  # type: ignore[attr-defined]
                x = block(x)
        return self.fc(x.mean((2, 3)))
