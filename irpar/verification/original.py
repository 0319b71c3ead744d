"""The whole model as ONNX Runtime runs it: what a partition is compared with."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx.external_data_helper import (
    load_external_data_for_model,
    load_external_data_for_tensor,
    uses_external_data,
)

from irpar.files.native_paths import NativeFolders, is_text
from irpar.ir import DType, ExternalTensor, Graph, Module, Value, dtype_of_numpy, tensor_type
from irpar.output.plan_record import Plan
from irpar.output.plan_source import sha256_of
from irpar.process import import_native
from irpar.sharding import IrparError, spelled

from .comparison import Array, Arrays
from .widened import widen_model

if TYPE_CHECKING:
    from .arithmetic import Nodes

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_NUMPY_TYPES = frozenset(f"tensor({name})" for name in ("float", "float16", "double", "bool", "string", *_INTEGERS))
"""Types, as ONNX Runtime writes them, that it takes and gives as numpy arrays."""


_NO_KERNEL = "ONNX Runtime has no CPU kernel for this dtype: verify a float32 version of the model instead"
_NO_OPERATOR = "ONNX Runtime lacks this operator: compare the results of irpar run with numbers of your own"
_CHECK_MODEL = "check the inputs, and that the model runs in ONNX Runtime by itself"


_WIDENED = "ONNX Runtime, which has no CPU kernels of bfloat16, ran the original in float32"

_MOST_IN_MEMORY = 2**31 - 2**22
"""Bytes of a model that is no file, a little less than protobuf takes."""

_MOST_SIZES = 1024
"""Elements of a constant that may be a shape, or axes, or the like."""


class VerificationError(IrparError):
    """The comparison cannot be made."""


class Original:
    """The whole model, run by ONNX Runtime.

    Args:
        model: the file, or a model that was built in memory.
        module: the same.
        name: what it is called in messages.
        notes: what is to be told of it.
        state: inputs of the partition; those that are initializers of the model are inputs of this one too.
    """

    def __init__(
        self,
        model: str | bytes,
        module: Module,
        name: str,
        notes: tuple[str, ...] = (),
        state: Collection[str] = (),
    ) -> None:
        self.model = model
        self.module = module
        self.name = name
        self.notes = notes
        self._folders = NativeFolders()
        self._is_wide = False
        weights = [value for value in module.graph.constants if value.source_name in state]
        self._given = {value.source_name for value in weights}
        for value in weights:
            module.graph.constant_to_input(value)

    @cached_property
    def nodes(self) -> "Nodes":
        """Its nodes, to be computed by irpar's kernels."""
        from .arithmetic import Nodes

        return Nodes(self.module)

    @classmethod
    def of_file(cls, path: str | Path | None, source: Mapping[str, Any], state: Collection[str] = ()) -> "Original":
        """The model in a file.

        Args:
            path: the file; None: where it was when it was partitioned.
            source: what plan.json says of it.
            state: names of inputs of the partition that may be weights of the model.

        Raises:
            VerificationError: it is missing, or not the file that was partitioned.
        """
        path = path or source.get("model")
        if path is None:
            raise VerificationError(
                "the plan does not say which file the model came from", do=f"name it: {_with_model()}"
            )
        path = Path(path)
        if not path.is_file():
            raise VerificationError(
                f"the original model is {'no file' if path.exists() else 'not there any more'}",
                where=str(path),
                do=f"name it: {_with_model()}",
            )
        if source.get("sha256") is not None and sha256_of(path) != source["sha256"]:
            raise VerificationError(
                "this is not the model that was partitioned: its sha256 is another",
                where=str(path),
                do=f"partition it again, or name the right file: {_with_model()}",
            )
        from irpar.onnx_io import load

        return cls(str(path), load(path), str(path), _external_notes(path, source.get("external") or ()), state)

    @classmethod
    def of_module(cls, module: Module) -> "Original":
        """A model that was built in memory."""
        from irpar.onnx_io import to_proto

        return cls(to_proto(module).SerializeToString(), module, "the module in memory")

    def run(
        self, inputs: Arrays, fetch: Sequence[str] | None = None, *, optimized: bool = True, threads: int = 0
    ) -> dict[str, Array]:
        """Run it.

        Args:
            inputs: full arrays by name.
            fetch: intermediate values to return instead of the outputs.
            optimized: whether ONNX Runtime may fuse and fold.
            threads: how many compute; 0: as many as ONNX Runtime chooses. One where several would lose updates.

        Raises:
            VerificationError: ONNX Runtime refuses the model or the inputs.
        """
        try:
            if not self._is_wide:
                return self._run(inputs, fetch, optimized, threads)
        except VerificationError as error:
            if error.do != _NO_KERNEL or not any(map(_is_narrow, self.nodes.module.all_graphs())):
                raise
            self._is_wide = True
            self.notes = (*self.notes, _WIDENED)
        found = self._run({name: _wide(given) for name, given in inputs.items()}, fetch, optimized, threads)
        return {name: self._rounded(name, array) for name, array in found.items()}

    def _run(self, inputs: Arrays, fetch: Sequence[str] | None, optimized: bool, threads: int) -> dict[str, Array]:
        onnxruntime = import_native("onnxruntime")

        from irpar.runtime.engines.ort_scatter import meets_itself
        from irpar.runtime.engines.ort_values import exact_options

        options = exact_options(value.dtype for graph in self.module.all_graphs() for value in graph.constants)
        meets = any(meets_itself(node) for graph in self.module.all_graphs() for node in graph)
        options.intra_op_num_threads = 1 if meets else threads
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        is_text_path = not isinstance(self.model, str) or is_text(self.model)
        if fetch is not None or self._given or self._is_wide or self._is_short_of_sizes or not is_text_path:
            model: str | bytes = self._with_outputs(fetch or (), options)
        else:
            model = self.model
        try:
            session = onnxruntime.InferenceSession(
                model, options, providers=["CPUExecutionProvider"], disabled_optimizers=self._wrong_optimizers
            )
            names = [output.name for output in session.get_outputs()] if fetch is None else list(fetch)
            return dict(zip(names, run_session(session, names, inputs), strict=True))
        except Exception as error:
            raise VerificationError(
                f"ONNX Runtime does not run the original: {first_line(error)}",
                where=self.name,
                do=_remedy(str(error)),
            ) from error

    @cached_property
    def _wrong_optimizers(self) -> list[str]:
        from irpar.runtime.engines.ort_optimizers import wrong_optimizers

        return wrong_optimizers(node for graph in self.module.all_graphs() for node in graph)

    def _rounded(self, name: str, array: Any) -> Any:
        """A result of the model in float32 as the model gives it."""
        return array.astype(DType.BF16.numpy) if name in self._narrow and isinstance(array, np.ndarray) else array

    @cached_property
    def _narrow(self) -> set[str]:
        """The values that are of bfloat16."""
        graph = self.nodes.graph
        named = {value.source_name: value for value in graph.values()}
        named |= dict(zip(graph.output_names, graph.outputs, strict=True))
        return {name for name, value in named.items() if _is_bf16(value)}

    @cached_property
    def _is_short_of_sizes(self) -> bool:
        """Whether integers that may be a shape lie in a file, where ONNX Runtime does not look for one."""
        constants = self.module.graph.constants
        return any(
            isinstance(value.data, ExternalTensor) and _may_be_sizes(value.dtype.value, value.data.size)
            for value in constants
        )

    def computed(self) -> set[str]:
        """Names of what the nodes of the model as it is give; conversion on loading may have added others."""
        return {name for node in self.proto().graph.node for name in node.output if name}

    def proto(self) -> onnx.ModelProto:
        """The model as it is written, with inputs for weights that are given; others in files are not read."""
        if isinstance(self.model, bytes):
            proto = onnx.load_from_string(self.model)
        else:
            proto = onnx.load(self.model, load_external_data=False)
            for tensor in proto.graph.initializer:
                if uses_external_data(tensor) and _may_be_sizes(tensor.data_type, prod(tensor.dims)):
                    load_external_data_for_tensor(tensor, str(Path(self.model).resolve().parent))
                    tensor.data_location = onnx.TensorProto.DEFAULT
                    tensor.ClearField("external_data")
        present = {value.name for value in proto.graph.input}
        proto.graph.input.extend(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in proto.graph.initializer
            if tensor.name in self._given - present
        )
        return proto

    def _with_outputs(self, fetch: Sequence[str], options: Any) -> bytes:
        proto = self.proto()
        self.find_weights(options)
        if self._is_wide:
            self._widen(proto)
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetch if name not in present)
        return bytes(proto.SerializeToString())

    def _widen(self, proto: onnx.ModelProto) -> None:
        """Let a model of bfloat16 be one of float32, its weights in memory.

        Raises:
            VerificationError: it is larger than ONNX Runtime takes from memory.
        """
        if sum(4 * prod(tensor.dims) for tensor in proto.graph.initializer) > _MOST_IN_MEMORY:
            what = "it has no kernels of bfloat16, and in float32 the weights are more than 2 GB"
            raise VerificationError(f"ONNX Runtime does not run the original: {what}", where=self.name, do=_NO_KERNEL)
        if isinstance(self.model, str):
            load_external_data_for_model(proto, str(Path(self.model).resolve().parent))
        widen_model(proto)

    def find_weights(self, options: Any) -> None:
        """Let a session of what was made of `proto` find the weights that lie in files."""
        if isinstance(self.model, str):
            folder = self._folders.name(Path(self.model).resolve().parent)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)


