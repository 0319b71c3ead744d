"""Models as ONNX Runtime's tools export them, of com.microsoft's operators, partitioned from annotations of weights."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import irpar
from irpar.sharding import IrparError
from irpar.verification.arithmetic import PlainArrays

HEADS, KEY_HEADS, SIZE = 8, 4, 16
BATCH, STEPS, PAST, WIDE, HIDDEN, BLOCK = 2, 4, 6, 64, 128, 16

_random = np.random.default_rng(7)


class Maker:
    """Nodes and weights of a model."""

    def __init__(self, *, has_flat_scales: bool = False) -> None:
        self.has_flat_scales = has_flat_scales
        self.levels: dict[str, int] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int, dtype: Any = np.float32) -> str:
        """Small numbers, or any bytes."""
        low, high = (0, 256) if dtype is np.uint8 else (-0.2, 0.2)
        self.given(name, _random.uniform(low, high, shape).astype(dtype))
        return name

    def given(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(
        self, op: str, operands: list[str], results: list[str], domain: str = "com.microsoft", **attributes: Any
    ) -> str:
        self.nodes.append(helper.make_node(op, operands, results, name=f"/{results[0]}", domain=domain, **attributes))
        return results[0]

    def quantised(self, name: str, data: str, inner: int, columns: int) -> str:
        """A product with a weight of 4 bits."""
        count = inner // BLOCK
        packed = self.weight(f"{name}.weight", columns, count, BLOCK // 2, dtype=np.uint8)
        numbers = _random.uniform(0.005, 0.02, (columns, count)).astype(np.float32)
        scales = self.given(f"{name}.scales", numbers.ravel() if self.has_flat_scales else numbers)
        operands = [data, packed, scales]
        if self.has_flat_scales:
            operands.append(self.weight(f"{name}.points", columns * count // 2, dtype=np.uint8))
        sizes = {"K": inner, "N": columns, "bits": 4, "block_size": BLOCK, **self.levels}
        return self.node("MatMulNBits", operands, [name], **sizes)

    def save(self, path: Path, inputs: dict[str, list[int]], outputs: dict[str, list[int]], opset: int = 21) -> Path:
        made = helper.make_graph(
            self.nodes,
            "model",
            [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, 1, shape) for name, shape in outputs.items()],
            self.weights,
        )
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(made, opset_imports=imports, ir_version=10), path)
        return path


def decoder(path: Path, *, has_flat_scales: bool = False, is_packed: bool = False) -> Path:
    """A step of one layer of Llama as onnxruntime-genai writes it: grouped attention over caches, weights of 4 bits."""
    m = Maker(has_flat_scales=has_flat_scales)
    h = m.node("SimplifiedLayerNormalization", ["x", m.weight("norm1", WIDE)], ["h"], domain="", epsilon=1e-5)
    if is_packed:
        data = [m.quantised("qkv", h, WIDE, (HEADS + 2 * KEY_HEADS) * SIZE), "", ""]
    else:
        sizes = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS}
        data = [m.quantised(name, h, WIDE, heads * SIZE) for name, heads in sizes.items()]
    lengths = m.given("lengths", np.full(BATCH, PAST, np.int32))
    total = m.given("total", np.asarray(PAST + 1, np.int32))
    caches = m.weight("cos", 32, SIZE // 2), m.weight("sin", 32, SIZE // 2)
    operands = [*data, "past_k", "past_v", lengths, total, *caches]
    a = m.node(
        "GroupQueryAttention",
        operands,
        ["a", "present_k", "present_v"],
        num_heads=HEADS,
        kv_num_heads=KEY_HEADS,
        do_rotary=1,
    )
    o = m.quantised("o", a, HEADS * SIZE, WIDE)
    norm2 = m.weight("norm2", WIDE)
    n = m.node("SkipSimplifiedLayerNormalization", ["x", o, norm2], ["n", "", "", "r"], epsilon=1e-5)
    gate, up = (m.quantised(name, n, WIDE, HIDDEN) for name in ("gate", "up"))
    act = m.node("QuickGelu", [gate], ["act"], alpha=1.0)
    both = m.node("Mul", [act, up], ["both"], domain="")
    m.node("Add", ["r", m.quantised("down", both, HIDDEN, WIDE)], ["y"], domain="")
    cache = [BATCH, KEY_HEADS, PAST, SIZE]
    present = [BATCH, KEY_HEADS, PAST + 1, SIZE]
    rows = [BATCH, 1, WIDE]
    return m.save(
        path, {"x": rows, "past_k": cache, "past_v": cache}, {"y": rows, "present_k": present, "present_v": present}
    )


def encoder(path: Path) -> Path:
    """One layer of BERT as ONNX Runtime's transformer optimizer writes it: a bias of q, k and v together, fused Gelu."""
    m = Maker()
    wide = HEADS * SIZE // 2
    parts = [m.node("MatMul", ["x", m.weight(f"{name}.weight", WIDE, wide)], [name], domain="") for name in "qkv"]
    a = m.node("MultiHeadAttention", [*parts, m.weight("qkv.bias", 3 * wide)], ["a"], num_heads=HEADS)
    o = m.node("MatMul", [a, m.weight("o.weight", wide, WIDE)], ["o"], domain="")
    norms = [m.weight(name, WIDE) for name in ("gamma1", "beta1", "o.bias", "gamma2", "beta2", "down.bias")]
    n = m.node("SkipLayerNormalization", [o, "x", *norms[:3]], ["n"], epsilon=1e-5)
    up = m.node("FusedMatMul", [n, m.weight("up.weight", HIDDEN, WIDE)], ["up"], transB=1)
    act = m.node("BiasGelu", [up, m.weight("up.bias", HIDDEN)], ["act"])
    down = m.node("MatMul", [act, m.weight("down.weight", HIDDEN, WIDE)], ["down"], domain="")
    m.node("SkipLayerNormalization", [down, n, *norms[3:]], ["y"], epsilon=1e-5)
    rows = [BATCH, STEPS, WIDE]
    return m.save(path, {"x": rows}, {"y": rows})


