"""A stand-in for CuPy on a machine without a device: numpy's functions, with CuPy's strictness.

An array of it does not become a numpy array unasked, does not mix with numpy arrays, has no dtypes that CuPy lacks, and
functions that CuPy lacks are missing. What CuPy gives in another dtype than numpy (`where` of bfloat16) comes so here.
"""

import ctypes
import math
import operator
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tests import strict_graphs
from tests.strict_graphs import launch, refuse_in_capture

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD")) | {BFLOAT16}

# CuPy's ufuncs of these names lack bfloat16, and functions of these names compute it in float32.
WITHOUT_BFLOAT16 = {"where", "clip", "matmul", "einsum", "argsort", "sort", "argmax", "argmin", "cumsum", "cumprod"}
UNSUPPORTED_BFLOAT16 = {"matmul", "einsum", "argsort", "sort", "argmax", "argmin", "cumsum", "cumprod"}

_NAMES = """
    abs absolute add all any arange arccos arccosh arcsin arcsinh arctan arctanh argmax argmin argsort asarray
    ascontiguousarray bitwise_and bitwise_or bitwise_xor broadcast_to ceil clip concatenate copysign copyto cos cosh
    cumprod cumsum divide einsum empty equal exp expand_dims expm1 eye flip floor floor_divide fmod frexp full
    full_like greater greater_equal invert isfinite isinf isnan left_shift less less_equal linspace log log1p max
    min logical_and logical_not logical_or logical_xor matmul maximum may_share_memory meshgrid minimum mod moveaxis multiply
    negative nonzero not_equal ones ones_like power prod repeat result_type right_shift rint sign sin sinh split
    sqrt squeeze stack subtract sum swapaxes take take_along_axis tan tanh tile trunc unique where zeros zeros_like
"""
READ_ON_HOST = {"nonzero", "unique"}
"""Those that wait for the device to tell how much they give."""
NAMES = frozenset(_NAMES.split())
"""The functions of CuPy that kernels and runtime may use."""


