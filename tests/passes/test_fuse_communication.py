import numpy as np
import onnx
import pytest

import irpar
from irpar.ir import Conflict, Module
from irpar.runtime.executor import Executor
from irpar.sharding import IrparError, Mesh
from tests.written import model_of_text

from .golden import check, read, run, run_pipeline

TWO = """
module {{network="{network}"}}
mesh @m = ["tp"=2]
graph local @g(%a: f32[4] of [8@tp], %b: f32[2, 6] of [4@tp, 6]) -> (%x, %y) opset 21 ranks [0, 1] {{
  %p = Neg(%a) : f32[4]
  %c = irpar.AllReduce(%p) {{axes=["tp"], reduce="sum", id=0}} : f32[4] doc "one"
  %q = Abs(%b) : f32[2, 6]
  %d = irpar.AllReduce(%q) {{axes=["tp"], reduce="{reduce}", id=1}} : f32[2, 6] doc "two"
  %x = Relu(%c) : f32[4]
  %y = Relu(%d) : f32[2, 6]
}}
"""


def two(network: str = "h100-nvlink-ib", reduce: str = "sum") -> str:
    return TWO.format(network=network, reduce=reduce)


def sent(module: Module) -> list[str]:
    return [node.op_type for graph in module.graphs for node in graph if node.domain == "irpar"]


def test_what_does_not_depend_on_each_other_is_sent_together() -> None:
    check(
        "fuse-communication",
        two(),
        """
        module {network="h100-nvlink-ib"}
        mesh @m = ["tp"=2]
        graph local @g(%a: f32[4] of [8@tp], %b: f32[2, 6] of [4@tp, 6]) -> (%x, %y) opset 21 ranks [0, 1] {
          %shape = constant : i64[2] [1, 4]
          %shape_1 = constant : i64[2] [1, 12]
          %widths = constant : i64[2] [4, 12]
          %shape_2 = constant : i64[1] [4]
          %shape_3 = constant : i64[2] [2, 6]
          %p = Neg(%a) : f32[4]
          %q = Abs(%b) : f32[2, 6]
          %fused = Reshape(%p, %shape) : f32[1, 4]
          %fused_1 = Reshape(%q, %shape_1) : f32[1, 12]
          %fused_2 = Concat(%fused, %fused_1) {axis=1} : f32[1, 16]
          %fused_3 = irpar.AllReduce(%fused_2) {axes=["tp"], reduce="sum", id=0} : f32[1, 16] doc "one; two"
          %piece, %piece_1 = Split(%fused_3, %widths) {axis=1} : f32[1, 4], f32[1, 12]
          %c = Reshape(%piece, %shape_2) : f32[4]
          %d = Reshape(%piece_1, %shape_3) : f32[2, 6]
          %x = Relu(%c) : f32[4]
          %y = Relu(%d) : f32[2, 6]
        }
        """,
    )


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (two("bytes"), ""),
        (two(reduce="max"), ""),
        (two(), "{size-mb=0.00005}"),
        (two().replace("%d = irpar.AllReduce(%q)", "%d = irpar.AllReduce(%e)").replace("%q = Abs(%b) : f32[2, 6]", "%r = ReduceSum(%c) {keepdims=0} : f32[]\n  %q = Abs(%b) : f32[2, 6]\n  %e = Add(%q, %r) : f32[2, 6]"), ""),
        (two().replace("f32[2, 6]", "f16[2, 6]"), ""),
    ],
    ids=["bytes", "reductions", "sizes", "dependence", "dtypes"],
)  # fmt: skip
def test_what_stays_alone(text: str, options: str) -> None:
    assert sent(run(f"fuse-communication{options}", text)) == ["AllReduce", "AllReduce"]


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ("mode=off", []),
        ("mode=size", [40 * 6]),
        ("mode=size, size-mb=0.0005", [40 * 3] * 2),  # 480 bytes of 160 each.
        ("mode=index, indices=[2, 3]", [40 * 2, 40 * 3]),
        ("mode=index, size-mb=0.0001", [40 * 6]),
    ],
)
@pytest.mark.parametrize("network", ["bytes", "h100-nvlink-ib"])
def test_modes(options: str, widths: list[int], network: str) -> None:
    """Six all-reduces of 40 numbers: how many numbers go at once."""
    text = several("AllReduce", ', reduce="sum"', [([2, 4, 5], [2, 4, 5])] * 6)
    module = read(text.replace("h100-nvlink-ib", network))
    run_pipeline(f"fuse-communication{{{options}}}", module)
    merged = [node for node in module.graph if node.domain == "irpar" and node.inputs[0].name.startswith("fused")]
    assert [node.inputs[0].shape[1] for node in merged] == widths
    assert len(sent(module)) == len(merged) + 6 - sum(widths) // 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("indices=[2]", r"there are indices \[2\] in mode auto"),
        ("mode=size, indices=[1]", r"there are indices \[1\] in mode size"),
        ("mode=index, indices=[3, 2]", r"the indices are \[3, 2\]"),
        ("mode=index, indices=[2, 2]", r"the indices are \[2, 2\]"),
        ("mode=index, indices=[-1, 2]", r"the indices are \[-1, 2\]"),
        ("size-mb=0", "size_mb is 0.0"),
        ("mode=size, size-mb=-3", "size_mb is -3.0"),
        ("size-mb=nan", "size_mb is nan"),
        ("mode=size, size-mb=inf", "size_mb is inf"),
        ("size-mb=1e308", r"size_mb is 1e\+308"),
    ],
)
def test_options_that_mean_nothing(options: str, message: str) -> None:
    with pytest.raises(IrparError, match=f"^{message}\n  fuse-communication{{.*\n  do: give"):
        run(f"fuse-communication{{{options}}}", two())


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("CollectivePermute", ", pairs=[{dim}, {next}]"),
        ("Broadcast", ", root={dim}"),
        ("CollectivePermute", ", pairs=[0, 1], shapes=[2, 4, 5, 2, 4, 5, 2, 4, 5]"),
    ],
    ids=["pairs", "roots", "sizes"],
)
def test_what_goes_elsewhere_stays_alone(op: str, attributes: str) -> None:
    module = read(several(op, attributes, shapes_of(op)))
    run_pipeline("fuse-communication", module)
    assert sent(module) == [op] * 3


