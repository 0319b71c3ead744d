"""Every PyTorch export under tests/fixtures: partitioned, verified against ONNX Runtime, and against PyTorch itself."""

import glob
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest

import irpar
from irpar.annotations.named import infer_undeclared_types
from irpar.api import Engine
from irpar.ir import TensorType
from tests.budget import every, of_each, pairs
from tests.shares import MESHES, Exceptions, check_exceptions, check_share

FIXTURES = Path(__file__).parent / "fixtures"
EXPORTS = sorted(path.stem for path in FIXTURES.glob("*.onnx"))
MODELS = sorted({stem.split("_")[0] for stem in EXPORTS})
TOLERANCE = {"gpt-fp16": 3e-2}
"""Model -> largest |a - b| / (1 + |b|), where it is not 1e-4."""


@dataclass(frozen=True)
class Collectives:
    """How many collectives a plan has at most, over dp=2 and over tp=2; over both their sum."""

    dp: int
    tp: int
    why: str


_BLOCKS = "one all-reduce for each attention and each feed-forward"
_FIRST = "the last in two halves, since only the first token is read of it"
_MASK = "the mask is looked up with indices of rows, which may point to any row (32 bytes)"
COLLECTIVES: dict[str, Collectives] = {
    "gpt": Collectives(0, 4, _BLOCKS),
    "gpt-fp16": Collectives(0, 4, _BLOCKS),
    "llama": Collectives(0, 4, _BLOCKS),
    "llama-opset23": Collectives(0, 4, _BLOCKS),
    "bert": Collectives(0, 5, f"{_BLOCKS}, {_FIRST}"),
    "vit": Collectives(0, 5, f"{_BLOCKS}, {_FIRST}"),
    "bart": Collectives(0, 5, _BLOCKS),
    "moe-capacity": Collectives(0, 2, "one all-reduce for each layer of experts"),
    "moe-topk": Collectives(4, 4, "tokens are gathered and scattered by indices that may point to any row"),
    "resnet": Collectives(
        0, 8, "two halves of a reduction for most blocks, and channels or weights brought together between"
    ),
    "unet": Collectives(
        0, 13, "one for each block, each way up or down, and exchanges where skips that are sharded are joined"
    ),
    "dlrm": Collectives(
        3, 6, "one for each table and perceptron; the loops of EmbeddingBag run replicated: their indices are gathered"
    ),
    "lstm": Collectives(0, 0, "states are whole"),
    "gru": Collectives(0, 0, "states are whole"),
    "if": Collectives(1, 4, "the predicate's sum; a sum for each branch, and what one of them reads"),
    "loop": Collectives(0, 1, "one all-reduce for the perceptron of a trip"),
    "scan": Collectives(0, 7, "the state at each of six steps, and all of them for the head"),
    "hf-gpt2": Collectives(1, 5, f"{_BLOCKS}, and for the vocabulary; {_MASK}"),
    "hf-llama": Collectives(1, 4, f"{_BLOCKS}; {_MASK}"),
    "hf-bert": Collectives(1, 5, f"{_BLOCKS}, {_FIRST}; {_MASK}"),
    "hf-t5": Collectives(0, 7, f"{_BLOCKS}, and for the vocabulary on both sides"),
    "hf-vit": Collectives(0, 5, f"{_BLOCKS}, {_FIRST}"),
    "hf-mixtral": Collectives(1, 6, f"{_BLOCKS}, that of two experts in two halves around their sum; {_MASK}"),
}

_STEPS = "a step of a recurrent layer needs the whole state of the one before: tp shards nothing"
_BAGS = "EmbeddingBag is exported as a Loop whose slices have sizes that depend on data"
MORE_THAN_ITS_SHARE: Exceptions = {
    **{("dlrm", ",".join(mesh)): (1.2, _BAGS) for mesh in MESHES if "tp" in mesh},
    **{(cell, ",".join(mesh)): (2.0, _STEPS) for cell in ("lstm", "gru") for mesh in MESHES if "tp" in mesh},
}


def model_of(export: str) -> str:
    """The first part of the file's name."""
    return export.split("_")[0]


def cuts_of(export: str, mesh: dict[str, int]) -> dict[str, list[str | None]]:
    """The annotations of an export, less the axes that the mesh lacks."""
    tensors = json.loads((FIXTURES / f"{export}.shardings.json").read_text())["tensors"]
    return {
        name: [next((axis for axis in dim or () if axis in mesh), None) for dim in spec]
        for name, spec in tensors.items()
    }


