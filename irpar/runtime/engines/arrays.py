"""Where the arrays of an array engine lie: those of the engine `numpy` all on the host."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from irpar.ir import Graph, Memory, Node, Value
from irpar.kernels import Kept, Kernel
from irpar.kernels.operands import written
from irpar.runtime.errors import EngineError, NodeError
from irpar.sharding import option

if TYPE_CHECKING:
    from .operation import Environment, Operation


class Moving(NamedTuple):
    """A copy of a tensor to another memory, for which there is room already.

    Attributes:
        run: copies, on any thread.
        result: the copy, asked by the rank's thread with what `run` gave.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Any] = lambda made: made


class Arrays:
    """What control flow, sequences and nodes need to know of where arrays lie. All lie on the host here.

    Attributes:
        name: the engine's, for messages.
        is_host: whether what the device holds are numpy arrays, too.
        opens: whether what no kernel computes is computed in ONNX's operators, where it can be said in these.
    """

    name = "numpy"
    is_host = True
    opens = True

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """The nodes of a nested graph or of a function's body, as they are computed."""
        return tuple(graph)

    def host(self, value: Any) -> "np.ndarray[Any, Any]":
        """A tensor as a numpy array, whose numbers can be read."""
        return np.asarray(value)

    def together(self, values: Sequence[Any]) -> tuple[ModuleType, list[Any]]:
        """Tensors as arrays of one module, and that module."""
        return np, list(values)

    def keep(self, array: Any) -> Any:
        """A tensor that was made of an array of any module."""
        return array

    def outside(self, value: Any) -> Any:
        """A value (a tensor, a list of tensors, or None) as the caller of a run takes it: in numpy arrays."""
        return value

    def operand(self, value: Any) -> Any:
        """A tensor as the process group takes it."""
        return value

    def moving(self, value: Any, to: Memory) -> Moving:
        """A copy of a tensor between the device and the host."""
        source = np.asarray(value)
        made = np.empty(source.shape, source.dtype)

        def run() -> Any:
            np.copyto(made, source)
            return made

        return Moving(run)

    def copied(self, value: Any) -> Any:
        """A tensor in memory of its own."""
        return np.array(value)

    def is_own(self, value: Any) -> bool:
        """Whether an array has its memory to itself: what is mapped from a file, or a part of another, has not."""
        return isinstance(value, np.ndarray) and value.base is None and value.flags.writeable

    def may_add_over(self, node: Node) -> bool:
        """Whether the kernel of a node that adds something to a sum may write over that sum."""
        return True

    def brought(self, made: Any, block: Any) -> Any:
        """What was made, in a block that it is to lie in, if that is of its kind; it may lie there already."""
        return made

    def is_stack(self, stack: Any, rows: Sequence[Any]) -> bool:
        """Whether arrays are the rows of another, where they are to lie."""
        return False

    def constant(self, array: "np.ndarray[Any, Any]", reads: "Reads") -> Any:
        """A tensor whose numbers are known before anything runs, and where they are read."""
        return array

    def on_host(
        self, inputs: Collection[Value], nodes: Sequence[Node], outputs: Sequence[Value] | None, around: Set[Value]
    ) -> Set[Value]:
        """The values of a body that lie on the host, though the engine has a device.

        Args:
            inputs, nodes: of the body.
            outputs: those of a nested graph or a function; None: the body is a segment.
            around: values around it of which it is known that they lie on the host.
        """
        return frozenset()

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> "Operation":
        """What computes a node with a kernel; `on_host`: there, though the engine has a device."""
        count = len(node.results)
        kept = Kept(place for place, value in enumerate(node.operands) if value is not None and value.is_constant)

        def run(inputs: list[Any], environment: "Environment") -> Sequence[Any]:
            into, scratch = environment.into.get(node), environment.scratch.get(node)
            results = kernel(np, inputs, attributes, count, into, kept, scratch)
            return results if into is None else _in_place(results, into)

        return run

    def without_kernel(self, node: Node) -> "Operation":
        """What computes a node that no kernel computes.

        Raises:
            EngineError: nothing does.
        """
        raise EngineError(
            f"the {self.name} engine has no kernel for {node.operator}, opset {node.version}",
            where=f"node {node.label}",
            do=f"use {option('engine', 'ort')}, or register a kernel with irpar.kernels.register",
        )

    def communication(self, node: Node) -> "Operation":
        """What a node of communication does that is part of a segment.

        Raises:
            EngineError: there is no such segment of the engine.
        """
        raise EngineError(f"segments of the {self.name} engine do not communicate", where=f"node {node.label}")

    def failure(self, node: Node, error: Exception) -> NodeError:
        """What to tell of an error at a node."""
        text = str(error).removeprefix(f"{node.op_type}: ")
        return NodeError(f"{node.operator} failed: {text}", where=f"node {node.label}")


def _in_place(results: Sequence[Any], into: Any) -> tuple[Any, ...]:
    """Results where they have a place: a kernel may have computed in another dtype, and given another array."""
    places = into if isinstance(into, tuple) else (into,)
    return tuple(written(np, result, place) for result, place in zip(results, places, strict=True))


class Reads:
    """Where a constant is read.

    Attributes:
        on_host: some kernel reads its numbers on the host.
        on_device: something reads it that may run on a device.
    """

    def __init__(self, on_host: bool, on_device: bool) -> None:
        self.on_host = on_host
        self.on_device = on_device


ON_HOST = Arrays()
"""All arrays are numpy's."""
