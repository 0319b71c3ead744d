"""A GPT and a Llama in plain PyTorch, small enough that their exports are kept as test fixtures."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder; `kv_heads` and `ffn` as their names say, `longest` is the most tokens of a row."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 64
    vocab: int = 64
    longest: int = 64


class GptAttention(nn.Module):
    """Causal self-attention through PyTorch's fused scaled_dot_product_attention, as most new code has it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q = nn.Linear(size.hidden, size.hidden)
        self.k = nn.Linear(size.hidden, size.hidden)
        self.v = nn.Linear(size.hidden, size.hidden)
        self.proj = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        batch, seq, hidden = x.shape
        query, key, value = (
            part(x).view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(context.transpose(1, 2).reshape(batch, seq, hidden))


class GptBlock(nn.Module):
    """A pre-LayerNorm block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.hidden)
        self.attn = GptAttention(size)
        self.ln_2 = nn.LayerNorm(size.hidden)
        self.fc1 = nn.Linear(size.hidden, size.ffn)
        self.fc2 = nn.Linear(size.ffn, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        x = x + self.attn(self.ln_1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 in small: learned positions, LayerNorm, biases."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocab, size.hidden)
        self.wpe = nn.Embedding(size.longest, size.hidden)
        self.h = nn.ModuleList(GptBlock(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`int64 [B,S] -> [B,S,V]`."""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RmsNorm(nn.Module):
    """Root mean square normalization with a gain."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """`[..,D] -> [..,D]`."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features (i, i + K/2) of `[B,H,S,K]` by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Grouped-query attention, written out step by step."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.hidden // size.heads
        self.q_proj = nn.Linear(size.hidden, size.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`; cos and sin `[S,K]`."""
        batch, seq, hidden = x.shape
        query = rotate(self.q_proj(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        key, value = self._repeat(key), self._repeat(value)
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        hidden_from = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden_from, float("-inf")).softmax(dim=-1)
        return self.o_proj((weights @ value).transpose(1, 2).reshape(batch, seq, hidden))

    def _repeat(self, x: Tensor) -> Tensor:
        batch, kv_heads, seq, head_dim = x.shape
        group = self.heads // kv_heads
        return x[:, :, None].expand(batch, kv_heads, group, seq, head_dim).reshape(batch, self.heads, seq, head_dim)


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """A pre-norm block around an attention."""

    def __init__(self, size: Size, attention: Callable[[Size], nn.Module], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.input_layernorm = norm(size.hidden)
        self.self_attn = attention(size)
        self.post_attention_layernorm = norm(size.hidden)
        self.mlp = LlamaMlp(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`; cos and sin as the attention takes them."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama in small: rotary positions, grouped-query attention, RMSNorm, SwiGLU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(LlamaBlock(size, LlamaAttention, RmsNorm) for _ in range(size.layers))
        self.norm = RmsNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)
        head_dim = size.hidden // size.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(size.longest), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`int64 [B,S] -> [B,S,V]`."""
        seq = input_ids.shape[1]
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return self.lm_head(self.norm(x))
