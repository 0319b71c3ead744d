"""The table of CUDA kernels: which function launches what for which version of which operator.

A function states its operator in its signature as those of `irpar.kernels.registry` do, and gets a `Gpu` in place of
the array module:

    @cuda_kernel("Softmax", since=13)
    def softmax(gpu: Gpu, x: Array, *, axis: int = -1, out: Array | None = None) -> Array | None: ...

Operands are CuPy's arrays of any strides, `HostArray` and `ShapeArray` those that are declared so. `out` is an array of
the result's shape and dtype, whose elements lie one after the other; a function that takes it writes there, and else
into `gpu.empty`: never does it give a view of an operand. An operand of the same shape may lie in the memory of `out`
where the operator is elementwise.

None says "not for me" (a dtype, a size, a layout, an attribute): then the kernel of `irpar.kernels` computes the node,
which is also what it is compared with, and what reports a call that is wrong.

While a CUDA graph is captured a function runs as ever, once for all replays; it must not wait for the device, read
numbers that lie there, upload anything, or use another stream than the current one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..registry import Array, Function, Kept, Signature
from ..table import Table
from .families import OPERATORS
from .gpu import Gpu


@dataclass(frozen=True)
class CudaKernel:
    """One operator version computed by launches.

    Attributes:
        domain: the operator's domain, `""` for ONNX's own.
        op_type: the operator's name.
        since: the first operator-set version that this function computes.
        function: `function(gpu, *operands, **attributes)`, giving one array, a tuple of arrays, or None.
        signature: what the function accepts.
    """

    domain: str
    op_type: str
    since: int
    function: Function
    signature: Signature

    def __call__(
        self,
        gpu: Gpu,
        inputs: Sequence[Array | None],
        attributes: Mapping[str, Any],
        n_outputs: int,
        out: Array | Sequence[Array | None] | None = None,
        kept: Kept | None = None,
    ) -> tuple[Array, ...] | None:
        """Compute the node's results on the current stream; None where this is nothing for the function.

        Args:
            gpu: the current device.
            inputs: the operands in order; `None` for an optional one that is absent.
            attributes: the attributes that the node sets, as Python values (int, float, str, tuples of those, arrays).
            n_outputs: how many results the node has.
            out: where the result goes; where the node has several an array or None for each.
            kept: what the function keeps of this node from run to run, if it keeps anything.
        """
        if not self._takes(inputs, attributes):
            return None
        keywords = dict(attributes)
        if self.signature.wants_n_outputs:
            keywords["n_outputs"] = n_outputs
        if out is not None and self.signature.writes_out:
            keywords["out"] = out
        if out is not None and self.signature.writes_outs:
            keywords["outs"] = out if isinstance(out, tuple) else (out,)
        if kept is not None and self.signature.keeps:
            keywords["kept"] = kept
        results = self.function(gpu, *inputs, **keywords)
        if results is None:
            return None
        if not isinstance(results, tuple):
            results = (results,)
        return results[:n_outputs] if len(results) >= n_outputs else None

    def _takes(self, inputs: Sequence[Array | None], attributes: Mapping[str, Any]) -> bool:
        """Whether operands and attributes are those of the function."""
        signature = self.signature
        if attributes.keys() - signature.attributes or signature.required_attributes - attributes.keys():
            return False
        if signature.variadic:
            return len(inputs) >= max(signature.required, 1) and all(operand is not None for operand in inputs)
        required = inputs[: signature.required]
        return signature.required <= len(inputs) <= len(signature.operands) and all(x is not None for x in required)


_TABLE: Table[CudaKernel] = Table(__package__, OPERATORS)


def cuda_kernel(op_type: str, since: int, domain: str = "") -> Callable[[Function], Function]:
    """Enter a function as the CUDA kernel of `op_type` from operator-set version `since` on; may be stacked."""

    def enter(function: Function) -> Function:
        entry = CudaKernel(domain, op_type, since, function, Signature.of(function))
        _TABLE.enter(entry, function.__module__)
        return function

    return enter


def has_kernel(domain: str, op_type: str, version: int) -> bool:
    """True where `lookup` finds a kernel; loads none."""
    return _TABLE.has(domain, op_type, version)


def lookup(domain: str, op_type: str, version: int) -> CudaKernel | None:
    """The CUDA kernel with the greatest since-version that is not above `version`, or None."""
    return _TABLE.find(domain, op_type, version)


def supported() -> list[tuple[str, str]]:
    """All (domain, op type) pairs that have a CUDA kernel, sorted."""
    return _TABLE.all()
