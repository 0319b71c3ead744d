"""Comparing a partition with ONNX Runtime on the original model, and finding the first tensor that differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from irpar.analysis.plan import Plan, sha256_of
from irpar.comparison import Array, Arrays, Difference, References, compare, nudged
from irpar.ir import Module, dtype_of_numpy, tensor_type
from irpar.process import import_native
from irpar.sharding import IrparError

if TYPE_CHECKING:
    from irpar.runtime.executor import Executor

VALUES_AT_ONCE = 256
"""How many tensors a bisection compares in one run of the two sides."""


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_NUMPY_TYPES = frozenset(f"tensor({name})" for name in ("float", "float16", "double", "bool", "string", *_INTEGERS))
"""Types, as ONNX Runtime writes them, that it takes and gives as numpy arrays."""


_NO_KERNEL = "ONNX Runtime has no CPU kernel for this dtype: verify a float32 version of the model instead"
_CHECK_MODEL = "check the inputs, and that the model runs in ONNX Runtime by itself"


class VerificationError(IrparError):
    """The comparison cannot be made."""


@dataclass(frozen=True)
class Verification:
    """The outputs of both sides, compared.

    Attributes:
        differences: one for each output.
        inputs: where the inputs came from.
        notes: what else a reader of the result must know.
    """

    differences: tuple[Difference, ...]
    inputs: str
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True where all outputs agree."""
        return all(difference.is_equal for difference in self.differences)

    @property
    def largest(self) -> float:
        """The largest |a - b| over all outputs."""
        return max((difference.largest for difference in self.differences), default=0.0)

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        verdict = "equal to" if self.is_equal else "different from"
        lines = [f"{verdict} ONNX Runtime on the original (inputs: {self.inputs})"]
        return "\n".join([*lines, *map(describe, self.differences), *self.notes])

    def check(self) -> "Verification":
        """Itself, where all outputs agree.

        Raises:
            VerificationError: naming the outputs that differ.
        """
        wrong = [difference for difference in self.differences if not difference.is_equal]
        if wrong:
            raise VerificationError(
                f"{len(wrong)} of {len(self.differences)} outputs differ from the original",
                notes=tuple(describe(difference) for difference in wrong[:5]),
                do="find the first tensor that differs with `irpar verify OUT --bisect`, and report it",
            )
        return self


@dataclass(frozen=True)
class Bisection:
    """The first tensor that differs, and how many before it agree."""

    first: Difference | None
    compared: int
    node: str


def describe(difference: Difference) -> str:
    """One line about a difference."""
    if difference.note:
        return f"{difference.name}: {difference.note}"
    where = f" at {list(difference.where)}" if difference.where else ""
    return (
        f"{difference.name}: largest difference {difference.largest:.3g}{where}, "
        f"relative {difference.relative:.3g}, allowed {difference.tolerance:g}"
    )


class Original:
    """The whole model, run by ONNX Runtime."""

    def __init__(self, model: str | bytes, module: Module, name: str, notes: tuple[str, ...] = ()) -> None:
        self.model = model
        self.module = module
        self.name = name
        self.notes = notes

    @classmethod
    def of_file(cls, path: str | Path | None, source: Mapping[str, Any]) -> "Original":
        """The model in a file.

        Args:
            path: the file; None: where it was when it was partitioned.
            source: what plan.json says of it.

        Raises:
            VerificationError: it is missing, or not the file that was partitioned.
        """
        path = path or source.get("model")
        if path is None:
            raise VerificationError(
                "the plan does not say which file the model came from", do="name it: irpar verify OUT --model MODEL"
            )
        path = Path(path)
        if not path.is_file():
            raise VerificationError(
                "the original model is not there any more",
                where=str(path),
                do="name it: irpar verify OUT --model MODEL",
            )
        if source.get("sha256") is not None and sha256_of(path) != source["sha256"]:
            raise VerificationError(
                "this is not the model that was partitioned: its sha256 is another",
                where=str(path),
                do="partition it again, or name the right file: irpar verify OUT --model MODEL",
            )
        from irpar.onnx_io import load

        return cls(str(path), load(path), str(path), _external_notes(path, source.get("external") or ()))

    @classmethod
    def of_module(cls, module: Module) -> "Original":
        """A model that was built in memory."""
        from irpar.onnx_io import to_proto

        return cls(to_proto(module).SerializeToString(), module, "the module in memory")

    def run(self, inputs: Arrays, fetch: Sequence[str] | None = None, *, optimized: bool = True) -> dict[str, Array]:
        """Run it.

        Args:
            inputs: whole arrays by name.
            fetch: intermediate values to return instead of the outputs.
            optimized: whether ONNX Runtime may fuse and fold.

        Raises:
            VerificationError: ONNX Runtime refuses the model or the inputs.
        """
        onnxruntime = import_native("onnxruntime")

        from irpar.runtime.ort_values import exact_options

        options = exact_options(value.dtype for graph in self.module.all_graphs() for value in graph.constants)
        model: str | bytes = self.model
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if fetch is not None:
            model = self._with_outputs(fetch, options)
        try:
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()] if fetch is None else list(fetch)
            return dict(zip(names, _run_session(session, names, inputs), strict=True))
        except Exception as error:
            raise VerificationError(
                f"ONNX Runtime does not run the original: {first_line(error)}",
                where=self.name,
                do=_NO_KERNEL if "NOT_IMPLEMENTED" in str(error) else _CHECK_MODEL,
            ) from error

    def computed(self) -> set[str]:
        """Names of what the nodes of the model as it is give; conversion on loading may have added others."""
        return {name for node in self._proto().graph.node for name in node.output if name}

    def _proto(self) -> onnx.ModelProto:
        if isinstance(self.model, bytes):
            return onnx.load_from_string(self.model)
        return onnx.load(self.model, load_external_data=False)

    def _with_outputs(self, fetch: Sequence[str], options: Any) -> bytes:
        proto = self._proto()
        if isinstance(self.model, str):
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(Path(self.model).resolve().parent)
            )
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetch if name not in present)
        return bytes(proto.SerializeToString())


