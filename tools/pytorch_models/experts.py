"""Two mixtures of experts: fixed capacity with einsum dispatch, and TopK with gather and scatter."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn
from torch.nn import functional


class Experts(nn.Module):
    """One two-layer perceptron for each expert, weights stacked."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, hidden, ffn))
        self.w2 = nn.Parameter(torch.zeros(experts, ffn, hidden))


class CapacityLayer(nn.Module):
    """Each token to its best expert, at most `capacity` tokens of a row to each: GShard's masks and einsums."""

    def __init__(self, hidden: int, ffn: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.count, self.capacity = experts, capacity
        self.norm = nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        tokens = self.norm(x)
        gates = self.router(tokens).softmax(dim=-1)
        gate, expert = gates.max(dim=-1)
        chosen = functional.one_hot(expert, self.count)
        place = chosen.cumsum(dim=1) * chosen - 1  # -1 where the token is not the expert's
        slots = torch.arange(self.capacity)
        dispatch = (place.unsqueeze(-1) == slots).to(x.dtype)
        rows = torch.einsum("bsec,bsd->ebcd", dispatch, tokens)
        inner = functional.gelu(torch.einsum("ebcd,edf->ebcf", rows, self.experts.w1))
        results = torch.einsum("ebcf,efd->ebcd", inner, self.experts.w2)
        return x + torch.einsum("bsec,ebcd->bsd", dispatch * gate[..., None, None], results)


class TopKLayer(nn.Module):
    """Each expert takes its best tokens of a row (expert choice): TopK, gather, and scatter-add back."""

    def __init__(self, hidden: int, ffn: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.count, self.capacity = experts, capacity
        self.norm = nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,D] -> [B,S,D]`."""
        batch, _, hidden = x.shape
        tokens = self.norm(x)
        gates = self.router(tokens).softmax(dim=-1)
        gate, place = gates.transpose(1, 2).topk(self.capacity, dim=-1)  # [B,E,C]
        rows = tokens[torch.arange(batch)[:, None, None], place]  # [B,E,C,D]
        inner = functional.gelu(torch.matmul(rows.transpose(0, 1).flatten(1, 2), self.experts.w1))
        results = torch.matmul(inner, self.experts.w2).view(self.count, batch, self.capacity, hidden).transpose(0, 1)
        weighted = (results * gate.unsqueeze(-1)).flatten(1, 2)  # [B,E*C,D]
        index = place.flatten(1).unsqueeze(-1).expand(-1, -1, hidden)
        return x + torch.zeros_like(x).scatter_add(1, index, weighted)


class Moe(nn.Module):
    """Token rows through layers of experts."""

    def __init__(self, layer: type[CapacityLayer | TopKLayer], hidden: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.zeros(32, hidden))  # without them equal tokens would tie in TopK
        self.layers = nn.ModuleList(layer(hidden, 48, experts=4, capacity=6) for _ in range(2))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`int64 [B,S] -> [B,S,V]`."""
        x = self.embed_tokens(input_ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)
