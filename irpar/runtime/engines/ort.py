"""The engine `ort`: one ONNX Runtime session for each segment and part, shared by the ranks of the part."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from irpar.files.native_paths import NativeFolders
from irpar.ir import (
    UNKNOWN,
    ArrayTensor,
    DType,
    ExternalTensor,
    Graph,
    Ints,
    Module,
    Node,
    Tensor,
    Value,
    clone_node,
    clone_value,
    tensor_type,
)
from irpar.kernels import has_kernel
from irpar.onnx_io import external_tensor, sizes_pieces, to_proto
from irpar.onnx_io.tensors import write_tensor
from irpar.ops.effects import schema_of
from irpar.ops.training_batch_norm import trains, write_out
from irpar.runtime.errors import EngineError, NodeError
from irpar.runtime.instructions import Program, Segment
from irpar.runtime.memory import AddsInPlace, check_memory
from irpar.runtime.small_tensors import are_small
from irpar.sharding import option

from .arena import Arena
from .arrays import ON_HOST, Arrays
from .base import Bind, BoundWork, CompiledSegment, Constants, EngineSettings
from .control_flow import CONTROL_FLOW
from .ort_bindings import Bindings, Buffers
from .ort_optimizers import unwanted_optimizers
from .ort_scatter import goes_in_turn, in_turn, meets_itself
from .ort_values import PLAIN, exact_options, from_ort, to_ort
from .ort_versions import ALWAYS_LOADED, newest_opset
from .sequences import SEQUENCE_OPS

INLINE_BYTES = 1024
"""Constants of up to this many bytes go into the model, where shape inference and constant folding see them."""

_NOWHERE = "in-memory"
"""The location of constants whose numbers are handed over in memory."""

_FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"

_COPY = np.ndarray.copy

_NO_KERNEL = re.compile(r"Could not find an implementation for ([\w.]+)\((\d+)\) node with name '([^']*)'")
_BAD_TYPE = re.compile(r"Type '([^']*)' of input parameter \(([^)]*)\) of operator \(([^)]*)\) in node \(([^)]*)\)")
_RUN_FAILED = re.compile(r"while running ([\w.]+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)


class OrtEngine:
    """Runs segments in ONNX Runtime on the CPU.

    Where all ranks are in this process each session computes on the thread that calls it, so that ranks run side by
    side. A rank in a process of its own gets its share of the cores, a whole program ONNX Runtime's own number of
    threads.
    """

    name = "ort"
    is_parallel = True
    writes_over = False
    adds_in_place: AddsInPlace = "none"
    """ONNX Runtime does not say that an output may be bound to the memory of an input."""
    keeps = False
    device_array = None
    notes: tuple[str, ...] = ()

    def __init__(self, settings: EngineSettings) -> None:
        self._opsets = settings.opsets
        self._threads = settings.threads
        self._shares_arena = settings.threads > 0

    def check_memory(self, needed: int, what: str, processes: int = 1) -> None:
        """Arrays lie in the host's memory; see `Engine.check_memory`."""
        check_memory(needed, what, processes)

    def edge(self, rank: int) -> Arrays:
        """Arrays are numpy's; see `Engine.edge`."""
        return ON_HOST

    def arena(self, rank: int, nbytes: int) -> Arena:
        """See `Engine.arena`; no segment asks for one."""
        return Arena(np, np.empty(nbytes, np.uint8))

    def layout(self, program: Program, compiled: Mapping[Segment, CompiledSegment]) -> None:
        """ONNX Runtime has memory of its own; see `Engine.layout`."""

    def compile(self, segment: Segment, constants: Constants) -> "OrtSegment":
        """Make a session of a segment; see `Engine.compile`."""
        weights = _Weights(constants)
        threads = 1 if _needs_one_thread(segment) else self._threads
        model = segment_model(segment, self._opsets, weights, threads)
        options = exact_options(value.dtype for value in segment.constants)
        options.intra_op_num_threads = threads
        if threads > 1:
            # Each segment has a pool: those that wait for work must leave the cores to the others, and to other ranks.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self._shares_arena:
            register_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
        entered = weights.enter(options)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=unwanted_optimizers([inner for node in segment.nodes for inner in _walk(node)]),
            )
        except Exception as error:
            raise _refusal(error, segment) from error
        finally:
            del entered  # ONNX Runtime has copied them.
        values = (*segment.inputs, *segment.outputs)
        if not all(map(_is_plain, values)):
            return ValueSegment(session, segment)
        return BoundSegment(session, segment) if are_small(values) else OrtSegment(session, segment)


