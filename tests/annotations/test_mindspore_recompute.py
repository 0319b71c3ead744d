"""What MindSpore says of recompute, the pass does."""

from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar.analysis.recompute_said import SAID, RecomputeSaid, recompute_said
from irpar.annotations.mindspore import hsdp, recompute
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module, print_module
from irpar.models import build
from irpar.module_pipeline import default_pipeline
from irpar.onnx_io import save
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.sharding import IrparError, Mesh


def step() -> Module:
    return irpar.train_step(build("gpt", preset="tiny", layers=1), optimizer="sgd")


def test_a_cell_is_computed_again() -> None:
    module = step()
    count = recompute(module, "h.*/mlp*")
    assert count == sum((node.scope or "").startswith("h.0/mlp") for node in module.graph)
    module.set_mesh(Mesh({"dp": 1}))
    assert "join-weights,recompute{match=[h.*/mlp*], parallel-optimizer-comm-recompute=false}," in default_pipeline(
        module
    )
    made = irpar.partition(module)
    assert made.module is not None
    again = {node.scope for node in made.module.graph if node.name.endswith(".again")}
    assert again
    assert all(scope is not None and scope.startswith("h.0/mlp") for scope in again)


def test_what_is_said_last_of_a_cell_holds() -> None:
    module = step()
    recompute(module, "h.0/mlp*")
    recompute(module, "h.0/attn*", mp_comm_recompute=False, parallel_optimizer_comm_recompute=True)
    recompute(module, "h.0/mlp*", mode=False)
    assert recompute_said(module) == (RecomputeSaid("h.0/attn*", False, True),)
    recompute(module, "h.0/attn*", False)
    module.set_mesh(Mesh({"dp": 1}))
    assert default_pipeline(module) == DEFAULT_PIPELINE


def test_it_goes_with_sharded_optimizer_state() -> None:
    module = step()
    recompute(module, "h.0*")
    hsdp(module, threshold=0, optimizer_level="level3")
    module.shard("input_ids", ["dp", None])
    module.set_mesh(Mesh({"dp": 2}))
    pipeline = default_pipeline(module)
    assert pipeline.index("zero{stage=3") < pipeline.index("recompute{match=")


def test_clones_text_and_files_have_it(tmp_path: Path) -> None:
    module = step()
    recompute(module, "h.0*")
    save(module, tmp_path / "step.onnx")
    printed = print_module(module)
    for again in (
        clone_module(module),
        parse_module(printed.text, resources=printed.resources),
        irpar.load(tmp_path / "step.onnx"),
    ):
        assert recompute_said(again) == recompute_said(module)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("h.7*", {}, 'no scope and no node is "h.7*"'),
    ("h.0*", {"mode": 1}, "mode is 1"),
    ("h.0*", {"mp_comm_recompute": None}, "mp_comm_recompute is None"),
    ("h.0*", {"recompute_slice_activation": True}, "recompute_slice_activation would cut"),
]


@pytest.mark.parametrize(("cell", "given", "said"), MISTAKES)
def test_mistakes(cell: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(IrparError) as error:
        recompute(step(), cell, **given)
    assert said in str(error.value)
    assert "\n  do: " in str(error.value)


def test_metadata_that_cannot_be_read() -> None:
    module = step()
    module.metadata[SAID] = '{"said": [{"mach": "h"}]}'
    with pytest.raises(IrparError, match=f"the metadata {SAID} of the module cannot be read"):
        recompute_said(module)
