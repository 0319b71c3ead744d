"""Gradients of irpar against PyTorch's autograd: all builders of models/, and the exports of tests/fixtures.

    python benchmarks/gradients.py [--only GLOB]... [--write]

For each model the gradients of all its outputs of floats, weighted at random, by all its initializers of several
floats (single ones are constants of the exporter, such as a mask's -3.4e38) are made by irpar.gradients and computed
twice: in float64 by irpar's own kernels, and in float32 by stock ONNX Runtime, whose model passes onnx.checker's full
check and has ONNX's own operators alone. Both are compared with torch.autograd in float64 over an interpreter of the
same ONNX file (torch_reference.py); so is torch.autograd in float32. The figures are the largest differences over the
largest element of each gradient. --write puts the table into
benchmarks/results/gradients.md.

Exit code 1 where a model is refused, float64 differs by more than 1e-9, or float32 by more than 1e-4 and by more than
four times what PyTorch's own float32 differs by. Without PyTorch nothing is compared, and it says so.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import irpar
from irpar import models
from irpar.ir import ArrayTensor, DType, Module, Tensor, TensorType, clone_module
from irpar.onnx_io import to_proto
from irpar.passes.autodiff import GRAD

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gradients.md"
SIZES = {"batch": 2, "seq": 5}
"""Of symbolic dims; others get 3."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A model with inputs.

    Attributes:
        name: of the builder or file.
        model: the ONNX model.
        inputs: by name; those that are missing are drawn.
    """

    name: str
    model: onnx.ModelProto
    inputs: Mapping[str, Array]


def cases() -> Iterator[Case]:
    """All of them."""
    for family in models.FAMILIES:
        yield Case(family, models.build(family, preset="tiny"), {})
    for kind in ("loop", "scan"):
        yield Case(f"control-{kind}", models.build("control", kind=kind), {})
    yield Case("recurrent-gru", models.build("recurrent", cell="gru"), {})
    for path in sorted((ROOT / "tests" / "fixtures").glob("*.onnx")):
        known = path.with_name(f"{path.name.split('_')[0]}.npz")
        inputs = dict(np.load(known)) if known.exists() else {}
        yield Case(path.stem, onnx.load(path), inputs)


def is_parameter(initializer: onnx.TensorProto) -> bool:
    """Whether it has several floats."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    return initializer.data_type in floats and int(np.prod(initializer.dims)) > 1


def as_float64(module: Module) -> Module:
    """A copy whose floats are float64, but for the scales of a Resize, which are float32 in any model."""
    made = clone_module(module)
    for graph in made.all_graphs():
        for value in graph.values():
            if any(node.op_type == "Resize" and index in (1, 2) for node, index in value.uses):
                continue
            if isinstance(value.type, TensorType) and value.type.dtype.is_float:
                value.type = TensorType(DType.F64, value.type.shape)
            if value.data is not None and value.data.dtype.is_float:
                value.data = ArrayTensor(value.data.numpy().astype(np.float64))
        for value, state in graph.states.items():
            if state.data is not None and state.data.dtype.is_float:
                graph.states[value] = replace(state, data=ArrayTensor(state.data.numpy().astype(np.float64)))
        for node in graph:
            for name, attribute in node.attributes.items():
                if name == "to" and attribute in (DType.F16.value, DType.BF16.value, DType.F32.value):
                    node.set_attribute(name, DType.F64.value)
                if isinstance(attribute, Tensor) and attribute.dtype.is_float:
                    node.set_attribute(name, ArrayTensor(attribute.numpy().astype(np.float64)))
    return made


def drawn(module: Module, given: Mapping[str, Array], random: np.random.Generator) -> dict[str, Array]:
    """Arrays for all inputs of a module: those that are given, and others at random."""
    found = {}
    for value in module.graph.inputs:
        type_ = value.tensor_type
        name = value.source_name
        if name in given:
            found[name] = given[name]
        elif type_.dtype.is_float:
            found[name] = random.standard_normal(type_.static_shape).astype(type_.dtype.numpy)
        elif type_.dtype is DType.BOOL:
            found[name] = np.ones(type_.static_shape, bool)
        else:
            found[name] = random.integers(0, 2, type_.static_shape).astype(type_.dtype.numpy)
    return found


def bound(case: Case) -> Module:
    """The module with sizes for its symbolic dims."""
    module = irpar.load(case.model)
    symbols: dict[str, int] = {}
    for value in module.graph.inputs:
        known = case.inputs.get(value.source_name)
        for place, dim in enumerate(value.tensor_type.shape or ()):
            if not isinstance(dim, int):
                symbols[str(dim)] = SIZES.get(str(dim), 3) if known is None else known.shape[place]
    return irpar.load(case.model, bind=symbols) if symbols else module


