"""The gpt of irpar.models in PyTorch eager, with the weights of the ONNX model."""

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import numpy_helper


class TorchGpt:
    """A model of `models.build("gpt", ...)` on a CUDA device.

    Args:
        model: the ONNX model.
        layers: how many blocks it has.
        heads: of each.
        device: of PyTorch.
    """

    def __init__(self, model: onnx.ModelProto, layers: int, heads: int, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._heads = heads
        self._device = device
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._weights: Mapping[str, Any] = {
            # PyTorch's linear takes [out, in].
            name: torch.from_numpy(_transposed(name, array)).contiguous().to(device)
            for name, array in arrays.items()
            if name.endswith((".weight", ".bias"))
        }
        self._layers = layers

    def ids(self, ids: Any) -> Any:
        """Token ids on the device."""
        return self._torch.from_numpy(ids).to(self._device)

    def __call__(self, ids: Any) -> Any:
        """Logits of token ids; both on the device."""
        functional, weights = self._torch.nn.functional, self._weights
        with self._torch.inference_mode():
            x = functional.embedding(ids, weights["wte.weight"]) + weights["wpe.weight"][: ids.shape[1]]
            for layer in range(self._layers):
                x = x + self._attention(f"h.{layer}.attn", self._norm(f"h.{layer}.ln_1", x))
                x = x + self._mlp(f"h.{layer}.mlp", self._norm(f"h.{layer}.ln_2", x))
            return functional.linear(self._norm("ln_f", x), weights["lm_head.weight"])

    def _norm(self, name: str, x: Any) -> Any:
        weights = self._weights
        return self._torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5
        )

    def _linear(self, name: str, x: Any) -> Any:
        return self._torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _attention(self, name: str, x: Any) -> Any:
        batch, seq, hidden = x.shape
        split = (batch, seq, self._heads, hidden // self._heads)
        query, key, value = (self._linear(f"{name}.{part}", x).view(split).transpose(1, 2) for part in "qkv")
        found = self._torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._linear(f"{name}.proj", found.transpose(1, 2).reshape(batch, seq, hidden))

    def _mlp(self, name: str, x: Any) -> Any:
        wide = self._torch.nn.functional.gelu(self._linear(f"{name}.c_fc", x), approximate="tanh")
        return self._linear(f"{name}.proj", wide)


def _transposed(name: str, array: Any) -> Any:
    is_table = name.startswith(("wte.", "wpe."))
    return array.T.copy() if array.ndim == 2 and not is_table else array.copy()
