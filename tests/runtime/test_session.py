"""Sessions: state stays on its ranks from run to run, and the numbers are those of a loop by hand.

`python -m tests.runtime.test_session FOLDER GROUP` is one rank of a process group that runs ten steps.
"""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy

import irpar
from irpar.arguments import ArgumentError
from irpar.cli import main
from irpar.errors import IrparError
from irpar.ir import ArrayTensor, Module, parse_module
from irpar.onnx_io import to_proto
from irpar.output.safetensors import SafetensorsError, read_safetensors
from irpar.runtime.errors import InputError, ProgramError
from irpar.runtime.session import SessionError
from tests.runtime.devices import strict_device
from tests.runtime.groups.mpi_libraries import find
from tests.runtime.launched import run_ranks

MEAN = """
graph @step(%x: f32[8, 6], state statistic %mean: f32[6], state counter %n: f32[] = 0.0) -> (%y, %mean_1 as "mean_next" replaces %mean, %n_1 replaces %n) opset 21 {
  %axes = constant : i64[1] [0]
  %one = constant : f32[] 1.0
  %n_1 = Add(%n, %one) : f32[]
  %batch = ReduceMean(%x, %axes) {keepdims=0} : f32[6]
  %change = Sub(%batch, %mean) : f32[6]
  %part = Div(%change, %n_1) : f32[6]
  %mean_1 = Add(%mean, %part) : f32[6]
  %y = Sub(%x, %mean_1) : f32[8, 6]
}
"""
CACHE = """
graph @step(%q: f32[2, 4, 1, 8], %k: f32[2, 4, 1, 8], state cache %keys: f32[2, 4, 16, 8], state counter %at: i64[1]) -> (%scores, %keys_1 replaces %keys, %at_1 replaces %at) opset 21 {
  %one = constant : i64[1] [1]
  %shape = constant : i64[4] [1, 1, 16, 1]
  %places = constant : i64[16] [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
  %here = Equal(%places, %at) : bool[16]
  %mask = Reshape(%here, %shape) : bool[1, 1, 16, 1]
  %keys_1 = Where(%mask, %k, %keys) : f32[2, 4, 16, 8]
  %at_1 = Add(%at, %one) : i64[1]
  %t = Transpose(%keys_1) {perm=[0, 1, 3, 2]} : f32[2, 4, 8, 16]
  %scores = MatMul(%q, %t) : f32[2, 4, 1, 16]
}
"""


def made(text: str, cuts: Mapping[str, Any], mesh: dict[str, int]) -> irpar.Partition:
    module: Module = parse_module(text)
    for name, cut in cuts.items():
        module.shard(name, cut)
    return irpar.partition(module, mesh)


def mean_of_ten(session: Any) -> None:
    """Ten steps of a running mean, compared with the mean of all rows."""
    random = np.random.default_rng(0)
    seen = []
    for step in range(10):
        x = random.standard_normal((8, 6), np.float32)
        seen.append(x)
        found = session.run({"x": x})
        assert list(found) == ["y"]
        mean = np.concatenate(seen).mean(axis=0)
        np.testing.assert_allclose(found["y"], x - mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(session.read("mean"), mean, rtol=1e-5, atol=1e-6)
        assert session.read("n") == step + 1


def cache_of_ten(session: Any) -> None:
    """Ten tokens of a key cache, compared with all keys by hand."""
    random = np.random.default_rng(1)
    keys = np.zeros((2, 4, 16, 8), np.float32)
    for step in range(10):
        q, k = (random.standard_normal((2, 4, 1, 8), np.float32) for _ in range(2))
        keys[:, :, step] = k[:, :, 0]
        found = session.run({"q": q, "k": k})
        np.testing.assert_allclose(found["scores"], q @ keys.swapaxes(2, 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(session.read("keys"), keys)
    assert session.steps == 10


@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 4}], ids=str)
def test_a_running_mean(mesh: dict[str, int], engine: Any) -> None:
    partition = made(MEAN, {"x": ["dp", None]}, mesh)
    with partition.session(engine=engine) as session:
        mean_of_ten(session)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_a_cache_of_keys(mesh: dict[str, int], engine: Any) -> None:
    partition = made(CACHE, {"q": ["dp", "tp", None, None]}, mesh)
    (keys, at) = partition.plan.state
    assert (keys["kind"], keys["sharding"]) == ("cache", [["dp"], ["tp"], None, None])
    assert (at["kind"], at["output"]) == ("counter", "at_1")
    assert partition.plan.collectives == []
    with partition.session(engine=engine) as session:
        cache_of_ten(session)


