"""The library cuBLASLt through ctypes: what it is called with, and plans of products that it has found a way for.

CuPy's own calls of cuBLAS cannot be captured in a CUDA graph; these take the stream and the workspace as arguments.
The numbers are those of its headers, the same in CUDA 12 and 13, which each table names.
"""

import ctypes
import threading
import weakref
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from ..gemm import Gemm, Operand

# library_types.h, cudaDataType_t
F32, F64, F16, BF16 = 0, 1, 2, 14

# cublas_api.h, cublasComputeType_t, by the type of alpha and beta: float32 in full, and float64
_COMPUTE = {F32: 68, F64: 70}
_COMPUTE_TF32 = 77

# cublasLt.h, cublasLtMatmulDescAttributes_t
_DESCRIPTOR_TRANSPOSED_A, _DESCRIPTOR_TRANSPOSED_B, _DESCRIPTOR_EPILOGUE, _DESCRIPTOR_BIAS_POINTER = 3, 4, 7, 8

# cublasLt.h, cublasLtMatrixLayoutAttribute_t; the order is by columns where nothing else is said
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6

# cublasLt.h, cublasLtMatmulPreferenceAttributes_t; the alignments are those of A, B, C and D
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTIONS, _PREFERENCE_ALIGNMENTS = 1, 3, (5, 6, 7, 8)

# cublasLt.h, cublasLtEpilogue_t: a set of bits, where 1 is nothing
EPILOGUES = {None: 0, "relu": 2, "gelu_tanh": 32}
_EPILOGUE_NONE, _EPILOGUE_BIAS = 1, 4

# cublasLt.h, cublasLtReductionScheme_t: partial sums are added up in the compute type, not in that of the result
_REDUCTIONS_IN_COMPUTE_TYPE = 2

_TRANSPOSED = 1  # cublas_api.h, cublasOperation_t

# cublas_api.h, cublasStatus_t
_STATUS = {
    1: "not initialized",
    3: "out of memory",
    7: "invalid value",
    8: "not for this device",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}

