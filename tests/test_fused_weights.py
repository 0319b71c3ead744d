"""Weights that hold q, k and v, or gate and up, side by side: each device has its part of each, and nothing is exchanged."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.ir import ExternalTensor
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

from .test_explanations import check_explained
from .written import model_of_text

MESHES = [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}]


def gpt(folder: Path, mesh: dict[str, int], **options: object) -> irpar.Partition:
    """A GPT-2 with one matrix for q, k and v, in Megatron's way."""
    models.save(folder / "gpt.onnx", "gpt", fused_qkv=True, **options)
    module = irpar.load(folder / "gpt.onnx")
    axes = {"dp_axis": "dp" if "dp" in mesh else None, "tp_axis": "tp"}
    irpar.annotate(module, models.annotations("gpt", fused_qkv=True, **axes))
    return irpar.partition(module, irpar.Mesh(mesh))


def kinds(partition: irpar.Partition) -> dict[str, int]:
    """How many collectives of each kind."""
    return {kind: entry["collectives"] for kind, entry in partition.plan.totals["by_kind"].items()}


def test_the_sections_of_an_annotated_weight_are_not_reported_as_gone(tmp_path: Path) -> None:
    """They are no tensors of the model; the weight is sharded as it was said."""
    partition = gpt(tmp_path, {"tp": 2})
    assert partition.plan.not_as_annotated == []
    assert any(entry["sections"] for entry in partition.plan.values)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_reduction_for_each_attention_and_mlp(tmp_path: Path, mesh: dict[str, int]) -> None:
    partition = gpt(tmp_path, mesh)
    layers = len({value["name"] for value in partition.plan.values if value["name"].endswith("attn.c_attn.weight")})
    assert kinds(partition) == {"all_reduce": 2 * layers}
    assert all(entry["axes"] == ["tp"] for entry in partition.plan.collectives)
    ranks = np.prod(list(mesh.values()))
    assert partition.plan.totals["flops_per_rank"] * ranks <= 1.1 * partition.plan.original["flops"]
    check_explained(partition.plan)
    partition.verify().check()
    partition.verify(engine="numpy").check()


@pytest.mark.parametrize("heads", [3, 4])
def test_heads_that_do_not_divide(tmp_path: Path, heads: int) -> None:
    partition = gpt(tmp_path, {"tp": 2}, heads=heads, hidden=48)
    partition.verify().check()
    assert partition.bisect().first is None


def test_weights_on_disk_are_the_sections_that_the_metadata_says(tmp_path: Path) -> None:
    partition = gpt(tmp_path, {"dp": 2, "tp": 4})
    partition.save(tmp_path / "out")
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    whole = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(tmp_path / "gpt.onnx").graph.initializer}
    parts = [onnx.load(tmp_path / "out" / part["model"]).graph for part in plan["parts"]]
    checked = 0
    for value in plan["values"]:
        if not value["sections"]:
            continue
        dim, sections = value["sections"]["dim"], value["sections"]["of"]
        assert value["sharding"][dim] == ["tp"]
        found = np.zeros_like(whole[value["source"]])
        for place, graph in enumerate(parts):
            block = next(onnx.numpy_helper.to_array(one) for one in graph.initializer if one.name == value["name"])
            (info,) = (info for info in graph.value_info if info.name == value["name"])
            said = {entry.key: entry.value for entry in info.metadata_props}
            assert json.loads(said["irpar.sections"]) == value["sections"]
            for start, stop in sections:
                size = (stop - start) // 4
                own, block = np.split(block, [size], dim)
                region = [slice(None)] * found.ndim
                region[dim] = slice(start + place * size, start + (place + 1) * size)
                found[tuple(region)] = own
            assert block.shape[dim] == 0
        np.testing.assert_array_equal(found, whole[value["source"]])
        checked += 1
    assert checked == 4  # Weight and bias of two layers.
    opened = irpar.Partition.open(tmp_path / "out")
    opened.verify().check()
    opened.verify(engine="numpy").check()