@pytest.mark.parametrize(
    ("text", "cuts", "steps"),
    [(MEAN, {"x": ["dp", None], "mean": ["tp"]}, "mean"), (CACHE, {"q": ["dp", "tp", None, None]}, "cache")],
    ids=["mean", "cache"],
)
def test_a_device_computes_the_steps(text: str, cuts: dict[str, Any], steps: str) -> None:
    partition = made(text, cuts, {"dp": 2, "tp": 2})
    with strict_device(host_elements=0), partition.session(engine="cupy") as session:
        {"mean": mean_of_ten, "cache": cache_of_ten}[steps](session)


def test_a_state_that_is_cut_otherwise_than_what_replaces_it() -> None:
    """What the next run takes is brought there; uneven blocks too."""
    partition = made(MEAN, {"x": ["dp", None], "mean": ["dp"]}, {"dp": 4})
    assert partition.plan.state[0]["sharding"] == [["dp"]]
    with partition.session() as session:
        mean_of_ten(session)


def test_run_takes_state_as_inputs_and_gives_it_back() -> None:
    partition = made(MEAN, {"x": ["dp", None]}, {"dp": 2})
    x = np.ones((8, 6), np.float32)
    found = partition.run({"x": x})
    assert list(found) == ["y", "mean_next", "n_1"]
    again = partition.run({"x": 3 * x, "mean": found["mean_next"], "n": found["n_1"]})
    np.testing.assert_array_equal(again["mean_next"], np.full(6, 2, np.float32))


def test_sessions_do_not_share_state() -> None:
    partition = made(MEAN, {"x": ["dp", None]}, {"dp": 2})
    one, other = partition.session(), partition.session()
    x = np.ones((8, 6), np.float32)
    one.run({"x": x})
    assert other.read("n") == 0
    other.run({"x": 5 * x})
    np.testing.assert_array_equal(one.read("mean"), np.ones(6))
    np.testing.assert_array_equal(other.read("mean"), np.full(6, 5))


COUNTERS = """
graph @step(%x: f32[4], state counter %a: f32[100000], state counter %b: f32[100000]) -> (%y, %a_1 replaces %a, %b_1 replaces %b) opset 21 {
  %one = constant : f32[] 1.0
  %y = Neg(%x) : f32[4]
  %a_1 = Add(%a, %one) : f32[100000]
  %b_1 = Add(%b, %one) : f32[100000]
}
"""


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_threads_that_share_a_session_take_turns(engine: Any, tmp_path: Path) -> None:
    """No step is lost, and what is saved beside runs is of one step."""
    session = made(COUNTERS, {"a": ["d"]}, {"d": 2}).session(engine=engine)
    x = np.ones(4, np.float32)
    saved = []

    def go(number: int) -> None:
        for step in range(10):
            session.run({"x": x})
            session.save(file := tmp_path / f"{number}-{step}")
            saved.append({name: array[0] for name, array in safetensors.numpy.load_file(file).items()})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, range(4)))
    assert session.steps == 40
    assert {found["a"] - found["b"] for found in saved} == {0}
    assert all((array == 40).all() for array in session.read_all().values())


def test_state_of_a_session_is_let_go_of_however_it_ends() -> None:
    partition = made(MEAN, {"x": ["dp", None]}, {"dp": 2})
    held = partition.session()._executor._held._held
    x = {"x": np.ones((8, 6), np.float32)}
    with partition.session() as session:
        session.run(x)
        assert len(held) == 1
    assert not held
    session = partition.session()
    session.run(x)
    with pytest.raises(InputError), session:
        session.run({"x": np.ones(3, np.float32)})
    assert not held
    session = partition.session()
    session.run(x)
    del session
    assert not held


