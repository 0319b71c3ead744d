"""Gradients of single operators against central differences in float64, by irpar's kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.analysis.types.inference import Inference
from irpar.analysis.types.type_merge import TypeInferenceError
from irpar.ir import ArrayTensor, DType, Graph, Module, Node, Tensor, Value
from irpar.ir.clone import clone_module
from irpar.ir.dims import symbol
from irpar.kernels import lookup
from irpar.output.parts import Part
from irpar.passes.autodiff import GRAD, Autodiff
from irpar.passes.autodiff.decomposition import decompose_all
from irpar.passes.infer_types import InferTypes
from irpar.runtime.engines.base import Constants, EngineSettings
from irpar.runtime.engines.numpy import NumpyEngine
from irpar.runtime.instructions import Segment
from tests.ops.rule_proof import Constant, Sample

Array = np.ndarray[Any, Any]

STEPS = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-2}
TOLERANCES = {np.dtype(np.float64): 2e-6, np.dtype(np.float32): 2e-2}
"""Of the sum of the terms; central differences in float64 of step 1e-6 have errors of some 1e-9."""
DIRECTIONS = 3
OPSET = 21


def is_float(array: Array) -> bool:
    """Whether an operand has a gradient."""
    return bool(ArrayTensor(array).dtype.is_float)


def widened(array: Array, dtype: Any = np.float64) -> Array:
    """Floats as float64; or as they are, for None."""
    return np.asarray(array, dtype) if is_float(array) and dtype is not None else array


def dtype_of(sample: Sample, index: int, dtype: Any) -> Any:
    """The dtype of an operand where those that may have it have `dtype`: scales are float32 always."""
    return None if sample.op in ("Resize", "Upsample") and index > 0 else dtype


def module_of(sample: Sample, dtype: Any = np.float64, symbols: Mapping[tuple[int, int], str] | None = None) -> Module:
    """The sample's node in a module, in float64; operands that are no Constants are inputs x0, x1 ...

    Args:
        sample: the sample.
        dtype: of its floats; None: their own.
        symbols: operand and dim to the symbol that takes the place of its size.
    """
    graph = Graph("sample")
    values: list[Value | None] = []
    for index, operand in enumerate(sample.operands):
        own = dtype_of(sample, index, dtype)
        if operand is None:
            values.append(None)
        elif isinstance(operand, Constant):
            values.append(graph.add_constant(ArrayTensor(widened(operand.array, own)), f"c{index}"))
        else:
            type_ = ArrayTensor(widened(operand, own)).type
            named = {dim: symbol(name) for (place, dim), name in (symbols or {}).items() if place == index}
            shape = tuple(named.get(dim, size) for dim, size in enumerate(type_.static_shape))
            values.append(graph.add_input(f"x{index}", type_.with_shape(shape)))
    attributes = {
        name: ArrayTensor(widened(value.numpy(), dtype)) if isinstance(value, Tensor) else value
        for name, value in sample.attributes.items()
    }
    results = [Value(f"y{index}") for index in range(sample.results)]
    graph.append(Node(sample.op, values, attributes, results=results, domain=sample.domain, version=sample.version))
    graph.set_outputs(results, [value.name for value in results])
    module = Module(graph, opsets={"": max(sample.version, OPSET)} if not sample.domain else dict(sample.opsets))
    InferTypes().run(module)
    return module


def decomposed(module: Module) -> Module | None:
    """A copy of a module in which the operator is replaced by what it is made of; None where it cannot be."""
    made = clone_module(module)
    return made if decompose_all(made.graph, made.opsets, Inference().result_types) else None


def feeds_of(sample: Sample, dtype: Any = np.float64) -> dict[str, Array]:
    """The sample's operands in float64, by input name."""
    return {
        f"x{index}": widened(operand, dtype_of(sample, index, dtype))
        for index, operand in enumerate(sample.operands)
        if isinstance(operand, np.ndarray)
    }


