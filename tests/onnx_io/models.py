"""Small ONNX models that the tests of reading and writing share."""

import subprocess
import sys

import onnx
from onnx import TensorProto, helper, parser

HEADER = '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>\n'


def model(text: str, header: str = HEADER) -> onnx.ModelProto:
    """A model from ONNX's text form."""
    return parser.parse_model(header + text)


def mlp() -> onnx.ModelProto:
    """x @ w + b, with a weight of 4 KiB and a bias of 128 bytes."""
    made = model(
        """mlp (float[batch, 32] x) => (float[batch, 32] y)
        <float[32, 32] w, float[32] b> { h = MatMul(x, w)  y = Add(h, b) }"""
    )
    del made.graph.value_info[:]
    for name, shape in (("w", [32, 32]), ("b", [32])):
        count = 32 * len(shape) if len(shape) == 1 else 1024
        values = [0.25 * (index % 7) for index in range(count)]
        made.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, shape, values))
    return made


PRINT_PEAK = """
with open("/proc/self/status") as status:  # getrusage would count the process that started this one as well
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
"""A Python program that prints the peak of its own resident memory in KB."""


def peak_kilobytes(program: str, *arguments: str) -> int:
    """Peak resident memory of a Python program in a fresh process."""
    command = [sys.executable, "-c", program + PRINT_PEAK, *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def external(made: onnx.ModelProto, name: str, **entries: str) -> onnx.ModelProto:
    """The model with one initializer declared external."""
    tensor = next(tensor for tensor in made.graph.initializer if tensor.name == name)
    for field in ("raw_data", "float_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return made
