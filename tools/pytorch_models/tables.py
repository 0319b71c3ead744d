"""DLRM: dense features and several embedding tables, their products in pairs, and two perceptrons."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn


class Dlrm(nn.Module):
    """Click probability of 8 dense features, two tables looked up once and two whose bags are summed."""

    def __init__(self, width: int = 16, rows: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.single = nn.ModuleList(nn.Embedding(rows, width) for _ in range(2))
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(2))
        self.top = nn.Sequential(nn.Linear(width + 10, 64), nn.ReLU(), nn.Linear(64, 1))
        pairs = torch.tril_indices(5, 5, offset=-1)
        self.register_buffer("left", pairs[0], persistent=False)
        self.register_buffer("right", pairs[1], persistent=False)

    left: Tensor
    right: Tensor

    def forward(self, dense: Tensor, ids: Tensor, bags: Tensor) -> Tensor:
        """dense `[B,8]`, ids `int64 [B,2]`, bags `int64 [2,B,3]` `-> [B,1]`."""
        bottom = self.bottom(dense)
        rows = [table(ids[:, i]) for i, table in enumerate(self.single)]
        rows += [table(bags[i]) for i, table in enumerate(self.bags)]
        features = torch.stack((bottom, *rows), dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.left, self.right]
        return torch.sigmoid(self.top(torch.cat((bottom, products), dim=1)))