@cache
def register_arena() -> None:
    """Let all sessions that ask for it take their working memory from one arena, once for the process.

    With an arena each, the sessions of a hundred segments would hold a hundred times the memory that one of them needs.
    """
    arena, default = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", arena, 0, default), None)


_OWN = "/segment"
"""Behind the names of constants: a model that ONNX Runtime has optimized before has the names that it would give to the
constants that it makes of this one."""


def segment_model(segment: Segment, opsets: dict[str, int], weights: "_Weights", threads: int = 1) -> onnx.ModelProto:
    """A segment as an ONNX model whose inputs and outputs are the segment's, for a session of so many threads."""
    graph = Graph(f"{segment.graph.name}_{segment.index}")
    copies: dict[Value, Value] = {}
    for value in segment.inputs:
        copies[value] = graph.add_input(value.name, value.type)
    for value in segment.constants:
        copy = copies[value] = clone_value(value)
        _strip(copy)
        copy.name += _OWN
        graph.adopt_constant(copy)
        weights.origins[copy] = value
    names: Counter[str] = Counter()
    for node in segment.nodes:
        made = graph.append(clone_node(node, copies, graph.names))
        for inner in tuple(_walk(made)):
            _strip_node(inner, names)
            if inner.identity == ("", "Scan"):
                _spare_empty(inner, copies)
            elif trains(inner):
                _replace_copies(copies, write_out(inner, opsets))
            elif threads != 1 and goes_in_turn(inner):
                _replace_copies(copies, in_turn(inner, opsets))
    kept = set(segment.outputs)
    for node in segment.nodes:
        for value in node.results:
            copy = copies[value]
            if (
                copy.data is None
                and value not in kept
                and copy.has_uses
                and not any(reader.domain for reader in copy.users)
            ):
                # ONNX Runtime infers it, and the model stays small. Its own operators do not take a size that it cannot
                # infer, such as that of a block which is sharded by coordinates.
                copy.type = UNKNOWN
            elif value.source is None and not value.has_uses and node.domain == "com.microsoft":
                copy.type = UNKNOWN  # The model leaves it out, and so may the session: some mean something else by it.
    graph.set_outputs([copies[value] for value in segment.outputs], [value.name for value in segment.outputs])
    _name_unread_results(graph)
    module = Module(graph, opsets=_known_opsets(graph, opsets))
    module.functions = {function.key: function for function in segment.functions()}
    return to_proto(module, graph, constant=weights.proto)


def _replace_copies(copies: dict[Value, Value], instead: Mapping[Value, Value]) -> None:
    copies.update({value: instead[copy] for value, copy in copies.items() if copy in instead})


def _spare_empty(scan: Node, copies: dict[Value, Value]) -> None:
    """Let constants stand for what a Scan walks along and collects where it has no elements.

    ONNX Runtime (1.31) divides by zero where it takes such tensors apart, or stacks them, along another axis than the
    first, and takes the process down.
    """
    _spare_empty_operands(scan)
    axes, scanned = scan.attributes.get("scan_output_axes"), scan.attributes.get("num_scan_inputs")
    if not isinstance(axes, Ints) or not isinstance(scanned, int) or scan.graph is None:
        return
    collected = scan.results[len(scan.operands) - scanned :]
    is_empty = [value.is_static and 0 in value.shape for value in collected]
    constants = {}
    for value in itertools.compress(collected, is_empty):
        constants[value] = scan.graph.add_constant(ArrayTensor(np.zeros(value.shape, value.dtype.numpy), value.dtype))
        value.replace_uses(constants[value])
        value.type = UNKNOWN
    _replace_copies(copies, constants)
    scan.set_attribute("scan_output_axes", Ints(0 if skip else axis for axis, skip in zip(axes, is_empty, strict=True)))


