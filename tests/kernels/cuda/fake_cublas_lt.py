"""cuBLASLt on the host: C functions that do by numpy what a descriptor says, with memory at the addresses given.

They are called through ctypes as the library's are. What a call must not do fails it: memory that is not aligned as was
said, a leading dim shorter than a column, no workspace, a bias in no epilogue.
"""

import ctypes
import itertools
import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from irpar.kernels.cuda.cublas_lt_library import PROTOTYPES, HeuristicResult

# The headers' numbers, apart from those of the code that is tested.
DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
COMPUTE = {68: np.float32, 77: np.float32, 70: np.float64}
MATMUL_DESC = {3: "transa", 4: "transb", 7: "epilogue", 8: "bias"}
LAYOUT = {5: "batch", 6: "stride"}
PREFERENCE = {1: "workspace", 3: "reductions", 5: "a", 6: "b", 7: "c", 8: "d"}
ATTRIBUTE_SIZES = {
    **{"transa": 4, "transb": 4, "epilogue": 4, "bias": 8, "batch": 4, "stride": 8},
    **{"workspace": 8, "reductions": 4, "a": 4, "b": 4, "c": 4, "d": 4},
}
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
WORKSPACE_BYTES = 4096


class FakeCublasLt:
    """The functions, as attributes.

    Args:
        refuses: of the attributes of a problem, whether there is no way to compute it.

    Attributes:
        heuristics: how often a way was looked for.
        products: the attributes of each product that was computed.
        alive: what was created and not destroyed.
    """

    def __init__(self, refuses: Any = lambda problem: False) -> None:
        self._refuses = refuses
        self._numbers = itertools.count(1)
        self._ways: dict[int, dict[str, Any]] = {}
        self.alive: dict[int, dict[str, Any]] = {}
        self.heuristics = 0
        self.products: list[dict[str, Any]] = []
        for name, arguments in PROTOTYPES.items():
            body = getattr(self, "_" + name.removeprefix("cublasLt"))
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(_checked(body)))

    def _create(self, made: int, **fields: Any) -> int:
        number = next(self._numbers)
        self.alive[number] = fields
        ctypes.c_void_p.from_address(made).value = number
        return SUCCESS

    def _set(self, owner: int, names: dict[int, str], attribute: int, value: int, size: int) -> int:
        name = names[attribute]
        assert size == ATTRIBUTE_SIZES[name], (name, size)
        self.alive[owner][name] = int.from_bytes(ctypes.string_at(value, size), "little", signed=True)
        return SUCCESS

    def _destroy(self, owner: int) -> int:
        del self.alive[owner]
        return SUCCESS

    def _Create(self, made: int) -> int:  # noqa: N802
        return self._create(made, handle=True)

    def _MatmulDescCreate(self, made: int, compute: int, scale: int) -> int:  # noqa: N802
        return self._create(made, compute=compute, scale=scale, transa=0, transb=0, epilogue=1, bias=0)

    def _MatmulDescSetAttribute(self, owner: int, *arguments: int) -> int:  # noqa: N802
        return self._set(owner, MATMUL_DESC, *arguments)

    def _MatmulDescDestroy(self, owner: int) -> int:  # noqa: N802
        return self._destroy(owner)

    def _MatrixLayoutCreate(self, made: int, kind: int, rows: int, columns: int, leading: int) -> int:  # noqa: N802
        assert leading >= rows >= 1
        assert columns >= 1
        return self._create(made, kind=kind, rows=rows, columns=columns, leading=leading, batch=1, stride=0)

    def _MatrixLayoutSetAttribute(self, owner: int, *arguments: int) -> int:  # noqa: N802
        return self._set(owner, LAYOUT, *arguments)

    def _MatrixLayoutDestroy(self, owner: int) -> int:  # noqa: N802
        return self._destroy(owner)

    def _MatmulPreferenceCreate(self, made: int) -> int:  # noqa: N802
        return self._create(made, workspace=0, reductions=7, a=256, b=256, c=256, d=256)

    def _MatmulPreferenceSetAttribute(self, owner: int, *arguments: int) -> int:  # noqa: N802
        return self._set(owner, PREFERENCE, *arguments)

    def _MatmulPreferenceDestroy(self, owner: int) -> int:  # noqa: N802
        return self._destroy(owner)

    def _MatmulAlgoGetHeuristic(  # noqa: N802
        self,
        handle: int,
        descriptor: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        wanted: int,
        found: int,
        count: int,
    ) -> int:
        assert self.alive[handle]["handle"]
        assert wanted == 1
        self.heuristics += 1
        problem = {**self.alive[descriptor], "a": self.alive[a], "b": self.alive[b], "d": self.alive[d]}
        way = next(self._numbers)
        self._ways[way] = {**self.alive[preference], "bias": self.alive[descriptor]["bias"]}
        if self._refuses({**problem, "preference": self.alive[preference]}):
            return NOT_SUPPORTED
        assert self.alive[preference]["workspace"] >= WORKSPACE_BYTES
        result = HeuristicResult.from_address(found)
        result.algorithm[0], result.workspace_bytes, result.state = way, WORKSPACE_BYTES, SUCCESS
        ctypes.c_int.from_address(count).value = 1
        return SUCCESS

    def _Matmul(  # noqa: N802
        self,
        handle: int,
        descriptor: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> int:
        assert self.alive[handle]["handle"]
        assert stream
        way = self._ways[ctypes.c_uint64.from_address(algorithm).value]
        what = self.alive[descriptor]
        for name, address in (("a", a), ("b", b), ("c", c), ("d", d)):
            assert address % way[name] == 0, f"{name} lies at {address}, aligned to less than {way[name]}"
        assert workspace
        assert workspace_bytes == WORKSPACE_BYTES
        ctypes.memset(workspace, 0xFF, workspace_bytes)
        kind = np.dtype(COMPUTE[what["compute"]])
        assert kind == DTYPES[what["scale"]]
        factors = [np.frombuffer(ctypes.string_at(x, kind.itemsize), kind)[0] for x in (alpha, beta)]
        first, second, third, target = (
            _matrices(address, self.alive[layout])
            for address, layout in ((a, a_layout), (b, b_layout), (c, c_layout), (d, d_layout))
        )
        left = first.transpose(0, 2, 1) if what["transa"] else first
        right = second.transpose(0, 2, 1) if what["transb"] else second
        sums = factors[0] * np.matmul(left.astype(kind), right.astype(kind))
        if factors[1]:
            sums = sums + factors[1] * third.astype(kind)
        epilogue = what["epilogue"]
        if epilogue & 4:
            assert what["bias"] % way["bias"] == 0
            bias = _elements(what["bias"], target.dtype, target.shape[1])
            sums = sums + bias.astype(kind)[:, None]
        if epilogue & 2:
            sums = np.maximum(sums, kind.type(0))
        if epilogue & 32:
            cube = kind.type(0.044715) * sums * sums * sums
            sums = kind.type(0.5) * sums * (1 + np.tanh(kind.type(math.sqrt(2 / math.pi)) * (sums + cube)))
        target[...] = sums.astype(target.dtype)
        self.products.append({**what, "batch": len(target), "dtype": first.dtype, "result": target.dtype})
        return SUCCESS


def _checked(body: Any) -> Any:
    """What fails is a call that is refused: an exception does not leave a C function."""

    def function(*arguments: Any) -> int:
        try:
            return int(body(*arguments))
        except Exception as error:
            print(f"{body.__name__}{arguments}: {type(error).__name__}: {error}")
            return INVALID_VALUE

    return function


def _elements(address: int, dtype: Any, count: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def _matrices(address: int, layout: dict[str, Any]) -> np.ndarray:
    """(batch, rows, columns) of matrices that lie column by column."""
    rows, columns, leading, batch, stride = (layout[x] for x in ("rows", "columns", "leading", "batch", "stride"))
    dtype = np.dtype(DTYPES[layout["kind"]])
    elements = _elements(address, dtype, (batch - 1) * stride + (columns - 1) * leading + rows)
    strides = (stride * dtype.itemsize, dtype.itemsize, leading * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(elements, (batch, rows, columns), strides)


class FakePool:
    """A pool of memory of the host, which gives as much of what is asked for as the products use."""

    def __init__(self) -> None:
        self.allocations = 0

    def malloc(self, size: int) -> Any:
        """Memory with an address."""
        self.allocations += 1
        memory = ctypes.create_string_buffer(min(size, WORKSPACE_BYTES))
        return SimpleNamespace(ptr=ctypes.addressof(memory), memory=memory)
