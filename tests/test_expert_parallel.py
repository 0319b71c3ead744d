"""Mixtures of experts: tokens cut over the axis that shards the experts go to them and back by one all-to-all each."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import irpar
from irpar import models
from tests.budget import pairs

GROUPS, TOKENS, EXPERTS, SLOTS, FEATURES, INNER = 4, 8, 4, 4, 16, 32


class Mixture:
    """A graph as it grows."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def op(self, op_type: str, *operands: str, **attributes: Any) -> str:
        """A node; its result has a name of its own."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, operands, [name], **attributes))
        return name

    def constant(self, numbers: Any, dtype: Any = np.int64) -> str:
        """An initializer."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(numbers, dtype)
        return name

    def weight(self, name: str, *shape: int) -> str:
        """An initializer of normals."""
        self.constants[name] = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        return name

    def save(self, folder: Path, shape: list[int]) -> irpar.Module:
        """The model whose last node gives y."""
        self.nodes[-1].output[0] = "y"
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
            [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
        return irpar.load(folder / "model.onnx")


def _switched(m: Mixture, x: str) -> tuple[str, str]:
    """Dispatch and combination masks [group, token, expert, slot] of the expert that each token scores highest."""
    gates = m.op("Softmax", m.op("MatMul", x, m.weight("router", FEATURES, EXPERTS)), axis=-1)
    on_off = m.constant([0, 1], np.float32)
    best = m.op("ArgMax", gates, axis=-1, keepdims=0)
    chosen = m.op("OneHot", best, m.constant([EXPERTS]), on_off, axis=-1)
    place = m.op("CumSum", chosen, m.constant(1), exclusive=1)
    last = m.constant([-1])
    place = m.op("ReduceSum", m.op("Mul", place, chosen), last, keepdims=0)
    gate = m.op("ReduceSum", m.op("Mul", gates, chosen), last, keepdims=0)
    # A place beyond the slots is no place.
    slot = m.op("Equal", m.op("Unsqueeze", place, last), m.constant(np.arange(SLOTS), np.float32))
    slot = m.op("Cast", slot, to=onnx.TensorProto.FLOAT)
    dispatch = m.op("Einsum", chosen, slot, equation="gse,gsc->gsec")
    return dispatch, m.op("Einsum", gate, dispatch, equation="gs,gsec->gsec")


def _einsums(m: Mixture, x: str, dispatch: str, combine: str) -> str:
    taken = m.op("Einsum", dispatch, x, equation="gsec,gsm->egcm")
    inner = m.op("Relu", m.op("Einsum", taken, m.weight("into", EXPERTS, FEATURES, INNER), equation="egcm,emh->egch"))
    given = m.op("Einsum", inner, m.weight("from", EXPERTS, INNER, FEATURES), equation="egch,ehm->egcm")
    return m.op("Einsum", combine, given, equation="gsec,egcm->gsm")


def _products(m: Mixture, x: str, dispatch: str, combine: str) -> str:
    """The same as exporters write it out."""

    def shaped(value: str, *shape: int) -> str:
        return m.op("Reshape", value, m.constant(shape))

    flat = m.op("Transpose", shaped(dispatch, GROUPS, TOKENS, EXPERTS * SLOTS), perm=[0, 2, 1])
    taken = shaped(m.op("MatMul", flat, x), GROUPS, EXPERTS, SLOTS, FEATURES)
    taken = shaped(m.op("Transpose", taken, perm=[1, 0, 2, 3]), EXPERTS, GROUPS * SLOTS, FEATURES)
    inner = m.op("Relu", m.op("MatMul", taken, m.weight("into", EXPERTS, FEATURES, INNER)))
    given = shaped(m.op("MatMul", inner, m.weight("from", EXPERTS, INNER, FEATURES)), EXPERTS, GROUPS, SLOTS, FEATURES)
    given = shaped(m.op("Transpose", given, perm=[1, 0, 2, 3]), GROUPS, EXPERTS * SLOTS, FEATURES)
    return m.op("MatMul", shaped(combine, GROUPS, TOKENS, EXPERTS * SLOTS), given)


def _sent(partition: irpar.Partition) -> list[tuple[str, list[str], int]]:
    return [(entry["kind"], entry["axes"], entry["bytes"]) for entry in partition.plan.collectives]


@pytest.mark.parametrize(
    ("mesh", "groups", "sent"),
    [
        # [4 experts, a group, 4 slots, 16 features] on each of 4 devices.
        ({"ep": 4}, ["ep"], [("all_to_all", ["ep"], 1024)] * 2),
        ({"ep": 2}, ["ep"], [("all_to_all", ["ep"], 2048)] * 2),
        # Groups over both axes: those of the other one stay where they are.
        ({"dp": 2, "ep": 2}, ["dp", "ep"], [("all_to_all", ["ep"], 1024)] * 2),
    ],
    ids=["each device an expert", "two experts", "groups over data as well"],
)
@pytest.mark.parametrize(("is_flat", "write"), pairs([False, True], [_einsums, _products]))
def test_one_all_to_all_each_way(
    write: Any, mesh: dict[str, int], groups: list[str], sent: list[Any], tmp_path: Path, *, is_flat: bool
) -> None:
    m, x = Mixture(), "x"
    shape = [GROUPS * TOKENS, FEATURES] if is_flat else [GROUPS, TOKENS, FEATURES]
    if is_flat:
        x = m.op("Reshape", x, m.constant([GROUPS, TOKENS, FEATURES]))
    y = write(m, x, *_switched(m, x))
    if is_flat:
        m.op("Reshape", y, m.constant(shape))
    module = m.save(tmp_path, shape)
    module.shard("x", [groups, *[None] * (len(shape) - 1)])
    module.shard("into", [["ep"], None, None])
    partition = irpar.partition(module, irpar.Mesh(mesh))
    assert _sent(partition) == sent
    assert (
        partition.plan.totals["flops_per_rank"] * np.prod(list(mesh.values()))
        <= 1.01 * partition.plan.original["flops"]
    )
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
        assert partition.executor(engine).log.differences(partition.plan.collectives) == []


@pytest.mark.parametrize(("mesh", "rows"), [({"ep": 4}, ["ep"]), ({"dp": 2, "ep": 2}, ["dp", "ep"])], ids=str)
@pytest.mark.parametrize("routing", ["einsum", "gather"])
def test_a_decoder_of_experts(routing: str, mesh: dict[str, int], rows: list[str], tmp_path: Path) -> None:
    """By masks, and by the places that each expert chooses in each row, which GatherND and ScatterND look up there."""
    models.save(tmp_path / "moe.onnx", "moe", batch=4, layers=1, routing=routing)
    module = irpar.load(tmp_path / "moe.onnx")
    module.shard("input_ids", [rows, None])
    module.shard("h.*.moe.experts.*.weight", [["ep"], None, None])
    partition = irpar.partition(module, irpar.Mesh(mesh))
    assert [kind for kind, _, _ in _sent(partition)] == ["all_to_all"] * 2
    partition.verify().check()


@pytest.mark.parametrize(
    ("slots", "sent"),
    [
        # As many slots as tokens: all tokens go to all devices, what experts add is reduced to where it belongs.
        (8, [("all_to_all", 128), ("all_gather", 512), ("reduce_scatter", 2048)]),
        # A quarter as many: places go around, tokens that experts chose to these, and what these give to all.
        (2, [("all_to_all", 128), ("all_gather", 16), ("reduce_scatter", 512), ("all_gather", 128)]),
    ],
    ids=["many slots", "few slots"],
)
@pytest.mark.parametrize("scatter", ["ScatterND", "ScatterElements"])
def test_experts_that_choose_tokens_by_place(
    scatter: str, slots: int, sent: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Tokens and results travel in the way that sends least for so many slots; places themselves are few bytes."""
    m, tokens = Mixture(), 32
    gates = m.op("Softmax", m.op("MatMul", "x", m.weight("router", FEATURES, EXPERTS)), axis=-1)
    m.nodes.append(
        helper.make_node(
            "TopK", [m.op("Transpose", gates, perm=[1, 0]), m.constant([slots])], ["gate", "places"], axis=-1
        )
    )
    taken = m.op("Gather", "x", "places", axis=0)
    inner = m.op("Relu", m.op("MatMul", taken, m.weight("into", EXPERTS, FEATURES, INNER)))
    last = m.constant([2])
    given = m.op(
        "Mul", m.op("MatMul", inner, m.weight("from", EXPERTS, INNER, FEATURES)), m.op("Unsqueeze", "gate", last)
    )
    zeros = m.constant(np.zeros((tokens, FEATURES)), np.float32)
    if scatter == "ScatterND":
        m.op(scatter, zeros, m.op("Unsqueeze", "places", last), given, reduction="add")
    else:
        rows, shape = m.constant([EXPERTS * slots, 1]), m.constant([EXPERTS * slots, FEATURES])
        index = m.op("Expand", m.op("Reshape", "places", rows), shape)
        m.op(scatter, zeros, index, m.op("Reshape", given, shape), reduction="add", axis=0)
    module = m.save(tmp_path, [tokens, FEATURES])
    for name in ("x", "y"):
        module.shard(name, [["ep"], None])
    for name in ("into", "from"):
        module.shard(name, [["ep"], None, None])
    partition = irpar.partition(module, irpar.Mesh({"ep": 4}))
    assert [(kind, size) for kind, _, size in _sent(partition)] == sent
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()
        assert partition.executor(engine).log.differences(partition.plan.collectives) == []
