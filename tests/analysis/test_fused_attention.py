"""Attention that is recognised in plain operators: golden texts, what forbids it, and the same numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.analysis.kernel_fusion import Stretch, fuse, stand_ins
from irpar.ir import Module, Node, Value, parse_module, plain_attribute, print_module
from irpar.kernels import lookup
from irpar.onnx_io import to_module
from irpar.passes.fold_constants import FoldConstants
from irpar.passes.infer_types import InferTypes
from irpar.verification.inputs import random_inputs
from tests.runtime.devices import strict_device

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPORTS = {
    "bart": 3,
    "bert": 2,
    "gpt": 2,
    "gpt-fp16": 2,
    "hf-bert": 2,
    "hf-gpt2": 2,
    "hf-llama": 2,
    "hf-mixtral": 2,
    "hf-t5": 3,
    "hf-vit": 2,
    "llama": 2,
    "vit": 2,
}
"""Exports with the attentions that each has."""
BUILT = {"bert": 2, "gpt": 2, "llama": 2, "moe": 2, "t5": 6, "vit": 2}


def typed(module: Module) -> Module:
    for pass_ in (InferTypes(), FoldConstants(), InferTypes()):
        pass_.run(module)
    return module


def untouched(body: str, inputs: str) -> Module:
    lines = [line if ": " in line else f"{line} : ?" for line in body.splitlines() if line.strip()]
    module = parse_module("\n".join([f"graph @g({inputs}) -> (%y) opset 23 {{", *lines, "}"]))
    InferTypes().run(module)
    return module


def fused(body: str, inputs: str = "%q: f32[2, 3, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 24]") -> str:
    """The nodes of a graph as they are then, a line each."""
    module = untouched(body, inputs)
    fuse(module.graph)
    lines = print_module(module).text.splitlines()
    return "\n".join(line.strip() for line in lines if " = " in line and " = constant" not in line)


SCORES = """
    %kt = Transpose(%k) {perm=[0, 1, 3, 2]}
    %s = MatMul(%q, %kt)
"""
WEIGHTED = """
    %p = Softmax(%s_) {axis=-1}
    %y = MatMul(%p, %v)