class StrictArray:
    """An array on the device that is not there.

    Attributes:
        reads: how often numbers of any were read on the host, which waits for a device.
    """

    reads = 0
    __array_priority__ = 1000
    __array_ufunc__ = None  # numpy's operators leave it to ours.

    def __init__(self, array: Any, dtype: Any = None, memptr: Any = None) -> None:
        """An array; or, as CuPy's, of a shape, a dtype, and memory."""
        if memptr is not None:
            array = np.frombuffer(memptr.owner, dtype, math.prod(array)).reshape(array)
        check_dtype(array.dtype)
        self._array = array

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    shape = property(lambda self: self._array.shape)
    ndim = property(lambda self: self._array.ndim)
    size = property(lambda self: self._array.size)
    dtype = property(lambda self: self._array.dtype)
    itemsize = property(lambda self: self._array.itemsize)
    nbytes = property(lambda self: self._array.nbytes)
    strides = property(lambda self: self._array.strides)
    base = property(lambda self: self._array.base)
    flags = property(lambda self: self._array.flags)
    T = property(lambda self: StrictArray(self._array.T))
    real = property(lambda self: StrictArray(self._array.real))
    imag = property(lambda self: StrictArray(self._array.imag))

    @property
    def data(self) -> Any:
        """Where it lies, as CuPy tells it."""
        memory = strict_graphs.root_of(self._array)
        return SimpleNamespace(ptr=strict_graphs.address_of(self._array), device_id=0, mem=memory)

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return (wrapped(item) for item in self._array)

    def __bool__(self) -> bool:
        _count_read()
        return bool(self._array)

    def __int__(self) -> int:
        _count_read()
        return int(self._array)

    def __float__(self) -> float:
        _count_read()
        return float(self._array)

    def __repr__(self) -> str:
        return f"StrictArray({self._array!r})"

    def __getitem__(self, index: Any) -> "StrictArray":
        places = bare(index)
        if any(array.dtype == bool for array in strict_graphs.arrays_in(places)):
            refuse_in_capture("D2H transfers are")
        return wrapped(launch(operator.getitem, (self._array, places), {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        launch(_set, (self._array, bare(index), bare(value)), {}, writes=self._array)

    def astype(self, dtype: Any, copy: bool = True) -> "StrictArray":
        check_dtype(np.dtype(dtype))
        if np.dtype(dtype) == self.dtype and not copy:
            return self
        return wrapped(launch(np.ndarray.astype, (self._array, dtype), {"copy": copy}))

    def tolist(self) -> Any:
        _count_read()
        return self._array.tolist()

    def item(self) -> Any:
        _count_read()
        return self._array.item()


def _set(array: np.ndarray, index: Any, value: Any) -> None:
    array[index] = value


_set.writes = True  # type: ignore[attr-defined]


def _fill(array: np.ndarray, value: Any) -> None:
    array.fill(value)


_fill.writes = True  # type: ignore[attr-defined]


def _count_read() -> None:
    refuse_in_capture("D2H transfers are")
    StrictArray.reads += 1


def _method(name: str) -> Callable[..., Any]:
    function = _fill if name == "fill" else getattr(np.ndarray, name)

    def method(self: StrictArray, *arguments: Any, **keywords: Any) -> Any:
        refuse_bfloat16(name, [self])
        given = (self._array, *map(bare, arguments)), {k: bare(v) for k, v in keywords.items()}
        return wrapped(launch(function, *given, writes=self._array if name == "fill" else given[1].get("out")))

    return method


for _name in (
    *("reshape", "transpose", "copy", "view", "squeeze", "swapaxes", "fill", "conj"),
    *("sum", "prod", "mean", "var", "max", "min", "any", "all", "argsort", "argmax", "argmin", "repeat"),
):
    setattr(StrictArray, _name, _method(_name))


def _operator(function: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
    def operate(self: StrictArray, other: Any) -> Any:
        left, right = (bare(other), self._array) if turned else (self._array, bare(other))
        return wrapped(launch(function, (left, right), {}))

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul"):
    _function, _plain = getattr(operator, _name), _name.rstrip("_")
    setattr(StrictArray, f"__{_plain}__", _operator(_function, turned=False))
    setattr(StrictArray, f"__r{_plain}__", _operator(_function, turned=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(StrictArray, f"__{_name}__", _operator(getattr(operator, _name), turned=False))
StrictArray.__ior__ = lambda self, other: (self.__setitem__(..., self | other), self)[1]
StrictArray.__neg__ = lambda self: wrapped(launch(operator.neg, (self._array,), {}))
StrictArray.__invert__ = lambda self: wrapped(launch(operator.invert, (self._array,), {}))
StrictArray.__abs__ = lambda self: wrapped(launch(operator.abs, (self._array,), {}))
StrictArray.__hash__ = None  # type: ignore[assignment]


def check_dtype(dtype: np.dtype) -> None:
    """Raise as CuPy does where it has no such arrays."""
    if dtype not in DTYPES:
        raise ValueError(f"Unsupported dtype {dtype}")


def bare(value: Any) -> Any:
    """The numpy array of a strict one, inside of tuples and lists too; numpy arrays are refused."""
    if isinstance(value, StrictArray):
        return value._array
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (tuple, list)):
        return type(value)(map(bare, value))
    return value


def wrapped(value: Any) -> Any:
    """A result of numpy as the device would give it: arrays, never numbers."""
    if isinstance(value, (np.ndarray, np.generic)):
        return StrictArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(*map(wrapped, value)) if hasattr(value, "_fields") else type(value)(map(wrapped, value))
    return value


def refuse_bfloat16(name: str, arguments: Any) -> None:
    """Raise as CuPy does where it has no such function of bfloat16."""
    if name in UNSUPPORTED_BFLOAT16 and any(isinstance(x, StrictArray) and x.dtype == BFLOAT16 for x in arguments):
        raise TypeError("data type 'E' not understood")


def _function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        refuse_bfloat16(name, arguments)
        if name in READ_ON_HOST:
            refuse_in_capture("D2H transfers are")
        given = tuple(map(bare, arguments)), {key: bare(value) for key, value in keywords.items()}
        found = launch(function, *given, writes=given[0][0] if name == "copyto" else given[1].get("out"))
        if keywords.get("out") is not None:
            return keywords["out"]
        result = wrapped(found)
        is_wide = name in WITHOUT_BFLOAT16 and isinstance(result, StrictArray) and result.dtype == BFLOAT16
        return result.astype(np.float32) if is_wide else result

    call.__name__ = name
    return call


def _copyto(target: np.ndarray, source: Any, **keywords: Any) -> None:
    np.copyto(target, source, **keywords)


_copyto.writes = True  # type: ignore[attr-defined]


def _empty(shape: Any, dtype: Any = float) -> np.ndarray:
    """Numbers that show where they are read; integers that index something."""
    made = np.zeros(shape, dtype)
    if made.dtype.kind in "fc":
        made.fill(np.nan)
    return made


_empty.only_allocates = True  # type: ignore[attr-defined]


def _asarray(value: Any, dtype: Any = None) -> StrictArray:
    """CuPy's asarray takes arrays of numpy too: that is how they come to the device; its own it gives back."""
    if isinstance(value, StrictArray) and dtype in (None, value.dtype):
        return value
    refuse_in_capture("H2D transfers are")
    return StrictArray(np.array(value._array if isinstance(value, StrictArray) else value, dtype=dtype))


class _Stream:
    """A stream that does at once what it is asked for."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def wait_event(self, event: "_Event") -> None:
        """All is done already."""

    def begin_capture(self) -> None:
        """What the calling thread launches is noted."""
        strict_graphs.begin_capture()

    def end_capture(self) -> strict_graphs.Graph:
        """What was noted."""
        return strict_graphs.end_capture()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: _Stream) -> None:
        """All is done already."""

    def synchronize(self) -> None:
        """All is done already."""


class Pinned(bytearray):
    """Memory of the host, with an address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class _Device:
    def __init__(self, number: int = 0) -> None:
        assert 0 <= number < STRICT.cuda.runtime.getDeviceCount()

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class CompileError(Exception):
    """What stands for CuPy's CompileException."""


def _memcpy(target: int, source: int, size: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, size)


def module() -> ModuleType:
    """The module: numpy's functions on strict arrays, and as much of CuPy's CUDA as the engine uses."""
    made = ModuleType("strict_device")
    for name in NAMES:
        setattr(made, name, _function(name, {"copyto": _copyto, "empty": _empty}.get(name) or getattr(np, name)))
    made.asarray = _asarray  # type: ignore[attr-defined]
    made.ndarray = StrictArray  # type: ignore[attr-defined]
    made.lib = SimpleNamespace(  # type: ignore[attr-defined]
        stride_tricks=SimpleNamespace(
            as_strided=_function("as_strided", lambda *a: np.lib.stride_tricks.as_strided(*a, writeable=False))
        )
    )
    made.linalg = SimpleNamespace(det=_function("det", np.linalg.det))  # type: ignore[attr-defined]
    transforms = ("fft", "ifft", "rfft", "irfft", "rfftn", "irfftn")
    made.fft = SimpleNamespace(**{name: _function(name, getattr(np.fft, name)) for name in transforms})  # type: ignore[attr-defined]
    made.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Stream=_Stream,
        Event=_Event,
        Device=_Device,
        get_current_stream=_Stream,
        alloc_pinned_memory=Pinned,
        UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, owner=owner),
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory, owner=memory.owner),
        MemoryPool=strict_graphs.Pool,
        get_allocator=lambda: strict_graphs.CURRENT.allocate,
        using_allocator=strict_graphs.using_allocator,
        runtime=SimpleNamespace(memcpyAsync=_memcpy, getDeviceCount=lambda: 1),
        compiler=SimpleNamespace(CompileException=CompileError),
    )
    made.get_default_memory_pool = strict_graphs.Pool  # type: ignore[attr-defined]
    return made


STRICT = module()
