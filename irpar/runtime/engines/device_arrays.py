"""Where arrays lie for an engine with a device: tensors there, the small integers that shape them on the host."""

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import DOMAIN, DType, Graph, Node, Value, tensor_type
from irpar.kernels import Kept, Kernel, KernelError, cuda
from irpar.kernels.faults import FAULTS
from irpar.kernels.registry import Signature
from irpar.ops.op_def import traits
from irpar.runtime.errors import EngineError, NodeError
from irpar.runtime.groups.base import Collective
from irpar.sharding import option

from .arrays import Arrays, Reads
from .host_values import HostValues
from .operation import Environment, Operation

if TYPE_CHECKING:
    from irpar.runtime.communication import Communication

HOST_ELEMENTS = 64
"""Tensors of more elements are computed on the device; others on the host where all that they are made of lies."""

DEVICE_DTYPES = frozenset(
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128),
    )
)
"""What CuPy has arrays of."""

_ADDS_OVER = frozenset([("", "Add"), (DOMAIN, "Fused"), (DOMAIN, "FusedEach"), (DOMAIN, "FusedMatMul")])
"""What reads an element of what it adds to when it writes that of the result, or looks where its operands lie."""

Array = np.ndarray[Any, Any]


class Held:
    """A tensor on the host, and from when something there reads it on, on the device too.

    Attributes:
        host: the numpy array; None where only the device has it.
        device: the device's array; None where it has none.
    """

    __slots__ = ("device", "host")

    def __init__(self, host: Array, device: Any = None) -> None:
        self.host = host
        self.device = device


class NotOnDeviceError(Exception):
    """A tensor is of a dtype that the device's arrays lack."""


class HostDeviceCopy:
    """How arrays come to a device and back.

    Args:
        upload: a device array of a numpy array.
        download: numpy arrays of device arrays; waits for the device.
        adopt: a device array from outside, on the device that is worked on.
        is_capturing: whether what the device is given is noted only, for a CUDA graph.
    """

    def __init__(
        self,
        upload: Callable[[Array], Any],
        download: Callable[[Sequence[Any]], list[Array]],
        adopt: Callable[[Any], Any],
        is_capturing: Callable[[], bool],
    ) -> None:
        self.upload = upload
        self.download = download
        self.adopt = adopt
        self.is_capturing = is_capturing