MASKS = {
    "": None,
    "lengths": np.asarray([STEPS - 1, STEPS], np.int32),
    "starts and ends": np.asarray([STEPS - 1, STEPS, 0, 1], np.int32),
    "keys": np.asarray([[1] * (STEPS - 1) + [0], [1] * STEPS], np.int32),
    "queries": np.tril(np.ones((BATCH, STEPS, STEPS), np.int32)),
}


def projected(
    path: Path, mask: str = "", *, has_past: bool = False, has_bias: bool = True, value_size: int = SIZE
) -> Path:
    """Attention with its projection, as ONNX Runtime's transformer optimizer writes BERT, and GPT-2 with a cache."""
    m = Maker()
    sizes = [HEADS * SIZE, HEADS * SIZE, HEADS * value_size]
    bias = m.weight("qkv.bias", sum(sizes)) if has_bias else ""
    operands = ["x", m.weight("qkv.weight", WIDE, sum(sizes)), bias]
    operands.append(m.given("mask", MASKS[mask]) if mask else "")
    inputs, outputs = {"x": [BATCH, STEPS, WIDE]}, {"y": [BATCH, STEPS, WIDE]}
    if has_past:
        operands.append("past")
        inputs["past"], outputs["present"] = ([2, BATCH, HEADS, steps, SIZE] for steps in (PAST, PAST + STEPS))
    results = ["a", "present"] if has_past else ["a"]
    a = m.node("Attention", operands, results, num_heads=HEADS, unidirectional=int(has_past), qkv_hidden_sizes=sizes)
    o = m.node("MatMul", [a, m.weight("o.weight", sizes[2], WIDE)], ["o"], domain="")
    m.node("Add", ["x", o], ["y"], domain="")
    return m.save(path, inputs, outputs)


