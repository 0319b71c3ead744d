"""What MindSpore says of where operators run, the pass place does."""

import pytest

import irpar
from irpar.analysis.place_said import SAID, PlaceSaid, place_said
from irpar.annotations.mindspore import primitive_target, recompute
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module, print_module
from irpar.models import build
from irpar.module_pipeline import default_pipeline
from irpar.sharding import IrparError, Mesh


def model() -> Module:
    module = irpar.load(build("dlrm", tables=2))
    module.set_mesh(Mesh({"d": 1}))
    return module


def test_operators_of_a_cell_run_on_the_host() -> None:
    module = model()
    count = primitive_target(module, "tables.*", "CPU")
    assert count == sum((node.scope or "").startswith("tables.") for node in module.graph)
    said = "join-weights,place{host=[tables.*], rest=device},fuse-communication"
    assert said in default_pipeline(module)
    printed = print_module(clone_module(module))
    assert said in default_pipeline(parse_module(printed.text, resources=printed.resources))
    made = irpar.partition(module)
    assert made.module is not None
    scopes = {node.scope for node in made.module.graph if node.place == "host"}
    assert scopes == {"tables.0", "tables.1"}


def test_what_is_said_last_of_an_operator_holds() -> None:
    module = model()
    primitive_target(module, "tables.*", "CPU")
    primitive_target(module, "tables.1", "GPU")
    primitive_target(module, "tables.*", "Ascend")
    primitive_target(module, "bottom", "CPU")
    assert place_said(module) == PlaceSaid(("bottom",), ("tables.1", "tables.*"))


def test_it_stands_behind_recompute() -> None:
    module = model()
    primitive_target(module, "bottom", "CPU")
    recompute(module, "top*")
    assert default_pipeline(module).index("recompute{") < default_pipeline(module).index("place{")


def test_what_cannot_be_is_refused() -> None:
    module = model()
    with pytest.raises(IrparError, match="target is 'TPU'"):
        primitive_target(module, "tables.*", "TPU")
    with pytest.raises(IrparError, match=r'no scope and no node is "tabels\.0"'):
        primitive_target(module, "tabels.0", "CPU")
    assert place_said(module) is None
    module.metadata[SAID] = "{"
    with pytest.raises(IrparError, match="cannot be read"):
        default_pipeline(module)