def test_a_name_that_no_file_of_state_can_hold_is_refused(tmp_path: Path) -> None:
    text = (
        MEAN.replace("%mean:", '%"__metadata__":')
        .replace("%mean,", '%"__metadata__",')
        .replace("(%batch, %mean)", '(%batch, %"__metadata__")')
        .replace("Add(%mean", 'Add(%"__metadata__"')
    )
    session = made(text, {}, {"dp": 2}).session()
    with pytest.raises(SafetensorsError, match='may not be called "__metadata__"'):
        session.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_state_is_written_and_read() -> None:
    partition = made(MEAN, {"x": ["dp", None], "mean": ["dp"]}, {"dp": 4})
    session = partition.session()
    mean = np.arange(6, dtype=np.float32)
    session.write("mean", mean)
    mean[:] = -1  # What the caller does with its array is not the session's.
    np.testing.assert_array_equal(session.read("mean"), np.arange(6))
    read = session.read("mean")
    read[:] = 9
    np.testing.assert_array_equal(session.read_all()["mean"], np.arange(6))


def test_what_cannot_be_asked() -> None:
    partition = made(MEAN, {"x": ["dp", None]}, {"dp": 2})
    session = partition.session()
    x = np.ones((8, 6), np.float32)
    with pytest.raises(InputError, match="mean is state of the session, and no input"):
        session.run({"x": x, "mean": np.zeros(6, np.float32)})
    with pytest.raises(InputError, match='there is no state "men"'):
        session.read("men")
    with pytest.raises(InputError, match="the inputs do not fit"):
        session.write_all({"n": np.float32(7), "mean": np.zeros(5, np.float32)})
    assert session.read("n") == 0  # All of them, or none.
    for ask in (session.read, session.run, session.write_all, session.load, session.save):
        with pytest.raises(ArgumentError, match="is the number 3"):
            ask(3)  # type: ignore[operator]
    session.close()
    with pytest.raises(ProgramError, match="the session is closed"):
        session.run({"x": x})
    plain = irpar.partition(
        parse_module("graph @g(%x: f32[2]) -> (%y) opset 21 {\n %y = Neg(%x) : f32[2]\n}"), {"dp": 1}
    )
    with pytest.raises(IrparError, match="the program has no state"):
        plain.session()


# -- files ------------------------------------------------------------------------------------------------------------

WEIGHTS = """
graph @g(%x: f32[2, 6], state cache %last: bf16[2, 5]) -> (%y, %now replaces %last) opset 21 {
  %w = constant : f32[6, 5] data("#w", 0, 120) from "weight"
  %p = MatMul(%x, %w) : f32[2, 5]
  %now = Cast(%p) {to=16} : bf16[2, 5]
  %before = Cast(%last) {to=1} : f32[2, 5]
  %y = Add(%p, %before) : f32[2, 5]
}
"""
W = np.random.default_rng(3).integers(-9, 9, (6, 5)).astype(np.float32)


def with_weights(mesh: dict[str, int]) -> irpar.Partition:
    """A program whose weight is state that no run changes."""
    module = parse_module(WEIGHTS, resources={"#w": ArrayTensor(W)})
    module.add_state("weight", kind="parameter")
    module.shard("weight", [None, "tp"])
    return irpar.partition(module, mesh)


def test_parts_without_constants_of_their_own_are_one(tmp_path: Path) -> None:
    """What a rank holds of a weight that is state is no part of its program; blocks of 2, 2 and 1 columns are."""
    with_weights({"tp": 5}).save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["part0", "plan.json", "state.safetensors"]
    assert (tmp_path / "out" / "part0" / "weights.bin").stat().st_size == 0
    assert len(with_weights({"tp": 3}).plan.parts) == 2


