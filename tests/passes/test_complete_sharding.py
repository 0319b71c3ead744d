import itertools

import pytest

from irpar.ir import AnnotationError, Module
from irpar.pass_manager import PassManager
from irpar.passes.complete_sharding import propagated
from irpar.sharding import IrparError, Mesh

from .golden import body, check, read, run

MLP = """
mesh @m = ["dp"=2, "tp"=4]
graph @mlp(%x: {x}) -> (%y) opset 21 {{
  %w1 = constant : {w1} data("mlp.bin", 0, 65536) from "fc1.weight"
  %w2 = constant : {w2} data("mlp.bin", 65536, 65536) from "fc2.weight"
  %h = MatMul(%x, %w1) : f32[8, 256] from "/fc1/MatMul"
  %a = Relu(%h) : f32[8, 256]
  %y = MatMul(%a, %w2) : f32[8, 64] from "/fc2/MatMul"
}}
"""
DONE = """
mesh @m = ["dp"=2, "tp"=4]
graph @mlp(%x: f32[8@dp, 64]) -> (%y) opset 21 {
  %w1 = constant : f32[64, 256@tp] data("mlp.bin", 0, 65536) from "fc1.weight"
  %w2 = constant : f32[256@tp, 64] data("mlp.bin", 65536, 65536) from "fc2.weight"
  %h = MatMul(%x, %w1) : f32[8@dp, 256@tp] from "/fc1/MatMul"
  %a = Relu(%h) : f32[8@dp, 256@tp]
  %y = MatMul(%a, %w2) : f32[8@dp, 64] from "/fc2/MatMul"
}
"""


def test_what_propagates_is_told_without_a_change():
    module = read(MLP.format(x="f32[8@dp?, 64]", w1="f32[64, 256@tp]", w2="f32[256, 64]"))
    before = str(module), dict(module.decisions)
    lies = propagated(module)
    assert (str(module), dict(module.decisions)) == before
    PassManager.parse("complete-sharding{strategy=propagate}").run(module)
    assert {name: str(lies[module.graph.value(name)]) for name in "xhay"} == {
        name: str(module.graph.value(name).sharding) for name in "xhay"
    }
    assert str(lies[module.graph.value("h")]) == "[@dp, @tp]"


@pytest.mark.parametrize(
    ("x", "w1", "w2"),
    [
        ("f32[8@dp, 64]", "f32[64, 256@tp]", "f32[256@tp, 64]"),
        ("f32[8@dp, 64]", "f32[64, 256@tp]", "f32[256, 64]"),
        ("f32[8@dp, 64]", "f32[64, 256]", "f32[256@tp, 64]"),
        ("f32[8@dp?, 64?]", "f32[64, 256@tp]", "f32[256?, 64?]"),
    ],
    ids=["all", "forward", "backward", "open"],
)
def test_axes_flow_both_ways(x: str, w1: str, w2: str) -> None:
    check("complete-sharding{share-results=false}", MLP.format(x=x, w1=w1, w2=w2), DONE)


def test_running_it_again_changes_nothing() -> None:
    module = check("complete-sharding", DONE, DONE)
    assert not PassManager.parse("complete-sharding").run(module).changed


def test_the_order_of_annotations_does_not_matter() -> None:
    annotations = [("x", ["dp", None]), ("fc1.weight", [None, "tp"]), ("fc2.weight", ["tp", None])]
    texts = set()
    for order in itertools.permutations(annotations):
        module = read(MLP.format(x="f32[8, 64]", w1="f32[64, 256]", w2="f32[256, 64]"))
        for name, spec in order:
            module.shard(name, spec)
        PassManager.parse("complete-sharding{share-results=false}").run(module)
        texts.add(body(module))
    assert texts == {DONE.strip()}