def _name_unread_results(graph: Graph) -> None:
    """Let results that nothing reads have names where later ones of the node are read, or it is an Attention.

    ONNX Runtime (1.31) refuses an Attention that reads a cache and leaves out that which it makes of it. Its own
    operators stay as the model has them.
    """
    for node in graph.walk():
        if node.domain == "com.microsoft":
            continue
        read = [value.has_uses for value in node.results]
        for index, value in enumerate(node.results):
            if not read[index] and (any(read[index + 1 :]) or node.op_type == "Attention"):
                value.source = value.name


def _spare_empty_operands(scan: Node) -> None:
    axes, scanned = scan.attributes.get("scan_input_axes"), scan.attributes.get("num_scan_inputs")
    if not isinstance(axes, Ints) or not isinstance(scanned, int) or scan.graph is None:
        return
    first, kept = len(scan.operands) - scanned, list(axes)
    for number, axis in enumerate(axes):
        value = scan.operands[first + number]
        if value is not None and value.is_static and 0 in value.shape and axis % len(value.shape):
            empty = np.moveaxis(np.zeros(value.shape, value.dtype.numpy), axis, 0)
            scan.set_operand(first + number, scan.graph.add_constant(ArrayTensor(empty.copy(), value.dtype)))
            kept[number] = 0
    scan.set_attribute("scan_input_axes", Ints(kept))


def _known_opsets(graph: Graph, opsets: dict[str, int]) -> dict[str, int]:
    """The operator sets of a segment; ONNX's own in a version that ONNX Runtime loads, if operators are the same."""
    if opsets.get("", 0) <= ALWAYS_LOADED or opsets[""] <= newest_opset():
        return opsets
    schemas = [schema_of("", node.op_type, node.version) for node in graph.walk() if node.domain == ""]
    is_known = all(schema is not None and schema.since_version <= newest_opset() for schema in schemas)
    return {**opsets, "": newest_opset()} if is_known else opsets


def _strip_node(node: Node, names: Counter[str]) -> None:
    """Take off facts, and let the name be what messages should say, told apart where nodes share a source.

    Operands that are left out at the end go too: ONNX Runtime's optimizer takes a zero point that is named "" for one
    that is there.
    """
    if node.operands and node.operands[-1] is None and node.callee is None:
        there = max((index + 1 for index, value in enumerate(node.operands) if value is not None), default=0)
        node.set_operands(node.operands[: max(there, _least_operands(node))])
    node.metadata = None
    node.doc = ""
    label = node.label
    names[label] += 1
    node.name = label if names[label] == 1 else f"{label} ({names[label]})"
    for value in node.results:
        _strip(value)


def _least_operands(node: Node) -> int:
    """How many operands an operator must name, left out or not."""
    schema = schema_of(node.domain, node.op_type, node.version)
    return 0 if schema is None else int(schema.min_input)


def _strip(value: Value) -> None:
    """Take off facts that ONNX Runtime has no use for."""
    value.sharding = value.global_shape = value.source = value.metadata = None
    value.doc = ""