def _is_narrow(graph: Graph) -> bool:
    """Whether something in a graph is of bfloat16."""
    return any(map(_is_bf16, graph.values()))


def _is_bf16(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is not None and type_.dtype is DType.BF16


def _wide(given: Any) -> Any:
    """An input of bfloat16 as float32."""
    is_narrow = isinstance(given, np.ndarray) and dtype_of_numpy(given.dtype) is DType.BF16
    return given.astype(np.float32) if is_narrow else given


def _may_be_sizes(data_type: int, count: int) -> bool:
    return data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) and count <= _MOST_SIZES


def _remedy(error: str) -> str:
    if "is not a registered function/op" in error:
        return _NO_OPERATOR
    return _NO_KERNEL if "NOT_IMPLEMENTED" in error else _CHECK_MODEL


def run_session(session: Any, names: Sequence[str], inputs: Arrays) -> list[Any]:
    """Run a session on arrays of any dtype."""
    from irpar.runtime.engines.ort_values import from_ort, to_ort

    ends = (*session.get_inputs(), *(output for output in session.get_outputs() if output.name in names))
    if all(end.type in _NUMPY_TYPES or not end.type.startswith("tensor(") for end in ends):
        # Copies: ONNX Runtime writes running statistics of BatchNormalization over the ones that it reads.
        own = {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in inputs.items()}
        return list(session.run(names, own))
    feeds = {}
    for name, given in inputs.items():
        array = np.asarray(given, order="C")
        feeds[name] = to_ort(array, dtype_of_numpy(array.dtype))
    return [from_ort(value) for value in session.run_with_ort_values(list(names), feeds)]


def _external_notes(path: Path, external: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What is to be said of external data that may have changed.

    Raises:
        VerificationError: a file has another size than it had.
    """
    notes = []
    for entry in external:
        file = path.parent / str(entry["file"])
        known = file.stat() if file.is_file() else None
        if known is not None and entry["size"] is not None and known.st_size != entry["size"]:
            raise VerificationError(
                f"not the external data that was partitioned: {known.st_size:,} bytes, it had {entry['size']:,}",
                where=str(file),
                do=f"partition the model again, or name the right one: {_with_model()}",
            )
        if known is not None and entry["mtime"] is not None and known.st_mtime != entry["mtime"]:
            notes.append(f"{file.name} was written after the model was partitioned: its weights may be others now")
    return tuple(notes)


def first_line(error: Exception) -> str:
    """The first line of an error's text, short enough for a message."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def check_fits(plan: Plan) -> None:
    """Refuse an original that does not fit into memory.

    Raises:
        OutOfMemoryError: with what it needs.
    """
    from irpar.runtime.memory import check_memory

    check_memory(plan.original.get("peak_bytes") or 0, "the original model")


def _with_model() -> str:
    return spelled("irpar verify OUT --model MODEL", "partition.verify(model=MODEL)")