"""
CAUSAL = [[float(key > query) * -1e9 for key in range(8)] for query in range(8)]


def test_a_scale_and_a_mask_that_is_added() -> None:
    inputs = "%q: f32[2, 6, 8, 16], %k: f32[2, 8, 3, 16], %v: f32[2, 3, 8, 24], %m: f32[2, 1, 8, 8]"
    body = """
        %two = constant : f32[] 0.5
        %four = constant : f32[] 4.0
        %kt = Transpose(%k) {perm=[0, 2, 3, 1]}
        %one = constant : i64[1] [2]
        %u = Unsqueeze(%v, %one)
        %wide = constant : i64[5] [2, 3, 2, 8, 24]
        %e = Expand(%u, %wide)
        %joined = constant : i64[4] [2, 6, 8, 24]
        %w = Reshape(%e, %joined)
        %ku = Unsqueeze(%kt, %one)
        %kwide = constant : i64[5] [2, 3, 2, 16, 8]
        %ke = Expand(%ku, %kwide)
        %kjoined = constant : i64[4] [2, 6, 16, 8]
        %kr = Reshape(%ke, %kjoined)
        %t = Mul(%q, %two)
        %s = MatMul(%t, %kr)
        %d = Div(%s, %four)
        %a = Add(%d, %m)
        %p = Softmax(%a) {axis=-1}
        %y = MatMul(%p, %w)
    """
    found = fused(body, inputs)
    assert found.splitlines() == [
        "%y_transpose = Transpose(%k) {perm=[0, 2, 1, 3]} : f32[2, 3, 8, 16]",
        "%y = Attention(%q, %y_transpose, %v, %m) {scale=0.125} : f32[2, 6, 8, 24]",
    ]


def test_keys_that_are_scaled_and_turned_behind_their_repetition() -> None:
    body = """
        %two = constant : i64[1] [2]
        %half = constant : f32[] 0.5
        %wide = constant : i64[5] [2, 3, 4, 8, 16]
        %ku = Unsqueeze(%k, %two)
        %ke = Expand(%ku, %wide)
        %kt = Transpose(%ke) {perm=[0, 1, 2, 4, 3]}
        %km = Mul(%kt, %half)
        %turned = constant : i64[4] [2, 12, 16, 8]
        %kr = Reshape(%km, %turned)
        %vu = Unsqueeze(%v, %two)
        %ve = Expand(%vu, %wide)
        VALUES
        %joined = constant : i64[4] [2, 12, 8, 16]
        %vr = Reshape(%vm, %joined)
        %qm = Mul(%q, %half)
        %s = MatMul(%qm, %kr)
        %p = Softmax(%s) {axis=-1}
        %y = MatMul(%p, %vr)
    """
    inputs = "%q: f32[2, 12, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 16]"
    found = fused(body.replace("VALUES", "").replace("%vm", "%ve"), inputs)
    assert found == "%y = Attention(%q, %k, %v) {scale=0.25} : f32[2, 12, 8, 16]"
    scaled = fused(body.replace("VALUES", "%vm = Mul(%ve, %half)"), inputs)
    assert "Attention(%q, %y_transpose, %vr) {scale=0.5}" in scaled, "values have no scale"


@pytest.mark.parametrize(
    ("before", "attributes"),
    [
        ("%s_ = Identity(%s)", "{scale=1.0}"),
        ("%c = constant : f32[] 8.0\n%s_ = Div(%s, %c)", "{scale=0.125}"),
        (
            "%c = constant : f32[] 8.0\n%d = Div(%s, %c)\n%t = Tanh(%d)\n%s_ = Mul(%t, %c)",
            "{scale=1.0, softcap=8.0}",
        ),
        (
            "%c = constant : f32[] -8.0\n%d = Div(%s, %c)\n%t = Tanh(%d)\n%s_ = Mul(%t, %c)",
            "{scale=1.0, softcap=8.0}",
        ),
        (f"%m = constant : f32[8, 8] {CAUSAL}\n%s_ = Add(%m, %s)", "{scale=1.0, is_causal=1}"),
    ],
    ids=["plain", "scale", "softcap", "negative softcap", "causal"],
)
def test_what_is_done_to_scores(before: str, attributes: str) -> None:
    assert fused(SCORES + before + WEIGHTED) == f"%y = Attention(%q, %k, %v) {attributes} : f32[2, 3, 8, 24]"


PLACES = "[0, 1, 2, 3, 4, 5, 6, 7]"
COMPARED = f"""
    %n = constant : i64[8] {PLACES}
    %r = constant : i64[8, 1] [{", ".join(f"[{n}]" for n in range(8))}]
    %c = constant : i64[1, 8] [{PLACES}]
    %axis = constant : i64[1] [1]
    %zero = constant : f32[] 0.0
    %low = constant : f32[] -1e9
    %off = constant : f32[] -inf