def test_large_ones_are_not_copied_for_a_launch() -> None:
    large = two().replace("f32[4]", "f32[8000000]").replace("of [8@tp]", "of [16000000@tp]")
    large = large.replace("f32[2, 6]", "f32[2, 4000000]").replace("of [4@tp, 6]", "of [4@tp, 4000000]")
    assert sent(run("fuse-communication{size-mb=1000}", large)) == ["AllReduce", "AllReduce"]


def test_it_needs_the_local_view() -> None:
    with pytest.raises(IrparError, match="needs the local view"):
        run("fuse-communication", 'mesh @m = ["tp"=2]\ngraph @g(%x: f32[4]) -> (%x) opset 21 {\n}')


def several(op: str, attributes: str, shapes: list[tuple[list[int], list[int]]]) -> str:
    """A program with a collective of each (operand, result) shape, the operands one after the other."""
    lines = []
    for number, (operand, result) in enumerate(shapes):
        lines.append(f"  %p{number} = Neg(%x{number}) : f32{operand}")
        dim = attributes.format(dim=number % 3, next=(number + 1) % 3)
        lines.append(f'  %y{number} = irpar.{op}(%p{number}) {{axes=["tp"]{dim}, id={number}}} : f32{result}')
    inputs = ", ".join(f"%x{n}: f32{operand} of {operand} replicated" for n, (operand, _) in enumerate(shapes))
    results = ", ".join(f"%z{n}" for n in range(len(shapes)))
    lines += [f"  %z{n} = Relu(%y{n}) : f32{result} of {result}" for n, (_, result) in enumerate(shapes)]
    head = f'module {{network="h100-nvlink-ib"}}\nmesh @m = ["tp"=3]\ngraph local @g({inputs}) -> ({results})'
    return f"{head} opset 21 ranks [0, 1, 2] {{\n" + "\n".join(lines) + "\n}\n"