_CREATED, _HANDLE, _ATTRIBUTE = c_void_p, c_void_p, (c_void_p, c_int, c_void_p, c_size_t)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_CREATED,),
    "cublasLtMatmulDescCreate": (_CREATED, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _ATTRIBUTE,
    "cublasLtMatmulDescDestroy": (_HANDLE,),
    "cublasLtMatrixLayoutCreate": (_CREATED, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": _ATTRIBUTE,
    "cublasLtMatrixLayoutDestroy": (_HANDLE,),
    "cublasLtMatmulPreferenceCreate": (_CREATED,),
    "cublasLtMatmulPreferenceSetAttribute": _ATTRIBUTE,
    "cublasLtMatmulPreferenceDestroy": (_HANDLE,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_HANDLE,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}
"""The arguments of each function that is called, as cublasLt.h declares them; each gives back a status."""


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: how a product may be computed."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


class CublasLtError(ValueError):
    """The library refuses a call."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} says {_STATUS.get(status, f'status {status}')}")


class Library:
    """The library's functions.

    Args:
        functions: what has them as attributes, a `ctypes.CDLL`: calls let other threads run.
    """

    def __init__(self, functions: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in PROTOTYPES.items():
            function = self._functions[name] = getattr(functions, name)
            function.argtypes, function.restype = arguments, c_int

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CublasLtError: it refuses.
        """
        status = self._functions[name](*arguments)
        if status:
            raise CublasLtError(name, status)

    def create(self, what: str, *arguments: Any) -> int:
        """What `cublasLt<what>Create` makes of some arguments."""
        made = c_void_p()
        self.call(f"cublasLt{what}Create", byref(made), *arguments)
        assert made.value is not None
        return made.value

    def set(self, what: str, owner: int, attribute: int, value: Any) -> None:
        """Set an attribute to a number of ctypes."""
        self.call(f"cublasLt{what}SetAttribute", owner, attribute, byref(value), ctypes.sizeof(value))


@cache
def library() -> Library:
    """The library that goes with CuPy.

    Raises:
        RuntimeError: there is none.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return Library(ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path))


class Addresses(NamedTuple):
    """Where the matrices of a product lie; the bias at 0 where there is none."""

    a: int
    b: int
    residual: int
    result: int
    bias: int

    def alignments(self, most: int) -> tuple[int, int, int, int]:
        """Of what powers of 2 up to one these are multiples; see `Problem`."""
        places = (self.a, self.b, self.residual | self.result, self.bias)
        return tuple(min(place & -place or most, most) for place in places)  # type: ignore[return-value]


class Problem(NamedTuple):
    """All of a product but addresses and factors.

    Attributes:
        call: the matrices; offsets do not matter.
        operands, result: cudaDataType_t; that of a residual is the result's.
        activation: see `EPILOGUES`.
        has_bias: a number is added to each column of the result.
        is_tf32: float32 operands may be rounded to 10 bits of mantissa.
        alignments: bytes of which the addresses of a, of b, of residual and result, and of the bias are multiples.
    """

    call: Gemm
    operands: int
    result: int
    activation: str | None
    has_bias: bool
    is_tf32: bool
    alignments: tuple[int, int, int, int]

    @property
    def scale(self) -> int:
        """What the sums and factors are: cudaDataType_t."""
        return F64 if self.operands == F64 else F32


class Plan:
    """A product that is ready to be computed.

    cuBLASLt counts column by column, where a result that lies row by row is its own transpose: c' = b' @ a'. Its first
    operand is b, and a bias of its rows is one of the columns of c.

    Args:
        library: the functions.
        handle: of the device.
        problem: what is computed.
        workspace_bytes: what it may use besides.

    Attributes:
        workspace_bytes: what it uses.

    Raises:
        CublasLtError: there is no way to compute it.
    """

    def __init__(self, library: Library, handle: int, problem: Problem, workspace_bytes: int) -> None:
        self._library, self._handle = library, handle
        self._made: list[tuple[str, int]] = []
        weakref.finalize(self, _destroy, library, self._made).atexit = False
        self._lock = threading.Lock()
        self._scalar = ctypes.c_double if problem.scale == F64 else ctypes.c_float
        call = problem.call
        self._descriptor = self._described(problem)
        self._first = self._laid_out(problem.operands, call.n, call.k, call.b, call.batch)
        self._second = self._laid_out(problem.operands, call.k, call.m, call.a, call.batch)
        self._result = self._laid_out(problem.result, call.n, call.m, call.c, call.batch)
        found = self._found(problem, workspace_bytes)
        self._algorithm = byref(found)
        self.workspace_bytes: int = found.workspace_bytes

    def _create(self, what: str, *arguments: Any) -> int:
        made = self._library.create(what, *arguments)
        self._made.append((what, made))
        return made

    def _described(self, problem: Problem) -> int:
        compute = _COMPUTE_TF32 if problem.is_tf32 and problem.operands == F32 else _COMPUTE[problem.scale]
        made = self._create("MatmulDesc", compute, problem.scale)
        epilogue = EPILOGUES[problem.activation] | (_EPILOGUE_BIAS if problem.has_bias else 0)
        for attribute, value in (
            (_DESCRIPTOR_TRANSPOSED_A, c_int32(_TRANSPOSED * problem.call.b.transposed)),
            (_DESCRIPTOR_TRANSPOSED_B, c_int32(_TRANSPOSED * problem.call.a.transposed)),
            (_DESCRIPTOR_EPILOGUE, c_uint32(epilogue or _EPILOGUE_NONE)),
        ):
            self._library.set("MatmulDesc", made, attribute, value)
        if problem.has_bias:  # Looking for a way reads of an address how it is aligned.
            self._library.set("MatmulDesc", made, _DESCRIPTOR_BIAS_POINTER, c_void_p(problem.alignments[-1]))
        return made

    def _laid_out(self, kind: int, rows: int, columns: int, operand: Operand, batch: int) -> int:
        """The layout of matrices whose rows are counted first, before they are transposed."""
        shape = (columns, rows) if operand.transposed else (rows, columns)
        made = self._create("MatrixLayout", kind, *shape, operand.leading)
        if batch > 1:
            self._library.set("MatrixLayout", made, _LAYOUT_BATCH_COUNT, c_int32(batch))
            self._library.set("MatrixLayout", made, _LAYOUT_BATCH_STRIDE, c_int64(operand.stride))
        return made

    def _found(self, problem: Problem, workspace_bytes: int) -> HeuristicResult:
        preference = self._create("MatmulPreference")
        a, b, result, _ = problem.alignments
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, c_uint64(workspace_bytes)),
            (_PREFERENCE_REDUCTIONS, c_uint32(_REDUCTIONS_IN_COMPUTE_TYPE)),
            *zip(_PREFERENCE_ALIGNMENTS, map(c_uint32, (b, a, result, result)), strict=True),
        ):
            self._library.set("MatmulPreference", preference, attribute, value)
        layouts = (self._first, self._second, self._result, self._result)
        name, found, count = "cublasLtMatmulAlgoGetHeuristic", HeuristicResult(), c_int()
        self._library.call(name, self._handle, self._descriptor, *layouts, preference, 1, byref(found), byref(count))
        if not count.value or found.state:
            raise CublasLtError(name, found.state or 15)
        return found

    def run(self, addresses: Addresses, factors: tuple[float, float], workspace: int, stream: int) -> None:
        """Compute alpha * a @ b + beta * residual and what follows.

        Args:
            addresses: where the matrices lie.
            factors: alpha and beta; where this is 0 nothing is read of the residual.
            workspace: where memory of `workspace_bytes` lies, which nothing else on the device uses meanwhile.
            stream: what it is done on.
        """
        if not addresses.bias:
            self._run(addresses, factors, workspace, stream)
            return
        with self._lock:  # The descriptor holds the address until the product is on its way.
            self._library.set("MatmulDesc", self._descriptor, _DESCRIPTOR_BIAS_POINTER, c_void_p(addresses.bias))
            self._run(addresses, factors, workspace, stream)

    def _run(self, addresses: Addresses, factors: tuple[float, float], workspace: int, stream: int) -> None:
        alpha, beta = map(self._scalar, factors)
        self._library.call(
            "cublasLtMatmul",
            *(self._handle, self._descriptor, byref(alpha)),
            *(addresses.b, self._first, addresses.a, self._second, byref(beta)),
            *(addresses.residual, self._result, addresses.result, self._result),
            *(self._algorithm, workspace, self.workspace_bytes, stream),
        )


def _destroy(library: Library, made: list[tuple[str, int]]) -> None:
    for what, owner in made:
        library.call(f"cublasLt{what}Destroy", owner)
