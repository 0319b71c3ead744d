"""What one model of the exports is: how it is built, seeded, fed and cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

COLUMNS, ROWS = 0, 1
"""Which dim of a matrix, as nn.Linear stores it ([out, in]), is cut."""

EMBEDDINGS = ("wte.weight", "tokens.weight", "word_embeddings.weight", "shared.weight")
"""Ends of names of parameters that get the standard deviation 1."""


@dataclass(frozen=True)
class Entry:
    """A model to export.

    Attributes:
        name: first part of the file names.
        build: makes the module; its parameters are drawn by `seeded`.
        inputs: name -> whole tensor, in the order of the module's arguments.
        cuts: glob of parameter names -> the dim that the axis tp cuts, as PyTorch stores the parameter.
        outputs: names of the results.
        batch: input -> the dim that the axis dp cuts (None: no dim); dim 0 where it is not said.
        symbols: input -> symbols of its dims, for exports with dynamic dims; empty: there are none.
        longest: symbol -> largest size.
        opset: version that the dynamo exporter writes.
        scripted: makes what torch.jit.script takes for the TorchScript exporter, of the same parameters.
        missing: exporter -> why it cannot export the model.
        dtype: of floating-point parameters, inputs and results.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    cuts: Mapping[str, int]
    outputs: tuple[str, ...] = ("logits",)
    batch: Mapping[str, int | None] = field(default_factory=dict)
    symbols: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)
    opset: int = 20
    scripted: Callable[[], nn.Module] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a module whose parameters are all random (gains and biases too), so that no two are equal."""
    torch.manual_seed(0)
    module = build().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_gain else 0.0, std=_deviation(name, parameter))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.2)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return module.to(dtype)


def _deviation(name: str, parameter: Tensor) -> float:
    """Keeps values of order 1 from layer to layer, at widths near 32."""
    if name.endswith(EMBEDDINGS):
        return 1.0
    match parameter.dim():
        case 0 | 1:
            return 0.2
        case 4:  # convolution
            return float((2 / parameter[0].numel()) ** 0.5)
        case _:
            return 0.18
