"""Shardings of an export by the names that the exporter gave, found by comparing values with the parameters'.

Exporters rename some weights, store some transposed, and fold the gain of a BatchNorm into a convolution; the values
tell which is which.
"""

from fnmatch import fnmatchcase

import numpy as np
import onnx
from onnx import numpy_helper
from torch import nn

from .entry import Entry

Spec = list[list[str] | None]


def shardings(entry: Entry, module: nn.Module, model: onnx.ModelProto) -> dict[str, Spec]:
    """Return input or initializer -> sharding: batch over dp, and parameters over tp as the entry says.

    Raises:
        RuntimeError: a pattern of the entry matches no parameter, a parameter that is to be cut is in no initializer,
            or an initializer equals both a matrix and its transpose.
    """
    tensors: dict[str, Spec] = {}
    for name, value in entry.inputs().items():
        cut = entry.batch.get(name, 0)
        if cut is not None:
            tensors[name] = [["dp"] if i == cut else None for i in range(value.dim())]
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    parameters = dict(module.named_parameters())
    for pattern in entry.cuts:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise RuntimeError(f"{entry.name}: no parameter matches {pattern!r}; there are {', '.join(parameters)}")
    for name, parameter in parameters.items():
        for cut in {cut for pattern, cut in entry.cuts.items() if fnmatchcase(name, pattern)}:
            found = _copies(parameter.detach().numpy(), cut, initializers)
            if not found:
                raise RuntimeError(f"{entry.name}: no initializer holds the parameter {name}")
            tensors |= found
    return tensors


def _copies(parameter: np.ndarray, cut: int, initializers: dict[str, np.ndarray]) -> dict[str, Spec]:
    """Return the shardings of all initializers that hold the parameter or some of its rows, maybe transposed."""
    found: dict[str, Spec] = {}
    for name, values in initializers.items():
        same = _holds(values, parameter)
        transposed = parameter.ndim == 2 == values.ndim and _is_block(values.T, parameter)
        if same and transposed:
            raise RuntimeError(f"{name} equals its own transpose")
        if same or transposed:
            axis = 1 - cut if transposed else cut
            found[name] = [["tp"] if i == axis else None for i in range(values.ndim)]
    return found


def _holds(values: np.ndarray, parameter: np.ndarray) -> bool:
    """Are they equal, or a block of rows, or for a convolution, equal up to a gain for each output channel?"""
    if values.dtype != parameter.dtype or values.ndim != parameter.ndim:
        return False
    if _is_block(values, parameter):
        return True
    if parameter.ndim != 4 or values.shape != parameter.shape:
        return False
    rows, others = values.reshape(len(values), -1), parameter.reshape(len(parameter), -1)
    gains = (rows * others).sum(axis=1, keepdims=True) / (others**2).sum(axis=1, keepdims=True)
    return bool(np.allclose(rows, gains * others, atol=1e-6))


def _is_block(values: np.ndarray, parameter: np.ndarray) -> bool:
    """Are the values rows of the parameter that follow one another? (Attention splits a fused matrix of q, k, v.)"""
    if values.ndim == 0 or len(values) == 0 or values.shape[1:] != parameter.shape[1:]:
        return False
    starts = range(0, len(parameter) - len(values) + 1, len(values)) if parameter.ndim == 2 else (0,)
    return any(np.array_equal(values, parameter[start : start + len(values)]) for start in starts)