def test_closed_dims_and_pins_stay() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%z) opset 21 {
          %y = Relu(%x) : f32[8, 4] replicated
          %z = Neg(%y) : f32[8, 4]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%z) opset 21 {
          %y = Relu(%x) : f32[8, 4] replicated
          %z = Neg(%y) : f32[8, 4] replicated
        }
        """,
    )


TORN = """
mesh @m = ["dp"=2, "tp"=4]
graph @g(%x: f32[64@tp{x}, 128]) -> (%y) opset 21 {{
  %w1 = constant : f32[128, 512@tp{w1}] data("w.bin", 0, 262144)
  %w2 = constant : {w2} data("w.bin", 262144, 262144)
  %h = MatMul(%x, %w1) : f32[64{h}, 512{k}]
  %a = Relu(%h) : f32[64{h}, 512{k}]
  %y = MatMul(%a, %w2) : f32[64{h}, 128]{whole}
}}
"""


@pytest.mark.parametrize("strategy", ["propagate", "cost"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"w1": "!1"}, {"h": "@tp", "k": "", "w2": "f32[512, 128] replicated", "whole": ""}),
        ({"x": "!1"}, {"h": "", "k": "@tp", "w2": "f32[512@tp, 128]", "whole": " replicated"}),
        ({"x": "!9", "w1": "!2"}, {"h": "", "k": "@tp", "w2": "f32[512@tp, 128]", "whole": " replicated"}),
    ],
    ids=["rows first", "columns first", "columns before rows"],
)
def test_what_an_earlier_round_decides_stays(before: dict[str, str], after: dict[str, str], strategy: str) -> None:
    plain = {"x": "", "w1": "", "w2": "f32[512, 128]", "h": "", "k": "", "whole": ""}
    pipeline = f"complete-sharding{{strategy={strategy}, share-results=false}}"
    module = check(pipeline, TORN.format(**plain | before), TORN.format(**plain | after))
    assert not PassManager.parse(pipeline).run(module).changed


def test_reasons_say_which_round_decided() -> None:
    plain = {"x": "!1", "w1": "", "w2": "f32[512, 128]", "h": "", "k": "", "whole": ""}
    module = run("complete-sharding", TORN.format(**plain))
    told = module.decision("a", "tp")
    assert told is not None
    assert told.why == "follows %h through Relu of %a at priority 0"


def test_later_rounds_add_axes_to_what_earlier_ones_left() -> None:
    check(
        "complete-sharding{strategy=propagate}",
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@dp, 4], %m: f32[8@(dp,tp)!1, 4], %n: f32[8?!2, 4]) -> (%z) opset 21 {
          %y = Add(%x, %m) : f32[8, 4]
          %v = Relu(%y) : f32[8, 4]
          %z = Mul(%v, %n) : f32[8, 4]
        }
        """,
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@dp, 4], %m: f32[8@(dp,tp), 4], %n: f32[8@(dp,tp), 4]) -> (%z) opset 21 {
          %y = Add(%x, %m) : f32[8@(dp,tp), 4]
          %v = Relu(%y) : f32[8@(dp,tp), 4]
          %z = Mul(%v, %n) : f32[8@(dp,tp), 4]
        }
        """,
    )


def test_no_dim_takes_the_axes_for_which_another_waits() -> None:
    check(
        "complete-sharding{strategy=propagate}",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[8@tp, 4], %w: f32[8?, 4@tp!1]) -> (%z) opset 21 {
          %y = Add(%x, %w) : f32[8, 4]
          %z = Relu(%y) : f32[8, 4]
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[8@tp, 4], %w: f32[8, 4@tp]) -> (%z) opset 21 {
          %y = Add(%x, %w) : f32[8@tp, 4]
          %z = Relu(%y) : f32[8@tp, 4]
        }
        """,
    )


