"""The models in plain PyTorch that are exported."""

from functools import partial

import torch
from pytorch_models.convolutional import Resnet, Unet
from pytorch_models.decoders import Gpt, Llama, Size
from pytorch_models.encoders import Bert, EncoderDecoder, Vit
from pytorch_models.experts import CapacityLayer, Moe, TopKLayer
from pytorch_models.opset23 import FusedLlama
from pytorch_models.stepwise import Branches, Recurrent, Repeated, Scanned, ScriptedBranches, ScriptedRepeated
from pytorch_models.tables import Dlrm
from torch import Tensor, nn

from .entry import COLUMNS, ROWS, Entry

BATCH = 4


def integers(*shape: int, high: int = 64, seed: int = 1) -> Tensor:
    """Draw int64 from 0 to `high` - 1."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def normals(*shape: int, seed: int = 1) -> Tensor:
    """Draw f32 from the standard normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(seq: int = 32) -> dict[str, Tensor]:
    """Token ids `[BATCH, seq]` alone."""
    return {"input_ids": integers(BATCH, seq)}


def padded_ids(seq: int = 16) -> dict[str, Tensor]:
    """Token ids `[BATCH, seq]` and the mask of rows of different lengths."""
    lengths = seq - torch.arange(BATCH)[:, None]
    return {"input_ids": integers(BATCH, seq), "attention_mask": (torch.arange(seq) < lengths).long()}


def images(size: int = 16) -> dict[str, Tensor]:
    """Images `[BATCH, 3, size, size]`."""
    return {"images": normals(BATCH, 3, size, size)}


GPT_CUTS = {
    "h.*.attn.[qkv].weight": COLUMNS,
    "h.*.attn.[qkv].bias": COLUMNS,
    "h.*.attn.proj.weight": ROWS,
    "h.*.fc1.weight": COLUMNS,
    "h.*.fc1.bias": COLUMNS,
    "h.*.fc2.weight": ROWS,
    "lm_head.weight": COLUMNS,
}
LLAMA_CUTS = {
    "layers.*.self_attn.[qkv]_proj.weight": COLUMNS,
    "layers.*.self_attn.o_proj.weight": ROWS,
    "layers.*.mlp.gate_proj.weight": COLUMNS,
    "layers.*.mlp.up_proj.weight": COLUMNS,
    "layers.*.mlp.down_proj.weight": ROWS,
    "lm_head.weight": COLUMNS,
}
EXPERT_CUTS = {"layers.*.experts.w[12]": 0, "lm_head.weight": COLUMNS}

_TOKENS = {"input_ids": ("batch", "seq")}
_OPSET_23 = "it knows opsets up to 20, these operators are of opset 23"
_HALF = "it writes scaled_dot_product_attention in f16 with a part in f32, which is no valid model"
_SCAN = "torch's scan can be neither traced nor scripted"


def gpt() -> nn.Module:
    """The GPT of the exports, in f32 and in f16."""
    return Gpt(Size(ffn=128))


ENTRIES: tuple[Entry, ...] = (
    Entry("gpt", gpt, ids, GPT_CUTS, symbols=_TOKENS, longest={"seq": Size.longest}),
    Entry(
        "llama",
        lambda: Llama(Size(heads=8, kv_heads=4)),
        ids,
        LLAMA_CUTS,
        symbols=_TOKENS,
        longest={"seq": Size.longest},
    ),
    Entry("gpt-fp16", gpt, ids, GPT_CUTS, dtype=torch.float16, missing={"torchscript": _HALF}),
    Entry(
        "llama-opset23",
        lambda: FusedLlama(Size(heads=8, kv_heads=4)),
        ids,
        LLAMA_CUTS,
        opset=23,
        missing={"torchscript": _OPSET_23},
    ),
    Entry(
        "bert",
        Bert,
        padded_ids,
        {
            "layer.*.attention.query.*": COLUMNS,
            "layer.*.attention.key.*": COLUMNS,
            "layer.*.attention.value.*": COLUMNS,
            "layer.*.attention.dense.weight": ROWS,
            "layer.*.intermediate.*": COLUMNS,
            "layer.*.output.weight": ROWS,
        },
    ),
    Entry(
        "bart",
        EncoderDecoder,
        lambda: {"input_ids": integers(BATCH, 16), "decoder_input_ids": integers(BATCH, 12, seed=2)},
        {
            "transformer.*.in_proj_weight": COLUMNS,
            "transformer.*.out_proj.weight": ROWS,
            "transformer.*.linear1.*": COLUMNS,
            "transformer.*.linear2.weight": ROWS,
            "lm_head.weight": COLUMNS,
        },
    ),
    Entry(
        "vit",
        Vit,
        images,
        {
            "blocks.*.qkv.*": COLUMNS,
            "blocks.*.proj.weight": ROWS,
            "blocks.*.fc1.*": COLUMNS,
            "blocks.*.fc2.weight": ROWS,
        },
    ),
    Entry("moe-capacity", partial(Moe, CapacityLayer), ids, EXPERT_CUTS),
    Entry("moe-topk", partial(Moe, TopKLayer), ids, EXPERT_CUTS),
    Entry(
        "resnet",
        Resnet,
        images,
        {"conv1.weight": 0, "layer*.conv1.weight": 0, "layer*.conv2.weight": 1},
        symbols={"images": ("batch",)},
    ),
    Entry(
        "unet",
        Unet,
        images,
        {  # ConvTranspose (up1) stores [in, out, ..]
            "*.conv1.weight": 0,
            "*.conv1.bias": 0,
            "*.conv2.weight": 1,
            "pool1.weight": 1,
            "up2.1.weight": 1,
            "up1.weight": 0,
        },
        outputs=("result",),
        opset=21,
    ),
    Entry(
        "dlrm",
        Dlrm,
        lambda: {"dense": normals(8, 8), "ids": integers(8, 2), "bags": integers(2, 8, 3, seed=2)},
        {
            "single.*.weight": 0,
            "bags.*.weight": 0,
            "bottom.0.*": COLUMNS,
            "bottom.2.weight": ROWS,
            "top.0.*": COLUMNS,
            "top.2.weight": ROWS,
        },
        outputs=("probability",),
        batch={"bags": 1},
    ),
    Entry("lstm", partial(Recurrent, nn.LSTM, False), partial(ids, 12), {"head.weight": COLUMNS}),
    Entry("gru", partial(Recurrent, nn.GRU, True), partial(ids, 12), {"head.weight": COLUMNS}),
    Entry(
        "if",
        Branches,
        lambda: {"x": normals(8, 32)},
        {"fc.weight": COLUMNS, "large2.weight": ROWS, "head.weight": COLUMNS},
        outputs=("y",),
        scripted=ScriptedBranches,
    ),
    Entry(
        "loop",
        Repeated,
        lambda: {"x": normals(8, 32), "steps": torch.tensor(3)},
        {"fc1.*": COLUMNS, "fc2.weight": ROWS, "head.weight": COLUMNS},
        outputs=("y",),
        batch={"steps": None},
        scripted=ScriptedRepeated,
    ),
    Entry(
        "scan",
        Scanned,
        lambda: {"x": normals(8, 6, 32)},
        {"given.weight": COLUMNS, "kept.weight": COLUMNS, "head.weight": COLUMNS},
        outputs=("y",),
        missing={"torchscript": _SCAN},
    ),
)
