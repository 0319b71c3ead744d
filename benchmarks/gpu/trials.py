"""Nodes with numbers for every kernel: ONNX's backend cases, and the samples that prove factor rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from irpar import kernels
from irpar.ir import ArrayTensor, Graph, Module, Node, Value
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

FLOATS = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes whose errors are reported."""
_ONNX_NAMES = {"f32": "tensor(float)", "f16": "tensor(float16)", "bf16": "tensor(bfloat16)"}
_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True)
class Call:
    """A node: its kernel, and the names of what it reads ("" where left out) and gives."""

    kernel: kernels.Kernel
    operands: tuple[str, ...]
    attributes: Mapping[str, Any]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A few nodes, mostly one, with numbers.

    Attributes:
        name: of the case or sample.
        calls: the nodes in order.
        arrays: the numbers of what they read.
        constants: names of operands that are known before anything runs.
        outputs: names of the results that are compared.
        expected: what ONNX's case data has for them; None where there is no such data.
        rtol, atol: the tolerances of that data.
    """

    name: str
    calls: tuple[Call, ...]
    arrays: Arrays
    constants: frozenset[str]
    outputs: tuple[str, ...]
    expected: Arrays | None = None
    rtol: float = 0.0
    atol: float = 0.0

    @property
    def operator(self) -> str | None:
        """The operator; None where there are several."""
        if len(self.calls) != 1:
            return None
        kernel = self.calls[0].kernel
        return f"{kernel.domain}.{kernel.op_type}" if kernel.domain else kernel.op_type

    def on_numpy(self) -> dict[str, Array]:
        """Every value by name, as the kernels compute it on numpy.

        Raises:
            KernelError: they do not take these dtypes.
        """
        values: dict[str, Any] = dict(self.arrays)
        for call in self.calls:
            operands = [values[name] if name else None for name in call.operands]
            results = call.kernel(np, operands, call.attributes, len(call.results))
            values.update(zip(call.results, results, strict=True))
        return values

    def module(self, values: Arrays) -> Module:
        """A model of the nodes, typed by the values that they have."""
        graph = Graph("trial")
        made: dict[str, Value] = {}
        for name, array in self.arrays.items():
            if name in self.constants:
                made[name] = graph.add_constant(ArrayTensor(array), name)
            else:
                made[name] = graph.add_input(name, ArrayTensor(array).type)
        for call in self.calls:
            kernel = call.kernel
            operands = [made[name] if name else None for name in call.operands]
            node = Node(
                kernel.op_type,
                operands,
                call.attributes,
                results=len(call.results),
                domain=kernel.domain,
                version=kernel.since,
            )
            graph.append(node)
            for name, value in zip(call.results, node.results, strict=True):
                if name:
                    value.type = ArrayTensor(values[name]).type
                    made[name] = value
        graph.set_outputs([made[name] for name in self.outputs])
        graph.output_names[:] = self.outputs
        return Module(graph, opsets={call.kernel.domain: call.kernel.since for call in self.calls})

    def on_engine(self, engine: str, values: Arrays) -> tuple[dict[str, Array], tuple[str, ...]]:
        """The outputs as an engine computes them, and what it notes.

        Args:
            engine: its name.
            values: what `on_numpy` gives, for the types.
        """
        with Executor(self.module(values), Mesh({"x": 1}), engine=engine) as executor:
            given = {name: array for name, array in self.arrays.items() if name not in self.constants}
            return executor.run(given), tuple(getattr(executor, "notes", ()))

    def on_module(self, module: Any) -> dict[str, Array]:
        """The outputs as the kernels compute them on arrays of a module, whatever an engine would do with small ones.

        Args:
            module: numpy or cupy.
        """
        values: dict[str, Any] = dict(self.arrays)
        for call in self.calls:
            signature = call.kernel.signature
            operands = [
                None if not name else _placed(values[name], place, signature, module)
                for place, name in enumerate(call.operands)
            ]
            results = call.kernel(module, operands, call.attributes, len(call.results))
            values.update(zip(call.results, results, strict=True))
        return {name: _on_host(values[name]) for name in self.outputs}

    def with_arrays(self, arrays: Arrays) -> "Trial":
        """The nodes on other numbers, for which there is no case data."""
        return replace(self, arrays=arrays, expected=None)

    def in_float64(self) -> "Trial":
        """On the same numbers in float64, where operands may be of several dtypes."""
        free = self._free_operands(None)
        wide = (*FLOATS.values(), _FLOAT64)
        return self.with_arrays(
            {
                name: array.astype(_FLOAT64) if name in free and array.dtype in wide else array
                for name, array in self.arrays.items()
            }
        )

    def in_dtype(self, dtype: str) -> "Trial | None":
        """On its float32 numbers rounded to a dtype; None where the operator takes none of that."""
        free = self._free_operands(_ONNX_NAMES[dtype])
        changed = {name for name in free if self.arrays[name].dtype == np.float32}
        if not changed:
            return None
        with np.errstate(over="ignore"):
            rounded = {name: self.arrays[name].astype(FLOATS[dtype]) for name in changed}
        return self.with_arrays({**self.arrays, **rounded})

    def _free_operands(self, dtype: str | None) -> set[str]:
        """Operands whose dtype the operator's schema leaves open, and may be `dtype`; all where there is no schema."""
        if len(self.calls) != 1:
            return set(self.arrays)
        call = self.calls[0]
        try:
            schema = onnx.defs.get_schema(call.kernel.op_type, domain=call.kernel.domain)
        except onnx.defs.SchemaError:
            return {name for name in call.operands if name}
        allowed = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        found = set()
        for place, name in enumerate(call.operands):
            formal = schema.inputs[min(place, len(schema.inputs) - 1)]
            types = allowed.get(formal.type_str)
            if name and types is not None and (dtype is None or dtype in types):
                found.add(name)
        return found


def _placed(value: Any, place: int, signature: Any, module: Any) -> Any:
    """An operand where a kernel wants it: some are read on the host."""
    if place in signature.host:
        return _on_host(value)
    return value if place in signature.shape_only else module.asarray(value)


def _on_host(value: Any) -> Array:
    return np.asarray(value.get() if hasattr(value, "get") else value)


def trials() -> Iterator[Trial]:
    """All of them. Cases come first; those that the kernels fail by design are left out."""
    yield from _cases()
    yield from _samples()


def _cases() -> Iterator[Trial]:
    from tests.kernels.conformance import EXCLUDED, cases

    for case in cases():
        if case.name not in EXCLUDED:
            calls = tuple(Call(call.kernel, call.inputs, call.attributes, call.outputs) for call in case.calls)
            outputs = tuple(case.outputs)
            yield Trial(case.name, calls, case.inputs, frozenset(), outputs, case.outputs, case.rtol, case.atol)


def _samples() -> Iterator[Trial]:
    from tests.ops.rule_proof import Constant
    from tests.ops.samples import SAMPLES

    for sample in SAMPLES:
        kernel = kernels.lookup(sample.domain, sample.op, sample.version)
        if kernel is None:
            continue
        arrays = {f"x{place}": array for place, array in enumerate(sample.arrays) if array is not None}
        operands = tuple(f"x{place}" if f"x{place}" in arrays else "" for place in range(len(sample.operands)))
        known = frozenset(f"x{place}" for place, one in enumerate(sample.operands) if isinstance(one, Constant))
        results = tuple(f"y{place}" for place in range(sample.results))
        attributes = {
            name: tuple(value) if isinstance(value, list) else value for name, value in sample.attributes.items()
        }
        yield Trial(str(sample), (Call(kernel, operands, attributes, results),), arrays, known, results)
