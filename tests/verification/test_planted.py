"""A rule that is planted wrong is reported, whatever family of operators it is of."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import irpar
from irpar.ops.op_def import DEFINITIONS
from irpar.ops.rule import FactorRule, Kind
from tests.written import model_of_text

Wrong = Callable[[FactorRule], FactorRule]


def passes(rule: FactorRule) -> FactorRule:
    """Each device computes its block of what it needs whole, or needs a halo of."""
    kinds = tuple(kind if kind is Kind.REDUCE else Kind.PASS for kind in rule.kinds)
    return replace(rule, kinds=kinds, moves=())


def reduces_otherwise(rule: FactorRule) -> FactorRule:
    """Partial results are reduced in another way."""
    return replace(rule, reduce="max" if rule.reduce == "sum" else "sum")


def reduces(rule: FactorRule) -> FactorRule:
    """What must be whole is taken apart, and the results are added up."""
    kinds = tuple(Kind.REDUCE if kind is Kind.REPLICATE else kind for kind in rule.kinds)
    return replace(rule, kinds=kinds, reduce="sum", moves=())


def swaps_results(rule: FactorRule) -> FactorRule:
    """The last two dims of results are taken for each other."""
    return replace(rule, results=tuple((*dims[:-2], dims[-1], dims[-2]) for dims in rule.results))


def turns_compounds(rule: FactorRule) -> FactorRule:
    """The major factor of a merged dim is taken for the minor one."""
    results = tuple(tuple(tuple(reversed(factors)) for factors in dims) for dims in rule.results)
    return replace(rule, results=results)


@dataclass(frozen=True)
class Plant:
    """A small model, and the rule in it that is made wrong.

    Attributes:
        text: the graph; weights are inputs of it that `weights` names.
        cuts: annotations.
        operator: whose rule is made wrong, with its domain.
        wrong: how.
        weights, integers: see `model_of_text`.
        mesh: the devices.
        keeps_local: the local node is mended as it should be.
    """

    text: str
    cuts: dict[str, list[Any]]
    operator: str
    wrong: Wrong = passes
    weights: tuple[str, ...] = ()
    integers: dict[str, Any] = field(default_factory=dict)
    mesh: str = "tp=2"
    keeps_local: bool = False


PLANTS = {
    "matmul": Plant(
        "g (float[4,16] x, float[16,8] w) => (float[4,8] y) { y = MatMul(x, w) }",
        {"w": [["tp"], None]},
        "MatMul",
        reduces_otherwise,
        ("w",),
    ),
    "convolution": Plant(
        "g (float[2,8,6,6] x, float[4,8,3,3] w) => (float[2,4,4,4] y) { y = Conv(x, w) }",
        {"w": [None, ["tp"], None, None]},
        "Conv",
        reduces_otherwise,
        ("w",),
    ),
    "reduction": Plant(
        "g (float[4,16] x) => (float[4] y) { y = ReduceSum<keepdims=0>(x, last) }",
        {"x": [None, ["tp"]]},
        "ReduceSum",
        reduces_otherwise,
        integers={"last": [1]},
    ),
    "normalisation": Plant(
        "g (float[4,16] x, float[16] w) => (float[4,16] y) { y = LayerNormalization(x, w) }",
        {"x": [None, ["tp"]], "y": [None, ["tp"]]},
        "LayerNormalization",
        weights=("w",),
    ),
    "softmax": Plant(
        "g (float[4,16] x) => (float[4,16] y) { y = Softmax(x) }",
        {"x": [None, ["tp"]], "y": [None, ["tp"]]},
        "Softmax",
    ),
    "gather": Plant(
        "g (int64[5] i, float[16,8] w) => (float[5,8] y) { y = Gather(w, i) }",
        {"w": [["tp"], None]},
        "Gather",
        reduces_otherwise,
        ("w",),
        keeps_local=True,
    ),
    "scatter": Plant(
        "g (float[8,6] x, int64[8,16] i, float[8,16] u) => (float[8,6] y) { y = ScatterElements<axis=1>(x, i, u) }",
        {"i": [None, ["tp"]], "u": [None, ["tp"]]},
        "ScatterElements",
        reduces,
    ),
    "reshape": Plant(
        "g (float[4,4] x) => (float[16] y) { y = Reshape(x, all) }",
        {"x": [None, ["tp"]], "y": [["tp"]]},
        "Reshape",
        turns_compounds,
        integers={"all": [16]},
        keeps_local=True,
    ),
    "transpose": Plant(
        "g (float[8,8] x) => (float[8,8] y) { y = Transpose(x) }",
        {"x": [["dp"], ["tp"]]},
        "Transpose",
        swaps_results,
        mesh="dp=2,tp=2",
    ),
    "concat": Plant(
        "g (float[4,6] x, float[4,6] z) => (float[8,6] y) { y = Concat<axis=0>(x, z) }",
        {"x": [["tp"], None], "z": [["tp"], None]},
        "Concat",
    ),
    "split": Plant(
        "g (float[8,6] x) => (float[4,6] y, float[4,6] z) { y, z = Split<axis=0, num_outputs=2>(x) }",
        {"x": [["tp"], None]},
        "Split",
    ),
    "pooling": Plant(
        "g (float[2,4,8] x) => (float[2,4,8] y) { y = AveragePool<kernel_shape=[3], pads=[1,1]>(x) }",
        {"x": [None, None, ["tp"]]},
        "AveragePool",
    ),
    "attention": Plant(
        """g (float[2,4,8,8] q, float[2,4,8,8] k, float[2,4,8,8] v) => (float[2,4,8,8] y) { y = Attention(q, k, v) }""",
        {"k": [None, None, ["tp"], None], "v": [None, None, ["tp"], None]},
        "Attention",
    ),
    "recurrent": Plant(
        """g (float[6,4,8] x, float[1,24,8] w, float[1,24,8] r) => (float[6,1,4,8] y) {
          y = GRU<hidden_size=8>(x, w, r) }""",
        {"x": [["tp"], None, None]},
        "GRU",
        weights=("w", "r"),
    ),
    "sums along an axis": Plant(
        "g (float[4,8] x) => (float[4,8] y) { y = CumSum(x, axis) }",
        {"x": [None, ["tp"]]},
        "CumSum",
        integers={"axis": 1},
    ),
    "places": Plant(
        "g (float[4,8] x) => (int64[4] y) { y = ArgMax<axis=1, keepdims=0>(x) }",
        {"x": [None, ["tp"]]},
        "ArgMax",
        reduces,
    ),
    "quantised": Plant(
        """g (uint8[4,16] x, uint8[16,8] w) => (uint8[4,8] y) <float s = {0.02}, uint8 z = {128}, float t = {0.5}> {
          y = QLinearMatMul(x, s, z, w, s, z, t, z) }""",
        {"x": [None, ["tp"]], "w": [["tp"], None]},
        "QLinearMatMul",
        reduces,
    ),
    "quantised products": Plant(
        "g (uint8[4,16] x, uint8[16,8] w) => (int32[4,8] y) { y = MatMulInteger(x, w) }",
        {"x": [None, ["tp"]], "w": [["tp"], None]},
        "MatMulInteger",
        reduces_otherwise,
    ),
    "products before a quantiser": Plant(
        """g (float[4,16] x, float[16,16] w, float[16,8] v) => (float[4,8] y) {
          h = MatMul(x, w)  q, s, z = DynamicQuantizeLinear(h)  a = Cast<to=1>(q)  m = Mul(a, s)  y = MatMul(m, v) }""",
        {"v": [["tp"], None]},
        "MatMul",
        reduces_otherwise,
        ("w", "v"),
    ),
    "images": Plant(
        """g (float[1,2,8,8] x) => (float[1,2,16,16] y) <float[4] s = {1, 1, 2, 2}> {
          y = Resize<mode="linear">(x, , s) }""",
        {"x": [None, None, ["tp"], None]},
        "Resize",
    ),
    "loops": Plant(
        """g (float[4,8] x, float[8,8] w, int64 n) => (float[4,8] y) <bool on = {1}> {
          y = Loop(n, on, x) <body = b (int64 i, bool c, float[4,8] s) => (bool d, float[4,8] z) {
            d = Identity(c)  z = MatMul(s, w) }> }""",
        {"w": [["tp"], None]},
        "MatMul",
        reduces_otherwise,
        ("w",),
    ),
    "branches": Plant(
        """g (float[4,64] x, float[64,1] w, int64 sr) => (float[4,1] y) <int64 k = {16000}, int64[1] last = {1}> {
          q = Equal(sr, k)
          y = If(q) <then_branch = a () => (float[4,1] u) { u = MatMul(x, w) },
                     else_branch = b () => (float[4,1] v) { v = ReduceSum(x, last) }> }""",
        {"x": [None, ["tp"]], "w": [["tp"], None]},
        "MatMul",
        reduces_otherwise,
        ("w",),
    ),
}


def partitioned(plant: Plant, folder: Path) -> irpar.Partition:
    onnx.save(model_of_text(plant.text, plant.weights, plant.integers, 23), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, plant.cuts)
    return irpar.partition(module, plant.mesh)


@pytest.mark.parametrize("family", PLANTS)
def test_a_wrong_rule_is_told(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[family]
    assert partitioned(plant, tmp_path).verify().result == "equal"
    known = DEFINITIONS["", plant.operator]
    assert known.rule is not None

    def rule(node: Any, right: Any = known.rule) -> FactorRule | None:
        found = right(node)
        return None if found is None else plant.wrong(found)

    localize = known.localize if plant.keeps_local else None
    wrong = replace(known, rule=rule, local_program=None, other_programs=(), localize=localize)
    monkeypatch.setitem(DEFINITIONS, ("", plant.operator), wrong)
    made = partitioned(plant, tmp_path)
    assert made.verify().result == "different"
    assert made.bisect().first is not None
