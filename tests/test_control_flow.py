"""If, Loop and Scan over several devices: their bodies are sharded with what is around them, and compute the same."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irpar
from irpar.runtime.log import CollectiveLog
from tests.budget import budget, every

from .written import model_of_text

Cuts = dict[str, list[Any]]

RECURRENT = """
    g (float[8,6,16] x, float[8,32] h0, float[16,32] wx, float[32,32] wh) => (float[8,32] h, float[8,6,32] hs) {
      h, hs = Scan <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1], body = b (float[8,32] a, float[8,16] xt)
        => (float[8,32] o, float[8,32] r) { p = MatMul(xt, wx)  q = MatMul(a, wh)  s = Add(p, q)  o = Tanh(s)  r = Neg(o) }>
        (h0, x) }"""
REPEATED = """
    g (float[8,16] x, float[16,32] w1, float[32,16] w2) => (float[8,16] y, float[5,8,32] rows) {
      n = Constant<value = int64 {5}>()  go = Constant<value = bool {1}>()
      y, rows = Loop(n, go, x) <body = b (int64 i, bool c, float[8,16] a) => (bool d, float[8,16] o, float[8,32] r) {
        d = Identity(c)  h = MatMul(a, w1)  r = Tanh(h)  k = MatMul(r, w2)  o = Add(a, k) }> }"""
UNTIL = """
    g (float[8,16] x, float[16,16] w) => (float[8,16] y) {
      n = Constant<value = int64 {9}>()  go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[8,16] a) => (bool d, float[8,16] o) {
        h = MatMul(a, w)  o = Tanh(h)  big = ReduceMax<keepdims=0>(o)  most = Constant<value = float {0.6}>()
        d = Less(big, most) }> }"""
BRANCHES = """
    g (float[8,16] x, float[16,32] w1, float[32,16] w2) => (float[8,16] y) {
      m = ReduceSum<keepdims=0>(x)  zero = Constant<value = float {0}>()  c = Greater(m, zero)
      y = If(c) <then_branch = t () => (float[8,16] a) { h = MatMul(x, w1)  r = Relu(h)  a = MatMul(r, w2) },
                 else_branch = e () => (float[8,16] b) { b = Neg(x) }> }"""
NESTED = """
    g (float[8,16] x, float[16,32] w1, float[32,16] w2) => (float[8,16] y) {
      n = Constant<value = int64 {4}>()  go = Constant<value = bool {1}>()  one = Constant<value = int64 {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[8,16] a) => (bool d, float[8,16] o) {
        d = Identity(c)  late = Greater(i, one)
        o = If(late) <then_branch = t () => (float[8,16] u) { h = MatMul(a, w1)  r = Tanh(h)  u = MatMul(r, w2) },
                      else_branch = e () => (float[8,16] v) { v = Add(a, x) }> }> }"""
BACKWARD = """
    g (float[6,8,4] x, float[8,4] h0) => (float[8,4] h, float[8,4,6] hs) {
      h, hs = Scan <num_scan_inputs=1, scan_input_directions=[1], scan_output_axes=[-1], scan_output_directions=[1],
        body = b (float[8,4] a, float[8,4] xt) => (float[8,4] o, float[8,4] r) {
        s = ReduceSum<keepdims=1>(xt, second)  o = Add(a, s)  r = Softmax<axis=1>(o)
        }> (h0, x) }"""
PASSED_THROUGH = """
    g (float[8,4] x, float[8,4] z) => (float[8,4] y, float[8,4] same, float[8,4] again, float[3,8,4] all) {
      n = Constant<value = int64 {3}>()  go = Constant<value = bool {1}>()
      y, same, again, all = Loop(n, go, x, x, z) <body = b (int64 i, bool c, float[8,4] a, float[8,4] k, float[8,4] l)
        => (bool d, float[8,4] o, float[8,4] m, float[8,4] p, float[8,4] q) {
        d = Identity(c)  o = Add(a, l)  m = Identity(k)  p = Identity(o)  q = Identity(z) }> }"""
TWO_STATES = """
    g (float[3,4] x, float[5] k0, float[3,6,4] xs) => (float[3,4] h, float[5] k, float[3,6,4] hs) {
      h, k, hs = Scan <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
        body = b (float[3,4] a, float[5] c, float[3,4] xt) => (float[3,4] o, float[5] d, float[3,4] r) {
        o = Add(a, xt)  d = Neg(c)  r = Tanh(o) }> (x, k0, xs) }"""
NO_TRIPS = """
    g (float[8,16] x, float[16,16] w, int64 n, bool go) => (float[8,16] y) {
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[8,16] a) => (bool d, float[8,16] o) {
        d = Identity(c)  h = MatMul(a, w)  o = Relu(h) }> }"""
OWN_WEIGHTS = """
    g (float[4,4] x) => (float[4,4] y) {
      n = Constant<value = int64 {3}>()  go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[4,4] a) => (bool d, float[4,4] o) {
        d = Identity(c)  w = Constant<value = float[4,4] {1,2,3,4, -1,0,1,2, 0.5,1,1,0, 2,2,-1,1}>()
        h = MatMul(a, w)  o = Tanh(h) }> }"""

DP_TP = {"dp": 2, "tp": 2}
PROGRAMS: dict[str, tuple[str, dict[str, int], Cuts, list[str]]] = {
    "state by columns comes back whole": (
        RECURRENT,
        DP_TP,
        {"x": ["dp", None, None], "wx": [None, "tp"], "wh": [None, "tp"]},
        ["all_gather tp 6"],
    ),
    "uneven state and batch": (RECURRENT, {"dp": 3}, {"x": ["dp", None, None]}, []),
    "ranks without a batch": (RECURRENT, {"dp": 5}, {"x": ["dp", None, None]}, []),
    "one of two states without rows": (TWO_STATES, {"dp": 4}, {"x": ["dp", None], "k0": [None]}, []),
    "trips without rows": (REPEATED, {"dp": 5}, {"x": ["dp", None]}, []),
    "a sum over nothing in each trip": (REPEATED, {"tp": 12}, {"w1": [None, "tp"]}, ["all_reduce tp 5"]),
    "uneven columns": (RECURRENT, {"tp": 3}, {"wh": [None, "tp"]}, ["all_gather tp 6"]),
    "the scanned axis is sharded": (RECURRENT, {"tp": 2}, {"x": [None, "tp", None]}, ["all_gather tp 1"]),
    "megatron in a loop": (
        REPEATED,
        DP_TP,
        {"x": ["dp", None], "w1": [None, "tp"], "w2": ["tp", None]},
        ["all_reduce tp 5"],
    ),
    "a condition of cut values": (
        UNTIL,
        DP_TP,
        {"x": ["dp", None], "w": [None, "tp"]},
        ["all_gather tp None", "all_reduce dp,tp None"],
    ),
    "a predicate of cut values": (
        BRANCHES,
        DP_TP,
        {"x": ["dp", None], "w1": [None, "tp"]},
        ["all_reduce dp 1", "all_reduce tp None"],
    ),
    "a branch in a loop": (NESTED, DP_TP, {"x": ["dp", None], "w1": [None, "tp"]}, ["all_reduce tp None"]),
    "backward, and a new last axis": (BACKWARD, DP_TP, {"x": [None, "dp", None]}, []),
    "passed through": (PASSED_THROUGH, {"dp": 3}, {"z": ["dp", None]}, []),
    "a value of the body": (REPEATED, {"tp": 4}, {"h": [None, "tp"]}, ["all_reduce tp 5"]),
    "a weight in the body": (OWN_WEIGHTS, {"tp": 2}, {"w": [None, "tp"]}, ["all_gather tp 3"]),
}
"""Model, mesh, annotations, and the collectives with their axes and how often they run."""


def load(text: str, folder: Path) -> irpar.Module:
    model = model_of_text(text, integers={"second": [1]})
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return irpar.load(folder / "model.onnx")


def drawn(session: onnxruntime.InferenceSession, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    given = {"n": np.array(0), "go": np.array(True)}
    return {
        entry.name: given[entry.name]
        if entry.name in given
        else (rng.standard_normal(entry.shape) / np.sqrt(entry.shape[-1])).astype(np.float32)
        for entry in session.get_inputs()
    }


def check(partition: irpar.Partition, folder: Path, inputs: dict[str, Any] | None = None) -> dict[str, CollectiveLog]:
    """Compare both engines with ONNX Runtime on the original, in memory and from disk."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = inputs or drawn(session)
    names = [entry.name for entry in session.get_outputs()]
    expected = dict(zip(names, session.run(names, inputs), strict=True))
    partition.save(folder / "out", force=True)
    logs = {}
    for engine in ("ort", "numpy"):
        for made in (partition, irpar.Partition.open(folder / "out")):
            got = made.run(inputs, engine=engine)
            for name, whole in expected.items():
                np.testing.assert_allclose(got[name], whole, rtol=1e-4, atol=1e-5, err_msg=f"{name} by {engine}")
            logs[engine] = made.executor(engine).log
    return logs


