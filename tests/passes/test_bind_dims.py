"""bind-dims: sizes for symbols, in every type, and refusals that list the symbols."""

import pytest

from irpar.analysis.types.symbols import UnboundSymbolError, free_symbols, require_static
from irpar.ir.text.files import parse_module
from irpar.pass_manager import PassManager
from irpar.passes.bind_dims import BindDims, BindError

MODEL = """
graph @g(%x: f32[batch, seq], %m: f32[batch, seq+1], %c: bool[]) -> (%y) opset 21 {
  %a = Relu(%x) : f32[batch, seq]
  %y = If(%c) {then_branch=graph @t() -> (%t) {
    %t = Neg(%a) : f32[batch, seq]
  }, else_branch=graph @e() -> (%e) {
    %e = Abs(%a) : f32[batch, inner]
  }} : f32[batch, seq]
}
"""


def test_sizes_reach_every_type_and_expression(check_golden):
    check_golden(
        "bind-dims{batch=2, seq=5}",
        MODEL,
        """
        graph @g(%x: f32[2, 5], %m: f32[2, 6], %c: bool[]) -> (%y) opset 21 {
          %a = Relu(%x) : f32[2, 5]
          %y = If(%c) {then_branch=graph @t() -> (%t) {
            %t = Neg(%a) : f32[2, 5]
          }, else_branch=graph @e() -> (%e) {
            %e = Abs(%a) : f32[2, inner]
          }} : f32[2, 5]
        }
        """,
    )


def test_some_symbols_may_stay(rewritten):
    text = rewritten("bind-dims{seq=5}", MODEL)
    assert "%x: f32[batch, 5], %m: f32[batch, 6]" in text


def test_without_sizes_nothing_changes(check_golden):
    check_golden("bind-dims", MODEL, MODEL)


def test_a_dim_without_name_is_called_by_its_place(rewritten):
    assert "%x: f32[3, 4]" in rewritten("bind-dims{x.0=3}", "graph @g(%x: f32[_, 4]) -> (%x) opset 21 {\n}")


def test_an_unknown_symbol_is_refused_with_the_symbols_of_the_model():
    with pytest.raises(BindError) as error:
        PassManager.parse("bind-dims{bach=2}").run(parse_module(MODEL))
    message = str(error.value)
    assert 'no symbol "bach"' in message
    assert "batch: x f32[batch, seq], m f32[batch, seq+1]" in message
    assert "nearest names: batch" in message
    assert "choose from: batch, seq" in message


def test_a_symbol_of_inner_values_only_cannot_be_bound():
    with pytest.raises(BindError, match='no symbol "inner"'):
        PassManager.parse("bind-dims{inner=2}").run(parse_module(MODEL))


def test_a_model_without_symbols_says_so():
    with pytest.raises(BindError, match="leave it out"):
        BindDims({"batch": 2}).run(parse_module("graph @g(%x: f32[2]) -> (%x) opset 21 {\n}"))


@pytest.mark.parametrize("size", [0, -3])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(BindError, match=f"batch is given the size {size}"):
        BindDims({"batch": size})


def test_sizes_that_make_a_dim_negative_are_refused():
    module = parse_module("graph @g(%x: f32[n], %y: f32[n-4]) -> (%x) opset 21 {\n}")
    with pytest.raises(BindError, match=r"%y f32\[n-4\] becomes f32\[-1\]"):
        BindDims({"n": 3}).run(module)


def test_free_symbols_lists_the_inputs_that_have_each():
    found = free_symbols(parse_module(MODEL))
    assert {symbol: [value.name for value in values] for symbol, values in found.items()} == {
        "batch": ["x", "m"],
        "seq": ["x", "m"],
    }


def test_require_static_lists_what_is_open_and_how_to_bind_it():
    with pytest.raises(UnboundSymbolError) as error:
        require_static(parse_module("graph @g(%x: f32[batch, _]) -> (%x) opset 21 {\n}"))
    message = str(error.value)
    assert "2 sizes are not known: batch, x.1" in message
    assert 'bind={"batch": ..., "x.1": ...}' in message
    require_static(parse_module("graph @g(%x: f32[2, 3]) -> (%x) opset 21 {\n}"))


def test_sizes_that_onnx_does_not_have_are_refused():
    most = 2**63 - 1
    with pytest.raises(BindError, match=f"n is given a size above {most}"):
        BindDims(sizes={"n": 10**5000})
    module = parse_module("graph @g(%x: f32[n]) -> (%y) opset 21 {\n  %y = Tile(%x) : f32[2*n]\n}\n")
    with pytest.raises(BindError, match=rf"becomes f32\[{2 * most}\]; the greatest size is {most}"):
        BindDims(sizes={"n": most}).run(module)
