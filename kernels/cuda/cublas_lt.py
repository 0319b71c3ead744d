"""Matrix products on a device by cuBLASLt: any batch and layout, with a bias, an activation, a residual at their end.

fp16 and bf16 operands are multiplied as they are and summed in float32; the result is rounded once.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..gemm import Gemm, Operand, contiguous_calls, product_shape
from ..operands import BFLOAT16, FLOAT32, compute_dtype, narrow, widen
from ..registry import Array, ArrayModule
from . import few_rows, padding
from .cublas_lt_library import BF16, EPILOGUES, F16, F32, F64, Addresses, CublasLtError, Library, Plan, Problem, library
from .finish import Finish
from .gpu import Gpu

TYPES: dict[np.dtype[Any], int] = {
    FLOAT32: F32,
    np.dtype(np.float64): F64,
    np.dtype(np.float16): F16,
    BFLOAT16: BF16,
}
"""cudaDataType_t of the dtypes that are multiplied."""

WORKSPACE_BYTES = {True: 32 * 2**20, False: 8 * 2**20}
"""Of a stream, by whether the device is of compute capability 9.0 or later."""

MOST_PLANS = 4096
"""Of a device; those that were not used for the longest time are dropped."""

MOST_ALIGNMENT = 256
"""Bytes; no way of computing a product asks for more."""


class Precision(threading.local):
    """How a thread's products are computed.

    Attributes:
        is_tf32: operands of float32 may be rounded to 10 bits of mantissa.
    """

    is_tf32 = False


PRECISION = Precision()


@contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Whether products of float32 that the thread asks for in here may round operands to 10 bits of mantissa."""
    before, PRECISION.is_tf32 = PRECISION.is_tf32, is_allowed
    try:
        yield
    finally:
        PRECISION.is_tf32 = before