def shapes_of(op: str, dims: int = 3) -> list[tuple[list[int], list[int]]]:
    """One shape for each dim that is gathered or scattered."""
    found = []
    for dim in range(dims):
        small, large = [2, 4, 5], [2, 4, 5]
        large[dim] *= 3
        ends = {"AllGather": (small, large), "ReduceScatter": (large, small), "AllToAll": (large, large)}
        found.append(ends.get(op, (small, small)))
    return found


KINDS_OF_FUSION = [
    ("AllReduce", ', reduce="sum"'),
    ("AllGather", ", dim={dim}"),
    ("ReduceScatter", ', dim={dim}, reduce="sum"'),
    ("AllToAll", ", split_dim={dim}, concat_dim={dim}"),
    ("CollectivePermute", ", pairs=[0, 1, 1, 2]"),
    ("Broadcast", ", root=1"),
]
"""With what each takes, of which `several` knows the dim."""


@pytest.mark.parametrize(("op", "attributes"), KINDS_OF_FUSION)
@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_the_values_are_the_same(op: str, attributes: str, engine: str) -> None:
    check_values(op, attributes, shapes_of(op), engine)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_all_to_alls_between_dims(engine: str) -> None:
    shapes = [([6, 4, 5], [2, 12, 5]), ([2, 12, 5], [2, 4, 15]), ([2, 4, 15], [6, 4, 5])]
    check_values("AllToAll", ", split_dim={dim}, concat_dim={next}", shapes, engine)


def check_values(op: str, attributes: str, shapes: list[tuple[list[int], list[int]]], engine: str) -> None:
    """Each rank has other numbers: what a rank holds is an input that is sharded."""
    text = several(op, attributes, shapes).replace("replicated", "")
    module, fused = read(text), read(text)
    run_pipeline("fuse-communication", fused)
    assert sent(module) == [op] * 3
    assert sent(fused) == [op]
    random = np.random.default_rng(0)
    blocks = [[random.standard_normal(shape).astype(np.float32) for shape, _ in shapes] for _ in range(3)]
    calls = []
    for made in (module, fused):
        results = ranks(made, blocks, engine)
        calls.append(results)
    for plain, merged in zip(*calls, strict=True):
        np.testing.assert_allclose(merged, plain, rtol=1e-6, atol=1e-6)


def ranks(module: Module, blocks: list[list[np.ndarray]], engine: str) -> list[np.ndarray]:
    """What every rank has in the end: its inputs are slices of whole ones, chosen by its coordinates."""
    for value in module.graph.inputs:
        value.sharding = irpar.Sharding.of_spec(module.mesh, [["tp"], None, None])
        value.global_shape = (value.shape[0] * 3, *value.shape[1:])
    for value in module.graph.outputs:
        value.sharding = irpar.Sharding.of_spec(module.mesh, [["tp"], None, None])
        value.global_shape = (value.shape[0] * 3, *value.shape[1:])
    inputs = {
        value.name: np.concatenate([blocks[rank][number] for rank in range(3)])
        for number, value in enumerate(module.graph.inputs)
    }
    with Executor(module, module.mesh, engine=engine) as executor:
        return list(executor.run(inputs).values())


UNEVEN = """
g (float[5, 64] x, float[64, 32] w1, float[64, 32] w2) => (float[5, 32] y, float[5, 32] z) {
  p = MatMul(x, w1)  q = MatMul(x, w2)  y = Relu(p)  z = Exp(q)
}
"""


