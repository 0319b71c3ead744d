"""Tables about a plan: what is alike in all layers is one line."""

import numpy as np
import pytest

import irpar
from irpar.advice.inspection_tables import print_inspection
from irpar.ir.text.files import parse_module
from irpar.output.tables import merged, pattern, print_summary
from irpar.pass_manager.default_pipeline import with_zero
from irpar.tables.display import output
from tests.training.programs import with_weights


@pytest.mark.parametrize("name", ["h.{}.fc1.weight", "b{}.fc1.weight", "block{}/fc1.weight", "l_{}x.fc1.weight", "{}"])
def test_layers_are_alike_however_their_numbers_stand_in_names(name: str) -> None:
    texts = [f"MatMul {name.format(layer)} sums over x:(1)2" for layer in (0, 11)]
    assert len(set(map(pattern, texts))) == 1
    assert merged(texts) == f"MatMul {name.format('*')} sums over x:(1)2"


def test_what_differs_in_more_than_numbers_stays_apart() -> None:
    assert pattern("b0.fc") != pattern("c0.fc")
    assert pattern("cut over x:(1)2") != pattern("cut over x:(2)2")


def test_a_single_text_keeps_its_numbers() -> None:
    assert merged(["b0.fc1 in s.yaml, line 3"]) == "b0.fc1"


def test_annotations_are_told_as_they_are_written() -> None:
    texts = [f'%w{n} (annotated "fc::{n}") of %v{n} (annotated "h.*.w" in s.yaml, line {n})' for n in (7, 8, 9)]
    assert merged(texts) == '%w* (annotated "fc::7" and 2 more) of %v* (annotated "h.*.w")'


def test_names_of_exporters_make_no_long_lines(capsys: pytest.CaptureFixture[str]) -> None:
    name = "/model/encoder/" + "layers/self_attention/" * 12 + "output_projection"
    text = f"""
        graph @g(%x: f32[8, 64]) -> (%y) opset 21 {{
          %w = constant : f32[64, 64] data("w.bin", 0, 16384) from "{name}.weight"
          %v = constant : f32[64, 64] data("w.bin", 0, 16384) from "{name}.bias"
          %h = MatMul(%x, %w) : f32[8, 64] from "{name}/MatMul"
          %y = MatMul(%h, %v) : f32[8, 64] from "{name}/MatMul_1"
        }}"""
    module = parse_module(text)
    module.shard(f"{name}.weight", [["tp"], None])
    partition = irpar.partition(module, "tp=2")
    print_summary(output(), partition.plan, "irpar explain OUT")
    print_inspection(output(), irpar.inspect(module), None)
    printed = capsys.readouterr().out
    assert "…" in printed
    assert "sums over tp" in printed
    assert max(map(len, printed.splitlines())) < 400


@pytest.mark.parametrize(("stage", "held"), [(0, 512), (1, 384), (3, 256)])
def test_state_is_what_a_rank_keeps_whatever_lies_beside_it(
    stage: int, held: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two weights of 128 bytes, each with its moment; what a loop adds up and gathers is none of it."""
    text = """
        graph @g(%x: f32[4, 8], %w: f32[8, 4] from "w", %u: f32[4, 8] from "u") -> (%y) opset 21 {
          %h = MatMul(%x, %w) : f32[4, 4]
          %y = MatMul(%h, %u) : f32[4, 8]
        }"""
    module = with_weights(text, w=np.ones((8, 4)), u=np.ones((4, 8)))
    step = irpar.train_step(module, loss="mse", optimizer="momentum", micro_batches=2)
    for name in ("x", "target"):
        step.shard(name, [None, ["dp"], None])
    zero = with_zero(f"zero{{stage={stage}, threshold-kb=0}}") if stage else None
    print_summary(output(), irpar.partition(step, "dp=2", pipeline=zero).plan, "irpar explain OUT")
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["state"][:4] == ["512", "B", str(held), "B"]