@pytest.mark.parametrize("name", every(2, PROGRAMS))
def test_bodies_are_cut(name: str, tmp_path: Path) -> None:
    text, mesh, cuts, collectives = PROGRAMS[name]
    module = load(text, tmp_path)
    for tensor, spec in cuts.items():
        module.shard(tensor, spec)
    partition = irpar.partition(module, irpar.Mesh(mesh))
    told = [f"{entry['kind']} {','.join(entry['axes'])} {entry['times']}" for entry in partition.plan.collectives]
    assert told == collectives
    for log in check(partition, tmp_path).values():
        assert log.differences(partition.plan.collectives) == []


@pytest.mark.parametrize(("n", "go"), [(0, True), (3, False), (4, True)])
def test_the_trip_count_is_known_when_it_runs(n: int, go: bool, tmp_path: Path) -> None:
    module = load(NO_TRIPS, tmp_path)
    module.shard("w", [None, "tp"])
    partition = irpar.partition(module, irpar.Mesh({"tp": 2}))
    (gather,) = partition.plan.collectives
    assert gather["times"] is None
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((8, 16), np.float32), "w": rng.standard_normal((16, 16), np.float32)}
    for log in check(partition, tmp_path, {**inputs, "n": np.array(n), "go": np.array(go)}).values():
        assert len(log) == (n if go else 0)