"""


@pytest.mark.parametrize(
    "mask",
    [
        "%b = GreaterOrEqual(%r, %c)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%r, %n)\n%m = Where(%b, %zero, %off)",
        "%b = LessOrEqual(%c, %r)\n%m = Where(%b, %zero, %low)",
        "%b = Greater(%c, %r)\n%m = Where(%b, %low, %zero)",
        "%b = Less(%r, %c)\n%m = Where(%b, %off, %zero)",
        "%g = Greater(%c, %r)\n%b = Not(%g)\n%m = Where(%b, %zero, %low)",
        "%u = Unsqueeze(%n, %axis)\n%b = GreaterOrEqual(%u, %c)\n%m = Where(%b, %zero, %low)",
    ],
)
def test_causal_masks_that_are_computed_of_places(mask: str) -> None:
    causal = "%y = Attention(%q, %k, %v) {scale=1.0, is_causal=1} : f32[2, 3, 8, 24]"
    assert fused(COMPARED + mask + SCORES + "%s_ = Add(%s, %m)" + WEIGHTED).endswith(causal)


@pytest.mark.parametrize(
    "chosen",
    [
        "%b = GreaterOrEqual(%r, %c)\n%s_ = Where(%b, %s, %off)",
        "%b = Greater(%c, %r)\n%s_ = Where(%b, %off, %s)",
        "%b = Less(%r, %n)\n%s_ = Where(%b, %low, %s)",
    ],
)
def test_scores_that_places_choose(chosen: str) -> None:
    causal = "%y = Attention(%q, %k, %v) {scale=1.0, is_causal=1} : f32[2, 3, 8, 24]"
    assert fused(COMPARED + SCORES + chosen + WEIGHTED).endswith(causal)


@pytest.mark.parametrize(
    "mask",
    [
        "%b = GreaterOrEqual(%c, %r)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%r, %c)\n%m = Where(%b, %low, %zero)",
        "%b = Greater(%r, %c)\n%m = Where(%b, %zero, %low)",
        "%b = Equal(%r, %c)\n%m = Where(%b, %zero, %low)",
        "%t = Mul(%n, %n)\n%b = GreaterOrEqual(%r, %t)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%r, %c)\n%m = Where(%b, %zero, %few)",
        "%b = GreaterOrEqual(%r, %later)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%falling, %fallen)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%same, %sames)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%wrapped, %wraps)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%floats, %float)\n%m = Where(%b, %zero, %low)",
        "%b = GreaterOrEqual(%one, %c)\n%m = Where(%b, %zero, %low)",
    ],
)
def test_other_masks_of_places(mask: str) -> None:
    few = "%few = constant : f32[] -1.0\n%one = constant : i64[1, 1] [[3]]\n"
    lists = {
        "falling": [*range(8, 0, -1)],
        "same": [0, 1, 1, 2, 3, 4, 5, 6],
        "wrapped": [2**63 - 1, *range(-(2**63), -(2**63) + 7)],
        "floats": [*map(float, range(8))],
    }
    for (name, rows), other in zip(lists.items(), ("fallen", "sames", "wraps", "float"), strict=True):
        dtype = "f32" if name == "floats" else "i64"
        few += f"%{name} = constant : {dtype}[8, 1] {[[row] for row in rows]}\n"
        few += f"%{other} = constant : {dtype}[1, 8] {[rows]}\n"
    few += f"%later = constant : i64[1, 8] {[[*range(1, 9)]]}\n"
    found = fused(COMPARED + few + mask + SCORES + "%s_ = Add(%s, %m)" + WEIGHTED)
    assert "is_causal" not in found
    assert "%m = " in found


def test_blocks_of_places_make_no_causal_mask() -> None:
    module = parse_module(
        """
        mesh @m = ["x"=2, "y"=2]
        graph local @g(%q: f32[2, 3, 4, 16] of [2, 3, 4, 16], %k: f32[2, 3, 4, 16] of [2, 3, 4, 16], %v: f32[2, 3, 4, 16] of [2, 3, 4, 16]) -> (%y) opset 23 ranks [0, 1, 2, 3] {
          %r = constant : i64[4, 1] of [8@x, 1] whole [[0], [1], [2], [3], [4], [5], [6], [7]]
          %c = constant : i64[1, 4] of [1, 8@y] whole [[0, 1, 2, 3, 4, 5, 6, 7]]
          %zero = constant : f32[] of [] 0.0
          %low = constant : f32[] of [] -1e9
          %b = GreaterOrEqual(%r, %c) : bool[4, 4] of [4, 4]
          %m = Where(%b, %zero, %low) : f32[4, 4] of [4, 4]
          %kt = Transpose(%k) {perm=[0, 1, 3, 2]} : f32[2, 3, 16, 4] of [2, 3, 16, 4]
          %s = MatMul(%q, %kt) : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %a = Add(%s, %m) : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %p = Softmax(%a) {axis=-1} : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %y = MatMul(%p, %v) : f32[2, 3, 4, 16] of [2, 3, 4, 16]
        }
        """
    )
    fuse(module.graph)
    (attention,) = (node for node in module.graph if node.op_type == "Attention")
    assert "is_causal" not in attention.attributes


def test_flags() -> None:
    inputs = "%q: f32[2, 3, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 24], %m: bool[2, 1, 8, 8]"
    low = "%low = constant : f32[] -inf\n"
    kept = fused(low + SCORES + "%s_ = Where(%m, %s, %low)" + WEIGHTED, inputs)
    assert kept == "%y = Attention(%q, %k, %v, %m) {scale=1.0} : f32[2, 3, 8, 24]"
    hidden = fused(low + SCORES + "%s_ = Where(%m, %low, %s)" + WEIGHTED, inputs)
    assert hidden.startswith("%y_not = Not(%m)")
    finite = fused(low.replace("-inf", "-3e38") + SCORES + "%s_ = Where(%m, %low, %s)" + WEIGHTED, inputs)
    assert "%y_cast = Cast(%m) {to=1}" in finite
    assert "%y_mul = Mul(%y_cast, %low)" in finite


@pytest.mark.parametrize(
    ("mask", "scores"),
    [
        ("[2, 1, 1, 8]", "Add(%s, %m)"),
        ("[8, 1]", "Add(%s, %m)"),
        ("[]", "Mul(%s, %negative)"),
    ],
    ids=["mask of keys", "mask of queries", "negative scale"],
)
def test_what_other_runtimes_refuse_is_for_those_who_run_it(mask: str, scores: str) -> None:
    inputs = f"%q: f32[2, 3, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 24], %m: f32{mask}"
    module = untouched("%negative = constant : f32[] -0.5\n" + SCORES + f"%s_ = {scores}" + WEIGHTED, inputs)
    assert "Attention" in {node.op_type for node in stand_ins(Stretch([*module.graph], {*module.graph.outputs}))}
    fuse(module.graph)
    assert "Attention" not in {node.op_type for node in module.graph}


def test_masks_are_whole_together() -> None:
    """A mask of keys and one of queries."""
    inputs = "%q: f32[2, 3, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 24], %m: f32[2, 1, 1, 8], %n: f32[8, 1]"
    found = fused(SCORES + "%t = Add(%s, %m)\n%s_ = Add(%t, %n)" + WEIGHTED, inputs)
    assert "= Attention(%q, %k, %v, %y_add) {scale=1.0}" in found


def test_a_query_that_may_see_no_key() -> None:
    """Where all keys have one number a softmax weighs them equally; that number added to scores would not."""
    inputs = "%q: f32[2, 3, 8, 16], %k: f32[2, 3, 8, 16], %v: f32[2, 3, 8, 24], %m: bool[2, 1, 8, 8]"
    low = "%low = constant : f32[] -1e9\n"
    assert "Attention" not in fused(low + SCORES + "%s_ = Where(%m, %s, %low)" + WEIGHTED, inputs)
    rows = ", ".join("[" + ", ".join(str(abs(i - j) < 2).lower() for j in range(8)) + "]" for i in range(8))
    near = f"%near = constant : bool[8, 8] [{rows}]\n"
    kept = SCORES + "%s_ = Where(%near, %s, %low)"
    assert "= Attention(" in fused(low + near + kept + WEIGHTED, inputs)
    both = SCORES.replace("%s =", "%t =") + "%s = Where(%m, %t, %low) : f32[2, 3, 8, 8]\n%s_ = Where(%near, %s, %low)"
    assert "= Attention(" not in fused(low + near + both + WEIGHTED, inputs)


def test_a_block_of_a_causal_mask_is_a_mask() -> None:
    takes = ", ".join(f"%{name}: f32[2, 3, 4, 16] of [2, 3, 4, 16]" for name in "qkv")
    module = parse_module(
        f"""
        mesh @m = ["x"=2, "y"=2]
        graph local @g({takes}) -> (%y) opset 23 ranks [0, 1, 2, 3] {{
          %m = constant : f32[4, 4] of [8@x, 8@y] whole {CAUSAL}
          %kt = Transpose(%k) {{perm=[0, 1, 3, 2]}} : f32[2, 3, 16, 4] of [2, 3, 16, 4]
          %s = MatMul(%q, %kt) : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %a = Add(%s, %m) : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %p = Softmax(%a) {{axis=-1}} : f32[2, 3, 4, 4] of [2, 3, 4, 4]
          %y = MatMul(%p, %v) : f32[2, 3, 4, 16] of [2, 3, 4, 16]
        }}
        """
    )
    fuse(module.graph)
    assert "Attention(%q, %k, %v, %m) {scale=1.0}" in print_module(module).text


def test_products_by_letters() -> None:
    inputs = "%q: f32[2, 8, 3, 16], %k: f32[2, 8, 3, 16], %v: f32[2, 8, 3, 24]"
    body = """
        %s = Einsum(%q, %k) {equation="bqhd,bkhd->bhqk"}
        %p = Softmax(%s) {axis=-1}
        %y = Einsum(%p, %v) {equation="bhqk,bkhd->bqhd"}
    """
    found = fused(body, inputs).splitlines()
    assert len(found) == 5
    assert found[-1] == "%y = Transpose(%y_heads) {perm=[0, 2, 1, 3]} : f32[2, 8, 3, 24]"


@pytest.mark.parametrize(
    "body",
    [
        SCORES + "%p = Softmax(%s) {axis=-1}\n%z = MatMul(%p, %v)\n%r = ReduceSum(%p) {keepdims=0}\n%y = Add(%z, %r)",
        SCORES + "%p = Softmax(%s) {axis=2}\n%y = MatMul(%p, %v)",
        SCORES + "%p = Softmax(%s) {axis=-1}\n%d = Relu(%p)\n%y = MatMul(%d, %v)",
        SCORES + "%c = constant : f32[] 2.0\n%m = Pow(%s, %c)\n%p = Softmax(%m) {axis=-1}\n%y = MatMul(%p, %v)",
        SCORES + "%n = constant : f32[] nan\n%f = IsInf(%v)\n%s_ = Where(%f, %n, %s)" + WEIGHTED,
    ],
    ids=[
        "weights that are read",
        "another axis",
        "weights that change",
        "scores that change",
        "NaN",
    ],
)
def test_what_is_none(body: str) -> None:
    square = "%q: f32[2, 3, 8, 8], %k: f32[2, 3, 8, 8], %v: f32[2, 3, 8, 8]"
    found = fused(body, square)
    assert "Attention" not in found


def test_keys_that_lie_by_size_are_turned() -> None:
    square = "%q: f32[2, 3, 8, 8], %k: f32[2, 3, 8, 8], %v: f32[2, 3, 8, 8]"
    found = fused("%s = MatMul(%q, %k)\n%p = Softmax(%s) {axis=-1}\n%y = MatMul(%p, %v)", square)
    assert "%y_transpose = Transpose(%k) {perm=[0, 1, 3, 2]}" in found
    assert "Attention(%q, %y_transpose, %v) {scale=1.0}" in found


def loaded(name: str) -> Module:
    if name in BUILT:
        return typed(to_module(models.build(name)))
    return typed(to_module(onnx.load(FIXTURES / f"{name}.onnx")))


def exports() -> list[Any]:
    names = [(f"{name}_{way}_fixed", count) for name, count in EXPORTS.items() for way in ("dynamo", "torchscript")]
    return [(name, count) for name, count in names if (FIXTURES / f"{name}.onnx").exists()]


CASES = [*exports(), *BUILT.items()]


def numbers(module: Module, nodes: Sequence[Node], inputs: Mapping[Value, Any]) -> list[Any]:
    """The outputs that nodes give, by irpar's own kernels."""
    known: dict[Value | None, Any] = {None: None, **inputs}
    known.update((value, value.data.numpy()) for value in module.graph.constants if value.data is not None)
    for node in nodes:
        kernel = lookup(node.domain, node.op_type, node.version)
        assert kernel is not None
        attributes = {name: plain_attribute(attribute) for name, attribute in node.attributes.items()}
        given = [known[value] for value in node.operands]
        known.update(zip(node.results, kernel(np, given, attributes, len(node.results)), strict=True))
    return [known[value] for value in module.graph.outputs]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        case if case[0] in ("gpt", "hf-llama_dynamo_fixed") else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_numbers_are_the_same(name: str, count: int) -> None:
    module = loaded(name)
    inputs = random_inputs(module.graph.inputs, module.graph)
    given = {value: inputs[value.name] for value in module.graph.inputs}
    nodes = list(module.graph)
    fused_nodes = stand_ins(Stretch(nodes, set(module.graph.outputs)))
    assert sum(node.op_type == "Attention" for node in fused_nodes) == count
    for found, right in zip(numbers(module, fused_nodes, given), numbers(module, nodes, given), strict=True):
        tolerance = 1e-2 if right.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance)


