"""How irpar behaves on big models, each part against a yardstick in the same run.

    python benchmarks/import_scale.py                 all parts
    python benchmarks/import_scale.py --only import   one part

import: 100,000 nodes and 50,000 external tensors, loaded by irpar and by onnx_ir in turn, each in a fresh process.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import onnx
from onnx import TensorProto, helper

LAYERS = 12_500
WIDTH = 256
NODES_PER_LAYER = 8
TENSORS_PER_LAYER = 4

_IRPAR = "from irpar.onnx_io import load"
_ONNX_IR = "from onnx_ir import load"
_TIMED = """
{imports}
import sys, time
start = time.perf_counter()
model = load(sys.argv[1])
seconds = time.perf_counter() - start
with open("/proc/self/status") as status:  # getrusage would count the process that started this one as well
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(seconds, int(peak) / 1024)
"""


def main() -> int:
    """Run the parts asked for; exit code 1 where one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENARIOS, help="run one part")
    parser.add_argument("--repeat", type=int, default=3, help="best of this many (default 3)")
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(SCENARIOS)
    with tempfile.TemporaryDirectory() as folder:
        results = [SCENARIOS[name](Path(folder), options.repeat) for name in chosen]
    return 0 if all(results) else 1


# -- import -------------------------------------------------------------------------------------------------------


def import_against_onnx_ir(folder: Path, repeat: int) -> bool:
    """Load time of irpar against onnx_ir; at most half is the target."""
    if find_spec("onnx_ir") is None:
        raise SystemExit("import: onnx_ir is not installed; do: pip install onnx-ir")
    path = folder / "large.onnx"
    make_large_model(path)
    times: dict[str, list[float]] = {_IRPAR: [], _ONNX_IR: []}
    memory: dict[str, float] = {}
    for _ in range(repeat):
        for imports, seconds in times.items():
            taken, peak = _in_fresh_process(imports, path)
            seconds.append(taken)
            memory[imports] = peak
    ours, theirs = min(times[_IRPAR]), min(times[_ONNX_IR])
    nodes, tensors = LAYERS * NODES_PER_LAYER, LAYERS * TENSORS_PER_LAYER
    print(f"import: {nodes:,} nodes, {tensors:,} external tensors, best of {repeat}")
    print(f"  irpar    {ours:6.2f} s   peak {memory[_IRPAR]:5.0f} MB")
    print(f"  onnx_ir  {theirs:6.2f} s   peak {memory[_ONNX_IR]:5.0f} MB")
    print(f"  ratio    {ours / theirs:6.2f}     (target: at most 0.50)")
    return ours / theirs <= 0.5


def _in_fresh_process(imports: str, path: Path) -> tuple[float, float]:
    """Seconds and peak MB of one load."""
    program = _TIMED.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), float(peak)


def make_large_model(path: Path) -> None:
    """Write a chain of MLP blocks with types for all values, as exporters write them, and a sparse data file."""
    graph = onnx.GraphProto(name="large")
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH]))
    offset = 0
    current = "x"
    for layer in range(LAYERS):
        for name, shape in (("fc1.weight", [WIDTH, WIDTH]), ("fc1.bias", [WIDTH]), ("fc2.weight", [WIDTH, WIDTH])):
            offset = _external(graph, f"h.{layer}.{name}", shape, path.stem + ".data", offset)
        offset = _external(graph, f"h.{layer}.ln.weight", [WIDTH], path.stem + ".data", offset)
        current = _block(graph, layer, current)
    graph.output.append(helper.make_tensor_value_info(current, TensorProto.FLOAT, ["batch", WIDTH]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    with open(path.with_name(path.stem + ".data"), "wb") as file:
        file.truncate(offset)


def _external(graph: onnx.GraphProto, name: str, shape: list[int], location: str, offset: int) -> int:
    """Add an initializer with external data; returns the offset behind it."""
    length = 4 * math.prod(shape)
    tensor = graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=text)
    return int(-(-(offset + length) // 4096) * 4096)


def _block(graph: onnx.GraphProto, layer: int, x: str) -> str:
    """Eight nodes with four weights; returns the name of the result."""
    weight = f"h.{layer}."
    steps: list[tuple[str, list[str], dict[str, object]]] = [
        ("MatMul", ["", weight + "fc1.weight"], {}),
        ("Add", ["", weight + "fc1.bias"], {}),
        ("Gelu", [""], {"approximate": "tanh"}),
        ("MatMul", ["", weight + "fc2.weight"], {}),
        ("Add", ["", x], {}),
        ("Mul", ["", weight + "ln.weight"], {}),
        ("Softmax", [""], {"axis": -1}),
        ("Cast", [""], {"to": TensorProto.FLOAT}),
    ]
    assert len(steps) == NODES_PER_LAYER
    current = x
    for number, (op_type, operands, attributes) in enumerate(steps):
        name = f"/h.{layer}/mlp/{op_type}_{number}"
        result = f"{name}_output_0"
        inputs = [operand or current for operand in operands]
        graph.node.append(helper.make_node(op_type, inputs, [result], name, **attributes))
        graph.value_info.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, ["batch", WIDTH]))
        current = result
    graph.value_info.pop() if layer == LAYERS - 1 else None
    return current


SCENARIOS: dict[str, Callable[[Path, int], bool]] = {"import": import_against_onnx_ir}


if __name__ == "__main__":
    raise SystemExit(main())