def reference(
    case: Case, inputs: Mapping[str, Array], seeds: Mapping[str, Array], names: Sequence[str], dtype: str
) -> dict[str, Array]:
    """torch.autograd's gradients by name, zeros where nothing depends on a tensor."""
    import torch
    from torch_reference import Interpreter

    interpreter = Interpreter(getattr(torch, dtype))
    tensor = interpreter.tensor
    leaves = {}
    for initializer in case.model.graph.initializer:
        if initializer.name in names:
            leaves[initializer.name] = tensor(onnx.numpy_helper.to_array(initializer)).requires_grad_()
    values = interpreter.run(case.model, inputs, leaves)
    total = sum((values[name.removeprefix(GRAD)] * tensor(seed)).sum() for name, seed in seeds.items())
    found = torch.autograd.grad(total, [leaves[name] for name in names], allow_unused=True)
    return {
        name: np.zeros(leaves[name].shape) if gradient is None else gradient.numpy()
        for name, gradient in zip(names, found, strict=True)
    }


def largest_difference(found: Mapping[str, Array], expected: Mapping[str, Array]) -> tuple[float, str]:
    """The largest difference over the largest element of a gradient, and which one it is of.

    Some gradients are zero but for rounding, such as those of biases of keys: a tenth of the largest gradient of the
    model is the least that counts as an element.
    """
    worst, which = 0.0, ""
    scales = {name: float(np.abs(wanted).max(initial=0.0)) for name, wanted in expected.items()}
    least = 0.1 * max(scales.values())
    for name, wanted in expected.items():
        difference = float(np.abs(found[GRAD + name].astype(np.float64) - wanted).max(initial=0.0))
        share = difference / max(scales[name], least)
        if not share <= worst:  # NaN counts
            worst, which = share, name
    return worst, which


def in_onnx_runtime(module: Module, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The results of a module in stock ONNX Runtime.

    Raises:
        AssertionError: it has operators of other domains.
    """
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    assert not {node.domain for node in model.graph.node} - {""}, "operators of other domains"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name: value.type for value in session.get_inputs()}
    feeds = {
        name: array.astype(np.float32) if wanted[name] == "tensor(float)" else array
        for name, array in inputs.items()
        if name in wanted
    }
    return dict(zip(names, session.run(None, feeds), strict=True))


def measure(case: Case) -> tuple[str, bool]:
    """A line of the table, and whether it is within the limits."""
    random = np.random.default_rng(0)
    start = time.perf_counter()
    module = bound(case)
    wrt = [initializer.name for initializer in case.model.graph.initializer if is_parameter(initializer)]
    try:
        narrow = irpar.gradients(module, wrt=wrt)
    except irpar.IrparError as error:
        return f"| {case.name} | | refused: {error.what} | | | | |", False
    seconds = time.perf_counter() - start
    inputs = drawn(narrow, case.inputs, random)
    try:
        wide = irpar.gradients(as_float64(module), wrt=wrt)
    except irpar.IrparError:  # ONNX has some operators without float64, of which the gradients take others.
        wide = as_float64(narrow)
    feeds = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in inputs.items()}
    found = {"float64": irpar.partition(wide, "d=1").run(feeds, engine="numpy")}
    found["float32"] = in_onnx_runtime(narrow, inputs)
    names = [name.removeprefix(GRAD) for name in narrow.graph.output_names]
    seeds = {name: array for name, array in feeds.items() if name.startswith(GRAD)}
    given = {name: array for name, array in inputs.items() if not name.startswith(GRAD)}
    expected = reference(case, given, seeds, names, "float64")
    theirs, _ = largest_difference(
        {GRAD + name: array for name, array in reference(case, given, seeds, names, "float32").items()}, expected
    )
    limits = {"float64": 1e-9, "float32": max(1e-4, 4 * theirs)}
    figures, ok = [], True
    for dtype, limit in limits.items():
        worst, which = largest_difference(found[dtype], expected)
        is_half = dtype == "float32" and any(value.dtype is DType.F16 for value in narrow.graph.constants)
        fine = worst <= (1e-2 if is_half else limit)
        figures.append(f"{worst:.1e}" + ("" if fine else f" ({which})"))
        ok &= fine
    nodes = sum(1 for _ in narrow.graph.walk())
    columns = (case.name, len(names), *figures, f"{theirs:.1e}", f"{nodes:,}", f"{seconds:.2f}")
    return f"| {' | '.join(map(str, columns))} |", ok


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of models (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: nothing is compared")
        return 0
    lines = [
        "| model | gradients | float64, irpar | float32, ONNX Runtime | float32, PyTorch | nodes | s |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    bad = 0
    for case in cases():
        if options.only and not any(fnmatchcase(case.name, pattern) for pattern in options.only):
            continue
        line, ok = measure(case)
        print(line, "" if ok else "<-", flush=True)
        lines.append(line)
        bad += not ok
    if options.write:
        RESULT.write_text(
            "# Gradients against torch.autograd\n\n`python benchmarks/gradients.py --write`: largest difference from "
            "float64 in PyTorch over the largest element of each gradient.\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