class Notes:
    """What ran on the host though the engine has a device: one line for each operator.

    Args:
        name: the engine's.
        strict: refuse instead.
    """

    def __init__(self, name: str, strict: bool) -> None:
        self._name = name
        self._strict = strict
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each operator, in order of first time."""
        with self._lock:
            return tuple(self._lines.values())

    def add(self, node: Node, reason: str) -> None:
        """Note that an operator runs on the host.

        Raises:
            EngineError: that is not wanted.
        """
        if self._strict:
            raise EngineError(
                f"the {self._name} engine cannot run {node.operator} on the device: {reason}",
                where=f"node {node.label}",
                do=f"run without {option('strict')}, which computes this operator on the host; or change the model, "
                "so that it does without",
            )
        with self._lock:
            self._lines.setdefault(node.operator, f"{node.operator} runs on the host: {reason} (node {node.label})")

    def add_generic(self, node: Node, reason: str) -> None:
        """Note that an operator has a CUDA kernel, which cannot be used."""
        with self._lock:
            line = f"{node.operator} runs by CuPy's functions: {reason} (node {node.label})"
            self._lines.setdefault(f"{node.operator} generic", line)

    def add_apart(self, node: Node, reason: str) -> None:
        """Note that an operator splits what is captured in CUDA graphs; one that runs on the host has its line."""
        with self._lock:
            if node.operator not in self._lines:
                line = f"{node.operator} splits CUDA graphs: {reason} (node {node.label})"
                self._lines.setdefault(f"{node.operator} splits", line)


class DeviceArrays(Arrays):
    """Tensors on a device.

    A tensor is an array of the device's module, or `Held`. Operands that a kernel reads on the host come there, and
    what they are made of is computed there if it is small, so that shapes are known without waiting for the device:
    which values these are is decided when a body is compiled (`on_host`). What the device cannot compute is computed on
    the host by the same kernel, with a note.

    Args:
        name: the engine's.
        module: the device's array module.
        transfer: how arrays come there and back.
        notes: what is told of nodes that ran on the host.
        others: what computes a node that no kernel computes, on host arrays.
        retried: errors of a kernel that mean that the device, and perhaps not the host, cannot compute it.
        host_elements: see `HOST_ELEMENTS`.
        word: where a node notes a problem with numbers on the device (see `FAULTS`); None: it waits for them.
        talks: how segments communicate; None: they do not.

    Attributes:
        gpu: gives the current device to launch CUDA kernels on; None where the module compiles none.
    """

    def __init__(
        self,
        name: str,
        module: ModuleType,
        transfer: HostDeviceCopy,
        notes: Notes,
        others: Callable[[Node], Operation],
        *,
        retried: tuple[type[Exception], ...],
        host_elements: int,
        word: Callable[[Node, str], Any] | None = None,
        talks: "Communication | None" = None,
    ) -> None:
        self.name = name
        self.module = module
        self.transfer = transfer
        self.notes = notes
        self.retried: tuple[type[Exception], ...] = (KernelError, NotOnDeviceError, *retried)
        self._others = others
        self._host_elements = host_elements
        self.word = word
        self.talks = talks
        self.gpu: Callable[[], cuda.Gpu] | None = cuda.Gpus(module) if hasattr(module, "RawModule") else None

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """See `Arrays.nodes`: nodes that one kernel computes are one."""
        return tuple(stand_ins(Stretch(tuple(graph), {*graph.outputs})))

    # -- moving ---------------------------------------------------------------------------------------------------

    def host(self, value: Any) -> Array:
        """A tensor as a numpy array; waits for the device where it lies only there."""
        if isinstance(value, Held):
            return value.host
        if isinstance(value, np.ndarray):
            return value
        return self.transfer.download([value])[0]

    def device(self, value: Any) -> Any:
        """A tensor as an array of the device.

        Raises:
            NotOnDeviceError: the device has no arrays of its dtype.
        """
        if not isinstance(value, Held):
            return value
        if value.device is None:
            if value.host.dtype not in DEVICE_DTYPES:
                raise NotOnDeviceError(_lacking(value.host.dtype))
            value.device = self.transfer.upload(value.host)
        return value.device

    def together(self, values: Sequence[Any]) -> tuple[ModuleType, list[Any]]:
        """Tensors as arrays of the device, or of numpy where all lie on the host, or one can lie only there."""
        held = [value for value in values if isinstance(value, Held)]
        if len(held) == len(values) or any(value.host.dtype not in DEVICE_DTYPES for value in held):
            return np, [self.host(value) for value in values]
        return self.module, [self.device(value) for value in values]

    def is_own(self, value: Any) -> bool:
        """See `Arrays.is_own`, of the device's memory."""
        return isinstance(value, self.module.ndarray) and value.base is None

    def copied(self, value: Any) -> Any:
        """See `Arrays.copied`; what the host has is written over by none."""
        return value if isinstance(value, Held) else value.copy()

    def may_add_over(self, node: Node) -> bool:
        """See `Arrays.may_add_over`."""
        return node.identity in _ADDS_OVER

    def brought(self, made: Any, block: Any) -> Any:
        """See `Arrays.brought`, of the device's memory."""
        if isinstance(made, Held) or place_of(made) == place_of(block):
            return made
        if (made.shape, made.dtype) != (block.shape, block.dtype):
            return made
        block[...] = made
        return block

    def is_stack(self, stack: Any, rows: Sequence[Any]) -> bool:
        """See `Arrays.is_stack`, in the device's memory."""
        if len(stack) != len(rows):
            return False
        return all(not isinstance(row, Held) and place_of(row) == place_of(stack[n]) for n, row in enumerate(rows))

    def keep(self, array: Any) -> Any:
        """A tensor that was made of an array of numpy or of the device."""
        return Held(np.asarray(array)) if isinstance(array, np.ndarray | np.generic) else array

    def constant(self, array: Array, reads: Reads) -> Any:
        """A tensor whose numbers are known: where it is read, and on the host as well where it is small."""
        if array.dtype not in DEVICE_DTYPES:
            return Held(array)
        device = self.transfer.upload(array) if reads.on_device else None
        if device is not None and not reads.on_host and array.size > self._host_elements:
            return device
        return Held(array, device)

    def enter(self, value: Any, on_host: bool = False) -> Any:
        """What came from outside: on the device, but for what is read on the host, and dtypes that the device lacks."""
        if isinstance(value, list):
            return [self.enter(item, on_host) for item in value]
        if isinstance(value, Held):
            return value
        if not isinstance(value, np.ndarray):
            return None if value is None else self.transfer.adopt(value)
        return Held(value) if on_host or value.dtype not in DEVICE_DTYPES else self.transfer.upload(value)

    def leave(self, values: Sequence[Any], keep_on_device: bool) -> list[Any]:
        """What goes outside: numpy arrays, all of which are waited for at once; or device arrays where those can be."""
        if keep_on_device:
            return [self._map(value, self._as_device) for value in values]
        arrays: list[Any] = []
        for value in values:
            self._map(value, lambda item: None if isinstance(item, Held) else arrays.append(item))
        found = iter(self.transfer.download(arrays) if arrays else ())
        return [self._map(value, lambda item: item.host if isinstance(item, Held) else next(found)) for value in values]

    def _as_device(self, value: Any) -> Any:
        is_host = isinstance(value, Held) and value.host.dtype not in DEVICE_DTYPES
        return value.host if is_host else self.device(value)

    def _map(self, value: Any, function: Callable[[Any], Any]) -> Any:
        """The function of a tensor, or of each of a sequence."""
        if isinstance(value, list):
            return [self._map(item, function) for item in value]
        return None if value is None else function(value)

    # -- computing ------------------------------------------------------------------------------------------------

    def on_host(
        self, inputs: Collection[Value], nodes: Sequence[Node], outputs: Sequence[Value] | None, around: Set[Value]
    ) -> Set[Value]:
        """See `Arrays.on_host`."""
        values = HostValues(self._host_elements, around)
        return values.of_segment(inputs, nodes) if outputs is None else values.of_body(inputs, nodes, outputs)

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> Operation:
        """What computes a node with a kernel, on the device or on the host."""
        return PlacedKernel(self, node, kernel, attributes, on_host)

    def without_kernel(self, node: Node) -> Operation:
        """What computes a node that no kernel computes: another engine, on the host.

        Raises:
            EngineError: none does, or the host is not wanted.
        """
        compute = self._others(node)
        self.notes.add(node, "irpar has no kernel of it")

        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            hosts = [None if value is None else self.host(value) for value in inputs]
            return [None if result is None else self.keep(result) for result in compute(hosts, environment)]

        return run

    def communication(self, node: Node) -> Operation:
        """See `Arrays.communication`."""
        return super().communication(node) if self.talks is None else Communicating(self, node, self.talks)

    def failure(self, node: Node, error: Exception) -> NodeError:
        """What to tell of an error at a node."""
        if isinstance(error, MemoryError) and not type(error).__module__.startswith("numpy"):
            return out_of_memory(f"{node.operator} failed", error, f"node {node.label}")
        if isinstance(error, EngineError):
            return NodeError(error.what, where=error.where, do=error.do)
        return super().failure(node, error)


