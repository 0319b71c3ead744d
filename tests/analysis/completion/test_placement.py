import pytest

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.node_placement import rule_view, why_whole
from irpar.analysis.completion.placement import Placement
from irpar.analysis.completion.rule_view import RuleView
from irpar.analysis.cost.network import BYTES
from irpar.ir import Function, Graph, Node
from irpar.ir.text.files import parse_module
from irpar.ops import FactorRule, Kind
from irpar.sharding import Axis, Mesh


def placed(text: str, mesh: str = '"x"=2, "y"=2') -> tuple[Node, Placement]:
    """The placement of the last node of a graph."""
    module = parse_module(f"mesh @m = [{mesh}]\n{text}")
    node = module.graph.last
    assert node is not None
    return node, Flow(module.graph, module.mesh).place(node, lambda _: True, BYTES)


def texts(placement: Placement) -> tuple[list[str], list[str]]:
    return [str(s) for s in placement.operands], [str(s) for s in placement.results]


MATMUL = "graph @g(%a: f32[{a}], %b: f32[{b}]) -> (%c) opset 21 {{ %c = MatMul(%a, %b) : f32[{c}] }}"


@pytest.mark.parametrize(
    ("a", "b", "c", "operands", "result"),
    [
        ("8@x, 64", "64, 32@y", "8@x, 32@y", ["[@x, _]", "[_, @y]"], "[@x, @y]"),
        ("8, 64@x", "64@x, 32", "8, 32", ["[_, @x]", "[@x, _]"], "[_, _] partial(sum: x)"),
        # One operand is sharded along k: cutting the other is free, gathering the first is not.
        ("8, 64@x", "64, 32", "8, 32", ["[_, @x]", "[@x, _]"], "[_, _] partial(sum: x)"),
        # Nothing is sharded, but the result is wanted in blocks: each device computes its own.
        ("8, 64", "64, 32", "8@x, 32", ["[@x, _]", "[_, _] replicated"], "[@x, _]"),
        # k over x and n over x at once cannot be: the small operand moves.
        ("8, 64@x", "64, 4096@x", "8, 4096", ["[_, _] replicated", "[_, @x]"], "[_, @x]"),
    ],
)
def test_matmul(a: str, b: str, c: str, operands: list[str], result: str) -> None:
    dims = {key: value + (" replicated" if "@" not in value else "") for key, value in (("a", a), ("b", b), ("c", c))}
    text = MATMUL.format(**{key: value.replace(" replicated", "") for key, value in dims.items()})
    for key, value in dims.items():
        if value.endswith("replicated"):
            text = text.replace(f"f32[{value[:-11]}]", f"f32[{value[:-11]}] replicated", 1) if key != "c" else text
    if dims["c"].endswith("replicated"):
        text = text.replace(f"f32[{c}] }}", f"f32[{c}] replicated }}")
    _, placement = placed(text)
    assert texts(placement) == (operands, [result])


def test_nodes_of_one_kind_share_all_but_their_values() -> None:
    module = parse_module(
        """mesh @m = ["x"=2]
        graph @g(%a: f32[8, 64], %w: f32[64, 64]) -> (%d) opset 21 {
            %b = MatMul(%a, %w) : f32[8, 64]
            %c = MatMul(%b, %w) : f32[8, 64]
            %d = MatMul(%w, %w) : f32[64, 64]
        }"""
    )
    first, second, other = module.graph
    views = [rule_view(node, module.mesh) for node in (first, second, other)]
    alone = RuleView(second, views[1].rule, module.mesh)  # type: ignore[union-attr]
    assert views[1].shared() == alone.shared() == views[0].shared()  # type: ignore[union-attr]
    assert views[1].values == alone.values == (*second.operands, second.result)  # type: ignore[union-attr]
    assert views[1].ways == (views[1],)  # type: ignore[union-attr]
    assert views[1].flops == alone.flops  # type: ignore[union-attr]
    assert views[2].shared() != alone.shared()  # type: ignore[union-attr]


def test_what_stands_behind_a_factor_of_one_is_left_out_with_it() -> None:
    module = parse_module('mesh @m = ["x"=2, "y"=2] graph @g(%a: f32[32]) -> (%b) opset 21 { %b = Relu(%a) : f32[32] }')
    rule = FactorRule((((0, 1, 2),),), (((0, 1, 2),),), (4, 1, 8), (Kind.PASS,) * 3)
    assert module.graph.last is not None
    view = RuleView(module.graph.last, rule, module.mesh)
    both, minor, whole = ((Axis("x"), Axis("y")),), ((Axis("x"),),), ((),)
    assert view.all_expressible(((Axis("x"),), (), (Axis("y"),))) == (minor, minor)
    assert view.all_expressible((both[0], (), ())) == (both, both)
    assert view.all_expressible(((), (), (Axis("y"),))) == (whole, whole)