def test_open_dims_take_minor_axes_and_closed_ones_none_at_any_priority() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@(dp,tp), 4], %o: f32[8@dp?!1, 4], %c: f32[8!1, 4!2]) -> (%z, %v) opset 21 {
          %y = Relu(%x) : f32[8, 4]
          %z = Add(%y, %o) : f32[8, 4]
          %v = Add(%y, %c) : f32[8, 4]
        }
        """,
        """
        mesh @m = ["dp"=2, "tp"=4]
        graph @g(%x: f32[8@(dp,tp), 4], %o: f32[8@(dp,tp), 4], %c: f32[8, 4] replicated) -> (%z, %v) opset 21 {
          %y = Relu(%x) : f32[8@(dp,tp), 4]
          %z = Add(%y, %o) : f32[8@(dp,tp), 4]
          %v = Add(%y, %c) : f32[8@(dp,tp), 4]
        }
        """,
    )


@pytest.mark.parametrize(("option", "cut"), [("false", "8@tp, 64"), ("true", "8, 64@tp")])
def test_op_priorities_go_through_elementwise_operators_first(option: str, cut: str) -> None:
    program = """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[8@tp, 32]{whole}) -> (%z) opset 21 {{
          %w = constant : f32[32, 64]{whole} data("w.bin", 0, 8192)
          %h = MatMul(%x, %w) : f32[{cut}]
          %a = Relu(%h) : f32[{cut}]
          %z = Neg(%a) : f32[8, 64@tp]
        }}
        """
    module = run(
        f"complete-sharding{{strategy=propagate, op-priorities={option}}}", program.format(cut="8, 64", whole="")
    )
    assert f"%a = Relu(%h) : f32[{cut}]" in str(module)
    assert f"%h = MatMul(%x, %w) : f32[{cut}]" in str(module)


def test_two_axes_on_one_dim_and_heads_of_a_reshape() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["a"=2, "b"=4]
        graph @g(%x: f32[2, 6, 64@(a,b)]) -> (%y) opset 21 {
          %s = constant : i64[4] [2, 6, 4, 16]
          %h = Reshape(%x, %s) : f32[2, 6, 4, 16]
          %y = Transpose(%h) {perm=[0, 2, 1, 3]} : f32[2, 4, 6, 16]
        }
        """,
        """
        mesh @m = ["a"=2, "b"=4]
        graph @g(%x: f32[2, 6, 64@(a,b)]) -> (%y) opset 21 {
          %s = constant : i64[4] replicated [2, 6, 4, 16]
          %h = Reshape(%x, %s) : f32[2, 6, 4@(a,b:(1)2), 16@b:(2)2]
          %y = Transpose(%h) {perm=[0, 2, 1, 3]} : f32[2, 4@(a,b:(1)2), 6, 16@b:(2)2]
        }
        """,
    )


def test_a_dim_with_empty_blocks_is_carried() -> None:
    # 5 over 4 is 2, 2, 1 and an empty block.
    check(
        "complete-sharding",
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[2, 3]) -> (%y) opset 21 {
          %w = constant : f32[3, 5@tp] data("w.bin", 0, 60)
          %h = MatMul(%x, %w) : f32[2, 5]
          %y = ReduceMax(%h) {keepdims=0} : f32[]
        }
        """,
        """
        mesh @m = ["tp"=4]
        graph @g(%x: f32[2, 3] replicated) -> (%y) opset 21 {
          %w = constant : f32[3, 5@tp] data("w.bin", 0, 60)
          %h = MatMul(%x, %w) : f32[2, 5@tp]
          %y = ReduceMax(%h) {keepdims=0} : f32[] replicated
        }
        """,
    )


def test_a_dim_of_one_element_is_cut_only_where_it_is_annotated() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["dp"=4]
        graph @g(%x: f32[1@dp, 3]) -> (%y) opset 21 {
          %r = Relu(%x) : f32[1, 3]
          %y = Sigmoid(%r) : f32[1@dp, 3]
        }
        """,
        """
        mesh @m = ["dp"=4]
        graph @g(%x: f32[1@dp, 3]) -> (%y) opset 21 {
          %r = Relu(%x) : f32[1, 3] replicated
          %y = Sigmoid(%r) : f32[1@dp, 3]
        }
        """,
    )


def _with_tokens(count: int, joined: str) -> Module:
    """So many tokens of 16 joined with the others, which are sharded over four devices."""
    text = f"""
        mesh @m = ["sp"=4]
        graph @g(%t: f32[4, {count}, 8], %x: f32[4, {16 - count}@sp, 8], %w: f32[8, 8]) -> (%y) opset 21 {{
          %k = {joined} : f32[4, 16, 8]
          %h = MatMul(%k, %w) : f32[4, 16, 8]
          %y = Relu(%h) : f32[4, 16, 8]
        }}
        """
    return run("complete-sharding,insert-redistribution", text)


