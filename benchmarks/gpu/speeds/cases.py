"""The cases: models with inputs, and what of them is counted, in the order of what they tell for their time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx

import irpar
from irpar import models
from irpar.ir import Module
from irpar.models.llama import LlamaConfig, rotary_tables
from irpar.models.weights import NUMPY_DTYPES

from . import decode_block

Array = np.ndarray[Any, Any]

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""dtypes as the report calls them."""
ALLOWED = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest |a - b| / |b| of irpar's and PyTorch's results, as vectors: both must compute the same."""
TRAINING_ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
"""Largest |a - b| / |b| of a loss of the first steps."""
PRECISIONS = {"float32": "f32", "float16": "fp16", "bfloat16": "bf16"}
"""As `irpar.train_step` calls them."""
LEARNING_RATE = 1e-4
TF32 = "tf32"
"""As a rate of products is called beside those of dtypes."""


@dataclass(frozen=True)
class Case:
    """A model in one size and dtype.

    Attributes:
        name: what `--only` takes.
        family: key of `FAMILIES`.
        dtype: of weights and activations; of a training step of products, "float32" being plain.
        settings: of the family.
        is_training: a step with AdamW instead of a forward pass.
        is_tf32: whether products of float32 may round their operands to TF32, on both sides.
        seconds: what it takes on a GPU machine, most of it PyTorch's compilation.
    """

    name: str
    family: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_training: bool = False
    is_tf32: bool = False
    seconds: float = 45.0

    @property
    def rate(self) -> str:
        """The rate of products that limits it: the dtype, or `TF32`."""
        return TF32 if self.is_tf32 else self.dtype

    @property
    def allowed(self) -> float:
        """How far the two sides may be apart."""
        coarse = "float16" if self.is_tf32 else self.dtype  # Both have 10 bits of mantissa.
        return (TRAINING_ALLOWED if self.is_training else ALLOWED)[coarse]

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The ONNX model; of a training step the one that is trained, in float32."""
        dtype = "float32" if self.is_training else self.dtype
        return FAMILIES[self.family].model(dtype, self.settings)

    def module(self) -> Module:
        """What irpar partitions: the model, or a step of training it."""
        module = irpar.load(self.model)
        if not self.is_training:
            return module
        precision = PRECISIONS[self.dtype]
        return irpar.train_step(module, optimizer="adamw", learning_rate=LEARNING_RATE, precision=precision)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """What a run takes."""
        made = FAMILIES[self.family].inputs(np.random.default_rng(0), self.dtype, self.settings)
        if self.is_training:
            tokens = made["input_ids"]
            made |= {"target": np.roll(tokens, -1, 1), "learning_rate": np.asarray(LEARNING_RATE, np.float32)}
        return made

    @property
    def masked_flops(self) -> int:
        """FLOPs of products that a causal mask makes unnecessary; the cost model counts them."""
        flops = FAMILIES[self.family].masked_flops(self.settings)
        return 3 * flops if self.is_training else flops

    def torch_module(self, device: str, dtype: Any = None) -> Any:
        """The same in PyTorch, with the same weights, on a device."""
        import torch

        from .torch_models import load

        weights = {one.name: tensor_of(onnx.numpy_helper.to_array(one), device) for one in self.model.graph.initializer}
        with torch.device("meta"):
            module = FAMILIES[self.family].torch_module(self.settings, _rotary_tensors(self, device))
        return load(module, weights, dtype)


def tensor_of(array: Array, device: str) -> Any:
    """A tensor of PyTorch with the numbers of an array, bfloat16 too."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)


# -- families ---------------------------------------------------------------------------------------------------------

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How the two sides of a kind of model are made.

    Attributes:
        model: of a dtype and settings.
        inputs: of a generator, a dtype and settings.
        torch_module: of settings, and cos and sin where there are any.
        masked_flops: see `Case.masked_flops`.
    """

    model: Callable[[str, Settings], onnx.ModelProto]
    inputs: Callable[[np.random.Generator, str, Settings], dict[str, Array]]
    torch_module: Callable[[Settings, Sequence[Any]], Any]
    masked_flops: Callable[[Settings], int]


def _tokens(random: np.random.Generator, settings: Settings) -> Array:
    return random.integers(0, settings["vocab"], (settings["batch"], settings["seq"]))