@pytest.mark.parametrize(
    "options", [*({"mask": mask} for mask in MASKS), {"has_past": True}, {"has_bias": False}], ids=str
)
def test_attention_with_its_projection_is_sharded_by_heads(options: dict[str, Any], tmp_path: Path) -> None:
    module = irpar.load(projected(tmp_path / "model.onnx", **options))
    module.shard("qkv.weight", [None, "tp"])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    share = partition.plan.totals["flops_per_rank"] / partition.plan.original["flops"]
    assert [entry["kind"] for entry in partition.plan.collectives] in (["reduce_scatter"], ["all_gather"])
    assert (share < 0.52) == (options.get("mask") != "starts and ends")


def test_values_of_other_sizes_and_caches_are_sharded_by_heads(tmp_path: Path) -> None:
    for options, name, spec in (
        ({"value_size": 4}, "o.weight", ["tp", None]),
        ({"has_past": True}, "past", [None, None, "tp", None, None]),
    ):
        module = irpar.load(projected(tmp_path / f"{name}.onnx", **options))
        module.shard(name, spec)
        partition = irpar.partition(module, {"tp": 4})
        partition.verify().check()
        assert partition.plan.totals["flops_per_rank"] < 0.27 * partition.plan.original["flops"]


@pytest.mark.parametrize("is_by_columns", [False, True])
@pytest.mark.parametrize("mask", [None, "lengths", "keys"])
@pytest.mark.parametrize("has_past", [False, True])
def test_attention_with_a_quantised_projection_is_sharded_by_heads(
    has_past: bool, mask: str | None, is_by_columns: bool, tmp_path: Path
) -> None:
    """As quantize_dynamic makes it of what the optimizer writes."""
    m = Maker()
    wide = HEADS * SIZE
    m.node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], domain="")
    count = [3 * wide] if is_by_columns else []
    scale = m.given("scale", _random.uniform(0.001, 0.002, count).astype(np.float32))
    point = m.given("point", np.full(count, 128, np.uint8))
    operands = ["q", m.weight("qkv.weight", WIDE, 3 * wide, dtype=np.uint8), m.weight("bias", 3 * wide), "s", scale]
    operands += [m.given("mask", MASKS[mask]) if mask and not has_past else "", "z", point]
    inputs, outputs = {"x": [BATCH, STEPS, WIDE]}, {"y": [BATCH, STEPS, WIDE]}
    if has_past:
        operands.append("past")
        inputs["past"], outputs["present"] = ([2, BATCH, HEADS, steps, SIZE] for steps in (PAST, PAST + STEPS))
    results = ["a", "present"] if has_past else ["a"]
    m.node("QAttention", operands, results, num_heads=HEADS, unidirectional=int(has_past))
    m.node("MatMul", ["a", m.weight("o.weight", wide, WIDE)], ["y"], domain="")
    module = irpar.load(m.save(tmp_path / "m.onnx", inputs, outputs))
    module.shard("qkv.weight", [None, "tp"])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    assert [entry["kind"] for entry in partition.plan.collectives] == ["reduce_scatter"]
    assert partition.plan.totals["flops_per_rank"] < 0.55 * partition.plan.original["flops"]


def test_heads_inside_attention_are_suggested(tmp_path: Path) -> None:
    suggestion = irpar.suggest(projected(tmp_path / "model.onnx"), {"tp": 2})
    module = irpar.load(tmp_path / "model.onnx")
    suggestion.apply(module)
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    assert len(partition.plan.collectives) == 1
    assert partition.plan.totals["flops_per_rank"] < 0.52 * partition.plan.original["flops"]