class Communicating:
    """A node of communication that is part of a segment."""

    def __init__(self, arrays: DeviceArrays, node: Node, talks: "Communication") -> None:
        self._arrays = arrays
        self._talks = talks
        self._known = traits(node)
        self._collective = None if self._known.waits else Collective.of(node)

    def __call__(self, inputs: list[Any], environment: Environment) -> Sequence[Any]:
        """Do what the node does, or let it begin, or wait for it."""
        (value,), talks, is_captured = inputs, self._talks, self._arrays.transfer.is_capturing()
        if self._collective is None:
            return (talks.finish(value, is_captured),)
        operand = self._arrays.device(value)
        if self._known.starts:
            return (talks.begin(self._collective, operand, is_captured),)
        return (talks.execute(self._collective, operand, is_captured),)


def out_of_memory(what: str, error: MemoryError, where: str) -> NodeError:
    """A failure for lack of device memory."""
    text = str(error).removesuffix(".") or "out of memory"
    return NodeError(
        f"{what} on the device: {text[0].lower()}{text[1:]}",
        where=where,
        do="use a smaller batch, shard the model over more devices, run fewer ranks on this one, or use "
        + option("engine", "ort"),
    )


class PlacedKernel:
    """A node that a kernel computes, on the device or on the host.

    On the device a CUDA kernel of the operator is asked first, if there is one.

    Attributes:
        lacking: why the device cannot compute it, as far as types tell; empty where it can.
    """

    def __init__(
        self, arrays: DeviceArrays, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool
    ) -> None:
        self._arrays = arrays
        self._node = node
        self._kernel = kernel
        self._attributes = attributes
        self._dtypes = tuple(
            type_.dtype.numpy if (type_ := tensor_type(value.type)) is not None else None for value in node.results
        )
        self.lacking = self._lacks()
        if self.lacking:
            arrays.notes.add(node, self.lacking)
        self._is_on_host = on_host or bool(self.lacking)
        self._word = None if arrays.word is None else partial(arrays.word, node)
        self._cuda = None
        if arrays.gpu is not None and not self._is_on_host:
            self._cuda = cuda.lookup(node.domain, node.op_type, node.version)
        self._kept = Kept(place for place, value in enumerate(node.operands) if value is not None and value.is_constant)

    @property
    def writes_out(self) -> bool:
        """Whether the CUDA kernel can write the results into arrays that it is given; they are never views."""
        if self._cuda is None:
            return False
        return self._cuda.signature.writes_outs or (self._cuda.signature.writes_out and len(self._dtypes) == 1)

    def _lacks(self) -> str:
        """Why the device cannot compute the node, as far as its types tell; empty where it can."""
        apart = self._kernel.signature.host | self._kernel.signature.shape_only
        read = [value for place, value in enumerate(self._node.operands) if value is not None and place not in apart]
        for value in (*read, *self._node.results):
            type_ = tensor_type(value.type)
            if type_ is not None and type_.dtype.numpy not in DEVICE_DTYPES:
                return _lacking(type_.dtype)
        return ""

    def __call__(self, inputs: list[Any], environment: Environment) -> Sequence[Any]:
        """Compute the node's results."""
        if self._is_on_host:
            return self._compute_on_host(inputs)
        try:
            with FAULTS.noted(self._word):
                return self._compute_on_device(inputs, environment.into.get(self._node))
        except self._arrays.retried as error:
            if self._arrays.transfer.is_capturing():
                raise  # That it cannot be captured does not say that the device cannot compute it.
            return self._fall_back(inputs, error)

    def _compute_on_host(self, inputs: list[Any]) -> list[Any]:
        arrays, apart = self._arrays, self._kernel.signature.shape_only
        operands = [
            None if value is None else _of_any_module(value) if place in apart else arrays.host(value)
            for place, value in enumerate(inputs)
        ]
        return [Held(result) for result in self._kernel(np, operands, self._attributes, len(self._dtypes))]

    def _compute_on_device(self, inputs: list[Any], out: Any) -> list[Any]:
        results = self._by_cuda(inputs, out)
        if results is None:
            operands = self._on_device(inputs, self._kernel.signature)
            results = self._kernel(self._arrays.module, operands, self._attributes, len(self._dtypes), out)
        # Where the device's module lacks a dtype's function it gives a wider one: what the node says, holds.
        return [
            result if dtype is None or result.dtype == dtype else result.astype(dtype)
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]

    def _by_cuda(self, inputs: list[Any], out: Any) -> tuple[Any, ...] | None:
        """The results of the operator's CUDA kernel, if there is one and it takes what is given."""
        if self._cuda is None or self._arrays.gpu is None:
            return None
        operands = self._on_device(inputs, self._cuda.signature)
        # What is made while a graph is captured is there when it is replayed, and not before.
        kept = self._kept.frozen() if self._arrays.transfer.is_capturing() else self._kept
        try:
            return self._cuda(self._arrays.gpu(), operands, self._attributes, len(self._dtypes), out, kept)
        except cuda.CompileError as error:
            self._arrays.notes.add_generic(self._node, str(error))
            self._cuda = None
            return None

    def _on_device(self, inputs: list[Any], signature: Signature) -> list[Any]:
        """Operands where a function with a signature reads them."""
        operands: list[Any] = []
        for place, value in enumerate(inputs):
            if value is None:
                operands.append(None)
            elif place in signature.host:
                operands.append(self._arrays.host(value))
            elif place in signature.shape_only:
                operands.append(_of_any_module(value))
            else:
                operands.append(self._arrays.device(value))
        return operands

    def _fall_back(self, inputs: list[Any], error: Exception) -> list[Any]:
        """On the host, from here on, where it can; its own error where it cannot either."""
        results = self._compute_on_host(inputs)
        cause = error.__cause__ if isinstance(error, KernelError) and error.__cause__ is not None else error
        text = str(cause).strip().splitlines()
        reason = text[0] if text else type(cause).__name__
        self._arrays.notes.add(self._node, reason)
        self._is_on_host = True
        return results


def place_of(array: Any) -> Hashable:
    """What two arrays of a device share that are the same; None: the host has it."""
    return None if isinstance(array, Held) else (array.data.ptr, array.shape, array.strides, array.dtype)


def _of_any_module(value: Any) -> Any:
    return value.host if isinstance(value, Held) else value


def _lacking(dtype: "DType | np.dtype[Any]") -> str:
    name = dtype.text if isinstance(dtype, DType) else "strings" if dtype.kind == "O" else str(dtype)
    return f"there are no device arrays of {name}"
