"""Products by cuBLASLt, on a stand-in that does on the host what its descriptors say."""

import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.kernels import gemm, lookup
from irpar.kernels.cuda import cublas_lt, padding
from irpar.kernels.cuda.cublas_lt_library import Library, library
from irpar.kernels.gemm import product
from tests.strict_device import STRICT, StrictArray

from .fake_cublas_lt import FakeCublasLt, FakePool

F16, BF16, F32, F64 = (np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
UNIT = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-21, F64: 2.0**-50}
GUARD = 16
"""Elements before and behind a result, which nothing may write to."""


class Stream:
    ptr = 4096


class Device:
    """A stand-in for CuPy whose arrays lie on the host, and for cuBLASLt."""

    def __init__(self, refuses: Any = lambda problem: False) -> None:
        self.fake, self.pool, self.stream = FakeCublasLt(refuses), FakePool(), Stream()
        cuda = SimpleNamespace(
            get_current_stream=lambda: self.stream, Device=lambda: SimpleNamespace(compute_capability="90")
        )
        self.xp = SimpleNamespace(
            **{**vars(STRICT), "__name__": "cupy", "cuda": cuda, "get_default_memory_pool": lambda: self.pool}
        )
        self.multiplier = cublas_lt.Multiplier(self.xp, Library(self.fake))
        self.multiplier.gpu = FakeGpu()