def _run_session(session: Any, names: Sequence[str], inputs: Arrays) -> list[Any]:
    """Run a session on arrays of any dtype."""
    from irpar.runtime.ort_values import from_ort, to_ort

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
                do="partition the model again, or name the right one: irpar verify OUT --model MODEL",
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


def _inputs_for(executor: "Executor", original: Original, inputs: Arrays | None, seed: int) -> tuple[Arrays, str]:
    if inputs is not None:
        return inputs, "given"
    from irpar.runtime.inputs import random_inputs

    return random_inputs(executor.inputs, original.module.graph, seed), f"random, seed {seed}"


def verify(
    executor: "Executor",
    original: Original,
    inputs: Arrays | None,
    *,
    tolerance: float | None,
    seed: int,
) -> Verification:
    """Run both sides on the same inputs and compare all outputs."""
    from irpar.runtime.specs import check_inputs

    inputs, kind = _inputs_for(executor, original, inputs, seed)
    # The original first: where it fails by itself, that is no fault of the partition.
    check_inputs(executor.inputs, inputs)
    expected = original.run(inputs)
    got = executor.run(inputs)
    missing = "the partition does not give it"
    differences = tuple(
        compare(name, got[name], expected[name], tolerance)
        if name in got
        else Difference(name, np.inf, np.inf, 0.0, note=missing)
        for name in expected
    )
    verified = Verification(differences, kind, (*original.notes, *executor.notes))
    if verified.is_equal or tolerance is not None:
        return verified
    return _beside_noise(verified, got, expected, original, inputs)


def _beside_noise(
    verified: Verification, got: Arrays, expected: Arrays, original: Original, inputs: Arrays
) -> Verification:
    """Differences judged by how far ONNX Runtime is from itself on the same inputs."""
    plain = original.run(inputs, optimized=False)
    moved = original.run(nudged(inputs), optimized=False)
    judged = []
    notes = list(verified.notes)
    for name, found in zip(expected, verified.differences, strict=True):
        if not found.is_equal and name in got:
            found, note = References(expected[name], plain[name], moved[name]).judge(found, got[name])
            notes.append(note)
        judged.append(found)
    return Verification(tuple(judged), verified.inputs, tuple(note for note in notes if note))


def bisect(
    executor: "Executor",
    original: Original,
    inputs: Arrays | None,
    *,
    tolerance: float | None,
    seed: int,
) -> Bisection:
    """Compare the intermediate values of both sides in the order of the original; stop at the first that differs."""
    inputs, _ = _inputs_for(executor, original, inputs, seed)
    held = {value.source_name for value in executor.parts[0].graph.values() if tensor_type(value.type)}
    producers = {value.source_name: node.label for node in original.module.graph for value in node.results}
    computed = original.computed()
    names = [name for name in producers if name in held and name in computed]
    compared = 0
    for batch in _batches(names, VALUES_AT_ONCE):
        # With fusions off every intermediate value exists.
        plain = original.run(inputs, fetch=batch, optimized=False)
        got = executor.run(inputs, fetch=batch)
        differences = {name: compare(name, got[name], plain[name], tolerance) for name in batch}
        wrong = [name for name, found in differences.items() if not found.is_equal]
        if wrong and tolerance is None:
            optimized = original.run(inputs, fetch=wrong)
            moved = original.run(nudged(inputs), fetch=wrong, optimized=False)
            for name in wrong:
                references = References(optimized[name], plain[name], moved[name])
                differences[name], _ = references.judge(differences[name], got[name])
        for name, found in differences.items():
            if not found.is_equal and tolerance is None:
                # Alone, so that both sides may fuse what comes before it in the same way.
                alone = executor.run(inputs, fetch=[name])[name], original.run(inputs, fetch=[name])[name]
                found, _ = References(alone[1], plain[name], moved[name]).judge(found, alone[0])
            if not found.is_equal:
                return Bisection(found, compared, producers[name])
            compared += 1
    return Bisection(None, compared, "")


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