def numbers_of(export: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs, and the results that PyTorch computed from them."""
    graph = onnx.load(FIXTURES / f"{export}.onnx").graph
    with np.load(FIXTURES / f"{model_of(export)}.npz") as arrays:
        return {one.name: arrays[one.name] for one in graph.input}, {one.name: arrays[one.name] for one in graph.output}


def loaded(export: str) -> irpar.Module:
    """The export, its symbols bound to the sizes of the inputs."""
    inputs, _ = numbers_of(export)
    graph = onnx.load(FIXTURES / f"{export}.onnx").graph
    bind = {
        dim.dim_param: size
        for value in graph.input
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True)
        if dim.dim_param
    }
    return irpar.load(FIXTURES / f"{export}.onnx", bind=bind)


def partitioned(export: str, mesh: dict[str, int]) -> irpar.Partition:
    """The export over the mesh, annotated by its shardings file; made once for several tests."""
    return _partitioned(export, tuple(mesh.items()))


@lru_cache(maxsize=64)
def _partitioned(export: str, axes: tuple[tuple[str, int], ...]) -> irpar.Partition:
    mesh = dict(axes)
    module = loaded(export)
    irpar.annotate(module, cuts_of(export, mesh))
    return irpar.partition(module, irpar.Mesh(mesh))


def check_numbers(partition: irpar.Partition, export: str, engine: Engine = "ort") -> None:
    """Fail where the partition differs from ONNX Runtime on the export, or from what PyTorch computed before it."""
    inputs, results = numbers_of(export)
    tolerance = TOLERANCE.get(model_of(export), 1e-4)
    partition.verify(inputs, tolerance=tolerance, engine=engine).check()
    got = partition.run(inputs, engine=engine)
    assert set(got) == set(results)
    for name, expected in results.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_array_less(np.abs(got[name] - expected) / (1 + np.abs(expected)), tolerance, name)


def check_collectives(partition: irpar.Partition, export: str) -> None:
    """Fail where the plan communicates more than the table says."""
    expected = COLLECTIVES[model_of(export)]
    most = sum({"dp": expected.dp, "tp": expected.tp}[axis] for axis in partition.plan.mesh["axes"])
    reasons = "\n".join(entry["reason"] for entry in partition.plan.collectives)
    count = partition.plan.totals["collectives"]
    assert count <= most, f"{count} collectives, at most {most} are expected: {expected.why}\n{reasons}"


def check_weights(partition: irpar.Partition, export: str) -> None:
    """Fail where a part holds more than its block of the weights that tp cuts, but for small vectors."""
    mesh = partition.plan.mesh["axes"]
    cut = {name for name, spec in cuts_of(export, mesh).items() if "tp" in spec}
    for part in partition.parts:
        found = [value for value in part.graph.constants if value.source in cut]
        assert found or not cut
        total = sum(part.tensor(value).nbytes for value in part.graph.constants)
        for value in found:
            held = part.tensor(value).nbytes * mesh["tp"]
            if value.sharding is not None and value.sharding.is_replicated:
                # Each device has it in full instead of gathering it.
                assert len(value.whole_shape) == 1
                assert 64 * part.tensor(value).nbytes <= 2 * total
                continue
            assert held == prod(value.whole_shape) * value.dtype.bits // 8, f"{value.source} is not sharded"


@pytest.mark.parametrize(("export", "mesh"), of_each(lambda case: model_of(case[0]), pairs(EXPORTS, MESHES)), ids=str)
def test_exports(export: str, mesh: dict[str, int]) -> None:
    partition = partitioned(export, mesh)
    check_numbers(partition, export)
    check_collectives(partition, export)
    check_weights(partition, export)
    check_share(partition, model_of(export), MORE_THAN_ITS_SHARE)


@pytest.mark.parametrize("export", of_each(model_of, [name for name in EXPORTS if model_of(name) in ("gpt", "llama")]))
def test_four_heads_over_four_ranks(export: str) -> None:
    partition = partitioned(export, {"tp": 4})
    check_numbers(partition, export)
    check_collectives(partition, export)
    check_weights(partition, export)
    check_share(partition, model_of(export), {})


@pytest.mark.parametrize(
    ("export", "mesh"), every(2, of_each(lambda case: model_of(case[0]), pairs(EXPORTS, MESHES))), ids=str
)
def test_exports_through_irpars_own_kernels(export: str, mesh: dict[str, int]) -> None:
    check_numbers(partitioned(export, mesh), export, "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("export", EXPORTS)
def test_every_intermediate_is_right_and_so_is_what_was_saved(export: str, tmp_path: Path) -> None:
    partition = partitioned(export, {"dp": 2, "tp": 2})
    inputs, _ = numbers_of(export)
    found = partition.bisect(inputs, tolerance=TOLERANCE.get(model_of(export), 1e-4))
    assert found.first is None
    assert found.compared > 1
    partition.save(tmp_path / "out")
    check_numbers(irpar.Partition.open(tmp_path / "out"), export)


def random_annotations(module: irpar.Module, mesh: dict[str, int], draw: random.Random) -> irpar.Module:
    """The module with 1 to 8 values of any kind cut over any axes along any dim of 4 or more."""
    infer_undeclared_types(module)
    results = (value for node in module.graph for value in node.results)
    shapes = {
        value.name: [dim if isinstance(dim, int) else 0 for dim in value.type.shape]
        for value in (*module.graph.inputs, *module.graph.constants, *results)
        if isinstance(value.type, TensorType) and value.type.shape
    }
    cuttable = sorted(name for name, shape in shapes.items() if max(shape) >= 4)
    for name in draw.sample(cuttable, min(len(cuttable), draw.randint(1, 8))):
        spec: list[list[str]] = [[] for _ in shapes[name]]
        for axis in draw.sample(sorted(mesh), draw.randint(1, len(mesh))):
            draw.choice([dim for dim, size in zip(spec, shapes[name], strict=True) if size >= 4]).append(axis)
        if draw.random() < 0.3:
            spec = [[*dim, "?"] for dim in spec]
        module.shard(glob.escape(name), [dim or None for dim in spec])
    return module


@pytest.mark.slow
@pytest.mark.parametrize("export", EXPORTS)
def test_random_annotations_give_right_numbers(export: str) -> None:
    draw = random.Random(export)
    for _ in range(3):
        mesh = draw.choice([{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3}])
        module = random_annotations(loaded(export), mesh, draw)
        try:
            partition = irpar.partition(module, irpar.Mesh(mesh))
        except irpar.IrparError as error:
            # A cut list of sizes is not folded, and what has these sizes cannot be sharded then.
            assert "its size depends on data" in str(error)  # noqa: PT017
        else:
            check_numbers(partition, export)


OPERATORS = {
    "llama-opset23_dynamo_fixed": {"Attention", "RMSNormalization", "RotaryEmbedding"},
    "resnet_torchscript_fixed": {"Conv", "MaxPool"},
    "unet_dynamo_fixed": {"GroupNormalization", "ConvTranspose", "Resize", "Concat"},
    "unet_torchscript_fixed": {"InstanceNormalization", "ConvTranspose", "Resize", "Concat"},
    "moe-capacity_torchscript_fixed": {"Einsum", "CumSum"},
    "moe-capacity_dynamo_fixed": {"Einsum", "CumSum"},
    "moe-topk_torchscript_fixed": {"TopK", "ScatterElements"},
    "moe-topk_dynamo_fixed": {"TopK", "GatherND", "ScatterElements"},
    "dlrm_torchscript_fixed": {"Loop"},
    "dlrm_dynamo_fixed": {"Loop"},
    "lstm_torchscript_fixed": {"LSTM"},
    "lstm_dynamo_fixed": {"LSTM"},
    "gru_torchscript_fixed": {"GRU"},
    "gru_dynamo_fixed": {"GRU"},
    "if_torchscript_fixed": {"If"},
    "if_dynamo_fixed": {"If"},
    "loop_torchscript_fixed": {"Loop"},
    "loop_dynamo_fixed": {"Loop"},
    "scan_dynamo_fixed": {"Scan"},
}


@pytest.mark.parametrize("export", OPERATORS)
def test_exports_have_the_operators_that_they_are_there_for(export: str) -> None:
    model = onnx.load(FIXTURES / f"{export}.onnx")
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    assert OPERATORS[export] <= {node.op_type for node in nodes}


def test_the_tables_are_of_models_that_exist() -> None:
    assert set(COLLECTIVES) == set(MODELS)
    check_exceptions(MORE_THAN_ITS_SHARE, MODELS)


def test_every_fixture_is_complete_small_and_described() -> None:
    text = (FIXTURES / "README.md").read_text()
    for model in MODELS:
        assert f"| {model} |" in text
    stems = {path.name.removesuffix(".shardings.json") for path in FIXTURES.glob("*.shardings.json")}
    assert stems == set(EXPORTS)
    assert {path.stem for path in FIXTURES.glob("*.npz")} == set(MODELS)
    sizes = [path.stat().st_size for path in FIXTURES.iterdir()]
    assert max(sizes) < 200_000
    assert sum(sizes) < 6_500_000


def test_without_torch_the_tool_says_what_to_install(tmp_path: Path) -> None:
    tool = Path(__file__).parent.parent / "tools" / "export_pytorch.py"
    # -S: a Python without site-packages.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tool), "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "torch, onnx, onnxscript not installed" in done.stderr
    assert "do: pip install torch onnx onnxscript transformers" in done.stderr
    assert not (tmp_path / "out").exists()