def run(module: Module, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The results of a module's graph by the engine `numpy`, by name."""
    graph = module.graph
    outputs = tuple(dict.fromkeys(graph.outputs))
    segment = Segment(0, graph, tuple(graph), tuple(graph.inputs), tuple(graph.constants), outputs)
    compiled = NumpyEngine(EngineSettings(module.opsets, 1)).compile(segment, Constants(Part(0, graph, (0,), ())))
    with np.errstate(all="ignore"):
        found = dict(zip(outputs, compiled.run([feeds[value.name] for value in graph.inputs]), strict=True))
    return {name: np.asarray(found[value]) for value, name in zip(graph.outputs, graph.output_names, strict=True)}


def gradients_of(module: Module, wrt: Sequence[str], outputs: Sequence[str] = ()) -> Module:
    """A copy of the module with autodiff run on it."""
    made = clone_module(module)
    Autodiff(outputs=tuple(outputs), wrt=tuple(wrt)).run(made)
    InferTypes().run(made)
    return made


def check_sample(sample: Sample, seed: int = 0, symbols: Mapping[tuple[int, int], str] | None = None) -> None:
    """Compare the gradients of a sample's operands with differences along random directions, together and each alone.

    For `symbols` see `module_of`.

    Raises:
        AssertionError: they differ.
    """
    dtype: Any = np.float64
    try:
        module: Module | None = _kernels_module(sample, dtype, symbols)
    except TypeInferenceError:  # ONNX has Celu and a few others for float32 alone.
        module = None
    if module is None or all(value.dtype is not DType.F64 for value in module.graph.outputs):
        dtype = np.float32
        module = _kernels_module(sample, dtype, symbols)
    feeds = feeds_of(sample, dtype)
    wrt = [name for name, array in feeds.items() if is_float(array) and array.size]
    check_module(module, feeds, wrt, seed=seed)


def _kernels_module(sample: Sample, dtype: Any, symbols: Mapping[tuple[int, int], str] | None = None) -> Module:
    """The sample's module; of an operator without a kernel what it is made of, which test_decompositions.py proves."""
    module = module_of(sample, dtype, symbols)
    if lookup(sample.domain, sample.op, sample.version) is not None:
        return module
    made = decomposed(module)
    assert made is not None, f"{sample} has no decomposition"
    InferTypes().run(made)
    return made


def check_module(module: Module, feeds: Mapping[str, Array], wrt: Sequence[str], seed: int = 0) -> None:
    """The same of any module, of one dtype."""
    step, tolerance = (table[feeds[wrt[0]].dtype] for table in (STEPS, TOLERANCES))
    random = np.random.default_rng(seed)
    # Differences of what is rounded to a narrower dtype say nothing, such as statistics of a LayerNormalization.
    outputs = [value.name for value in module.graph.outputs if value.dtype.numpy == feeds[wrt[0]].dtype]
    backward = gradients_of(module, wrt, outputs)
    whole = run(module, feeds)
    seeds = {
        value.name: random.standard_normal(whole[value.name.removeprefix(GRAD)].shape).astype(value.dtype.numpy)
        for value in backward.graph.inputs
        if value.name.startswith(GRAD)
    }
    found = run(backward, {**feeds, **seeds})
    for name in wrt:
        gradient = found[GRAD + name]
        assert gradient.shape == feeds[name].shape, f"grad.{name} is {gradient.shape}, not {feeds[name].shape}"
        assert gradient.dtype == feeds[name].dtype
        assert np.isfinite(gradient).all(), f"grad.{name} is not finite"
        for _ in range(DIRECTIONS):
            direction = random.standard_normal(feeds[name].shape).astype(feeds[name].dtype)
            sides = []
            for sign in (1, -1):
                moved = run(module, {**feeds, name: feeds[name] + feeds[name].dtype.type(sign * step) * direction})
                sides.append(sum(float((moved[key.removeprefix(GRAD)] * value).sum()) for key, value in seeds.items()))
            expected = (sides[0] - sides[1]) / (2 * step)
            given = float((gradient * direction).sum())
            # Sums of many terms of both signs are compared with the size of the terms.
            size = float(np.abs(gradient * direction).sum()) + 1e-3
            assert abs(given - expected) <= tolerance * max(size, abs(expected)), (
                f"along {name}: gradient {given}, difference {expected}, terms of {size}"
            )