# -- with gradients -------------------------------------------------------------------------------------------------

TRAINED = """
    graph @g(%x: f16[2, 8, 3, 16], %k: f16[2, 3, 8, 16], %v: f16[2, 8, 72], %dy: f16[2, 3, 8, 24]) -> (%y, %dq, %dkt, %dv) opset 18 {
        %q = Transpose(%x) {perm=[0, 2, 1, 3]} : ?
        %parts = constant : i64[4] [2, 8, 3, 24]
        %vr = Reshape(%v, %parts) : ?
        %vh = Transpose(%vr) {perm=[0, 2, 1, 3]} : ?
        %kt = Transpose(%k) {perm=[0, 1, 3, 2]} : ?
        %c = constant : f16[] 4.0
        %low = constant : f32[] -inf
        %zero = constant : f32[] 0.0
        %m = constant : bool[8, 8] MASK
        %s = MatMul(%q, %kt) : ?
        %d = Div(%s, %c) : ?
        %w = Cast(%d) {to=1} : ?
        %a = Where(%m, %w, %low) : ?
        %p = Softmax(%a) {axis=-1} : ?
        %p16 = Cast(%p) {to=10} : ?
        %y = MatMul(%p16, %vh) : ?
        %pt = Transpose(%p16) {perm=[0, 1, 3, 2]} : ?
        %dv = MatMul(%pt, %dy) : ?
        %vm = Transpose(%v) {perm=[0, 2, 1]} : ?
        %turned = constant : i64[4] [2, 3, 24, 8]
        %vt = Reshape(%vm, %turned) : ?
        %dp16 = MatMul(%dy, %vt) : ?
        %dp = Cast(%dp16) {to=1} : ?
        %last = constant : i64[1] [-1]
        %weighed = Mul(%p, %dp) : ?
        %sum = ReduceSum(%weighed, %last) : ?
        %apart = Sub(%dp, %sum) : ?
        %ds = Mul(%p, %apart) : ?
        %seen = Where(%m, %ds, %zero) : ?
        %ds16 = Cast(%seen) {to=10} : ?
        %scaled = Div(%ds16, %c) : ?
        %qt = Transpose(%x) {perm=[0, 2, 3, 1]} : ?
        %kn = Transpose(%kt) {perm=[0, 1, 3, 2]} : ?
        %dq = MatMul(%scaled, %kn) : ?
        %dkt = MatMul(%qt, %scaled) : ?
    }
"""
"""As autodiff and simplify-layout write it, of 16 bits."""


