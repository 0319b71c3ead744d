"""Variants that begin with what was found of another come to what they come to by themselves."""

import pytest

import irpar
from irpar import models
from irpar.advice.suggestion import refined_variants
from irpar.advice.suggestion.refined_variants import RefinedVariants
from irpar.analysis.completion import refinement
from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import cost_of_placements, placements_of
from irpar.analysis.cost.network import BYTES
from irpar.ir import Module
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, NORMALISE

MESH = irpar.Mesh({"tp": 4})


def completed(family: str, cuts: dict[str, list[str | None]]) -> Module:
    module = irpar.load(models.build(family))
    irpar.annotate(module, cuts)
    module.set_mesh(MESH)
    PassManager.parse(f"{NORMALISE},{COMPLETE}").run(module)
    return module


def sent(flow: Flow, placements: dict, pinned: set[str]) -> int:
    return cost_of_placements(flow, placements, BYTES, lambda value: value.name in pinned, pinned)[0]


FAMILIES = {
    "gpt": (
        {"h.*.attn.q.weight": [None, "tp"], "h.*.mlp.c_fc.weight": [None, "tp"]},
        {"h.*.attn.q.weight": [None, "tp"]},
        {"h.0.attn.q.weight": [None, "tp"], "h.1.mlp.c_fc.weight": [None, "tp"], "lm_head.weight": [None, "tp"]},
    ),
    "resnet": (
        {"layer1.*.1.conv.weight": ["tp", None, None, None]},
        {"layer1.0.1.conv.weight": ["tp", None, None, None]},
        {"layer1.*.1.conv.weight": ["tp", None, None, None], "layer2.*.1.conv.weight": ["tp", None, None, None]},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_costs_no_more_than_from_the_start(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int | None] = []

    def refine(*given, **named):
        begun.append(None if len(given) < 5 else len(given[4]))
        return refinement.refine(*given, **named)

    monkeypatch.setattr(refined_variants, "refine", refine)
    variants = RefinedVariants()
    cuts = FAMILIES[family]
    for tried in (*cuts, cuts[0]):
        module = completed(family, tried)
        flow, pinned = Flow(module.graph, MESH), set(module.annotated)
        before = placements_of(flow, BYTES)
        found = variants.refine(flow, before, BYTES, pinned)
        anew = refinement.refine(flow, before, BYTES, pinned)
        assert sent(flow, found, pinned) <= sent(flow, anew, pinned) <= sent(flow, before, pinned)
    assert begun[0] is None
    assert begun[-1] == 0  # What is known already is not searched again.
    assert None not in begun[1:]
