"""What exports contain that a partitioner gets wrong without an error: each as a small model with its right answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import irpar
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from tests.budget import budget, pairs

from .written import model_of_text

Cuts = dict[str, list[Any]]


@dataclass(frozen=True)
class Trap:
    """A small model, how it is annotated, and what of the work a rank may do.

    Attributes:
        text: the graph in ONNX's text form; weights are inputs of it that `weights` names.
        cuts: annotations.
        weights: graph inputs that become initializers of seeded normals.
        integers: int64 initializers by name.
        share: largest number of times its share of the FLOPs that a rank does.
        mesh: the devices.
        opset: of the model.
    """

    text: str
    cuts: Cuts
    weights: tuple[str, ...] = ()
    integers: dict[str, Any] = field(default_factory=dict)
    share: float = 1.1
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 2, "tp": 2})
    opset: int = 18

    def model(self) -> onnx.ModelProto:
        """The model with its weights."""
        return model_of_text(self.text, self.weights, self.integers, self.opset)


_ATTENTION = {"x": [["dp"], None, None], "wq": [None, ["tp"]], "wk": [None, ["tp"]], "wv": [None, ["tp"]]}
_ATTENTION_WEIGHTS = ("wq", "wk", "wv", "wo")

TRAPS = {
    # Head counts in the targets of Reshape, with -1 for the batch: on two devices there are 2 of the 4 heads.
    "head counts baked into Reshape targets": Trap(
        """g (float[4,17,64] x, float[64,64] wq, float[64,64] wk, float[64,64] wv, float[64,64] wo) => (float[4,17,64] y) {
          q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm=[0,2,1,3]>(q1)
          k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm=[0,2,3,1]>(k1)
          v0 = MatMul(x, wv)  v1 = Reshape(v0, heads)  v = Transpose<perm=[0,2,1,3]>(v1)
          s = MatMul(q, k)  p = Softmax<axis=-1>(s)  c = MatMul(p, v)
          c1 = Transpose<perm=[0,2,1,3]>(c)  c2 = Reshape(c1, merged)  y = MatMul(c2, wo) }""",
        {**_ATTENTION, "wo": [["tp"], None]},
        _ATTENTION_WEIGHTS,
        {"heads": [-1, 17, 4, 16], "merged": [-1, 17, 64]},
    ),
    # Batch and heads in one dim, K transposed behind it. A rank's heads of its rows are no block of the merged dim.
    "K transposed through a merged batch x heads dim": Trap(
        """g (float[4,8,32] x, float[32,32] wq, float[32,32] wk, float[32,32] wv, float[32,32] wo) => (float[4,8,32] y) {
          q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q2 = Transpose<perm=[0,2,1,3]>(q1)  q = Reshape(q2, rows)
          k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k2 = Transpose<perm=[0,2,1,3]>(k1)  k3 = Reshape(k2, rows)
          k = Transpose<perm=[0,2,1]>(k3)
          v0 = MatMul(x, wv)  v1 = Reshape(v0, heads)  v2 = Transpose<perm=[0,2,1,3]>(v1)  v = Reshape(v2, rows)
          s = MatMul(q, k)  p = Softmax<axis=-1>(s)  c = MatMul(p, v)
          c0 = Reshape(c, unmerged)  c1 = Transpose<perm=[0,2,1,3]>(c0)  c2 = Reshape(c1, merged)  y = MatMul(c2, wo) }""",
        {**_ATTENTION, "wo": [["tp"], None]},
        _ATTENTION_WEIGHTS,
        {"heads": [0, 0, 4, 8], "rows": [16, 8, 8], "unmerged": [-1, 4, 8, 8], "merged": [0, 0, 32]},
    ),
    # The contiguous blocks of the fused weight are not those of its three parts.
    "fused qkv and its Split": Trap(
        """g (float[4,8,32] x, float[32,96] w) => (float[4,8,32] y) {
          f = MatMul(x, w)  q, k, v = Split<axis=-1, num_outputs=3>(f)  a = Mul(q, k)  y = Add(a, v) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]]},
        ("w",),
        share=1.2,
    ),
    "the bias of a row-parallel Gemm": Trap(
        """g (float[4,32] x, float[64,32] w1, float[64] b1, float[32,64] w2, float[32] b2) => (float[4,32] y) {
          h0 = Gemm<transB=1>(x, w1, b1)  h = Relu(h0)  y = Gemm<transB=1, beta=0.5>(h, w2, b2) }""",
        {"x": [["dp"], None], "w1": [["tp"], None], "b1": [["tp"]], "w2": [None, ["tp"]]},
        ("w1", "b1", "w2", "b2"),
    ),
    "the bias of a Conv that is sharded by input channels": Trap(
        """g (float[4,8,6,6] x, float[16,8,3,3] w1, float[16] b1, float[8,16,3,3] w2, float[8] b2)
             => (float[4,8,2,2] y) {
          h0 = Conv(x, w1, b1)  h = Relu(h0)  y = Conv(h, w2, b2) }""",
        {"x": [["dp"], None, None, None], "w1": [["tp"], None, None, None], "w2": [None, ["tp"], None, None]},
        ("w1", "b1", "w2", "b2"),
    ),
    "the group count of a depthwise Conv": Trap(
        """g (float[4,8,6] x, float[16,8,1] w1, float[16,1,3] w2, float[8,16,1] w3) => (float[4,8,4] y) {
          a = Conv(x, w1)  b = Conv<group=16>(a, w2)  y = Conv(b, w3) }""",
        {"x": [["dp"], None, None], "w1": [["tp"], None, None], "w3": [None, ["tp"], None]},
        ("w1", "w2", "w3"),
    ),
    "keys and values repeated by Expand and Reshape": Trap(
        """g (float[4,6,32] q, float[4,6,16] x, float[16,16] w) => (float[4,4,6,8] y) {
          k0 = MatMul(x, w)  k1 = Reshape(k0, groups)  k2 = Transpose<perm=[0,2,1,3]>(k1)  k3 = Unsqueeze(k2, two)
          k4 = Expand(k3, repeated)  k = Reshape(k4, heads)
          q1 = Reshape(q, query)  q2 = Transpose<perm=[0,2,1,3]>(q1)  y = Mul(q2, k) }""",
        {"x": [["dp"], None, None], "q": [["dp"], None, ["tp"]], "w": [None, ["tp"]]},
        ("w",),
        {"groups": [4, 6, 2, 8], "two": [2], "repeated": [4, 2, 2, 6, 8], "heads": [4, 4, 6, 8], "query": [4, 6, 4, 8]},
    ),
    # Every rank's rows have numbers of their own from 0; the Range counts all rows.
    "a Range over the batch that feeds GatherND": Trap(
        """g (float[4,6,8] x, int64[4] last) => (float[4,8] y) {
          size = Shape(x)  count = Gather(size, zero)  rows = Range(zero, count, one)
          a = Unsqueeze(rows, ones)  b = Unsqueeze(last, ones)  at = Concat<axis=1>(a, b)  z = GatherND(x, at)
          y = Relu(z) }""",
        {"x": [["dp"], None, None], "last": [["dp"]]},
        integers={"zero": 0, "one": 1, "ones": [1]},
        mesh={"dp": 2},
    ),
    "tied embeddings with a Transpose at run time": Trap(
        """g (int64[4,6] ids, float[32,16] w) => (float[4,6,32] y) {
          x = Gather(w, ids)  t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }""",
        {"ids": [["dp"], None], "w": [["tp"], None]},
        ("w",),
    ),
    "the batch on dim 1": Trap(
        """g (float[6,4,16] x, float[16,32] w1, float[32,16] w2) => (float[6,4,16] y) {
          h0 = MatMul(x, w1)  h = Relu(h0)  y = MatMul(h, w2) }""",
        {"x": [None, ["dp"], None], "w1": [None, ["tp"]], "w2": [["tp"], None]},
        ("w1", "w2"),
    ),
    # [B, S, D] to [B*S, D]: the batch is the major part of the merged dim and stays cut.
    "batch and sequence in one dim": Trap(
        """g (float[4,6,16] x, float[16,32] w1, float[32] b1, float[32,16] w2, float[16] b2) => (float[4,6,16] y) {
          r = Reshape(x, rows)  h0 = Gemm(r, w1, b1)  h = Relu(h0)  z = Gemm(h, w2, b2)  y = Reshape(z, back) }""",
        {"x": [["dp"], None, None], "w1": [None, ["tp"]], "b1": [["tp"]], "w2": [["tp"], None]},
        ("w1", "b1", "w2", "b2"),
        {"rows": [-1, 16], "back": [4, 6, 16]},
    ),
    # 4 rows, 4 features in a head, 4 heads: numbers that are equal by chance must not be taken for each other.
    "constants that repeat the size of a cut dim": Trap(
        """g (float[4,4,16] x, float[16,16] w, float[4,4] c) => (float[4,4,4,4] y) {
          h = MatMul(x, w)  r = Reshape(h, all)  t = Transpose<perm=[2,0,3,1]>(r)  y = Add(t, c) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]]},
        ("w", "c"),
        {"all": [4, 4, 4, 4]},
    ),
    "an If whose predicate sums over the batch": Trap(
        """g (float[4,8] x) => (float[4,8] y) {
          s = ReduceSum<keepdims=0>(x)  z = Sub(s, s)  p = GreaterOrEqual(s, z)
          y = If(p) <then_branch = a () => (float[4,8] u) { u = Exp(x) },
                     else_branch = b () => (float[4,8] v) { v = Neg(x) }> }""",
        {"x": [["dp"], None]},
        share=2.0,
        mesh={"dp": 2},
    ),
    "BatchNormalization of opset 9": Trap(
        """g (float[4,8,3] x, float[8] s, float[8] b, float[8] m, float[8,8,1] w) => (float[4,8,3] y) {
          v = Mul(s, s)  h = Conv(x, w)  y = BatchNormalization(h, s, b, m, v) }""",
        {"x": [["dp"], None, None], "w": [["tp"], None, None]},
        ("s", "b", "m", "w"),
        opset=9,
    ),
    # Up to opset 12 all dims from the axis on are normalised together.
    "Softmax of opset 11": Trap(
        """g (float[4,6,8] x, float[8,8] w) => (float[4,6,8] y) {
          h = MatMul(x, w)  y = Softmax<axis=1>(h) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]]},
        ("w",),
        share=1.5,
        opset=11,
    ),
    # [S, B, D]; what PyTorch's MultiheadAttention does: rows of a head of a batch are taken together before the transpose.
    "batch x heads in one dim of [seq, batch x heads, d]": Trap(
        """g (float[6,4,32] x, float[32,32] wq, float[32,32] wk, float[32,32] wv, float[32,32] wo, float[32] bo)
             => (float[6,4,32] y) {
          q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm=[1,0,2]>(q1)
          k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm=[1,2,0]>(k1)
          v0 = MatMul(x, wv)  v1 = Reshape(v0, heads)  v = Transpose<perm=[1,0,2]>(v1)
          s = MatMul(q, k)  p = Softmax<axis=-1>(s)  c = MatMul(p, v)
          c1 = Transpose<perm=[1,0,2]>(c)  c2 = Reshape(c1, rows)  o = Gemm(c2, wo, bo)  y = Reshape(o, back) }""",
        {**_ATTENTION, "x": [None, ["dp"], None], "wo": [["tp"], None]},
        (*_ATTENTION_WEIGHTS, "bo"),
        {"heads": [6, 16, 8], "rows": [24, 32], "back": [6, 4, 32]},
    ),
    # q, k and v of a head side by side: the cut of the columns is one of the heads.
    "fused qkv, head by head": Trap(
        """g (float[4,6,32] x, float[32,96] w, float[32,32] wo) => (float[4,6,32] y) {
          f = MatMul(x, w)  r = Reshape(f, heads)  q, k, v = Split<axis=-1, num_outputs=3>(r)
          a = Transpose<perm=[0,2,1,3]>(q)  b = Transpose<perm=[0,2,3,1]>(k)  c = Transpose<perm=[0,2,1,3]>(v)
          s = MatMul(a, b)  p = Softmax<axis=-1>(s)  o = MatMul(p, c)
          t = Transpose<perm=[0,2,1,3]>(o)  u = Reshape(t, merged)  y = MatMul(u, wo) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]], "wo": [["tp"], None]},
        ("w", "wo"),
        {"heads": [0, 0, 4, 24], "merged": [0, 0, 32]},
    ),
    # [.., 3, heads, features]: the blocks of the columns are not those of the heads.
    "fused qkv, part by part": Trap(
        """g (float[4,6,32] x, float[32,96] w, float[32,32] wo) => (float[4,6,32] y) {
          f = MatMul(x, w)  r = Reshape(f, parts)  h = Transpose<perm=[2,0,3,1,4]>(r)
          q = Gather<axis=0>(h, zero)  k0 = Gather<axis=0>(h, one)  v = Gather<axis=0>(h, two)
          k = Transpose<perm=[0,1,3,2]>(k0)  s = MatMul(q, k)  p = Softmax<axis=-1>(s)  o = MatMul(p, v)
          t = Transpose<perm=[0,2,1,3]>(o)  u = Reshape(t, merged)  y = MatMul(u, wo) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]], "wo": [["tp"], None]},
        ("w", "wo"),
        {"parts": [0, 0, 3, 4, 8], "merged": [0, 0, 32], "zero": 0, "one": 1, "two": 2},
    ),
    # Zeros of [1, heads, queries, keys], with the whole model's number of heads.
    "a zero bias with the heads baked in": Trap(
        """g (float[4,6,32] x, float[32,32] wq, float[32,32] wk, float[4,6] m) => (float[4,4,6,6] y) {
          q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm=[0,2,1,3]>(q1)
          k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm=[0,2,3,1]>(k1)
          z = ConstantOfShape(bias)  n = Unsqueeze(m, middle)  c = Add(z, n)
          s = MatMul(q, k)  t = Add(s, c)  y = Softmax<axis=-1>(t) }""",
        {"x": [["dp"], None, None], "m": [["dp"], None], "wq": [None, ["tp"]], "wk": [None, ["tp"]]},
        ("wq", "wk"),
        {"heads": [0, 0, 4, 8], "bias": [1, 4, 6, 6], "middle": [1, 2]},
    ),
    "GroupNorm as Reshape and InstanceNormalization": Trap(
        """g (float[4,8,4,4] x, float[16,8,3,3] w1, float[4] one, float[4] zero, float[16,1,1] s, float[16,1,1] b,
             float[8,16,1,1] w2) => (float[4,8,2,2] y) {
          h = Conv(x, w1)  r = Reshape(h, groups)  n = InstanceNormalization(r, one, zero)  u = Reshape(n, back)
          a = Mul(u, s)  c = Add(a, b)  d = Relu(c)  y = Conv(d, w2) }""",
        {"x": [["dp"], None, None, None], "w1": [["tp"], None, None, None], "w2": [None, ["tp"], None, None]},
        ("w1", "one", "zero", "s", "b", "w2"),
        {"groups": [0, 4, -1], "back": [4, 16, 2, 2]},
    ),
    "heads before the batch": Trap(
        """g (float[4,4,16] x, float[4,16,32] w1, float[4,32,16] w2) => (float[4,4,16] y) {
          h0 = MatMul(x, w1)  h = Relu(h0)  y = MatMul(h, w2) }""",
        {"x": [["tp"], ["dp"], None], "w1": [["tp"], None, None], "w2": [["tp"], None, None]},
        ("w1", "w2"),
    ),
    # [directions, batch, hidden]
    "the states of a recurrent layer": Trap(
        """g (float[3,4,8] x, float[1,32,8] w, float[1,32,8] r, float[1,64] b, float[1,4,8] h0, float[1,4,8] c0)
             => (float[3,1,4,8] y, float[1,4,8] h, float[1,4,8] c) {
          y, h, c = LSTM<hidden_size=8>(x, w, r, b, , h0, c0) }""",
        {"x": [None, ["dp"], None]},
        ("w", "r", "b"),
        mesh={"dp": 2},
    ),
    # Axes and ends of attributes became operands.
    "Slice, Squeeze and ReduceSum of opset 9": Trap(
        """g (float[4,6,8] x, float[8,8] w) => (float[4,8] y) {
          h = MatMul(x, w)  s = Slice<axes=[1], starts=[1], ends=[5]>(h)  r = ReduceSum<axes=[1], keepdims=1>(s)
          y = Squeeze<axes=[1]>(r) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]]},
        ("w",),
        opset=9,
    ),
    "TopK and Clip of opset 10": Trap(
        """g (float[4,6,8] x, float[8,8] w) => (float[4,6,3] y, int64[4,6,3] i) {
          h = MatMul(x, w)  c = Clip<min=-1.0, max=1.0>(h)  y, i = TopK<axis=-1>(c, three) }""",
        {"x": [["dp"], None, None], "w": [None, ["tp"]]},
        ("w",),
        {"three": [3]},
        share=1.2,
        opset=10,
    ),
    "Unsqueeze, Pad and Dropout of opset 12": Trap(
        """g (float[4,8] x, float[8,8] w) => (float[4,1,12] y) {
          h = MatMul(x, w)  d = Dropout(h)  u = Unsqueeze<axes=[1]>(d)  y = Pad(u, pads) }""",
        {"x": [["dp"], None], "w": [None, ["tp"]]},
        ("w",),
        {"pads": [0, 0, 2, 0, 0, 2]},
        opset=12,
    ),
}


def _partition(trap: Trap, folder: Path) -> irpar.Partition:
    path = folder / "trap.onnx"
    onnx.save(trap.model(), path)
    module = irpar.load(path)
    irpar.annotate(module, trap.cuts)
    return irpar.partition(module, irpar.Mesh(trap.mesh))


@pytest.mark.parametrize(("name", "engine"), pairs(list(TRAPS), ["ort", "numpy"]))
def test_numbers_are_right(name: str, engine: Any, tmp_path: Path) -> None:
    partition = _partition(TRAPS[name], tmp_path)
    for seed in range(budget(3, least=1)):
        partition.verify(tolerance=1e-4, engine=engine, seed=seed).check()


@pytest.mark.parametrize("name", TRAPS)
def test_the_work_is_divided(name: str, tmp_path: Path) -> None:
    trap = TRAPS[name]
    plan = _partition(trap, tmp_path).plan
    share = plan.totals["flops_per_rank"] / max(plan.original["flops"], 1)
    excess = share * np.prod(list(trap.mesh.values()))
    assert excess <= trap.share, f"a rank does {share:.1%} of the FLOPs, {excess:.3f} of its share"


def test_batch_normalization_in_training_mode_reduces_its_statistics(tmp_path: Path) -> None:
    text = """g (float[4,8,3] x, float[8] s, float[8] b, float[8] m) => (float[4,8,3] y, float[8] rm, float[8] rv) {
      v = Mul(s, s)  y, rm, rv = BatchNormalization<training_mode=1>(x, s, b, m, v) }"""
    trap = Trap(text, {"x": [["dp"], None, None]}, ("s", "b", "m"), mesh={"dp": 2})
    partition = _partition(trap, tmp_path)
    partition.verify(tolerance=1e-4).check()
    assert [(entry["kind"], entry["bytes"]) for entry in partition.plan.collectives] == [("all_reduce", 8 * 4)] * 2


def test_dropout_in_training_mode_is_refused(tmp_path: Path) -> None:
    text = "g (float[4,8] x) => (float[4,8] y) { y = Dropout(x, ratio, training) }"
    model = Trap(text, {}).model()
    for name, number in (("ratio", np.float32(0.5)), ("training", np.bool_(True))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(number), name))
    onnx.save(model, tmp_path / "dropout.onnx")
    module = irpar.load(tmp_path / "dropout.onnx")
    module.shard("x", [["dp"], None])
    with pytest.raises(irpar.IrparError, match="draws random numbers"):
        irpar.partition(module, irpar.Mesh({"dp": 2}))


FAULTS = {
    "a Reshape to a target that is computed, of rows cut over one device": (
        "g (float[4,6] x, int64[3] s) => (float[a,b,c] y) { y = Reshape(x, s) }",
        {"x": [["one"], None]},
        {"one": 1, "two": 2},
        {"x": np.arange(24, dtype=np.float32).reshape(4, 6), "s": np.array([2, 3, 4])},
    ),
    "a Loop whose condition is left out": (
        """g (float[4] x) => (float[2,4] y) <int64 n={2}> {
          y = Loop(n, ) <body = b (int64 i, bool c) => (bool d, float[4] z) { d = Identity(c) z = Relu(x) }> }""",
        {"x": [["one"]]},
        {"one": 2},
        {"x": np.ones(4, np.float32)},
    ),
    # 3 inf - 1 inf is no number; the product of what is reduced first is infinite.
    "sums in parts beside infinite numbers": (
        "g (float[8,16] a, float[16,4] b, float[4,3] c) => (float[8,3] y) { p = MatMul(a, b)  y = MatMul(p, c) }",
        {"a": [None, ["one"]], "b": [["one"], None]},
        {"one": 2},
        {
            "a": np.linspace(-1, 2, 128, dtype=np.float32).reshape(8, 16),
            "b": np.linspace(-3, 4, 64, dtype=np.float32).reshape(16, 4),
            "c": np.array([[np.inf, 1, 2], [1, 1, 1], [1, 2, 3], [0, 1, 0]], np.float32),
        },
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_that_were_found(what: str, tmp_path: Path) -> None:
    text, cuts, mesh, inputs = FAULTS[what]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for node in model.graph.node:
        if node.op_type == "Loop":
            node.input[:] = [node.input[0], ""]
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(module, cuts)
    irpar.partition(module, irpar.Mesh(mesh)).verify(inputs).check()


def test_an_annotated_result_of_a_function_keeps_its_rank(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "my": 1]>
      g (float[4,6] x) => (float[4,6] y) { a = Cast<to=11>(x)  v = my.F(a)  y = Relu(v) }
      <domain: "my", opset_import: ["": 21]> F (p) => (q) { q = Cast<to=1>(p) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("v", [["t"], None])
    instrumentation = Instrumentation(reproducer=None, verify_each=True)
    manager = PassManager.parse(DEFAULT_PIPELINE, instrumentation)
    irpar.partition(module, irpar.Mesh({"t": 2}), pipeline=manager).verify().check()
