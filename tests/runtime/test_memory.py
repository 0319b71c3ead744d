"""Runs that do not fit into memory are refused before they begin."""

from pathlib import Path

import numpy as np
import pytest

from irpar import api
from irpar.analysis.memory.liveness import bytes_at_rest, peak
from irpar.ir import ArrayTensor, DType, Graph, Module, Node, TensorType
from irpar.ir.text.files import parse_module
from irpar.kernels import Kept, lookup
from irpar.output.parts import Part, parts_of
from irpar.runtime import memory
from irpar.runtime.memory import OutOfMemoryError, check_memory, kept_bytes, memory_limit, run_bytes
from irpar.sharding import IrparError

from .programs import MLP, mlp_weights, module


def doubled(times: int) -> Module:
    """x joined with itself again and again: 2**times times its 128 bytes."""
    lines = [f"%a{i + 1} = Concat(%a{i}, %a{i}) {{axis=0}} : f32[{4 << (i + 1)}, 8]" for i in range(times)]
    return parse_module(
        f"graph @g(%a0: f32[4, 8]) -> (%y) opset 18 {{\n{chr(10).join(lines)}\n"
        f"%y = ReduceSum(%a{times}) {{keepdims=0}} : f32[]\n}}"
    )


def test_a_run_that_does_not_fit_is_refused_with_both_figures(tmp_path: Path) -> None:
    made = api.partition(doubled(40), "tp=2")
    told = r"a run of all ranks of mesh tp=2 .* needs about [\d,]{15,} bytes of memory, there are [\d,]+\n"
    with pytest.raises(OutOfMemoryError, match=told):
        made.run({"a0": np.ones((4, 8), np.float32)})
    made.save(tmp_path / "out")
    with pytest.raises(OutOfMemoryError, match=told):
        api.Partition.open(tmp_path / "out").executor()
    with pytest.raises(OutOfMemoryError, match="the original model needs about"):
        made.verify()
    with pytest.raises(OutOfMemoryError, match="the original model needs about"):
        made.bisect()


def test_the_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = api.partition(doubled(4), "tp=2")
    made.executor("ort")
    monkeypatch.setenv(memory.LIMIT, "1000")
    with pytest.raises(OutOfMemoryError, match="there are 1,000"):
        made.executor("numpy")
    monkeypatch.setenv(memory.LIMIT, "none")
    assert memory_limit() is None
    assert made.executor("numpy").run({"a0": np.ones((4, 8), np.float32)})["y"] == 32 * 16
    monkeypatch.setenv(memory.LIMIT, "5 GB")
    with pytest.raises(IrparError, match='IRPAR_MEMORY_LIMIT is "5 GB"'):
        memory_limit()


COPIED = """
mesh @m = ["x"=1]
graph local @g(%h: f32[64] in host) -> (%y) opset 21 ranks [0] {
  %d = irpar.Copy(%h) {to="device", id=0} : f32[64]
  %y = Neg(%d) : f32[64]
}
"""


def test_device_and_host_that_are_one_memory_have_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 bytes of the one and 256 of the other; a limit that is set holds for each by itself."""
    monkeypatch.setattr(memory, "_group_limit", lambda: 600)
    with pytest.raises(OutOfMemoryError, match="on device and host together, needs about 768 bytes of memory"):
        api.partition(parse_module(COPIED), pipeline="group-segments").executor("numpy")
    monkeypatch.setenv(memory.LIMIT, "600")
    api.partition(parse_module(COPIED), pipeline="group-segments").executor("numpy")
    monkeypatch.setenv(memory.LIMIT, "500")
    with pytest.raises(OutOfMemoryError, match="needs about 512 bytes of memory, there are 500"):
        api.partition(parse_module(COPIED), pipeline="group-segments").executor("numpy")


def test_the_limit_is_the_smaller_of_machine_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUP_LIMIT", tmp_path / "memory.max")
    machine = memory_limit()
    for text, expected in (("max\n", machine), ("4096\n", 4096)):
        (tmp_path / "memory.max").write_text(text)
        assert memory_limit() == expected
    check_memory(4096, "this")
    with pytest.raises(OutOfMemoryError, match=r"this needs about 2,000 bytes of memory, there are 4,096 for 3 such"):
        check_memory(2000, "this", 3)
    with pytest.raises(OutOfMemoryError):
        check_memory(4097, "this")


def test_what_the_ranks_need_by_hand() -> None:
    loaded = module(MLP, **mlp_weights())
    parts = parts_of(loaded, loaded.mesh)
    graph = loaded.graph
    # %x is 48 bytes, %h and %r are 32, %p and %y are 48; at the collective %p and %y are held.
    assert peak(graph).activation_bytes == 96
    assert bytes_at_rest(graph) == 96
    # Two parts with 2 * 96 bytes of weights each, four ranks.
    assert run_bytes(parts, 2, writes_over=True) == 2 * 192 + 4 * 96


def test_only_ranks_that_compute_count_with_their_peak() -> None:
    made = api.partition(doubled(10), "dp=4")
    most = peak(made.parts[0].graph).activation_bytes
    rest = bytes_at_rest(made.parts[0].graph)
    assert rest == 128  # the input; the sum is 4 bytes
    assert run_bytes(made.parts, 1, writes_over=True) == 4 * rest + (most - rest)
    assert run_bytes(made.parts, 2, writes_over=True) == 4 * rest + 2 * (most - rest)


CONVOLUTIONS = [
    # Kernels of 3x3 are transformed: 16 numbers for each 9.
    ((1, 64, 48, 48), (64, 64, 3, 3), {}, 16 * 64 * 64 * 4),
    # Many channels apart lie side by side.
    ((1, 384, 6, 6), (384, 1, 3, 3), {"group": 384}, 384 * 9 * 4),
    ((1, 64, 32, 32), (64, 64, 3, 3), {"strides": [2, 2]}, 0),
    ((1, 8, 32, 32), (8, 8, 3, 3), {}, 0),
]


@pytest.mark.parametrize(("x", "weight", "attributes", "expected"), CONVOLUTIONS)
def test_what_kernels_keep_of_constants_counts(
    x: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, object], expected: int
) -> None:
    kept = Kept([1])
    kernel = lookup("", "Conv", 22)
    assert kernel is not None
    random = np.random.default_rng(0)
    operands = [random.standard_normal(shape).astype(np.float32) for shape in (x, weight)]
    kernel(np, operands, {**attributes, "pads": [1, 1, 1, 1]}, 1, kept=kept)
    assert sum(made.nbytes for made in kept._made.values()) == expected
    graph = Graph("g")
    graph.view, graph.ranks = "local", (0,)
    constant = graph.add_constant(ArrayTensor(operands[1]), "w")
    node = Node(
        "Conv", [graph.add_input("x", TensorType(DType.F32, x)), constant], {**attributes, "pads": [1] * 4}, version=22
    )
    graph.set_outputs([graph.append(node).result])
    assert kept_bytes(graph) == expected
    parts = [Part(0, graph, (0,), (0,))]
    known = run_bytes(parts, 1, writes_over=True)
    assert run_bytes(parts, 1, writes_over=True, keeps=True) == known + expected
