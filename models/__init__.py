"""Builders of ONNX models for demos, docs, tests and benchmarks; they use `onnx` alone and nothing of irpar.

model = build("gpt", preset="tiny", layers=4)             # an onnx.ModelProto, weights inside
save("gpt.onnx", "gpt", preset="small", weights="external")  # weights streamed to gpt.onnx.data
tensors = annotations("gpt", layers=4)                    # Megatron-style sharding of its inputs and weights
"""

from .annotations import annotations
from .config import ConfigError, DecoderConfig, ModelConfig
from .gpt import GptConfig
from .llama import LlamaConfig
from .mlp import MlpConfig
from .registry import FAMILIES, Family, ModelSize, build, config_of, save

__all__ = [
    "FAMILIES",
    "ConfigError",
    "DecoderConfig",
    "Family",
    "GptConfig",
    "LlamaConfig",
    "MlpConfig",
    "ModelConfig",
    "ModelSize",
    "annotations",
    "build",
    "config_of",
    "save",
]
