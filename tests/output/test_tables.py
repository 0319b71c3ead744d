"""Tables about a plan: what is alike in all layers is one line."""

import pytest

import irpar
from irpar.advice.inspection_tables import print_inspection
from irpar.ir.text.files import parse_module
from irpar.output.tables import merged, pattern, print_summary
from irpar.tables.display import output


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
