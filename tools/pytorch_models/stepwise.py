"""Recurrent layers, and models with a branch or a loop, each as both exporters take them."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional


class Recurrent(nn.Module):
    """A classifier of token rows by the last state of LSTM or GRU layers."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU], bidirectional: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.cell = cell(32, 16, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(32 if bidirectional else 16, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`int64 [B,S] -> [B,8]`."""
        x, _ = self.cell(self.embed_tokens(input_ids))
        return self.head(x[:, -1])


class Branches(nn.Module):
    """One of two perceptrons by the sign of the sum of the whole batch; as torch.cond."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.small = nn.Linear(width, width)
        self.large1 = nn.Linear(width, 2 * width)
        self.large2 = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,32] -> [B,32]`."""
        x = self.fc(x)
        return self.head(torch.cond(x.sum() > 0, self._large, self._small, (x,)))

    def _large(self, x: Tensor) -> Tensor:
        return self.large2(functional.gelu(self.large1(x)))

    def _small(self, x: Tensor) -> Tensor:
        return torch.tanh(self.small(x))


class ScriptedBranches(Branches):
    """The same as a Python `if`, for torch.jit.script."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B,32] -> [B,32]`."""
        x = self.fc(x)
        if bool(x.sum() > 0):
            y = self.large2(functional.gelu(self.large1(x)))
        else:
            y = torch.tanh(self.small(x))
        return self.head(y)


class Repeated(nn.Module):
    """A residual perceptron with the same weights, as often as an input says; as torch.while_loop."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """`[B,32]`, int64 scalar `-> [B,32]`."""
        _, x = torch.while_loop(  # type: ignore[no-untyped-call]
            lambda step, x: step < steps, lambda step, x: (step + 1, self.block(x)), (torch.zeros_like(steps), x)
        )
        return self.head(x)

    def block(self, x: Tensor) -> Tensor:
        """One step, `[B,32] -> [B,32]`."""
        return x + 0.25 * self.fc2(functional.gelu(self.fc1(x)))


class ScriptedRepeated(Repeated):
    """The same as a Python `for`, for torch.jit.script."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """`[B,32]`, int64 scalar `-> [B,32]`."""
        for _ in range(int(steps)):
            x = self.block(x)
        return self.head(x)


class Scanned(nn.Module):
    """A recurrence by hand through torch's scan: `[B,S,32] -> [B,S,32]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.given = nn.Linear(width, width)
        self.kept = nn.Linear(width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,S,32] -> [B,S,32]`."""

        def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(given + self.kept(state))
            return state, state.clone()

        _, states = scan(step, torch.zeros_like(x[:, 0]), self.given(x), dim=1)
        return self.head(states)
