"""A Llama whose parts have operators of their own from opset 23 on: Attention, RMSNormalization, RotaryEmbedding."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn
from torch.nn import functional

from .decoders import LlamaBlock, Size


class FusedAttention(nn.Module):
    """Grouped-query attention in one call."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.hidden // size.heads
        self.q_proj = nn.Linear(size.hidden, size.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`; cos and sin `[longest,K/2]`."""
        batch, seq, hidden = x.shape
        places = torch.arange(seq).expand(batch, seq)
        query = self._by_head(self.q_proj(x), self.heads)
        key = self._by_head(self.k_proj(x), self.kv_heads)
        value = self._by_head(self.v_proj(x), self.kv_heads)
        query = torch.onnx.ops.rotary_embedding(query, cos, sin, places)
        key = torch.onnx.ops.rotary_embedding(key, cos, sin, places)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(context.transpose(1, 2).reshape(batch, seq, hidden))

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)


def rms_norm(hidden: int) -> nn.Module:
    """RMSNormalization in one call."""
    return nn.RMSNorm(hidden, eps=1e-5)


class FusedLlama(nn.Module):
    """Llama in small, in fused operators."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(LlamaBlock(size, FusedAttention, rms_norm) for _ in range(size.layers))
        self.norm = rms_norm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)
        head_dim = size.hidden // size.heads
        angles = torch.outer(torch.arange(size.longest), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`int64 [B,S] -> [B,S,V]`."""
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))