def _causal_flops(settings: Settings) -> int:
    """Of queries and keys, and of weights and values: what lies above the diagonal."""
    seq = settings["seq"]
    return 4 * settings["layers"] * settings["batch"] * settings["hidden"] * (seq * (seq - 1) // 2)


def _subset(settings: Settings, *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names}


def _gpt(dtype: str, settings: Settings) -> onnx.ModelProto:
    return models.build("gpt", dtype=dtype, opset=20, fused_qkv=True, tied=True, **settings)


def _torch_gpt(settings: Settings, rotary: Sequence[Any]) -> Any:
    from .torch_models import Gpt

    return Gpt(**_subset(settings, "layers", "hidden", "heads", "vocab", "seq"))


def _llama(dtype: str, settings: Settings) -> onnx.ModelProto:
    return models.build("llama", dtype=dtype, opset=23, **settings)


def _torch_llama(settings: Settings, rotary: Sequence[Any]) -> Any:
    from .torch_models import Llama

    cos, sin = rotary
    sizes = _subset(settings, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    return Llama(**sizes, cos=cos, sin=sin)


def _decode_config(dtype: str, settings: Settings) -> decode_block.DecodeConfig:
    return decode_block.DecodeConfig(dtype=dtype, opset=23, layers=1, fused=True, **settings)


def _decode_inputs(random: np.random.Generator, dtype: str, settings: Settings) -> dict[str, Array]:
    batch, hidden, cached = settings["batch"], settings["hidden"], settings["seq"]
    past = (batch, settings["kv_heads"], cached, hidden // settings["heads"])
    kind = NUMPY_DTYPES[dtype]
    return {
        "x": random.standard_normal((batch, 1, hidden), np.float32).astype(kind),
        "position_ids": np.full((batch, 1), cached, np.int64),
        "past_key": random.standard_normal(past, np.float32).astype(kind),
        "past_value": random.standard_normal(past, np.float32).astype(kind),
    }


def _torch_decode(settings: Settings, rotary: Sequence[Any]) -> Any:
    from .torch_models import LlamaStep

    cos, sin = rotary
    return LlamaStep(**_subset(settings, "hidden", "heads", "kv_heads", "ffn"), cos=cos, sin=sin)


def _rotary_tensors(case: Case, device: str) -> Sequence[Any]:
    """cos and sin of all positions of a Llama: no weights, but constants of its graph."""
    if "kv_heads" not in case.settings:
        return ()
    one_more = case.settings["seq"] + 1
    sizes = _subset(case.settings, "hidden", "heads")
    tables = rotary_tables(LlamaConfig(dtype=case.dtype, seq=one_more, **sizes))
    return [tensor_of(np.asarray(table), device) for table in tables]


def _bert(dtype: str, settings: Settings) -> onnx.ModelProto:
    return models.build("bert", dtype=dtype, opset=20, **settings)


def _bert_inputs(random: np.random.Generator, dtype: str, settings: Settings) -> dict[str, Array]:
    """Rows of several lengths: the last ones padded."""
    batch, seq = settings["batch"], settings["seq"]
    lengths = random.integers(seq * 3 // 4, seq + 1, (batch, 1))
    types = np.zeros((batch, seq), np.int64)
    return {
        "input_ids": _tokens(random, settings),
        "token_type_ids": types,
        "attention_mask": (np.arange(seq) < lengths).astype(np.int64),
    }


def _torch_bert(settings: Settings, rotary: Sequence[Any]) -> Any:
    from .torch_models import Bert

    return Bert(**_subset(settings, "layers", "hidden", "heads", "vocab", "seq"))


def _resnet(dtype: str, settings: Settings) -> onnx.ModelProto:
    return models.build("resnet", dtype=dtype, opset=20, bottleneck=True, **settings)


def _pixels(random: np.random.Generator, dtype: str, settings: Settings) -> dict[str, Array]:
    shape = (settings["batch"], 3, settings["image"], settings["image"])
    return {"pixels": random.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])}


def _torch_resnet(settings: Settings, rotary: Sequence[Any]) -> Any:
    from .torch_models import Resnet

    return Resnet(**_subset(settings, "width", "blocks", "classes"))


def _token_inputs(random: np.random.Generator, dtype: str, settings: Settings) -> dict[str, Array]:
    return {"input_ids": _tokens(random, settings)}


def _none_masked(settings: Settings) -> int:
    return 0


FAMILIES = {
    "gpt": Family(_gpt, _token_inputs, _torch_gpt, _causal_flops),
    "llama": Family(_llama, _token_inputs, _torch_llama, _causal_flops),
    "decode": Family(
        lambda dtype, settings: decode_block.build(_decode_config(dtype, settings)),
        _decode_inputs,
        _torch_decode,
        _none_masked,
    ),
    "bert": Family(_bert, _bert_inputs, _torch_bert, _none_masked),
    "resnet": Family(_resnet, _pixels, _torch_resnet, _none_masked),
}

# -- the cases --------------------------------------------------------------------------------------------------------

_GPT2 = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257}
_LLAMA3 = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 2048, "batch": 1}
_LLAMA2 = {**_LLAMA3, "kv_heads": 32, "ffn": 11008}
_BLOCK = {"layers": 1, "vocab": 256}
_BERT = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 30522}
_RESNET = {"width": 64, "blocks": (3, 4, 6, 3), "classes": 1000, "image": 224}
HALF, BRAIN, FULL = "float16", "bfloat16", "float32"