class _Weights:
    """How the constants of one segment reach its session.

    Small ones stand in the model. What lies in one piece in a file is mapped from there by ONNX Runtime, and shared by
    all that map it. Anything else, such as blocks of columns, is copied into the session and kept nowhere else.
    """

    def __init__(self, constants: Constants) -> None:
        self.origins: dict[Value, Value] = {}
        self._constants = constants
        self._folder: Path | None = None
        self._names = NativeFolders()
        self._copied: list[tuple[str, Tensor]] = []

    def proto(self, value: Value) -> onnx.TensorProto:
        """How the model refers to a constant."""
        origin = self.origins.get(value)
        tensor = value.data if origin is None else self._constants.tensor(origin)
        assert tensor is not None
        made = onnx.TensorProto(name=value.name)
        is_small = tensor.nbytes <= INLINE_BYTES or tensor.dtype.bits < 8
        if origin is None or is_small or tensor.dtype is DType.STR or sizes_pieces(value):
            write_tensor(tensor, made)
            return made
        location, offset = self._file_range(tensor) or (_NOWHERE, 0)
        if location == _NOWHERE:
            self._copied.append((value.name, tensor))
        external_tensor(made, tensor, location, offset)
        return made

    def enter(self, options: onnxruntime.SessionOptions) -> list[Any]:
        """Hand over what the model only refers to; returns what must live until the session is made."""
        if self._folder is not None:
            options.add_session_config_entry(_FOLDER_ENTRY, self._names.name(self._folder.resolve()))
        values = [to_ort(np.ascontiguousarray(tensor.numpy()), tensor.dtype) for _, tensor in self._copied]
        if values:
            options.add_external_initializers([name for name, _ in self._copied], values)
        return values

    def _file_range(self, tensor: Tensor) -> tuple[str, int] | None:
        """File name and offset of a tensor that ONNX Runtime may map: it takes one folder, and no links."""
        base = tensor.base
        if not isinstance(base, ExternalTensor):
            return None
        whole = base.numpy()
        block = whole[tuple(slice(start, stop) for start, stop in tensor.region)]
        path = base.path
        if not block.flags.c_contiguous or path.is_symlink() or path.stat().st_nlink > 1:
            return None
        if path.parent != (self._folder or path.parent):
            return None
        self._folder = path.parent
        return path.name, base.offset + block.ctypes.data - whole.ctypes.data


def _refusal(error: Exception, segment: Segment) -> EngineError:
    """Why ONNX Runtime does not take a segment, told by op."""
    text = str(error).strip()
    do = _advice(segment)
    if match := _NO_KERNEL.search(text):
        op_type, version, name = match.groups()
        types = _operand_types(segment, name)
        # What ONNX Runtime makes of an operator that is a function has no name.
        where = f"node {name}" if name else segment.label
        return EngineError(f"ONNX Runtime has no CPU kernel for {op_type}, opset {version}{types}", where=where, do=do)
    if match := _BAD_TYPE.search(text):
        type_, operand, op_type, name = match.groups()
        return EngineError(
            f"ONNX Runtime does not take {type_} as an operand of {op_type}",
            where=f"node {name}, operand %{operand}",
            do=do,
        )
    return EngineError("ONNX Runtime refuses the segment", where=segment.label, notes=(text.splitlines()[0],), do=do)


def _advice(segment: Segment) -> str:
    """What to do when ONNX Runtime does not take a segment: another engine only where it has all kernels."""
    walked = (inner for node in segment.nodes for inner in _walk(node))
    lacking = dict.fromkeys(node.operator for node in walked if node.callee is None and not _numpy_runs(node))
    if not lacking:
        return f"use {option('engine', 'numpy')}"
    return f"check that ONNX Runtime runs the original; the engine numpy has no kernel for {', '.join(lacking)}"


def _needs_one_thread(segment: Segment) -> bool:
    """Whether several would lose updates: in functions, whose bodies stay as they are, or where sizes are not known."""
    walked = (inner for node in segment.nodes for inner in _walk(node))
    called = (inner for function in segment.functions() for inner in function.graph.walk())
    return any(meets_itself(node) and not goes_in_turn(node) for node in walked) or any(map(meets_itself, called))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for nested in node.nested_graphs():
        yield from nested.walk()