def test_weights_that_onnx_runtime_packs_are_known_to_it_where_a_product_runs_alone(tmp_path: Path) -> None:
    """With an accuracy level it computes with integers, but only where it has packed the weights ahead."""
    m = Maker()
    m.levels = {"accuracy_level": 4}
    m.quantised("y", "x", WIDE, HIDDEN)
    m.save(tmp_path / "m.onnx", {"x": [BATCH, WIDE, WIDE]}, {"y": [BATCH, WIDE, HIDDEN]})
    module = irpar.load(tmp_path / "m.onnx")
    (node,) = module.graph
    x = _random.standard_normal((BATCH, WIDE, WIDE)).astype(np.float32)
    weights = [value.data.numpy() for value in node.inputs[1:] if value.data is not None]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (found,) = PlainArrays(module.opsets).without_kernel(node)([x, *weights], None)  # type: ignore[arg-type]
    assert np.array_equal(found, expected)


def test_an_operator_of_which_no_type_is_known_is_named(tmp_path: Path) -> None:
    m = Maker()
    m.node("NhwcConv", ["x", m.weight("w", 8, 3, 3, 8)], ["h"], pads=[1, 1, 1, 1])
    m.node("Relu", ["h"], ["r"], domain="")
    m.node("Relu", ["r"], ["y"], domain="")
    module = irpar.load(m.save(tmp_path / "m.onnx", {"x": [2, 8, 8, 8]}, {"y": [2, 8, 8, 8]}))
    module.shard("x", ["tp", None, None, None])
    with pytest.raises(IrparError, match=r"does not know the operator com\.microsoft\.NhwcConv") as error:
        irpar.partition(module, {"tp": 2})
    assert "/h" in str(error.value)


def test_an_unknown_operator_is_not_blamed_for_what_does_not_depend_on_it(tmp_path: Path) -> None:
    m = Maker()
    m.node("NhwcConv", ["x", m.weight("w", 8, 3, 3, 8)], ["z"], pads=[1, 1, 1, 1])
    m.node("Relu", ["x"], ["b"], domain="")
    m.node("Neg", ["b"], ["y"], domain="")
    module = irpar.load(m.save(tmp_path / "m.onnx", {"x": [2, 8, 8, 8]}, {"y": [2, 8, 8, 8]}))
    module.shard("x", ["tp", None, None, None])
    with pytest.raises(IrparError, match="not known yet") as error:
        irpar.partition(module, {"tp": 2}, pipeline="complete-sharding,insert-redistribution,localize")
    assert "infer-types" in str(error.value)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_flat_scales", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_a_decoder_of_grouped_attention_is_cut_by_heads(
    count: int, has_flat_scales: bool, is_packed: bool, tmp_path: Path
) -> None:
    """Also where one product gives q, k and v; each rank has one too."""
    module = irpar.load(decoder(tmp_path / "decoder.onnx", has_flat_scales=has_flat_scales, is_packed=is_packed))
    for name in ("qkv", "gate", "up") if is_packed else ("q", "k", "v", "gate", "up"):
        module.shard(f"{name}.weight", ["tp", None, None])
    partition = irpar.partition(module, {"tp": count})
    partition.verify().check()
    kinds = [entry["kind"] for entry in partition.plan.collectives]
    assert kinds == ["all_reduce", "reduce_scatter"]
    lies = {entry["name"]: entry["sharding"] for entry in partition.plan.outputs}
    assert lies["present_k"] == lies["present_v"] == [None, ["tp"], None, None]
    assert partition.plan.totals["flops_per_rank"] < partition.plan.original["flops"] / count * 1.05
    assert max(part["weight_bytes"] for part in partition.plan.parts) < partition.plan.original["weight_bytes"] * 0.7
    products = [node for node in partition.module.graphs[0] if node.op_type == "MatMulNBits"]
    assert len(products) == (5 if is_packed else 7)


