"""Models of every family, with the settings that change what they are made of."""

from typing import Any

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("mlp", {"gemm": True, "layers": 3}),
    ("gpt", {}),
    ("gpt", {"fused_qkv": True, "tied": True}),
    ("llama", {}),
    ("llama", {"preset": "gqa"}),
    ("bert", {}),
    ("vit", {}),
    ("t5", {}),
    ("moe", {}),
    ("moe", {"routing": "gather"}),
    ("resnet", {}),
    ("resnet", {"preset": "bottleneck"}),
    ("dlrm", {}),
    ("unet", {}),
    ("unet", {"levels": 1}),
    ("recurrent", {}),
    ("recurrent", {"cell": "gru", "bidirectional": True}),
    ("control", {"kind": "if"}),
    ("control", {"kind": "loop"}),
]