def test_plans_without_reading_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", fused_qkv=True, weights="external")
    read = ExternalTensor.numpy

    def small(tensor: ExternalTensor) -> np.ndarray:
        assert tensor.nbytes <= 1024, f"{tensor.name} at {tensor.offset} is read"
        return read(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(ExternalTensor, "numpy", small)
        module = irpar.load(tmp_path / "gpt.onnx")
        irpar.annotate(module, models.annotations("gpt", None, fused_qkv=True))
        partition = irpar.partition(module, "tp=2")
        partition.save(tmp_path / "plan", weights="none")
    partition.save(tmp_path / "out")
    irpar.Partition.open(tmp_path / "out").verify().check()
    again = irpar.Partition.open(tmp_path / "out").run({"input_ids": np.zeros((4, 32), np.int64)})
    np.testing.assert_array_equal(again["logits"], partition.run({"input_ids": np.zeros((4, 32), np.int64)})["logits"])


GROUPED = """g (float[2,6,16] x, float[16,32] wqkv, float[32] b, float[16,16] wo, float[16,48] wgu, float[24,16] down)
  => (float[2,6,16] y) {
  f0 = MatMul(x, wqkv)  f = Add(f0, b)  q0, k0, v0 = Split<axis=-1>(f, sizes)
  q1 = Reshape(q0, qheads)  q = Transpose<perm=[0,2,1,3]>(q1)
  k1 = Reshape(k0, heads)  k2 = Expand(k1, groups)  k3 = Reshape(k2, qheads)  k = Transpose<perm=[0,2,3,1]>(k3)
  v1 = Reshape(v0, heads)  v2 = Expand(v1, groups)  v3 = Reshape(v2, qheads)  v = Transpose<perm=[0,2,1,3]>(v3)
  s = MatMul(q, k)  p = Softmax<axis=-1>(s)  c0 = MatMul(p, v)
  c1 = Transpose<perm=[0,2,1,3]>(c0)  c = Reshape(c1, merged)  o = MatMul(c, wo)  r = Add(x, o)
  gu = MatMul(r, wgu)  gate = Slice(gu, zero, half, last)  up = Slice(gu, half, end, last)
  act = Sigmoid(gate)  swish = Mul(gate, act)  m = Mul(swish, up)  d = MatMul(m, down)  y = Add(r, d) }"""
INTEGERS = {
    "sizes": [16, 8, 8],
    "qheads": [2, 6, 4, 4],
    "heads": [2, 6, 2, 1, 4],
    "groups": [2, 6, 2, 2, 4],
    "merged": [2, 6, 16],
    "zero": [0],
    "half": [24],
    "end": [48],
    "last": [-1],
}
WEIGHTS = ("wqkv", "b", "wo", "wgu", "down")


@pytest.mark.parametrize("annotated", ["columns", "rows", "both"])
def test_sections_of_other_sizes(tmp_path: Path, annotated: str) -> None:
    """Grouped queries, and gate and up by Slice; the matrices are cut too where only those behind them are annotated."""
    onnx.save(model_of_text(GROUPED, WEIGHTS, INTEGERS), tmp_path / "g.onnx")
    module = irpar.load(tmp_path / "g.onnx")
    columns = {"wqkv": [None, "tp"], "b": ["tp"], "wgu": [None, "tp"]}
    rows = {"wo": ["tp", None], "down": ["tp", None]}
    cuts = {"columns": columns, "rows": rows, "both": columns | rows}[annotated]
    irpar.annotate(module, {**cuts, "y": [None, None, None]})
    partition = irpar.partition(module, "tp=2")
    assert kinds(partition) == {"all_reduce": 2}
    graph = partition.parts[0].graph
    assert graph.value("wqkv").shape == (16, 16)
    assert graph.value("wgu").shape == (16, 24)
    assert sum(node.op_type == "MatMul" for node in graph) == 6
    partition.verify().check()
    assert partition.bisect().first is None


def test_whole_matrices_stay_whole(tmp_path: Path) -> None:
    onnx.save(model_of_text(GROUPED, WEIGHTS, INTEGERS), tmp_path / "g.onnx")
    module = irpar.load(tmp_path / "g.onnx")
    irpar.annotate(module, {"x": ["dp", None, None]})
    partition = irpar.partition(module, "dp=2")
    assert kinds(partition) == {}
    for part in partition.parts:
        assert part.graph.value("wqkv").shape == (16, 32)
        assert part.graph.value("wgu").shape == (16, 48)
    assert not any(value["sections"] for value in partition.plan.values)
    partition.verify().check()


def test_partial_sums_of_sections_are_reduced_together(tmp_path: Path) -> None:
    """Rows of the matrices are sharded too: one all_reduce for q, k and v together, as before they were taken apart."""
    onnx.save(model_of_text(GROUPED, WEIGHTS, INTEGERS), tmp_path / "g.onnx")
    module = irpar.load(tmp_path / "g.onnx")
    cuts = {"wqkv": ["x", "tp"], "b": ["tp"], "wo": ["tp", None], "wgu": [None, "tp"], "down": ["tp", None]}
    irpar.annotate(module, cuts)
    pipeline = DEFAULT_PIPELINE.replace("insert-redistribution", "insert-redistribution{refine=false}")
    partition = irpar.partition(module, "x=2,tp=2", pipeline=pipeline)
    partition.verify().check()
    assert kinds(partition) == {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    (entry,) = (
        entry for entry in partition.plan.collectives if entry["axes"] == ["x"] and entry["kind"] == "all_reduce"
    )
    assert entry["bytes"] == 2 * 6 * 32 // 2 * 4
    check_explained(partition.plan)


def tied(folder: Path, *sizes: str) -> irpar.Module:
    """Layers that share one matrix for q, k and v, each with the sizes of its sections."""
    body = "\n".join(
        f"""p{n} = MatMul(h{n}, w) a{n} = Add(p{n}, b) q{n}, k{n}, v{n} = Split<axis=-1>(a{n}, sizes{n})
        s{n} = {f"Sum(q{n}, k{n}, v{n})" if each == "16,16,16" else f"Relu(k{n})"}
        r{n} = Relu(s{n}) h{n + 1} = MatMul(r{n}, o)"""
        for n, each in enumerate(sizes)
    )
    lists = ", ".join(f"int64[3] sizes{n} = {{{each}}}" for n, each in enumerate(sizes))
    text = f"""g (float[4,16] h0, float[16,48] w, float[48] b, float[16,16] o) => (float[4,16] h{len(sizes)})
        <{lists}> {{ {body} }}"""
    onnx.save(model_of_text(text, ["w", "b", "o"]), folder / "tied.onnx")
    return irpar.load(folder / "tied.onnx")


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}], ids=str)
def test_layers_that_share_a_fused_weight_exchange_nothing(tmp_path: Path, mesh: dict[str, int]) -> None:
    module = tied(tmp_path, *["16,16,16"] * 3)
    module.shard("w", [None, ["tp"]])
    module.shard("h3", [None, None])
    partition = irpar.partition(module, irpar.Mesh(mesh))
    assert kinds(partition) == {"all_reduce": 3}
    # Each rank holds its part of the matrix once, whatever the number of layers.
    floats = 16 * 48 + 48 + 16 * 16
    (held,) = {part["weight_bytes"] for part in partition.plan.parts}
    assert held <= 4 * floats / mesh["tp"] + 100  # Sizes of sections.
    assert [node.op_type for node in partition.module.graphs[0]].count("MatMul") == 6
    partition.verify().check()


def test_a_shared_weight_stays_one_where_layers_take_other_sections(tmp_path: Path) -> None:
    for sizes, weights in (("16,16,16", 3), ("8,16,24", 1)):
        module = tied(tmp_path, "16,16,16", sizes)
        irpar.PassManager.parse("infer-types,fold-constants,cse,split-weights").run(module)
        assert sum(value.source_name == "w" for value in module.graph.constants) == weights