def test_programs_of_uneven_blocks_merge_alike(tmp_path) -> None:  # type: ignore[no-untyped-def]
    onnx.save(model_of_text(UNEVEN), tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    cuts = {"x": ["dp", None], "w1": [None, "tp"], "w2": [None, "tp"], "y": ["dp", None], "z": ["dp", None]}
    irpar.annotate(module, cuts)
    partition = irpar.partition(module, Mesh({"dp": 2, "tp": 2}), network="h100-nvlink-ib")
    assert len(partition.module.graphs) == 2
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_gather"]
    partition.verify(engine="numpy").check()
    log = partition.executor("numpy").log
    assert log.differences(partition.plan.collectives) == []


BODY = """
module {network="h100-nvlink-ib"}
mesh @m = ["tp"=2]
graph local @g(%n: i64[] of [] replicated, %a: f32[4] of [8@tp], %b: f32[6] of [12@tp]) -> (%x, %y) opset 21 ranks [0, 1] {
  %x, %y = Loop(%n, _, %a, %b) {body=graph @b(%i: i64[], %go: bool[], %s: f32[4], %t: f32[6]) -> (%go, %c, %d) {
      %p = Neg(%s) : f32[4]
      %c = irpar.AllReduce(%p) {axes=["tp"], reduce="max", id=0} : f32[4]
      %q = Abs(%t) : f32[6]
      %d = irpar.AllReduce(%q) {axes=["tp"], reduce="max", id=1} : f32[6]
    }} : f32[4], f32[6]
}
"""


def test_bodies_merge_what_is_in_them() -> None:
    module = read(BODY)
    run_pipeline("fuse-communication", module)
    assert [node.op_type for node in module.graph.walk() if node.domain == "irpar"] == ["AllReduce"]


def test_conflicts_are_told_together() -> None:
    module = read(two())
    for name, value in (("c", "a"), ("d", "b")):
        module.conflicts[name] = Conflict(value, "[@tp]", "annotated", f"Relu of {value}", "[_]", "", name == "d", "do")
    run_pipeline("fuse-communication", module)
    (told,) = module.conflicts.values()
    assert (told.value, told.lies, told.node, told.avoid) == ("a; b", "[@tp]", "Relu of a; Relu of b", "do")
    assert told.rematerialized


def test_blocks_without_elements_are_sent_alone() -> None:
    """A 0 in the shape that a Reshape gets would be the size that was there."""
    empty = two().replace("%b: f32[2, 6] of [4@tp, 6]", "%b: f32[2, 0] of [4@tp, 0]").replace("f32[2, 6]", "f32[2, 0]")
    assert sent(run("fuse-communication", empty)) == ["AllReduce", "AllReduce"]


STAGES = """
module {network="h100-nvlink-ib"}
mesh @m = ["x"=3]
graph local @first(%a: f32[4] of [4]) -> (%s) opset 21 ranks [0] {
  BEGIN
  %b = irpar.Recv() {channel=3, pairs=[1, 0], dtype="f32", shape=[4], id=2} : f32[4] of [4]
  %c = Neg(%b) : f32[4] of [4] partial(sum: x)
  END
}
graph local @second(%a: f32[4] of [4]) -> (%s) opset 21 ranks [1] {
  BEGIN
  irpar.Send(%p) {channel=3, pairs=[1, 0], id=2}
  %c = Neg(%a) : f32[4] of [4] partial(sum: x)
  END
}
graph local @third(%a: f32[4] of [4]) -> (%s) opset 21 ranks [2] {
  BEGIN
  %c = Neg(%a) : f32[4] of [4] partial(sum: x)
  END
}
"""
"""What the first program reduces last depends on what the second one has reduced first, by what it sends."""
BEGIN = """
  %u = Relu(%a) : f32[4] of [4] partial(sum: x)
  %v = Abs(%a) : f32[4] of [4] partial(sum: x)
  %p = irpar.AllReduce(%u) {axes=["x"], reduce="sum", id=0} : f32[4] of [4]
  %o = irpar.AllReduce(%v) {axes=["x"], reduce="sum", id=1} : f32[4] of [4]
"""
END = """
  %q = irpar.AllReduce(%c) {axes=["x"], reduce="sum", id=3} : f32[4] of [4]
  %s = Sum(%p, %o, %q) : f32[4] of [4]
"""


def test_what_another_rank_sends_in_between_keeps_collectives_apart() -> None:
    module = read(STAGES.replace("BEGIN", BEGIN.strip()).replace("END", END.strip()))
    run_pipeline("fuse-communication", module)
    apart = ["AllReduce", "AllReduce"]
    assert sent(module) == [apart[0], "Recv", apart[1], apart[0], "Send", apart[1], *apart]
    numbers = np.arange(4, dtype=np.float32)
    with Executor(module, module.mesh, engine="numpy") as executor:
        # %p and %o are 3 a, %q is -3 a - a - a; ids agree, though the third program has one less.
        np.testing.assert_array_equal(executor.run({"a": numbers})["s"], numbers)
