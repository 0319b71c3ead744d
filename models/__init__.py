"""Builders of ONNX models for demos, docs, tests and benchmarks; they use `onnx` alone and nothing of irpar.

model = build("gpt", preset="tiny", layers=4)             # an onnx.ModelProto, weights inside
save("gpt.onnx", "gpt", preset="small", weights="external")  # weights streamed to gpt.onnx.data
tensors = annotations("gpt", layers=4)                    # Megatron-style sharding of its inputs and weights
"""

from .annotations import annotations
from .bert import BertConfig
from .config import ConfigError, ModelConfig, TextConfig
from .control import ControlConfig
from .dlrm import DlrmConfig
from .gpt import GptConfig
from .llama import LlamaConfig
from .mlp import MlpConfig
from .moe import MoeConfig
from .recurrent import RecurrentConfig
from .registry import FAMILIES, Family, ModelSize, build, config_of, save
from .resnet import ResnetConfig
from .t5 import T5Config
from .unet import UnetConfig
from .vit import VitConfig

__all__ = [
    "FAMILIES",
    "BertConfig",
    "ConfigError",
    "ControlConfig",
    "DlrmConfig",
    "Family",
    "GptConfig",
    "LlamaConfig",
    "MlpConfig",
    "ModelConfig",
    "ModelSize",
    "MoeConfig",
    "RecurrentConfig",
    "ResnetConfig",
    "T5Config",
    "TextConfig",
    "UnetConfig",
    "VitConfig",
    "annotations",
    "build",
    "config_of",
    "save",
]