def test_flat_zero_points_that_products_of_other_sizes_share(tmp_path: Path) -> None:
    m = Maker(has_flat_scales=True)
    m.given("points", np.full(WIDE * HIDDEN // BLOCK // 2, 0x87, np.uint8))
    for name, data, inner, columns in (("up", "x", WIDE, HIDDEN), ("down", "up", HIDDEN, WIDE)):
        m.quantised(name, data, inner, columns)
        m.nodes[-1].input[3] = "points"
    module = irpar.load(m.save(tmp_path / "m.onnx", {"x": [3, WIDE]}, {"down": [3, WIDE]}))
    module.shard("up.weight", ["tp", None, None])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    assert [entry["kind"] for entry in partition.plan.collectives] == ["reduce_scatter"]


@pytest.mark.parametrize("shape", [[2], [2, 1], [2, 4], [2, 4, 4], [1, 1]], ids=str)
def test_masks_of_attention_with_its_projection(shape: list[int], tmp_path: Path) -> None:
    """A mask of one step for more is read by nobody; ONNX Runtime's attention of three operands refuses it."""
    m = Maker()
    m.node("Attention", ["x", m.weight("w", 16, 48), m.weight("b", 48), "mask"], ["y"], num_heads=4)
    path = m.save(tmp_path / "m.onnx", {"x": [2, 4, 16]}, {"y": [2, 4, 16]})
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("mask", onnx.TensorProto.INT32, shape))
    onnx.save(model, path)
    module = irpar.load(path)
    module.shard("w", [None, "tp"])
    numbers = np.full(shape, 3, np.int32) if len(shape) == 1 else np.ones(shape, np.int32)
    inputs = {"x": _random.standard_normal((2, 4, 16)).astype(np.float32), "mask": numbers}
    (expected,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    (found,) = irpar.partition(module, {"tp": 2}).executor("ort").run(inputs).values()
    np.testing.assert_allclose(found, expected, 1e-4, 1e-5)


@pytest.mark.parametrize("is_doubled", [False, True])
def test_a_query_behind_many_sums(is_doubled: bool, tmp_path: Path) -> None:
    """As many ways lead back as 2 to the power of the sums, and further than calls may go."""
    m = Maker()
    m.node("MatMul", ["x", m.weight("w", 16, 16)], ["q0"], domain="")
    m.weight("one", 16)
    for step in range(1500):
        m.node("Add", [f"q{step}", f"q{step}" if is_doubled else "one"], [f"q{step + 1}"], domain="")
    operands = ["q1500", "", "", "", "", m.given("lengths", np.full(2, 3, np.int32)), m.given("all", np.int32(4))]
    m.node("GroupQueryAttention", operands, ["y", "k", "v"], num_heads=2, kv_num_heads=1)
    module = irpar.load(m.save(tmp_path / "m.onnx", {"x": [2, 4, 16]}, {"y": [2, 4, 8]}))
    module.shard("x", ["tp", None, None])
    assert irpar.partition(module, {"tp": 2}).plan.collectives == []


def test_an_encoder_takes_its_heads_of_a_bias_of_all_three(tmp_path: Path) -> None:
    module = irpar.load(encoder(tmp_path / "encoder.onnx"))
    for name in ("q.weight", "k.weight", "v.weight"):
        module.shard(name, [None, "tp"])
    module.shard("up.weight", ["tp", None])
    module.shard("y", [None, None, None])
    partition = irpar.partition(module, {"tp": 4})
    partition.verify().check()
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_reduce", "all_reduce"]


def test_an_operator_whose_sizes_are_not_told_runs_whole(tmp_path: Path) -> None:
    m = Maker()
    m.node("FusedMatMul", ["x", m.weight("w", 64, 8)], ["h"])
    m.node("DynamicQuantizeMatMul", ["h", m.weight("q", 8, 8, dtype=np.uint8), m.given("s", np.float32(0.1))], ["d"])
    m.node("Relu", ["d"], ["y"], domain="")
    module = irpar.load(m.save(tmp_path / "m.onnx", {"x": [6, 64]}, {"y": [6, 8]}))
    module.shard("x", [None, "tp"])
    partition = irpar.partition(module, {"tp": 2})
    partition.verify().check()
    assert "all_reduce" in {entry["kind"] for entry in partition.plan.collectives}