def test_minor_factors_are_cut_only_inside_whole_majors() -> None:
    # Heads cut over x: 4 heads of 16 make 64, of which the major part is sharded.
    _, placement = placed(
        "graph @g(%x: f32[2, 64@x]) -> (%y) opset 21 { %s = constant : i64[3] replicated [2, 4, 16]"
        " %y = Reshape(%x, %s) : f32[2, 4@x, 16] }"
    )
    assert texts(placement) == (["[_, @x]", "[_] replicated"], ["[_, @x, _]"])
    # 16 cut over x inside uncut heads cannot be told on the merged dim: it is gathered, or cut afterwards.
    _, placement = placed(
        "graph @g(%x: f32[2, 64] replicated) -> (%y) opset 21 { %s = constant : i64[3] replicated [2, 4, 16]"
        " %y = Reshape(%x, %s) : f32[2, 4, 16@x] }"
    )
    assert texts(placement) == (["[_, _] replicated", "[_] replicated"], ["[_, _, _] replicated"])


def test_nodes_without_a_rule_run_whole_and_say_why() -> None:
    node, placement = placed("graph @g(%x: f32[8@x]) -> (%n) opset 21 { %n = NonZero(%x) : i64[1, _] replicated }")
    assert texts(placement) == (["[_] replicated"], ["[_, _] replicated"])
    assert placement.rule is None
    assert why_whole(node) == "the size of its result depends on data"
    call = Function("my", "F", Graph()).call(())
    assert why_whole(call) == "a function call: open it with inline-functions"


def test_empty_blocks_cut_like_others() -> None:
    # 5 over 4 leaves the last device without a row: three share the work.
    node, placement = placed("graph @g(%x: f32[5@x]) -> (%y) opset 21 { %y = Relu(%x) : f32[5@x] }", mesh='"x"=4')
    assert texts(placement) == (["[@x]"], ["[@x]"])
    assert node.result.sharding is not None
    assert placement.ways(node.result.sharding.mesh) == 3


def test_one_element_is_not_cut() -> None:
    text = "graph @g(%x: f32[1@x, 8]) -> (%y) opset 21 { %y = Relu(%x) : f32[1@x, 8] }"
    _, placement = placed(text, mesh='"x"=4')
    assert texts(placement) == (["[_, _] replicated"], ["[_, _] replicated"])


def test_a_query_without_elements_is_not_attended_with() -> None:
    """Where keys and values are results too, these have elements: the device would have to run the op."""
    text = """graph @g(%q: f32[2, 4, 5@x, 8], %k: f32[2, 4, 6, 8] replicated, %v: f32[2, 4, 6, 8] replicated,
                       %pk: f32[2, 4, 3, 8] replicated, %pv: f32[2, 4, 3, 8] replicated) -> (%y) opset 23 {{
      {results} = Attention(%q, %k, %v, _, %pk, %pv) : {types} }}"""
    alone = text.format(results="%y", types="f32[2, 4, 5@x, 8]").replace(", _, %pk, %pv", "")
    assert texts(placed(alone, mesh='"x"=4')[1])[1] == ["[_, _, @x, _]"]
    types = "f32[2, 4, 5@x, 8], f32[2, 4, 9, 8] replicated, f32[2, 4, 9, 8] replicated"
    beside = text.format(results="%y, %nk, %nv", types=types)
    assert texts(placed(beside, mesh='"x"=4')[1])[1][0] == "[_, _, _, _] replicated"
    assert texts(placed(beside, mesh='"x"=3')[1])[1][0] == "[_, _, @x, _]"


def test_a_result_that_has_the_reduced_factor_is_in_blocks() -> None:
    """What attention found among the keys of a device is partial; these keys are a result of their own."""
    caches = "%a: f32[1, 2, 30, 4], %b: f32[1, 2, 30, 4]"
    text = f"""
        graph @g(%q: f32[1, 2, 2, 4], {caches}) -> (%y, %k, %v) opset 24 {{
          %y, %k, %v = Attention(%q, %q, %q, _, %a, %b) : f32[1, 2, 2, 4], f32[1, 2, 32, 4], f32[1, 2, 32, 4]
        }}"""
    node = parse_module(text).graph.first
    assert node is not None
    view = rule_view(node, Mesh({"x": 4}))
    assert view is not None
    (factor,) = view.program_factors
    cut = view.placement(tuple((Axis("x"),) if at == factor else () for at in range(len(view.rule.sizes))))
    assert cut is not None
    assert list(map(str, cut.results)) == ["[_, _, _, _] partial(sum: x)", "[_, _, @x, _]", "[_, _, @x, _]"]


def test_convolutions_are_alike_whose_attributes_are() -> None:
    def kind(pads: list[int]) -> object:
        text = (
            'mesh @m = ["x"=2]\ngraph @g(%x: f32[1, 4, 8], %w: f32[4, 4, 3]) -> (%y) opset 21 '
            f"{{ %y = Conv(%x, %w) {{pads={pads}}} : f32[1, 4, 8] }}"
        )
        module = parse_module(text)
        assert module.graph.last is not None
        view = rule_view(module.graph.last, module.mesh)
        assert view is not None
        assert view.program_factors
        return view.program_kind

    assert kind([1, 1]) == kind([1, 1])
    assert kind([1, 1]) != kind([2, 0])


def test_nodes_whose_programs_read_elements_are_never_alike() -> None:
    text = (
        'mesh @m = ["x"=2]\ngraph @g(%x: f32[1, 8]) -> (%y) opset 21 { %p = constant : i64[4] [0, 1, 0, 1]'
        " %y = Pad(%x, %p) : f32[1, 10] }"
    )
    node = parse_module(text).graph.last
    assert node is not None
    view = rule_view(node, Mesh({"x": 2}))
    assert view is not None
    assert view.program_factors
    assert view.program_kind is node