class Multiplier:
    """What a device is asked for products with: plans, and a workspace for each stream.

    Args:
        module: CuPy; the device is the current one.
        functions: cuBLASLt's.
    """

    def __init__(self, module: ArrayModule, functions: Library) -> None:
        self._module = module
        self._library = functions
        self._handle = functions.create("")
        self._workspace_bytes = WORKSPACE_BYTES[int(module.cuda.Device().compute_capability) >= 90]
        self._workspaces: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._plans: OrderedDict[Problem, Plan | None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """What the workspaces take of the device."""
        return len(self._workspaces) * self._workspace_bytes

    @cached_property
    def gpu(self) -> Gpu:
        """The device, for kernels."""
        return Gpu(self._module)

    def plan(self, problem: Problem) -> Plan | None:
        """How a problem is computed; None where there is no way."""
        with self._lock:
            if problem in self._plans:
                self._plans.move_to_end(problem)
                return self._plans[problem]
            try:
                plan = Plan(self._library, self._handle, problem, self._workspace_bytes)
            except CublasLtError:
                plan = None
            self._plans[problem] = plan
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return plan

    def run(self, plan: Plan, addresses: Addresses, factors: tuple[float, float]) -> None:
        """Compute a plan on the current stream; see `Plan.run`."""
        stream = self._module.cuda.get_current_stream()
        plan.run(addresses, factors, self._workspace(stream) if plan.workspace_bytes else 0, stream.ptr)

    def _workspace(self, stream: Any) -> int:
        """The address of a stream's workspace, which lasts as long as the stream: captured graphs use it too.

        It does not come from the allocator of the moment, whose memory a captured graph may own.
        """
        found = self._workspaces.get(stream)
        if found is None:
            pool = self._module.get_default_memory_pool()
            found = self._workspaces[stream] = pool.malloc(self._workspace_bytes)
        return int(found.ptr)


_MULTIPLIERS: dict[int, Multiplier] = {}
_LOCK = threading.Lock()


def workspace_bytes() -> int:
    """What the workspaces of all streams take."""
    return sum(multiplier.held_bytes for multiplier in _MULTIPLIERS.values())


def _multiplier(xp: ArrayModule, device: int) -> Multiplier:
    """That of a device, which is the current one."""
    if device not in _MULTIPLIERS:
        with _LOCK:
            if device not in _MULTIPLIERS:
                _MULTIPLIERS[device] = Multiplier(xp, library())
    return _MULTIPLIERS[device]


def matmul(
    xp: ArrayModule,
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    dtype: "np.dtype[Any] | None" = None,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Array:
    """activation(alpha * a @ b + beta * residual + bias), over the last two dims; leading dims broadcast.

    The whole is one launch for each call that `contiguous_calls` makes of it, where the library has a way to do so.

    Args:
        xp: CuPy.
        a, b: operands of one dtype; a vector counts as one row or one column. Where they are of two, both are taken in
            the wider one's compute dtype.
        out: what the result is written into, where it is of its shape and dtype, and contiguous; or where its rows lie
            evenly further apart, and a product takes less time so (see `padding`).
        dtype: of the result: that of `a` (None), or another, which is rounded to from the compute dtype.
        bias: a number for each column of the result.
        activation: None, "relu" (which may make 0 of NaN), or "gelu_tanh".
        residual: of the result's shape.
        alpha, beta: factors.

    Returns:
        A new array, or `out`.

    Raises:
        ValueError: the operands do not fit each other.
    """
    if activation not in EPILOGUES:
        raise ValueError(f"activation {activation!r} is none of {', '.join(map(repr, EPILOGUES))}")
    dtype = a.dtype if dtype is None else np.dtype(dtype)
    if a.dtype != b.dtype:
        common = np.promote_types(compute_dtype(a.dtype), compute_dtype(b.dtype))
        a, b = a.astype(common, copy=False), b.astype(common, copy=False)
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(f"inner dims {a.shape[-1]} and {inner} differ")
    shape, kind = product_shape(a, b), dtype if dtype in (a.dtype, compute_dtype(a.dtype)) else compute_dtype(a.dtype)
    _check_addends(bias, residual, shape)
    is_fit = out is not None and out.shape == shape and out.dtype == kind
    finish = Finish(bias, activation, residual, alpha, beta)
    if out is not None and is_fit and not out.flags.c_contiguous:
        if inner and _is_written_apart(xp, a, b, out, finish):
            return out
        is_fit = False
    result = out if out is not None and is_fit else xp.empty(shape, dtype=kind)
    if residual is not None and residual.dtype == kind and not residual.flags.c_contiguous:
        result[...] = residual  # The library adds what lies in one piece, and to that itself too.
        finish = finish._replace(residual=result)
    if not result.size:
        return narrow(result, dtype)
    if not inner:
        result.fill(0)
        sums = widen(result)
        finish.of_dtype(xp, kind).launch(_multiplier(xp, result.data.device_id).gpu, sums, result)
        return narrow(result, dtype)
    _multiply(xp, a, b, result, finish)
    return narrow(result, dtype)


def _check_addends(bias: Array | None, residual: Array | None, shape: tuple[int, ...]) -> None:
    if bias is not None and bias.shape != shape[-1:]:
        raise ValueError(f"a bias of shape {bias.shape} does not fit a product of shape {shape}")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"a residual of shape {residual.shape} does not fit a product of shape {shape}")


def _multiply(xp: ArrayModule, a: Array, b: Array, result: Array, finish: Finish) -> None:
    """Write a product and what follows on it, none of which is empty, into a contiguous array."""
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right, calls = contiguous_calls(xp, left, right, batch)
    # A bias of a product with a vector would be one of its single column.
    is_together = finish.bias is None or b.ndim > 1
    taken = finish.of_dtype(xp, result.dtype)
    multiplier = _multiplier(xp, left.data.device_id)
    is_single = is_together and len(calls) == 1
    addresses = left.data.ptr, right.data.ptr, result.data.ptr
    if is_single and few_rows.is_fit(calls[0], left, right, result, addresses[:2]):
        few_rows.multiply(multiplier.gpu, calls[0], left, right, result, taken)
        return
    if taken.activation == "gelu_tanh" and result.itemsize > 2:
        # The library computes tanh in hardware, to 10 bits.
        _multiply(xp, a, b, result, taken._replace(activation=None))
        Finish(activation=taken.activation).launch(multiplier.gpu, result, result)
        return
    is_alike = is_single and taken.residual is None and left.dtype == result.dtype
    is_padded = is_alike and padding.is_worth(calls[0], left.itemsize, addresses)
    if is_padded and _multiply_padded(xp, multiplier, calls[0], left, right, result, taken):
        return
    if is_together and _is_done(multiplier, calls, left, right, result, taken):
        return
    if finish.is_any:
        kind = compute_dtype(a.dtype)
        product = result if result.dtype == kind and finish.residual is None else xp.empty(result.shape, dtype=kind)
        _multiply(xp, a, b, product, Finish(alpha=finish.alpha))
        taken._replace(alpha=1.0).launch(multiplier.gpu, product, result)
        return
    raise ValueError(f"cuBLASLt multiplies no {a.dtype}{list(a.shape)} with {b.dtype}{list(b.shape)}")


def _is_written_apart(xp: ArrayModule, a: Array, b: Array, out: Array, finish: Finish) -> bool:
    """Write a product into an array whose rows lie further apart, if it is one that takes less time so."""
    pitch = padding.row_pitch(out)
    if pitch is None or a.ndim < 2 or b.ndim < 2 or a.dtype != out.dtype or finish.residual is not None:
        return False
    left, right, calls = contiguous_calls(xp, a, b, np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    call = calls[0]._replace(c=calls[0].c._replace(leading=pitch))
    addresses = left.data.ptr, right.data.ptr, out.data.ptr
    if len(calls) > 1 or not padding.is_worth(call, left.itemsize, addresses):
        return False
    taken = finish.of_dtype(xp, out.dtype)
    return _multiply_padded(xp, _multiplier(xp, left.data.device_id), call, left, right, out, taken)


def _multiply_padded(
    xp: ArrayModule, multiplier: Multiplier, call: Gemm, a: Array, b: Array, result: Array, finish: Finish
) -> bool:
    """Compute a product with what lies at odd places copied to even ones, of the rest in pieces; see `padding`."""
    whole, last = padding.column_parts(call, result.itemsize)
    if not whole.n:
        return False
    is_odd = [padding.is_odd(own, x.data.ptr, x.itemsize) for own, x in ((call.a, a), (call.b, b), (call.c, result))]

    def even(is_needed: bool, lines: Array, operand: Operand) -> tuple[Array, Operand]:
        if not is_needed:
            return lines, operand
        made, operand = padding.apart(xp, lines, operand)
        padding.copy_rows(multiplier.gpu, lines, made)
        return made, operand

    a_lines, c_lines = padding.lines(xp, a, call.a, call.m, call.k), result.reshape(call.m, call.n)
    right, b_place = even(is_odd[1], padding.lines(xp, b, call.b, call.k, whole.n), call.b)
    for rows in padding.row_pieces(whole, result.itemsize, is_odd[0] or is_odd[2]):
        left, a_place = even(is_odd[0], a_lines[:, rows] if call.a.transposed else a_lines[rows], call.a)
        own = c_lines[rows, : whole.n]
        target, place = padding.apart(xp, own, call.c) if is_odd[2] else (own, call.c)
        piece = whole._replace(m=rows.stop - rows.start, a=a_place, b=b_place, c=place)
        if not _is_summed(xp, multiplier, piece, left, right, target, finish.of_columns(slice(whole.n))):
            return False
        if is_odd[2]:
            padding.copy_rows(multiplier.gpu, target, own)
    return not last.n or _is_done(multiplier, [last], a, b, result, finish.of_columns(slice(whole.n, None)))


def _is_summed(
    xp: ArrayModule, multiplier: Multiplier, call: Gemm, a: Array, b: Array, result: Array, finish: Finish
) -> bool:
    """Compute a product and what follows on it: of an odd number of terms in two parts, whose sums are not rounded."""
    whole, rest = padding.term_parts(call, a.itemsize)
    if not rest.k or not whole.k or not result.flags.c_contiguous:
        return _is_done(multiplier, [call], a, b, result, finish)
    sums = xp.empty((call.m, call.n), dtype=FLOAT32)
    first = Finish(alpha=finish.alpha)
    both = ((whole, first), (rest, first._replace(residual=sums)))
    if not all(_is_done(multiplier, [part], a, b, sums, with_sums) for part, with_sums in both):
        return False
    finish._replace(alpha=1.0).launch(multiplier.gpu, sums, result)
    return True


def _is_done(multiplier: Multiplier, calls: list[Gemm], a: Array, b: Array, result: Array, finish: Finish) -> bool:
    """Compute a product and what follows on it, if the library has a way for all calls."""
    bias = 0 if finish.bias is None else finish.bias.data.ptr
    operands, kind = TYPES[a.dtype], TYPES[result.dtype]
    residual, beta = (result, 0.0) if finish.residual is None else (finish.residual, finish.beta)
    planned = []
    for call in calls:
        target = call.c.offset * result.itemsize
        addresses = Addresses(
            a.data.ptr + call.a.offset * a.itemsize,
            b.data.ptr + call.b.offset * b.itemsize,
            residual.data.ptr + target,
            result.data.ptr + target,
            bias,
        )
        problem = Problem(
            _unplaced(call),
            operands,
            kind,
            finish.activation,
            bool(bias),
            PRECISION.is_tf32,
            addresses.alignments(MOST_ALIGNMENT),
        )
        plan = multiplier.plan(problem)
        if plan is None:
            return False
        planned.append((plan, addresses))
    for plan, addresses in planned:
        multiplier.run(plan, addresses, (finish.alpha, beta))
    return True


def _unplaced(call: Gemm) -> Gemm:
    """The call with matrices at the beginning."""
    return call._replace(a=call.a._replace(offset=0), b=call.b._replace(offset=0), c=call.c._replace(offset=0))