def test_both_branches_run(tmp_path: Path) -> None:
    module = load(BRANCHES, tmp_path)
    module.shard("w1", [None, "tp"])
    partition = irpar.partition(module, irpar.Mesh({"tp": 2}))
    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((16, 32), np.float32), "w2": rng.standard_normal((32, 16), np.float32)}
    ran = [
        len(check(partition, tmp_path, {"x": np.full((8, 16), sign, np.float32), **weights})["ort"])
        for sign in (1.0, -1.0)
    ]
    assert ran == [1, 0]


def test_a_loop_reads_what_is_outside_once(tmp_path: Path) -> None:
    """What a body needs otherwise than it lies outside is moved before the loop, not at each trip."""
    module = load(REPEATED, tmp_path)
    module.shard("w1", ["tp", None])
    module.shard("x", ["tp", None])
    partition = irpar.partition(module, irpar.Mesh({"tp": 2}))
    told = [(entry["value"], entry["kind"], entry["times"]) for entry in partition.plan.collectives]
    assert told == [("w1", "all_gather", 1)]
    check(partition, tmp_path)


def test_a_body_that_runs_whole_cannot_be_annotated(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[8] x) => (float[8] y) {
          s = SequenceConstruct(x, x)  i = Constant<value = int64 {0}>()
          t = SequenceMap(s) <body = b (float[8] a) => (float[8] r) { r = Neg(a) }>
          y = SequenceAt(t, i) }"""
    )
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("r", ["tp"])
    with pytest.raises(
        irpar.IrparError, match=r"%r is annotated \[@tp\], but the body of SequenceMap .* runs replicated"
    ):
        irpar.partition(module, irpar.Mesh({"tp": 2}))


STEPS = {
    "h = MatMul(a, w)": "o = Tanh(h)",
    "h = MatMul(a, v)": "o = Add(a, h)",
    "h = Mul(a, z)": "o = Softmax<axis=1>(h)",
    "h = Add(a, z)": "o = Sigmoid(h)",
    "h = ReduceMean<keepdims=1>(a, second)": "o = Sub(a, h)",
    "h = Transpose<perm=[0,1]>(a)": "o = Neg(h)",
}


@st.composite
def loops(draw: st.DrawFn) -> tuple[str, dict[str, int], Cuts]:
    """A loop or scan with steps from above, a mesh, and annotations of some values inside and outside."""
    rows, width = draw(st.integers(2, 7)), draw(st.integers(2, 9))
    row, square = f"float[{rows},{width}]", f"float[{width},{width}]"
    lines = [
        f"{first}  {second}" for first, second in draw(st.lists(st.sampled_from(sorted(STEPS.items())), max_size=3))
    ]
    body = "  a0 = Identity(a)  " + "  ".join(
        line.replace("o = ", f"a{n + 1} = ").replace("h = ", f"h{n} = ").replace("(h)", f"(h{n})").replace(", h)", f", h{n})")
        .replace("(a)", f"(a{n})").replace("(a,", f"(a{n},") for n, line in enumerate(lines)
    )  # fmt: skip
    last = f"a{len(lines)}"
    trips = draw(st.integers(1, 3))
    head = f"g ({row} x, {row} z, {square} w, {square} v, float[{trips},{rows},{width}] xs)"
    kind = draw(st.sampled_from(["Loop", "Scan"]))
    if kind == "Loop":
        text = f"""{head} => ({row} y, float[{trips},{rows},{width}] ys) {{
          n = Constant<value = int64 {{{trips}}}>()  go = Constant<value = bool {{1}}>()  z0 = Add(z, z)
          y, ys = Loop(n, go, x) <body = b (int64 i, bool c, {row} a) => (bool d, {row} {last}, {row} r) {{
            d = Identity(c)  {body.replace("z)", "z0)")}  r = Abs({last}) }}> }}"""
    else:
        text = f"""{head} => ({row} y, float[{trips},{rows},{width}] ys) {{
          y, ys = Scan <num_scan_inputs=1, body = b ({row} a, {row} z0) => ({row} {last}, {row} r) {{
            {body.replace("z)", "z0)")}  r = Abs({last}) }}> (x, xs) }}"""
    mesh = draw(st.sampled_from([{"p": 2}, {"p": 3}, {"p": 5}, {"p": 2, "q": 2}, {"p": 4, "q": 2}]))
    names = {"x": 2, "z": 2, "w": 2, "v": 2, "xs": 3, "y": 2, "ys": 3, last: 2, "a": 2, "r": 2}
    cuts: Cuts = {}
    for name in draw(st.lists(st.sampled_from(sorted(names)), unique=True, min_size=1, max_size=3)):
        axes = draw(st.permutations([*mesh, *[None] * (names[name] - 1)]))[: names[name]]
        cuts[name] = list(axes)
    return text, mesh, cuts


def _check_drawn(program: tuple[str, dict[str, int], Cuts], folder: Path) -> None:
    text, mesh, cuts = program
    module = load(text, folder)
    for name, spec in cuts.items():
        module.shard(name, spec)
    partition = irpar.partition(module, irpar.Mesh(mesh))
    for log in check(partition, folder).values():
        assert log.differences(partition.plan.collectives) == []


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=budget(25), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(program=loops())
def test_random_loops(program: tuple[str, dict[str, int], Cuts], tmp_path: Path) -> None:
    _check_drawn(program, tmp_path)


@pytest.mark.slow
@settings(max_examples=budget(400), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(program=loops())
def test_many_random_loops(program: tuple[str, dict[str, int], Cuts], tmp_path: Path) -> None:
    _check_drawn(program, tmp_path)


NUMBERS_OF_A_VECTOR = """
    g (float[8] x, float[4,6] h) => (float[4,6] y) {
      y = Scan <num_scan_inputs=1, body = b (float[4,6] a, float e) => (float[4,6] c) {
        s = Softmax<axis=1>(a)  c = Add(s, e) }> (h, x) }"""
NOTHING_TO_WALK_ALONG = """
    g (float[4,5,3] x, float[6] h) => (float[6] w, float[5,4,3] y) {
      w, y = Scan <num_scan_inputs=1, scan_input_axes=[1], body = b (float[6] s, float[4,3] e) => (float[6] t, float[4,3] q) {
        t = Tanh(s)  q = Neg(e) }> (h, x) }"""
NOTHING_COLLECTED_IS_READ = """
    g (float[3,4] x, int64 n) => (float[4,3] z, float w) {
      k = ReduceSum<keepdims=0>(x)
      y, s = Scan <num_scan_inputs=1, scan_output_axes=[1,0], body = b (float[4] e) => (float[4] q, float r) {
        q = Neg(e)  r = ReduceSum<keepdims=0>(x) }> (x)
      z, w = Loop <body = b2 (int64 i, bool c, float[4,3] a, float a2) => (bool d, float[4,3] q2, float a3) {
        d = Identity(c)  q2 = Neg(a)  a3 = Neg(a2) }> (n,, y, k) }"""


@pytest.mark.parametrize(
    ("text", "mesh", "cuts"),
    [
        (NUMBERS_OF_A_VECTOR, {"x": 2}, {"h": [None, "x"]}),
        # On the last device there is nothing: ONNX Runtime must not be asked to take it apart, or to stack it.
        (NOTHING_TO_WALK_ALONG, {"x": 4}, {"x": [None, None, "x"]}),
        (NOTHING_COLLECTED_IS_READ, {"x": 3}, {"x": [None, "x"]}),
    ],
)
def test_scans_that_failed_once(text: str, mesh: dict[str, int], cuts: Cuts, tmp_path: Path) -> None:
    module = load(text, tmp_path)
    for tensor, spec in cuts.items():
        module.shard(tensor, spec)
    check(irpar.partition(module, irpar.Mesh(mesh)), tmp_path)
