"""Older versions of operators, which ONNX has no cases for, against ONNX Runtime at that version."""

import numpy as np
import pytest

from irpar import kernels

from .reference import assert_same

RANDOM = np.random.default_rng(7)
X = RANDOM.standard_normal((2, 3, 4), dtype=np.float32)
IMAGE = RANDOM.standard_normal((2, 4, 6, 5), dtype=np.float32)
POSITIVE = np.abs(X) + 0.5


def vector(*values: float, dtype=np.float32) -> np.ndarray:
    return np.array(values, dtype=dtype)


CHANNELS = [vector(*RANDOM.uniform(0.5, 2, 4)) for _ in range(4)]

# (operator, inputs, version, number of results, attributes)
OLDER = [
    ("BatchNormalization", (IMAGE, *CHANNELS), 9, 1, {"epsilon": 1e-3}),
    ("Clip", (X,), 6, 1, {"min": -0.5, "max": 0.25}),
    ("Clip", (X,), 6, 1, {}),
    ("Dropout", (X,), 10, 1, {"ratio": 0.3}),
    ("GroupNormalization", (IMAGE, vector(2, 3), vector(1, -1)), 18, 1, {"num_groups": 2}),
    ("Hardmax", (X,), 11, 1, {"axis": 1}),
    ("LogSoftmax", (X,), 11, 1, {"axis": 1}),
    ("LpPool", (IMAGE,), 11, 1, {"kernel_shape": [2, 2], "p": 3}),
    ("Pad", (X,), 2, 1, {"pads": [0, 1, 0, 0, 0, 2], "value": 3.0}),
    ("Pad", (X,), 10, 1, {"pads": [0, 1, 2, 0, 0, 1], "mode": "reflect"}),
    ("Slice", (X,), 9, 1, {"starts": [1, -3], "ends": [9, -1], "axes": [1, 2]}),
    ("Softmax", (X,), 11, 1, {}),
    ("Softmax", (X,), 11, 1, {"axis": 2}),
    ("Softmax", (X,), 12, 1, {"axis": -2}),
    ("Split", (X,), 11, 2, {"axis": 2, "split": [1, 3]}),
    ("Split", (X,), 11, 3, {"axis": 1}),
    ("Split", (X, vector(3, 1, dtype=np.int64)), 13, 2, {"axis": 2}),
    ("Split", (X,), 17, 2, {"axis": 2}),
    ("Split", (X,), 18, 2, {"axis": 1, "num_outputs": 2}),
    ("Squeeze", (X[:, :1],), 11, 1, {"axes": [1]}),
    ("Squeeze", (X[:1, :1],), 11, 1, {}),
    ("Unsqueeze", (X,), 11, 1, {"axes": [0, -1]}),
    ("Upsample", (IMAGE, vector(1, 1, 2, 2)), 9, 1, {"mode": "nearest"}),
    ("Upsample", (IMAGE, vector(1, 1, 2, 2)), 9, 1, {"mode": "linear"}),
    *[
        (op_type, (POSITIVE,), version, 1, {"axes": [0, 2], "keepdims": 0})
        for op_type, version in {
            "ReduceSum": 11,
            "ReduceMean": 13,
            "ReduceMax": 13,
            "ReduceMin": 13,
            "ReduceProd": 13,
            "ReduceL1": 13,
            "ReduceL2": 13,
            "ReduceSumSquare": 13,
            "ReduceLogSum": 13,
            "ReduceLogSumExp": 13,
        }.items()
    ],
]


@pytest.mark.parametrize(("op_type", "inputs", "version", "n_outputs", "attributes"), OLDER)
def test_older_version(op_type, inputs, version, n_outputs, attributes):
    assert_same(op_type, [np.ascontiguousarray(x) for x in inputs], version, n_outputs, **attributes)


def test_lookup_takes_the_greatest_version_not_above():
    assert kernels.lookup("", "Softmax", 12).since == 1
    assert kernels.lookup("", "Softmax", 13).since == 13
    assert kernels.lookup("ai.onnx", "Softmax", 26).since == 13
    assert kernels.lookup("", "Gelu", 19) is None
    assert kernels.lookup("elsewhere", "Softmax", 13) is None


def test_supported_lists_what_lookup_finds():
    names = kernels.supported()
    assert names == sorted(set(names))
    assert all(kernels.lookup(domain, op_type, 28) is not None for domain, op_type in names)
