"""Dims of fewer elements than devices, and others that leave devices without any: the numbers stay those of the whole."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irpar
from irpar.ir import parse_module
from irpar.sharding import filled_blocks

from . import random_programs
from .budget import budget, every
from .random_programs import Draw, Program, Spec, UnsteadyError, check, partitioned
from .test_odd_shardings import PROGRAMS, Specs, ids
from .written import model_of_text

# -- written programs -----------------------------------------------------------------------------------------------

EMPTY: list[tuple[str, dict[str, int], Specs]] = [
    ("matmul", {"x": 4, "y": 4}, {"x": [["x", "y"], None]}),  # 10 over 16
    ("matmul", {"x": 6}, {"x": [["x"], None]}),  # 10 over 6: 2 2 2 2 2 0
    ("matmul", {"x": 8}, {"x": [None, ["x"]]}),  # partial sums over 12 in 8
    ("matmul", {"x": 16}, {"w1": [None, ["x"]]}),
    ("matmul", {"x": 3, "y": 8}, {"x": [["y"], None], "w2": [["x"], ["y"]]}),
    ("matmul", {"x": 8}, {"y": [["x"], None], "h": [["x:(4)2", "x:(2)2"], ["x:(1)2"]]}),
    ("attention", {"x": 4}, {"x": [["x"], None, None]}),  # a batch of 3 over 4
    ("attention", {"x": 4}, {"x": [None, ["x"], None]}),
    ("attention", {"x": 4, "y": 2}, {"q": [["x"], ["y"], None, None], "y": [None, ["x"], None]}),
    ("attention", {"x": 5}, {"s": [None, ["x"], None, None]}),
    ("conv", {"x": 4}, {"x": [["x"], None, None, None]}),
    ("conv", {"x": 8}, {"w": [["x"], None, None, None]}),
    ("conv", {"x": 4}, {"w": [None, ["x"], None, None], "x": [None, ["x"], None, None]}),
    ("conv", {"x": 2, "y": 4}, {"x": [["y"], None, ["x"], None], "z": [None, ["x", "y"], None, None]}),
    ("reduce", {"x": 8}, {"x": [["x"], None, None]}),
    ("reduce", {"x": 5}, {"x": [None, ["x"], None]}),
    ("reduce", {"x": 4, "y": 4}, {"x": [None, ["x"], ["y"]], "shift": [["y", "x"]]}),
    ("reduce", {"x": 4}, {"scale": [["x:(2)2"], None, ["x:(1)2"]], "shift": [["x"]]}),
    ("reshape", {"x": 4}, {"x": [["x"], None]}),
    ("reshape", {"x": 4}, {"a": [["x"], None, None], "t": [["x"], None, None]}),
    ("reshape", {"x": 8}, {"y": [["x"], None], "gate": [["x:(1)2"], ["x:(2)4"]]}),
    ("gather", {"x": 8}, {"table": [["x"], None]}),
    ("gather", {"x": 2, "y": 4}, {"table": [["x", "y"], None], "ids": [["y"], None]}),
    ("gather", {"x": 4, "y": 4}, {"ids": [["x"], ["y"]], "y": [["y"], ["x"], None]}),
    ("gather", {"x": 4}, {"position": [["x"], None, None], "z": [None, ["x"], None]}),
]


@pytest.mark.parametrize(("name", "mesh", "specs"), every(3, EMPTY), ids=ids)
def test_empty_blocks(name: str, mesh: dict[str, int], specs: Specs, tmp_path: Path) -> None:
    program = PROGRAMS[name].program(irpar.Mesh(mesh), specs)
    assert not check(program, tmp_path, saved=True).refusal
    assert cut_into_empty_blocks(partitioned(program, tmp_path))


def cut_into_empty_blocks(partition: irpar.Partition) -> set[str]:
    """The values that are sharded so that some device holds no elements of them."""
    found = set()
    for value in partition.module.graphs[0].values():
        if value.sharding is not None and value.global_shape is not None:
            parts = map(value.sharding.dim_parts, range(value.sharding.rank))
            if any(filled_blocks(*pair) < pair[1] for pair in zip(value.global_shape, parts, strict=True)):
                found.add(value.source_name)
    return found


CARRIED: list[tuple[str, int, Specs, set[str], list[str]]] = [
    ("matmul", 6, {"x": [["x"], None]}, {"x", "p", "h", "a", "y"}, []),
    ("matmul", 8, {"w1": [None, ["x"]]}, {"w1", "p", "b", "h", "a", "w2"}, ["all_reduce"]),
    ("attention", 4, {"x": [["x"], None, None]}, {"x", "y"}, []),
    ("reduce", 8, {"x": [None, None, ["x"]]}, {"x", "d", "e", "shift", "n", "t"}, ["all_reduce"]),
]


@pytest.mark.parametrize(("name", "devices", "specs", "cut", "sent"), CARRIED, ids=ids)
def test_completion_carries_them(
    name: str, devices: int, specs: Specs, cut: set[str], sent: list[str], tmp_path: Path
) -> None:
    partition = partitioned(PROGRAMS[name].program(irpar.Mesh({"x": devices}), specs), tmp_path)
    assert cut <= cut_into_empty_blocks(partition)
    assert [entry["kind"] for entry in partition.plan.collectives] == sent


def test_a_weight_without_elements_is_written_and_read(tmp_path: Path) -> None:
    """A table that is smaller than what is looked up in it, and brought together for that."""
    numbers = ", ".join(map(str, range(66)))
    text = f"""g (int64[8,8] ids) => (float[8,8,6] y) <float[11,6] table = {{{numbers}}}> {{
      e = Gather(table, ids)  y = Relu(e) }}"""
    onnx.save(model_of_text(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("table", ["x", None])
    irpar.partition(module, irpar.Mesh({"x": 8})).save(tmp_path / "out")
    opened = irpar.Partition.open(tmp_path / "out")
    model = onnx.load(tmp_path / "out" / opened.plan.parts[-1]["model"])
    (weight,) = (constant for constant in model.graph.initializer if constant.name == "table")
    assert list(weight.dims) == [0, 6]
    opened.verify().check()


@pytest.mark.parametrize("dtype", ["float", "bool", "int64"])
def test_a_table_that_is_put_in_another_order_may_lack_rows_on_a_device(dtype: str) -> None:
    """Each device looks its own rows up, by another rule than that of nodes which put elements in another order."""
    model = model_of_text(
        f"g ({dtype}[2] x) => ({dtype}[2] y) <int64[2] i = {{1, 0}}> {{ y = Gather(x, i) }}", opset=18
    )
    module = irpar.load(model)
    module.shard("x", ["x"])
    partition = irpar.partition(module, irpar.Mesh({"x": 4}))
    for engine in ("ort", "numpy"):
        partition.verify(engine=engine).check()


def test_what_does_not_run_without_elements_is_told(tmp_path: Path) -> None:
    text = """g (float[2,4,5,8] x, float[2,4,6,8] k, float[2,4,6,8] v, float[2,4,3,8] pk, float[2,4,3,8] pv)
      => (float[2,4,5,8] y, float[2,4,9,8] nk, float[2,4,9,8] nv) {
      q = Relu(x)  y, nk, nv = Attention(q, k, v, , pk, pv) }"""
    onnx.save(model_of_text(text, opset=23), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("x", [None, None, "x", None])
    partition = irpar.partition(module, irpar.Mesh({"x": 4}))
    partition.verify().check()
    reason = partition.plan.collectives[0]["reason"]
    assert "5 over 4 leaves a rank without elements, on which Attention of %y cannot run" in reason


def test_which_tensor_leaves_a_rank_without_elements_is_told() -> None:
    """Three tokens before those of a sentence, which are too few for these to be had by every device."""
    module = parse_module("""graph @g(%tokens: f32[4, 3, 8], %x: f32[4, 13, 8]) -> (%y) opset 21 {
      %r = Relu(%x) : f32[4, 13, 8]
      %y = Concat(%tokens, %r) {axis=1} : f32[4, 16, 8]
    }""")
    module.shard("x", [None, "x", None])
    (gathered,) = irpar.partition(module, irpar.Mesh({"x": 4})).plan.collectives
    told = "dim 1, along which another of its tensors has 3: 3 over 4 leaves a rank without elements"
    assert told in gathered["reason"]


# -- random programs ------------------------------------------------------------------------------------------------

MESHES = ({"x": 4, "y": 3}, {"x": 8}, {"x": 3, "y": 5}, {"x": 12}, {"x": 2, "y": 6})
PIECES = {8: ("{0}", "{0}:(1)2", "{0}:(2)4", "{0}:(1)4"), 12: ("{0}", "{0}:(1)4", "{0}:(4)3"), 4: ("{0}", "{0}:(2)2")}


@st.composite
def programs(draw: Draw) -> Program:
    """A random program, whose annotated values are sharded over more devices than most dims have elements."""
    program: Program = draw(random_programs.programs(count=2))
    mesh = irpar.Mesh(draw(st.sampled_from(MESHES)))
    return replace(program, mesh=mesh, annotations={n: _spec(draw, s, mesh) for n, s in program.annotations.items()})


def _spec(draw: Draw, like: Spec, mesh: irpar.Mesh) -> Spec:
    dims: list[list[str]] = [[] for _ in like]
    for axis, size in mesh.axes.items():
        if like and draw(st.integers(0, 4)):
            piece = draw(st.sampled_from(PIECES.get(size, ("{0}",)))).format(axis)
            dims[draw(st.integers(0, len(like) - 1))].insert(0, piece)
    return [[*dim, "?"] if draw(st.integers(0, 3)) == 0 else dim or None for dim in dims]


def _draw_many(count: int) -> None:
    ends: Counter[str] = Counter()

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs())
    def draws(program: Program) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                refusal = check(program, Path(folder), saved=ends.total() % 5 == 0).refusal
            except UnsteadyError:
                refusal = "the original has no steady answer"
            empty = not refusal and cut_into_empty_blocks(partitioned(program, Path(folder)))
        ends[refusal or ("some device without elements" if empty else "elements on all devices")] += 1

    draws()
    assert ends["some device without elements"] > 0.5 * count, ends


def test_random_programs_on_many_devices() -> None:
    _draw_many(budget(60))


@pytest.mark.slow
def test_many_random_programs_on_many_devices() -> None:
    _draw_many(budget(800))