@pytest.mark.parametrize("tp", [1, 3, 5])
def test_what_was_written_goes_on(tp: int, tmp_path: Path) -> None:
    with_weights({"tp": tp}).save(tmp_path / "out")
    opened = irpar.Partition.open(tmp_path / "out")
    entries = {entry["input"]: entry for entry in opened.plan.state}
    assert (entries["weight"]["file"], entries["weight"]["output"]) == ("state.safetensors", None)
    assert (entries["last"]["file"], entries["last"]["dtype"]) == (None, "bf16")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    with opened.session() as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], x @ W)
        last = (x @ W).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(session.run({"x": x})["y"], x @ W + last.astype(np.float32))
        session.save(tmp_path / "saved.safetensors")
        with pytest.raises(SessionError, match="exists already"):
            session.save(tmp_path / "saved.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "saved.safetensors")
    np.testing.assert_array_equal(found["weight"], W)
    assert found["last"].dtype == ml_dtypes.bfloat16
    with opened.session() as again:
        again.load(tmp_path / "saved.safetensors")
        np.testing.assert_array_equal(again.read("last"), last)


def test_what_the_library_writes_is_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"weight": np.ones((6, 5), np.float32), "last": np.zeros((2, 5), ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(tensors, path)
    session = with_weights({"tp": 5}).session()
    session.load(path)
    np.testing.assert_array_equal(session.read("weight"), 1)
    safetensors.numpy.save_file({"weigth": tensors["weight"]}, path)
    with pytest.raises(SessionError, match="other tensors than the program has states") as told:
        session.load(path)
    assert "lacking: last, weight" in str(told.value)
    assert "unknown: weigth" in str(told.value)
    safetensors.numpy.save_file({**tensors, "last": np.zeros((5, 2), ml_dtypes.bfloat16)}, path)
    with pytest.raises(SessionError, match="other types than the states") as told:
        session.load(path)
    assert "last: bf16[5, 2], expected bf16[2, 5]" in str(told.value)
    np.testing.assert_array_equal(session.read("weight"), 1)


@pytest.mark.parametrize("data", [b"", b"x" * 20, b"\xff" * 8, b"\x10" + b"\0" * 7 + b'{"a": {"dtype": '])
def test_what_is_no_safetensors_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(SafetensorsError, match="not a safetensors file, or a damaged one"):
        read_safetensors(path)
    with pytest.raises(SafetensorsError, match="cannot read the tensors"):
        read_safetensors(tmp_path / "none.safetensors")


def test_a_partition_whose_state_is_not_its_own_is_refused(tmp_path: Path) -> None:
    with_weights({"tp": 5}).save(tmp_path / "out")
    safetensors.numpy.save_file({"weight": W.T.copy()}, tmp_path / "out" / "state.safetensors")
    with pytest.raises(ProgramError, match=r'"weight" is f32\[5, 6\] in state.safetensors'):
        irpar.Partition.open(tmp_path / "out").session()
    (tmp_path / "out" / "state.safetensors").unlink()
    with pytest.raises(SafetensorsError, match="cannot read the tensors"):
        irpar.Partition.open(tmp_path / "out").session()


def test_commands_leave_state_out_and_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(MEAN, {"x": ["dp", None], "mean": ["tp"]}, {"dp": 2, "tp": 2}).save(tmp_path / "out")
    np.savez(tmp_path / "in.npz", x=np.ones((8, 6), np.float32))
    words = ["run", str(tmp_path / "out"), "--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "o.npz")]
    assert main(words) == 0
    with np.load(tmp_path / "o.npz") as found:
        assert sorted(found) == ["mean_next", "n_1", "y"]
        np.testing.assert_array_equal(found["mean_next"], np.ones(6))
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "out")]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "statistic", "mean_next", "f32", "[6@tp]"] in shown
    assert ["n", "counter", "n_1", "f32", "[]"] in shown


def test_a_module_with_state_is_written_as_onnx() -> None:
    module = parse_module(WEIGHTS, resources={"#w": ArrayTensor(W)})
    module.add_state("weight", kind="parameter")
    model = to_proto(module)
    onnx.checker.check_model(model)
    assert states(irpar.load(model)) == states(module)


@pytest.mark.parametrize(
    "change", [{"input": -1}, {"input": 9}, {"input": True}, {"output": -1}, {"parameter": 5}, {"kind": "cash"}]
)
def test_states_in_metadata_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    model = to_proto(parse_module(MEAN))
    (entry,) = (entry for entry in model.metadata_props if entry.key == "irpar.states")
    first, second = json.loads(entry.value)
    entry.value = json.dumps([{**first, **change}, second])
    with pytest.raises(IrparError, match=r"metadata irpar\.states cannot be read"):
        irpar.load(model)
    entry.value = json.dumps([first, first])
    with pytest.raises(IrparError, match=r"metadata irpar\.states cannot be read"):
        irpar.load(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output": 0}, "has the type f32\\[6\\], and %y, which replaces it, f32\\[8, 6\\]"),
        ({"parameter": "nope"}, 'belongs to "nope", which is no input and no weight'),
    ],
)
def test_states_in_metadata_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    model = to_proto(parse_module(MEAN))
    (entry,) = (entry for entry in model.metadata_props if entry.key == "irpar.states")
    first, second = json.loads(entry.value)
    entry.value = json.dumps([{**first, **change}, second])
    with pytest.raises(IrparError, match=said):
        irpar.load(model)