def trained(text: str = TRAINED, **others: str) -> tuple[Module, list[Node]]:
    mask = [[key <= query for key in range(8)] for query in range(8)]
    text = text.replace("MASK", str(mask).lower())
    for old, new in others.items():
        text = text.replace(old, new)
    module = parse_module(text)
    InferTypes().run(module)
    return module, stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))


def test_gradients_take_what_the_forward_direction_keeps() -> None:
    module, nodes = trained()
    assert [node.op_type for node in nodes] == [
        "Transpose",
        "Reshape",
        "Transpose",
        "Transpose",
        "Transpose",
        "AttentionForward",
        "Transpose",
        "AttentionGradient",
        "Transpose",
    ]
    rng = np.random.default_rng(3)
    inputs = {value: rng.standard_normal(value.shape).astype(np.float16) for value in module.graph.inputs}
    plain = numbers(module, list(module.graph), inputs)
    for found, right in zip(numbers(module, nodes, inputs), plain, strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%scaled = Div(%ds16, %c)", "%scaled = Mul(%ds16, %c)"),
        ("%apart = Sub(%dp, %sum)", "%apart = Sub(%sum, %dp)"),
        ("[2, 3, 24, 8]\n        %vt = Reshape(%vm, %turned)", "[2, 3, 24, 8]\n        %vt = Reshape(%v, %turned)"),
        ("%qt = Transpose(%x) {perm=[0, 2, 3, 1]}", "%qt = Transpose(%k) {perm=[0, 1, 3, 2]}"),
        ("f16[2, 3, 8, 24]) -> (%y,", "f16[2, 3, 8, 24]) -> (%ds,"),
    ],
    ids=["another scale", "another difference", "other values", "other queries", "gradients that are read"],
)
def test_what_is_no_gradient(old: str, new: str) -> None:
    assert old in TRAINED
    _, nodes = trained(TRAINED.replace(old, new))
    assert "AttentionGradient" not in {node.op_type for node in nodes}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"precision": "bf16"}),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in (("gpt", {}), ("llama", {"precision": "fp16"}), ("bert", {}), ("vit", {}))
        ),
    ],
    ids=str,
)
def test_training_steps(name: str, options: dict[str, str]) -> None:
    step = irpar.train_step(to_module(models.build(name)), loss="cross_entropy", **options)
    graph = irpar.partition(step, "d=1").executor("numpy").parts[0].graph
    nodes = stand_ins(Stretch(list(graph), set(graph.outputs)))
    kinds = [node.op_type for node in nodes]
    assert kinds.count("AttentionForward") == kinds.count("AttentionGradient") == BUILT[name]


@pytest.mark.slow
def test_a_training_step_gives_the_same() -> None:
    step = irpar.train_step(to_module(models.build("bert")), loss="cross_entropy")
    partition = irpar.partition(step, "d=1")
    expected_by = partition.executor("numpy")
    assert partition.module is not None
    inputs = random_inputs(expected_by.inputs, partition.module.graph)
    expected = expected_by.run(inputs)
    with strict_device():
        found = partition.executor("cupy").run(inputs)
    for name, right in expected.items():
        largest = max(1e-6, float(np.abs(right).max())) if right.size else 1.0
        np.testing.assert_allclose(found[name], right, rtol=0, atol=1e-5 * largest, err_msg=name)