def _gpt_case(batch: int, seq: int, dtype: str, is_tf32: bool = False) -> Case:
    name = f"gpt2-b{batch}-s{seq}-{TF32 if is_tf32 else SHORT[dtype]}"
    return Case(name, "gpt", dtype, {**_GPT2, "batch": batch, "seq": seq}, is_tf32=is_tf32)


def _bert_case(seq: int, dtype: str) -> Case:
    return Case(f"bert-b8-s{seq}-{SHORT[dtype]}", "bert", dtype, {**_BERT, "batch": 8, "seq": seq})


def _resnet_case(batch: int, dtype: str) -> Case:
    return Case(f"resnet50-b{batch}-{SHORT[dtype]}", "resnet", dtype, {**_RESNET, "batch": batch})


def _training_case(dtype: str) -> Case:
    settings = {**_GPT2, "batch": 4, "seq": 256}
    return Case(f"gpt2-train-{SHORT[dtype]}", "gpt", dtype, settings, is_training=True, seconds=75)


QUICK = (
    _gpt_case(1, 128, HALF),
    Case("llama-block-bf16", "llama", BRAIN, {**_LLAMA3, **_BLOCK, "fused": True}, seconds=35),
    Case("llama-decode-bf16", "decode", BRAIN, _LLAMA3, seconds=35),
    _gpt_case(8, 1024, HALF),
    _gpt_case(1, 128, FULL),
    _training_case(BRAIN),
    _resnet_case(16, HALF),
    _bert_case(128, HALF),
)
"""What four minutes hold."""
CASES = {
    case.name: case
    for case in (
        *QUICK,
        Case("llama-block-parts-bf16", "llama", BRAIN, {**_LLAMA3, **_BLOCK}, seconds=35),
        Case("llama-block-f16", "llama", HALF, {**_LLAMA3, **_BLOCK, "fused": True}, seconds=35),
        Case("llama2-block-bf16", "llama", BRAIN, {**_LLAMA2, **_BLOCK, "fused": True}, seconds=35),
        Case("llama2-decode-bf16", "decode", BRAIN, _LLAMA2, seconds=35),
        _gpt_case(8, 1024, BRAIN),
        _gpt_case(8, 1024, FULL),
        _training_case(FULL),
        _gpt_case(8, 1024, FULL, is_tf32=True),
        _gpt_case(1, 128, BRAIN),
        _gpt_case(1, 1024, HALF),
        _gpt_case(8, 128, HALF),
        _resnet_case(1, HALF),
        _resnet_case(16, FULL),
        _resnet_case(1, FULL),
        _bert_case(512, HALF),
        _bert_case(128, FULL),
        _bert_case(512, FULL),
        _gpt_case(1, 1024, FULL),
        _gpt_case(1, 1024, BRAIN),
        _gpt_case(8, 128, FULL),
        _gpt_case(8, 128, BRAIN),
    )
}
"""All, by name."""
AUTOTUNED = ("llama-block-bf16", "llama-decode-bf16", "gpt2-b8-s1024-f16", "bert-b8-s128-f16")
"""What `--max-autotune` compiles so as well."""
_TINY = {"layers": 1, "hidden": 32, "heads": 2, "vocab": 64, "batch": 2, "seq": 8}
_TINY_LLAMA = {**_TINY, "heads": 4, "kv_heads": 2, "ffn": 64}
_TINY_DECODE = {name: value for name, value in _TINY_LLAMA.items() if name not in ("layers", "vocab")}
_TINY_RESNET = {"width": 8, "blocks": (1, 1), "classes": 10, "image": 16, "batch": 2}
TINY = {
    case.name: case
    for case in (
        Case("tiny-gpt-f32", "gpt", FULL, _TINY),
        Case("tiny-gpt-f16", "gpt", HALF, _TINY),
        Case("tiny-llama-bf16", "llama", BRAIN, {**_TINY_LLAMA, "fused": True}),
        Case("tiny-llama-parts-f32", "llama", FULL, _TINY_LLAMA),
        Case("tiny-decode-f32", "decode", FULL, _TINY_DECODE),
        Case("tiny-bert-f32", "bert", FULL, _TINY),
        Case("tiny-resnet-f32", "resnet", FULL, _TINY_RESNET),
        Case("tiny-gpt-tf32", "gpt", FULL, _TINY, is_tf32=True),
        Case("tiny-train-f32", "gpt", FULL, _TINY, is_training=True),
        Case("tiny-train-bf16", "gpt", BRAIN, _TINY, is_training=True),
    )
}
"""For development, without a GPU."""


def case_of(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: there is none.
    """
    return {**CASES, **TINY}[name]