@pytest.mark.parametrize("joined", ["Concat(%t, %x) {axis=1}", "Concat(%x, %t) {axis=1}"])
def test_where_one_tensor_is_too_small_to_be_cut_the_axis_goes_to_another_dim(joined: str) -> None:
    """Three tokens beside more, of which devices hold a part each."""
    module = _with_tokens(3, joined)
    assert [str(module.graph.value(name).sharding) for name in "khy"] == ["[@sp, _, _]"] * 3
    moved = [node.op_type for node in module.graph if node.domain == "irpar"]
    assert sorted(moved) == ["AllSlice", "AllToAll"], "the tokens are there in full"


@pytest.mark.parametrize("joined", ["Concat(%t, %x) {axis=1}", "Concat(%x, %t) {axis=1}"])
def test_a_token_beside_many_is_there_in_full(joined: str) -> None:
    module = _with_tokens(1, joined)
    assert [str(module.graph.value(name).sharding) for name in "tkhy"] == ["[_, _, _] replicated", *["[_, @sp, _]"] * 3]
    assert not [node for node in module.graph if node.domain == "irpar"]


def test_what_is_looked_up_may_be_sharded_along_another_dim_first() -> None:
    """Patches of a sequence of which devices hold a part each: sums of what each finds there would be twice as large."""
    text = """
        mesh @m = ["sp"=2]
        graph @g(%x: f32[4, 32@sp, 3]) -> (%y) opset 21 {
          %i = constant : i64[3, 16] data("i.bin", 0, 384)
          %p = Gather(%x, %i) {axis=1} : f32[4, 3, 16, 3]
          %y = Relu(%p) : f32[4, 3, 16, 3]
        }
        """
    module = run("complete-sharding,insert-redistribution", text)
    assert [str(module.graph.value(name).sharding) for name in "py"] == ["[@sp, _, _, _]"] * 2
    assert [node.op_type for node in module.graph if node.domain == "irpar"] == ["AllToAll"]


def test_experts_that_are_looked_up_are_sharded_along_their_inner_dim_where_that_sends_less() -> None:
    """What is made of a weight of each token's expert is larger than the weights of all experts."""
    text = """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[64, 1, 16], %w: f32[4@tp, 16, 32], %v: f32[4@tp, 32, 16], %e: i64[64, 1]) -> (%y) opset 21 {
          %a = GatherND(%w, %e) : f32[64, 16, 32]
          %h = MatMul(%x, %a) : f32[64, 1, 32]
          %r = Relu(%h) : f32[64, 1, 32]
          %b = GatherND(%v, %e) : f32[64, 32, 16]
          %y = MatMul(%r, %b) : f32[64, 1, 16]
        }
        """
    module = run("complete-sharding,insert-redistribution", text)
    cuts = [str(module.graph.value(name).sharding) for name in "ahb"]
    assert all("@tp" in cut and "partial" not in cut for cut in cuts), cuts
    assert "AllGather" not in [node.op_type for node in module.graph]


def test_an_op_without_a_rule_stays_whole() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%n) opset 21 {
          %n = NonZero(%x) : i64[2, _]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4]) -> (%n) opset 21 {
          %n = NonZero(%x) : i64[2, _] replicated
        }
        """,
    )


def test_constants_that_readers_want_differently_are_written_whole() -> None:
    module = run(
        "complete-sharding",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[8@tp, 4], %y: f32[8, 4@tp]) -> (%a, %b) opset 21 {
          %c = constant : f32[8, 4] data("c.bin", 0, 128)
          %a = Add(%x, %c) : f32[8, 4]
          %b = Add(%y, %c) : f32[8, 4]
        }
        """,
    )
    assert module.graph.value("c").sharding.is_replicated