def _numpy_runs(node: Node) -> bool:
    is_composed = not node.domain and (node.op_type in CONTROL_FLOW or node.op_type in SEQUENCE_OPS)
    return is_composed or has_kernel(node.domain, node.op_type, node.version)


def _operand_types(segment: Segment, label: str) -> str:
    for node in segment.nodes:
        if node.label == label:
            return f" on {', '.join(str(value.type) for value in node.inputs)}"
    return ""


def _failure(error: Exception, segment: Segment) -> NodeError:
    text = str(error).strip()
    if match := _RUN_FAILED.search(text):
        op_type, name, message = match.groups()
        return NodeError(f"{op_type} failed: {message.strip().splitlines()[0]}", where=f"node {name}")
    return NodeError(text.splitlines()[0] if text else type(error).__name__, where=segment.label)


def _is_plain(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is None or type_.dtype in PLAIN


class OrtSegment:
    """A session whose inputs and outputs are all of dtypes that numpy has; ONNX Runtime has an arena of its own."""

    arena_bytes = 0

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        self._session = session
        self._segment = segment
        self._inputs = [value.name for value in segment.inputs]
        self._outputs = [value.name for value in segment.outputs]

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute the segment's outputs; see `CompiledSegment.run`."""
        try:
            return self._session.run(self._outputs, dict(zip(self._inputs, inputs, strict=True)))  # type: ignore[no-any-return]
        except Exception as error:
            raise _failure(error, self._segment) from error

    @property
    def bind(self) -> Bind | None:
        """See `CompiledSegment`; large outputs would be held from run to run."""
        return None


class BoundSegment(OrtSegment):
    """A session of a few small tensors, into and out of buffers that are bound once: copies cost less than binding."""

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        super().__init__(session, segment)
        self._bindings: Bindings | None = Bindings(session, segment)
        self._compute = session.run_with_iobinding

    @property
    def bind(self) -> Bind | None:
        """See `CompiledSegment`; None where results do not have the sizes that the model declares."""
        return None if self._bindings is None else self._bind

    def _bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundWork:
        buffers = Buffers(self._session, self._segment, inputs, outputs)
        return BoundWork(buffers.runs(self._session), lambda error: _failure(error, self._segment), buffers)

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute the segment's outputs; see `CompiledSegment.run`."""
        bindings = self._bindings  # Another thread may find meanwhile that they do not do.
        if bindings is None:
            return super().run(inputs, rank)
        buffers = bindings.buffers
        for array, (buffer, shape, dtype) in zip(inputs, buffers.inputs, strict=True):
            if array.shape != shape or array.dtype != dtype:
                return super().run(inputs, rank)
            buffer[...] = array
        try:
            self._compute(buffers.binding)
        except Exception:
            # Either the node fails again, or a model declares sizes that its results do not have.
            results = super().run(inputs, rank)
            self._bindings = None
            return results
        return list(map(_COPY, buffers.outputs))


class ValueSegment(OrtSegment):
    """A session with inputs or outputs of dtypes that numpy lacks (bfloat16, float8, int4).

    Raises:
        EngineError: it takes or gives something that is no tensor as well.
    """

    def __init__(self, session: onnxruntime.InferenceSession, segment: Segment) -> None:
        super().__init__(session, segment)
        for value in (*segment.inputs, *segment.outputs):
            if tensor_type(value.type) is None:
                raise EngineError(
                    f"ONNX Runtime cannot pass %{value.name} {value.type} beside tensors of such dtypes as bf16",
                    where=segment.label,
                    do=_advice(segment),
                )

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute the segment's outputs; see `CompiledSegment.run`."""
        feeds = {
            value.name: to_ort(np.asarray(array, order="C"), value.dtype)
            for value, array in zip(self._segment.inputs, inputs, strict=True)
        }
        try:
            found = self._session.run_with_ort_values(self._outputs, feeds)
        except Exception as error:
            raise _failure(error, self._segment) from error
        return [from_ort(value) for value in found]