WEIGHTED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[4, 8] x) => (float[4, 8] y, float[8] w1) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] ax = {0}> {
  y = Mul(x, w)
  s = ReduceSum<keepdims=0>(x, ax)
  w1 = Add(w, s)
}"""


def test_a_partition_whose_weight_is_state_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "w.onnx", str(tmp_path / "out")
    onnx.save(onnx.parser.parse_model(WEIGHTED), model)
    module = irpar.load(model)
    module.add_state("w", "w1", kind="parameter")
    module.shard("w", ["d"])
    partition = irpar.partition(module, "d=2")
    assert partition.verify().is_equal
    other = {"w": np.full(8, 3, np.float32), "x": np.ones((4, 8), np.float32)}
    assert partition.verify(other).is_equal
    assert partition.bisect(other).first is None
    partition.save(out)
    np.savez(tmp_path / "in.npz", x=other["x"])
    assert main(["verify", out, "--inputs", str(tmp_path / "in.npz")]) == 0
    assert "equal to ONNX Runtime on the original (inputs: given)" in capsys.readouterr().out


def states(module: Module) -> list[tuple[object, ...]]:
    """The states of a module, numbers included."""
    return [
        (value.source_name, state.kind, state.output, state.parameter, state.data and state.data.raw())
        for value, state in module.graph.states.items()
    ]


# -- process groups ---------------------------------------------------------------------------------------------------


def rank(folder: str, group: str) -> None:
    """One rank; rank 0 runs ten steps of each program."""
    for name, steps in (("mean", mean_of_ten), ("cache", cache_of_ten)):
        with irpar.Partition.open(Path(folder) / name) as partition:
            executor = partition.executor("numpy", group)
            if not executor.is_driver:
                executor.serve()
                continue
            with partition.session(engine="numpy", group=group) as session:
                steps(session)
                kept = session.read_all()
                session.save(Path(folder) / f"{name}-{group}.safetensors")
                session.load(Path(folder) / f"{name}-{group}.safetensors")
                assert all(np.array_equal(session.read(state), value) for state, value in kept.items())
            print(f"{name} is right", flush=True)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    made(MEAN, {"x": ["dp", None], "mean": ["tp"]}, {"dp": 2, "tp": 2}).save(folder / "mean")
    made(CACHE, {"q": ["dp", "tp", None, None]}, {"dp": 2, "tp": 2}).save(folder / "cache")
    return folder


@pytest.mark.slow
def test_ten_steps_in_four_processes(programs: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.test_session", str(programs), "processes"]
    ending, out, err = run_ranks(command, 4)
    assert (ending.code, out) == (0, "mean is right\ncache is right\n"), err


@pytest.mark.slow
def test_ten_steps_of_mpi(programs: Path) -> None:
    library = find("MPICH")
    if isinstance(library, str):
        pytest.skip(library)
    ended = library.run(4, "tests.runtime.test_session", str(programs), "mpi")
    assert (ended.code, ended.out) == (0, "mean is right\ncache is right\n"), ended.err


ALIASED = """
graph @step(%x: f32[4], state cache %sum: f32[4], state cache %last: f32[4]) -> (%sum_1 as "y", %flat, %all, %sum_1 replaces %sum, %last_1 replaces %last) opset 21 {
  %sum_1 = Add(%sum, %x) : f32[4]
  %last_1 = Identity(%x) : f32[4]
  %shape = constant : i64[2] [2, 2]
  %flat = Reshape(%sum_1, %shape) : f32[2, 2]
  %all = SequenceConstruct(%sum_1, %x) : seq<f32[4]>
}
"""


@pytest.mark.parametrize("engine", ["numpy", "ort"])
@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}])
def test_writing_to_what_went_in_or_came_out_leaves_the_state(engine: Any, mesh: dict[str, int]) -> None:
    with made(ALIASED, {}, mesh).session(engine=engine) as session:
        for step in range(1, 3):
            x = np.ones(4, np.float32)
            results = session.run({"x": x})
            for array in (x, results["y"], results["flat"], *results["all"]):
                if array.flags.writeable:
                    array[...] = 100
            assert session.read("sum").tolist() == [step] * 4
            assert session.read("last").tolist() == [1] * 4


if __name__ == "__main__":
    rank(*sys.argv[1:])