def test_decisions_lead_back_to_the_annotation() -> None:
    module = read(MLP.format(x="f32[8, 64]", w1="f32[64, 256]", w2="f32[256, 64]"))
    module.shard("x", ["dp", None])
    module.shard("fc1.weight", [None, "tp"])
    PassManager.parse("complete-sharding").run(module)
    assert [name for name, _ in module.chain("w2", "tp")] == ["w2", "a", "h", "w1"]
    assert [name for name, _ in module.chain("y", "dp")] == ["y", "a", "h", "x"]
    assert module.chain("w2", "tp")[-1][1].why == 'annotated "fc1.weight"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mesh @m = ["tp"=2]\ngraph @g(%x: f32[batch@tp]) -> (%y) opset 21 { %y = Relu(%x) : f32[batch] }', "batch"),
        ("graph @g(%x: f32[8]) -> (%y) opset 21 { %y = Relu(%x) : f32[8] }", "no mesh"),
        (
            'mesh @m = ["tp"=2]\ngraph @g(%x: f32[8]) -> (%n) opset 21 { %n = NonZero(%x) : i64[1, _@tp] }',
            "depends on data",
        ),
        ('mesh @m = ["tp"=2]\ngraph @g(%x: f32[8@tp]) -> (%y) opset 21 { %y = Relu(%x) : ? }', "run infer-types"),
    ],
    ids=["symbol", "mesh", "data-dependent", "untyped"],
)
def test_refusals(text: str, message: str) -> None:
    module = read(text)
    with pytest.raises(IrparError, match=message):
        PassManager.parse("complete-sharding").run(module)


def test_an_annotation_that_matches_nothing_lists_the_nearest_names() -> None:
    module = read(MLP.format(x="f32[8, 64]", w1="f32[64, 256]", w2="f32[256, 64]"))
    with pytest.raises(AnnotationError, match=r"nearest names: .*fc1\.weight"):
        module.shard("fc.weight", [None, "tp"])


def test_an_axis_that_the_mesh_lacks_is_named_with_its_remedy() -> None:
    module = read("graph @g(%x: f32[8, 4]) -> (%y) opset 21 { %y = Relu(%x) : f32[8, 4] }")
    module.shard("x", ["mp", None])
    with pytest.raises(AnnotationError, match=r'no axis "mp" in mesh dp=2,tp=4') as caught:
        module.set_mesh(Mesh({"dp": 2, "tp": 4}))
    assert 'write "dp" (size 2), "tp" (size 4), or add mp to the mesh' in str(caught.value)
    assert "it matches 1 tensor(s), the first: x f32[8, 4]" in str(caught.value)


def test_the_result_of_a_gemm_that_is_taken_apart_keeps_its_reason() -> None:
    module = read(
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8], %w: f32[8, 6], %b: f32[6]) -> (%z) opset 21 {
          %y = Gemm(%x, %w, %b) : f32[4, 6]
          %z = Relu(%y) : f32[4, 6]
        }
        """
    )
    module.shard("y", [None, "tp"])
    module.set_mesh(module.mesh)
    PassManager.parse("split-bias,complete-sharding").run(module)
    producer = module.graph.value("y").node
    assert producer is not None
    assert producer.op_type == "Add"
    assert [decision.why for decision in module.decisions["y"]] == ['annotated "y"']
    assert [name for name, _ in module.chain("z")] == ["z", "y"]


def test_a_loop_lies_alike_on_both_sides_of_its_boundary() -> None:
    check(
        "complete-sharding",
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8], %w: f32[8, 8@tp]) -> (%y, %ys) opset 21 {
          %n = constant : i64[] 3
          %y, %ys = Loop(%n, _, %x) {body=graph @b(%i: i64[], %c: bool[], %a: f32[4, 8]) -> (%d, %o, %r) {
            %d = Identity(%c) : bool[]
            %o = MatMul(%a, %w) : f32[4, 8]
            %r = Relu(%o) : f32[4, 8]
          }} : f32[4, 8], f32[3, 4, 8]
        }
        """,
        """
        mesh @m = ["tp"=2]
        graph @g(%x: f32[4, 8@tp], %w: f32[8, 8@tp]) -> (%y, %ys) opset 21 {
          %n = constant : i64[] replicated 3
          %y, %ys = Loop(%n, _, %x) {body=graph @b(%i: i64[] replicated, %c: bool[] replicated, %a: f32[4, 8@tp]) -> (%d, %o, %r) {
            %d = Identity(%c) : bool[] replicated
            %o = MatMul(%a, %w) : f32[4, 8@tp]
            %r = Relu(%o) : f32[4, 8@tp]
          }} : f32[4, 8@tp], f32[3, 4, 8@tp]
        }
        """,
    )