class FakeGpu:
    """What does in numpy what finish.cu and padding.cu do."""

    multiprocessors = 1

    def launch(self, program: Any, function: str, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        """Finish sums, or copy rows."""
        if function == "copy_rows":
            arguments[1]._array[...] = arguments[0]._array
            return
        assert function == "finish"
        sums, result, bias, residual, count, columns, alpha, beta, activation = arguments
        assert count == result.size
        y = alpha * sums._array
        assert y.dtype == sums.dtype
        y = y + beta * residual._array.astype(y.dtype) if isinstance(residual, StrictArray) else y
        if isinstance(bias, StrictArray):
            assert bias.shape == (columns,)
            y = y + bias._array.astype(y.dtype)
        result._array[...] = (lambda x: x, lambda x: np.maximum(x, 0), gelu_tanh)[activation](y)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(cublas_lt, "_MULTIPLIERS", {0: made.multiplier})
    return made


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def exact(a: np.ndarray, b: np.ndarray, **addends: Any) -> Any:
    return finished(np.matmul(a.astype(F64), b.astype(F64)), **addends)


def finished(y: np.ndarray, *, bias: Any, activation: Any, residual: Any, alpha: float, beta: float) -> Any:
    y = alpha * y
    y = y if residual is None else y + beta * residual.astype(F64)
    y = y if bias is None else y + bias.astype(F64)
    return {None: y, "relu": np.maximum(y, 0), "gelu_tanh": gelu_tanh(y)}[activation]


def guarded(shape: tuple[int, ...], dtype: np.dtype, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """A poisoned result amid memory that must stay as it is, and all of that memory."""
    count = int(np.prod(shape))
    memory = np.full(offset + count + 2 * GUARD, np.nan, dtype)
    return memory[offset + GUARD : offset + GUARD + count].reshape(shape), memory


@st.composite
def operand(draw: Any, batch: list[int], rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """A view with its dims in any order in memory, at any offset, with gaps; batch dims missing or of one element."""
    kept = draw(st.integers(0, len(batch)))
    dims = [draw(st.sampled_from([1, size])) for size in batch[len(batch) - kept :]] + [rows, columns]
    order = draw(st.permutations(range(len(dims))))
    gaps = [draw(st.sampled_from([0, 0, 1, 3])) for _ in order]
    sizes = [dims[place] + gap for place, gap in zip(order, gaps, strict=True)]
    offset = draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = np.random.default_rng(seed).standard_normal(offset + int(np.prod(sizes))).astype(dtype)
    whole = numbers[offset:].reshape(sizes)
    return whole[tuple(slice(0, dims[place]) for place in order)].transpose(np.argsort(order))


@st.composite
def problem(draw: Any) -> dict[str, Any]:
    dtype = draw(st.sampled_from([F16, BF16, F32, F64]))
    result = draw(st.sampled_from([dtype, F32 if dtype.itemsize == 2 else dtype]))
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    m, k, n = (draw(st.sampled_from([1, 2, 3, 5, 8])) for _ in range(3))
    a, b = draw(operand(batch, m, k, dtype)), draw(operand(batch, k, n, dtype))
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    numbers = np.random.default_rng(draw(st.integers(0, 9)))
    return {
        **{"a": a, "b": b, "dtype": result, "shape": shape, "offset": draw(st.integers(0, 3))},
        "bias": numbers.standard_normal(n).astype(dtype) if draw(st.booleans()) else None,
        "residual": numbers.standard_normal(shape).astype(dtype) if draw(st.booleans()) else None,
        "activation": draw(st.sampled_from([None, "relu", "gelu_tanh"])),
        **{"alpha": draw(st.sampled_from([1.0, -0.5])), "beta": draw(st.sampled_from([1.0, 2.0]))},
    }


def check(device: Device, case: dict[str, Any]) -> None:
    a, b, dtype = case["a"], case["b"], case["dtype"]
    addends = {name: case[name] for name in ("bias", "activation", "residual", "alpha", "beta")}
    placed = {name: StrictArray(x) if isinstance(x, np.ndarray) else x for name, x in addends.items()}
    out, memory = guarded(case["shape"], dtype, case["offset"])
    before = memory.copy()
    written = StrictArray(out)
    found = cublas_lt.matmul(device.xp, StrictArray(a), StrictArray(b), written, dtype=dtype, **placed)
    assert found is written
    wanted, room = exact(a, b, **addends), np.matmul(abs(a.astype(F64)), abs(b.astype(F64)))
    assert (abs(out.astype(F64) - wanted) <= UNIT[dtype] * (room + abs(wanted) + 4)).all()
    around = np.ones(len(memory), bool)
    around[case["offset"] + GUARD : len(memory) - GUARD] = False
    assert memory[around].tobytes() == before[around].tobytes()


@given(problem())
def test_products_of_any_layout_with_what_follows(case: dict[str, Any]) -> None:
    made = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas_lt, "_MULTIPLIERS", {0: made.multiplier})
        check(made, case)


@given(problem())
def test_what_the_library_cannot_add_is_added_after(case: dict[str, Any]) -> None:
    made = Device(lambda problem: problem["epilogue"] != 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas_lt, "_MULTIPLIERS", {0: made.multiplier})
        check(made, case)


def test_nothing_to_multiply_by_is_refused() -> None:
    made = Device(lambda problem: True)
    ones = StrictArray(np.ones((2, 3), F32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas_lt, "_MULTIPLIERS", {0: made.multiplier})
        with pytest.raises(ValueError, match=r"multiplies no float32\[2, 3\] with float32\[3, 2\]"):
            cublas_lt.matmul(made.xp, ones, ones.T)


@pytest.mark.parametrize(
    ("first", "second"),
    [((7,), (7, 3)), ((5, 7), (7,)), ((7,), (7,)), ((2, 5, 7), (7,)), ((7,), (2, 7, 3)), ((2, 0, 7), (7, 4))],
)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_vectors_and_empty_results(device: Device, first: Any, second: Any, dtype: np.dtype) -> None:
    a, b = (np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in (first, second))
    found = product(device.xp, StrictArray(a), StrictArray(b))
    wanted = np.matmul(a.astype(F64), b.astype(F64))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found._array.astype(F64), wanted)


def test_sums_of_nothing_are_zero_with_what_follows(device: Device) -> None:
    a, b = StrictArray(np.ones((2, 0), F16)), StrictArray(np.ones((0, 3), F16))
    bias = np.array([-1, 0, 2], F16)
    out = StrictArray(np.full((2, 3), np.nan, F16))
    found = cublas_lt.matmul(device.xp, a, b, out, bias=StrictArray(bias), activation="relu")
    assert found is out
    np.testing.assert_array_equal(out._array, [[0, 0, 2]] * 2)
    assert not device.fake.products


def test_two_dtypes_are_multiplied_in_the_wider_one(device: Device) -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    found = product(device.xp, StrictArray(a.astype(F16)), StrictArray(b))
    assert found.dtype == F16
    np.testing.assert_array_equal(found._array, a @ b)
    assert device.fake.products[-1]["dtype"] == F64


def test_16_bit_operands_are_not_widened(device: Device) -> None:
    a, b = StrictArray(np.ones((4, 8), BF16)), StrictArray(np.ones((8, 4), BF16))
    for dtype in (BF16, F32):
        found = product(device.xp, a, b, dtype)
        assert found.dtype == dtype
        last = device.fake.products[-1]
        assert (last["dtype"], last["result"], last["compute"]) == (BF16, dtype, 68)


def test_tf32_is_used_where_asked_for_alone(device: Device) -> None:
    a, b = StrictArray(np.ones((4, 8), F32)), StrictArray(np.ones((8, 4), F32))

    def compute() -> int:
        product(device.xp, a, b)
        return device.fake.products[-1]["compute"]

    assert compute() == 68
    with cublas_lt.tf32(True):
        assert compute() == 77
        with cublas_lt.tf32(False):
            assert compute() == 68
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(compute()))
        thread.start()
        thread.join()
        assert elsewhere == [68]
    assert compute() == 68


def test_a_way_is_looked_for_once(device: Device) -> None:
    a, b = StrictArray(np.ones((4, 8), F32)), StrictArray(np.ones((8, 4), F32))
    out = StrictArray(np.empty((4, 4), F32))
    for _ in range(5):
        cublas_lt.matmul(device.xp, a, b, out)
    assert device.fake.heuristics == 1
    assert device.pool.allocations == 1
    cublas_lt.matmul(device.xp, a, b, out, alpha=2.0)  # A factor is no part of the problem.
    assert device.fake.heuristics == 1


def test_each_stream_has_a_workspace_that_goes_with_it(device: Device) -> None:
    a = StrictArray(np.ones((4, 4), F32))
    first, device.stream = device.stream, Stream()
    for stream in (first, device.stream, first):
        device.stream = stream
        product(device.xp, a, a)
    assert device.pool.allocations == 2
    assert device.multiplier.held_bytes == cublas_lt.WORKSPACE_BYTES[True]
    del first, stream
    device.stream = Stream()
    assert device.multiplier.held_bytes == 0


def test_plans_that_are_long_unused_are_dropped(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "MOST_PLANS", 2)
    for size in range(1, 6):
        product(device.xp, StrictArray(np.ones((size, 4), F32)), StrictArray(np.ones((4, 4), F32)))
    assert len(device.multiplier._plans) == 2
    kinds = [fields for fields in device.fake.alive.values() if "compute" in fields]
    assert len(kinds) == 2


@pytest.mark.parametrize("added", [(3, 4), (4,), (1, 4), (3, 1), (1, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_gemm_is_one_launch(device: Device, added: tuple[int, ...], dtype: np.dtype) -> None:
    numbers = np.random.default_rng(1)
    a, b, c = (numbers.standard_normal(shape).astype(dtype) for shape in ((5, 3), (4, 5), added))
    kernel = lookup("", "Gemm", 13)
    assert kernel is not None
    attributes = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}
    out = StrictArray(np.full((3, 4), np.nan, dtype))
    (found,) = kernel(device.xp, [StrictArray(x) for x in (a, b, c)], attributes, 1, out)
    wanted = 0.5 * a.T.astype(F64) @ b.T.astype(F64) + 2.0 * c.astype(F64)
    assert found is out
    np.testing.assert_allclose(found._array.astype(F64), wanted, rtol=0, atol=4 * UNIT[dtype])
    assert len(device.fake.products) == 1


@pytest.mark.parametrize("odd", ["a", "b", "y", "ab", "by", "aby"])
@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_rows_at_odd_places_are_put_further_apart(
    device: Device, monkeypatch: pytest.MonkeyPatch, odd: str, turned: str
) -> None:
    for name, value in {"FEWEST_PRODUCTS": 1, "FEWEST_TERMS": 8, "PIECE_BYTES": 1}.items():
        monkeypatch.setattr(padding, name, value)
    m, k, n = 304, 24, 29 if "y" in odd else 32
    numbers = np.random.default_rng(4)

    def lying(rows: int, columns: int, name: str) -> np.ndarray:
        shape = (columns, rows) if name in turned else (rows, columns)
        gap = 8 - shape[1] % 8 + (name in odd)
        found = numbers.standard_normal((shape[0], shape[1] + gap)).astype(F16)[:, : shape[1]]
        return found.T if name in turned else found

    a, b, bias = lying(m, k, "a"), lying(k, n, "b"), numbers.standard_normal(n).astype(F16)
    out, memory = guarded((m, n), F16, 0)
    before = memory.copy()
    cublas_lt.matmul(device.xp, *map(StrictArray, (a, b, out)), bias=StrictArray(bias), activation="relu")
    wanted = exact(a, b, bias=bias, activation="relu", residual=None, alpha=1.0, beta=1.0)
    np.testing.assert_allclose(out.astype(F64), wanted, rtol=0, atol=20 * UNIT[F16])
    assert memory[:GUARD].tobytes() == before[:GUARD].tobytes()
    assert memory[-GUARD:].tobytes() == before[-GUARD:].tobytes()
    is_cut = n % 8 > 0  # Then the last columns are a product of their own.
    pieces = 1 if odd == "b" else 3  # of 128, 128 and 48 rows
    assert len(device.fake.products) == pieces + is_cut
    layouts = [layout for layout in device.fake.alive.values() if "leading" in layout]
    if not is_cut:
        assert all(layout["leading"] % 8 == 0 for layout in layouts)


@pytest.mark.parametrize("odd", ["", "a", "b"])
def test_a_product_is_written_to_rows_that_lie_further_apart(
    device: Device, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    for name, value in {"FEWEST_PRODUCTS": 1, "FEWEST_TERMS": 8, "PIECE_BYTES": 1}.items():
        monkeypatch.setattr(padding, name, value)
    numbers = np.random.default_rng(5)
    a, b = (
        numbers.standard_normal((*shape[:-1], shape[-1] + (name == odd))).astype(F16)[..., : shape[-1]]
        for name, shape in {"a": (3, 100, 24), "b": (24, 32)}.items()
    )
    b = b[:, :29]
    bias = numbers.standard_normal(29).astype(F16)
    out = padding.pitched(device.xp, (3, 100, 29), F16, 24)
    assert out is not None
    assert (padding.row_pitch(out), out.strides) == (32, (6400, 64, 2))
    memory = out._array.base
    assert memory.shape == (300, 32)
    memory[...] = np.nan
    found = cublas_lt.matmul(device.xp, *map(StrictArray, (a, b)), out, bias=StrictArray(bias), activation="relu")
    assert found is out
    wanted = exact(a, b, bias=bias, activation="relu", residual=None, alpha=1.0, beta=1.0)
    np.testing.assert_allclose(out._array.astype(F64), wanted, rtol=0, atol=20 * UNIT[F16])
    assert np.isnan(memory[:, 29:]).all()
    assert len(device.fake.products) == (4 if odd == "a" else 2)  # Rows of a that lie at odd places come in pieces.


def test_what_cannot_be_written_further_apart_is_given_elsewhere(device: Device) -> None:
    """Such as a product that is too small for it."""
    a, b = (np.random.default_rng(6).standard_normal((5, 5)).astype(F16) for _ in range(2))
    out = StrictArray(np.zeros((5, 8), F16)[:, :5])
    found = cublas_lt.matmul(device.xp, StrictArray(a), StrictArray(b), out)
    assert found is not out
    np.testing.assert_allclose(found._array, a.astype(F64) @ b.astype(F64), rtol=0, atol=20 * UNIT[F16])
    assert not out._array.any()


def test_which_results_have_rows_that_lie_further_apart() -> None:
    logits = padding.pitched(STRICT, (2, 4, 50257), F16, 768)
    assert logits is not None
    assert padding.row_pitch(logits) == 50264
    assert padding.pitched(STRICT, (2, 4, 50264), F16, 768) is None, "all rows begin at even places"
    assert padding.pitched(STRICT, (2, 4, 50257), F32, 768) is None, "no 16-bit numbers"
    assert padding.pitched(STRICT, (2, 4, 257), F16, 768) is None, "a small product"
    assert padding.row_pitch(StrictArray(np.zeros((4, 3), F16).T)) is None
    assert padding.row_pitch(StrictArray(np.zeros((2, 4, 3), F16)[:, ::2])) == 6
    assert padding.row_pitch(StrictArray(np.zeros((2, 5, 3), F16)[:, :4])) is None


@pytest.mark.parametrize(
    ("turned", "k", "m"), [("", 29, 20), ("b", 29, 20), ("ab", 29, 24), ("a", 24, 29), ("ab", 29, 29)]
)
def test_odd_terms_and_rows_are_products_of_their_own(
    device: Device, monkeypatch: pytest.MonkeyPatch, turned: str, k: int, m: int
) -> None:
    for name, value in {"FEWEST_PRODUCTS": 1, "FEWEST_TERMS": 8}.items():
        monkeypatch.setattr(padding, name, value)
    numbers = np.random.default_rng(4)

    def lying(rows: int, columns: int, name: str) -> np.ndarray:
        shape = (columns, rows) if name in turned else (rows, columns)
        wide = numbers.standard_normal((shape[0], -(-shape[1] // 8) * 8)).astype(F16)[:, : shape[1]]
        return wide.T if name in turned else wide

    a, b, bias = lying(m, k, "a"), lying(k, 32, "b"), numbers.standard_normal(32).astype(F16)
    out, memory = guarded((m, 32), F16, 0)
    before = memory.copy()
    cublas_lt.matmul(device.xp, *map(StrictArray, (a, b, out)), bias=StrictArray(bias), activation="relu")
    wanted = exact(a, b, bias=bias, activation="relu", residual=None, alpha=1.0, beta=1.0)
    np.testing.assert_allclose(out.astype(F64), wanted, rtol=0, atol=20 * UNIT[F16])
    for part in (slice(None, GUARD), slice(-GUARD, None)):
        assert memory[part].tobytes() == before[part].tobytes()
    parts_of_rows, parts_of_terms = 1 + ("a" in turned and m % 8 > 0), 1 + (k % 8 > 0)
    assert len(device.fake.products) == parts_of_rows * parts_of_terms


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_in_rows_of_a_length(device: Device, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEWEST_PRODUCTS": 1, "FEWEST_TERMS": 8}.items():
        monkeypatch.setattr(padding, name, value)
    numbers = np.random.default_rng(4)
    a = numbers.standard_normal((2, 10, 24)).astype(F16)
    b = numbers.standard_normal((29, 24) if turned else (24, 29)).astype(F16)
    b = b.T if turned else b
    kernel = lookup("irpar", "FusedMatMul", 1)
    assert kernel is not None
    for out in (None, StrictArray(np.full((2, 10, 32), np.nan, F16))):
        (found,) = kernel(device.xp, [StrictArray(a), StrictArray(b)], {"length": 32}, 1, out)
        assert found.shape == (2, 10, 32)
        assert out is None or found is out
        wanted = a.astype(F64) @ b.astype(F64)
        np.testing.assert_allclose(found._array[..., :29].astype(F64), wanted, rtol=0, atol=20 * UNIT[F16])
    assert len(device.fake.products) == 4, "24 columns and the last 5, twice"
    kinds = {layout["leading"] for layout in device.fake.alive.values() if "leading" in layout}
    assert 32 in kinds


@pytest.mark.parametrize("turned", [False, True])
def test_the_last_columns_of_odd_rows_are_a_product_of_their_own(turned: bool) -> None:
    b = gemm.Operand(turned, 10, 768 if turned else 50257, 0)
    logits = gemm.Gemm(8192, 50257, 768, 1, gemm.Operand(False, 0, 768, 0), b, gemm.Operand(False, 0, 50257, 0))
    whole, last = padding.column_parts(logits, 2)
    assert (whole.n, whole.b.offset, whole.c.offset) == (50256, 10, 0)
    assert (last.n, last.b.offset, last.c.offset) == (1, 10 + (50256 * 768 if turned else 50256), 50256)


def test_which_products_have_rows_put_further_apart() -> None:
    place = gemm.Operand(False, 0, 768, 0)
    logits = gemm.Gemm(8192, 50257, 768, 1, place, place, gemm.Operand(False, 0, 50257, 0))
    assert padding.is_worth(logits, 2, (256, 256, 256))
    assert not padding.is_worth(logits, 4, (256, 256, 256)), "no 16-bit numbers"
    even = logits._replace(n=50264, c=place)
    assert not padding.is_worth(even, 2, (256, 256, 256)), "all lies at even places"
    assert padding.is_worth(even, 2, (256, 258, 256))
    assert padding.is_worth(logits._replace(c=place), 2, (256, 256, 256)), "not all columns are whole 16 bytes"
    assert not padding.is_worth(logits._replace(k=64), 2, (256, 256, 256)), "copying would take longer"
    assert not padding.is_worth(logits._replace(m=1), 2, (256, 256, 256)), "a small product"
    assert not padding.is_worth(logits._replace(batch=2), 2, (256, 256, 256))
    odd = gemm.Operand(False, 0, 262_145, 0)
    large = gemm.Gemm(8192, 262_144, 1024, 1, place, odd, place)
    assert not padding.is_worth(large, 2, (256, 256, 256)), "a copy takes too much memory"


OPERATORS: dict[str, tuple[str, str, list[tuple[int, ...]], dict[str, Any]]] = {
    "columns": ("", "Conv", [(3, 4, 5, 6), (6, 2, 3, 2)], {"group": 2, "pads": (1, 1, 1, 1), "strides": (2, 1)}),
    "no columns": ("", "Conv", [(2, 4, 5, 6), (6, 4, 1, 1)], {}),
    "with a bias": ("", "Conv", [(2, 4, 5), (6, 4, 3), (6,)], {}),
    "transposed": ("", "ConvTranspose", [(2, 4, 5, 6), (4, 3, 2, 2)], {"strides": (2, 2)}),
    "heads": ("", "Attention", [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)], {"is_causal": 1}),
    "steps": ("", "LSTM", [(3, 2, 4), (1, 20, 4), (1, 20, 5)], {"hidden_size": 5}),
    "einsum": ("", "Einsum", [(2, 3, 4), (2, 4, 5)], {"equation": "bij,bjk->ikb"}),
    "fused": ("com.microsoft", "FusedMatMul", [(2, 4, 3), (2, 5, 4)], {"alpha": 0.5, "transA": 1, "transB": 1}),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_operators_multiply_what_they_are_given(device: Device, name: str, dtype: np.dtype) -> None:
    domain, operator, shapes, attributes = OPERATORS[name]
    numbers = np.random.default_rng(2)
    operands = [(numbers.standard_normal(shape) / 2).astype(dtype) for shape in shapes]
    kernel = lookup(domain, operator, 1 if domain else 23)
    assert kernel is not None
    (found,) = kernel(device.xp, [StrictArray(x) for x in operands], attributes, 1)
    (wanted,) = kernel(np, [x.astype(F64) for x in operands], attributes, 1)
    assert found.dtype == dtype
    np.testing.assert_allclose(found._array.astype(F64), wanted, rtol=0, atol=4 * UNIT[dtype])
    assert device.fake.products
    # The state of a recurrent layer is float32.
    assert {one["dtype"] for one in device.fake.products} == ({dtype, F32} if operator == "LSTM" else {dtype})


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_convolution_is_written_where_it_belongs(device: Device, dtype: np.dtype) -> None:
    x, weight = (StrictArray(np.ones(shape, dtype)) for shape in ((2, 3, 4, 4), (5, 3, 3, 3)))
    out = StrictArray(np.full((2, 5, 2, 2), np.nan, dtype))
    kernel = lookup("", "Conv", 22)
    assert kernel is not None
    (found,) = kernel(device.xp, [x, weight], {}, 1, out)
    assert found is out
    np.testing.assert_array_equal(out._array, np.full((2, 5, 2, 2), 27, dtype))


def test_the_library_that_goes_with_cupy() -> None:
    pytest.importorskip("cuda.pathfinder")
    try:
        found = library()
    except Exception as error:
        pytest.skip(f"there is none: {error}")
    made = found.create("MatrixLayout", 0, 4, 4, 4)
    found.call("cublasLtMatrixLayoutDestroy", made)
