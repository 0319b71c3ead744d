"""What the text form leaves out, because it follows from the header."""

from collections.abc import Mapping

REFERENCE_KINDS: dict[int, str] = {
    1: "float",
    2: "int",
    3: "string",
    4: "tensor",
    5: "graph",
    6: "floats",
    7: "ints",
    8: "strings",
    9: "tensors",
    10: "graphs",
    11: "sparse_tensor",
    12: "sparse_tensors",
    13: "type",
    14: "types",
}
"""ONNX's AttributeType numbers by the names that `ref("alpha", float)` uses."""


def default_version(opsets: Mapping[str, int], domain: str) -> int:
    """The opset version of a node that names none."""
    return opsets.get(domain, 1)


def default_call_version(opsets: Mapping[str, int], domain: str) -> int:
    """The opset version of a call that names none."""
    return opsets.get(domain, 0)
