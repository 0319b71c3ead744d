"""What a kernel says about a call that it cannot compute."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from irpar import kernels
from irpar.kernels import registry
from irpar.kernels.families import OPERATORS

X = np.ones((2, 3), dtype=np.float32)
Y = np.ones((4, 3), dtype=np.float32)
IDS = np.array([0, 5], dtype=np.int64)

# (operator, inputs, attributes, number of results, what the message must say)
REFUSED = [
    ("Add", (X, Y), {}, 1, r"Add: operands could not be broadcast .*\n  operands: float32\[2, 3\], float32\[4, 3\]"),
    ("Add", (X, Y.astype(np.float64)), {}, 1, "Add: operands must have one dtype, not float32, float64"),
    ("Add", (X,), {}, 1, r"Add: operand 1 \(b\) is missing"),
    ("Add", (X, X, X), {}, 1, "Add: 3 operands given, version 7 takes at most 2"),
    ("Add", (X, X), {"axis": 1}, 1, "Add: attribute 'axis' is not supported at version 7"),
    ("Relu", (X,), {}, 2, "Relu: the node has 2 results, this version gives 1"),
    ("And", (X, X), {}, 1, "And: operands must be bool, not float32"),
    ("MatMul", (X, Y), {}, 1, "MatMul: inner dims 3 and 4 differ"),
    ("Gemm", (X[0], Y), {}, 1, "Gemm: operands must be matrices, not of rank 1 and 2"),
    ("Concat", (X,), {}, 1, "Concat: attribute 'axis' is missing"),
    ("Concat", (X, None), {"axis": 0}, 1, "Concat: needs at least one operand, and none may be absent"),
    ("Softmax", (X,), {"axis": 2}, 1, r"Softmax: axis 2 is outside \[-2, 1\] for rank 2"),
    ("Gather", (X, IDS), {}, 1, r"Gather: an index is outside \[-2, 1\] on axis 0"),
    (
        "Gelu",
        (X,),
        {"approximate": "erf"},
        1,
        "Gelu: attribute approximate='erf' is not supported; it can",
    ),
    ("Cast", (X,), {"to": 99}, 1, "Cast: ONNX data type 99 is not supported"),
    ("Split", (X, IDS), {"axis": 1}, 2, r"Split: split \[0, 5\] does not cut 3 elements into 2 results"),
    ("Squeeze", (X, IDS[:1]), {}, 1, "Squeeze: cannot drop dim 0, which has 2 elements"),
    ("Transpose", (X,), {"perm": (0, 0)}, 1, r"Transpose: attribute perm=\[0, 0\] is no permutation of the 2 dims"),
    ("Dropout", (X, None, np.array(True)), {}, 1, "Dropout: training mode draws random numbers"),
    ("Conv", (X[None, None], X[None, None]), {"group": 3}, 1, "Conv: 3 groups of weight .* do not fit 1 channels"),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "n_outputs", "message"), REFUSED)
def test_refusal_names_operator_and_problem(op_type, inputs, attributes, n_outputs, message):
    kernel = kernels.lookup("", op_type, 21)
    with pytest.raises(kernels.KernelError, match=f"^{message}") as caught:
        kernel(np, inputs, attributes, n_outputs)
    assert caught.value.op_type == op_type


def test_two_kernels_for_one_version_are_refused():
    with pytest.raises(ValueError, match="two kernels for Add since version 7"):
        kernels.register("Add", 7, lambda xp, a, b: a + b)


def test_registered_kernel_is_found(monkeypatch):
    kernels.supported()  # What is loaded later enters the table that it meets.
    monkeypatch.setattr(registry._TABLE, "entries", {})

    @kernels.kernel("Twice", since=3, domain="test")
    def twice(xp, x, *, times: int = 2):
        return x * np.float32(times)

    kernel = kernels.lookup("test", "Twice", 4)
    (y,) = kernel(np, [X], {"times": 3}, 1)
    assert y.tolist() == [[3.0] * 3] * 2
    assert kernels.supported() == [("test", "Twice")]
    assert kernels.lookup("test", "Twice", 2) is None


def test_each_family_has_what_is_said_of_it():
    for module in pkgutil.iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")
    found = {}
    for (domain, op_type), (first, *_) in registry._TABLE.entries.items():
        package, _, family = first.function.__module__.rpartition(".")
        if package == kernels.__name__:
            found[domain, op_type] = family, first.since
    assert found == OPERATORS, "say it in kernels/families.py"


def test_only_what_is_looked_up_is_loaded():
    program = """
import sys
from irpar import kernels
assert kernels.has_kernel("", "MatMul", 13) and kernels.has_kernel("ai.onnx", "Relu", 6)
assert not kernels.has_kernel("", "Relu", 5) and not kernels.has_kernel("", "Florp", 1)
assert kernels.lookup("", "Relu", 5) is None and kernels.lookup("", "Relu", 14).op_type == "Relu"
loaded = [name for name in sys.modules if name.startswith("irpar.kernels.")]
assert "irpar.kernels.activation" in loaded and "irpar.kernels.matmul" not in loaded, loaded
try:
    kernels.register("MatMul", 1, lambda xp, a, b: a)
except ValueError as error:
    assert "two kernels for MatMul since version 1" in str(error)
else:
    raise SystemExit("registered twice")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_scalar_results_are_arrays():
    (y,) = kernels.lookup("", "Add", 21)(np, [np.array(1, np.float32)] * 2, {}, 1)
    assert isinstance(y, np.ndarray)
    assert y.shape == ()


def test_what_is_made_of_constants_is_kept():
    kept, made = registry.Kept([1]), []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [kept.of(1, "squares", make), kept.of(1, "roots", make), kept.of(1, "squares", make)] == [0, 1, 0]
    assert [kept.of(0, "squares", make), kept.of(0, "squares", make)] == [2, 3]
