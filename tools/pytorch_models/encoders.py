"""BERT, a vision transformer with fused qkv, and an encoder-decoder of PyTorch's own layers."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn
from torch.nn import functional


class BertAttention(nn.Module):
    """Bidirectional self-attention step by step, with an additive mask."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`; mask `[B,1,1,S]`, 0 where a token may be seen."""
        query, key, value = (self._by_head(part(x)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / (x.shape[-1] // self.heads) ** 0.5
        context = torch.matmul((scores + mask).softmax(dim=-1), value).permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(x.shape))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).permute(0, 2, 1, 3)


class BertLayer(nn.Module):
    """A post-LayerNorm layer with Gelu."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.attention = BertAttention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden)
        self.intermediate = nn.Linear(hidden, ffn)
        self.output = nn.Linear(ffn, hidden)
        self.output_norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`; mask `[B,1,1,S]`."""
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.output(functional.gelu(self.intermediate(x))))


class Bert(nn.Module):
    """A classifier of token rows by their first token."""

    def __init__(self, hidden: int = 32, heads: int = 4, ffn: int = 128, layers: int = 2, vocab: int = 64) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(64, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layer = nn.ModuleList(BertLayer(hidden, heads, ffn) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`int64 [B,S]`, `int64 [B,S]` (1: a token, 0: padding) `-> [B,8]`."""
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        x = self.norm(x + self.token_type_embeddings(torch.zeros_like(input_ids)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e9
        for layer in self.layer:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class VitBlock(nn.Module):
    """A pre-LayerNorm block; q, k and v come from one matrix."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, ffn)
        self.fc2 = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        context = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(context.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    """A classifier of images of 16 x 16 in patches of 4 x 4, with a class token."""

    def __init__(self, hidden: int = 32, heads: int = 4, ffn: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, hidden, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.position = nn.Parameter(torch.zeros(1, 17, hidden))
        self.blocks = nn.ModuleList(VitBlock(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 8)

    def forward(self, images: Tensor) -> Tensor:
        """`[B,3,16,16] -> [B,8]`."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class EncoderDecoder(nn.Module):
    """BART in small, of nn.Transformer: learned positions, fused in_proj_weight, rows in the order [seq, batch]."""

    def __init__(self, hidden: int = 32, heads: int = 4, ffn: int = 128, vocab: int = 64) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, hidden)
        self.encoder_positions = nn.Embedding(32, hidden)
        self.decoder_positions = nn.Embedding(32, hidden)
        self.transformer = nn.Transformer(hidden, heads, 1, 1, ffn, dropout=0.0, activation="gelu")
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """`int64 [B,S]`, `int64 [B,T] -> [B,T,V]`."""
        source = self.shared(input_ids) + self.encoder_positions(torch.arange(input_ids.shape[1]))
        target = self.shared(decoder_input_ids) + self.decoder_positions(torch.arange(decoder_input_ids.shape[1]))
        length = decoder_input_ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.transformer(source.transpose(0, 1), target.transpose(0, 1), tgt_mask=mask, tgt_is_causal=True)
        return self.lm_head(x.transpose(0, 1))
