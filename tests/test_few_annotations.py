"""The input and two weights of each layer are enough: completion finds Megatron's plan for the rest."""

from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from tests.budget import every

TWO_A_LAYER = {
    "gpt": ("h.*.attn.q.weight", "h.*.mlp.c_fc.weight"),
    "llama": ("layers.*.self_attn.q_proj.weight", "layers.*.mlp.gate_proj.weight"),
    "bert": ("encoder.*.attention.query.weight", "encoder.*.ffn.intermediate.weight"),
    "t5": ("*.block.*.self.q.weight", "decoder.block.*.cross.q.weight", "*.block.*.ffn.wi_0.weight"),
    "vit": ("blocks.*.attn.q.weight", "blocks.*.mlp.fc1.weight"),
    "moe": ("h.*.attn.q.weight", "h.*.moe.experts.fc.weight"),
}
"""The queries, and the first matrix of the feed-forward; of a decoder with cross-attention its queries too."""
HEADS = {"gpt": "lm_head.weight", "llama": "lm_head.weight", "moe": "lm_head.weight", "t5": "lm_head.weight"}
"""The last matrix belongs to no layer."""


@pytest.mark.parametrize("family", every(2, TWO_A_LAYER))
def test_two_weights_a_layer_cut_the_whole_transformer(family: str, tmp_path: Path) -> None:
    onnx.save(models.build(family), tmp_path / "model.onnx")
    hand = models.annotations(family, "dp", "tp")
    plans = []
    for names in (tuple(hand), (*TWO_A_LAYER[family], *filter(None, [HEADS.get(family)]))):
        module = irpar.load(tmp_path / "model.onnx")
        inputs = [value.name for value in module.graph.inputs]
        irpar.annotate(module, {name: hand[name] for name in dict.fromkeys((*inputs, *names)) if name in hand})
        partition = irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 2}))
        partition.verify().check()
        plans.append(partition.plan)
    by_hand, by_few = plans
    assert by_few.totals["flops_per_rank"] <= 1.02 * by_hand.totals["flops_per_rank"]
    assert by_few.totals["flops_per_rank"] / by_few.original["flops"] <= 1.1 / 4
    assert by_few.totals["sent_bytes"] <= by_hand.totals["sent_bytes"]
    assert by_few.totals["collectives"] <= by_hand.totals["collectives"]
