"""How irpar behaves on big models, each part against a yardstick in the same run.

    python benchmarks/import_scale.py                 all parts
    python benchmarks/import_scale.py --only import   one part

import:   100,000 nodes and 50,000 external tensors, loaded by irpar and by onnx_ir in turn, each in a fresh process.
pipeline: the default pipeline over Llamas of 2,000 to 64,000 nodes; the slope of time over nodes, both logarithmic.
llama:    the shape of Llama 70B, 140 GB in a sparse file, over tp=8 x dp=2 with --weights none: seconds and memory.
weights:  4 GB of random weights cut over tp=2, by columns and by rows, against cp of the same bytes; --gigabytes 2 has
          less of them, so that the start of the program, which is told apart, counts for more.
"""

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
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
    parser.add_argument("--gigabytes", type=float, default=4, help="of weights in the part weights (default 4)")
    options = parser.parse_args()
    scenarios = SCENARIOS | {"weights": partial(weights_against_cp, pairs=max(1, round(2 * options.gigabytes)))}
    chosen = [options.only] if options.only else list(SCENARIOS)
    with tempfile.TemporaryDirectory() as folder:
        results = [scenarios[name](Path(folder), options.repeat) for name in chosen]
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


# -- pipeline -----------------------------------------------------------------------------------------------------

NODES_PER_LLAMA_LAYER = 52
NODE_COUNTS = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000)


def pipeline_slope(folder: Path, repeat: int) -> bool:
    """Time of the default pipeline over the number of nodes; a slope of at most 1.1 is the target."""
    print(f"pipeline: default passes on Llamas, dp=2 x tp=2, best of {repeat}")
    points = []
    for count in NODE_COUNTS:
        nodes, seconds = _pipeline_time(folder, count // NODES_PER_LLAMA_LAYER, repeat)
        points.append((nodes, seconds))
        print(f"  {nodes:6,} nodes  {seconds:6.2f} s   {seconds / nodes * 1e6:5.0f} us a node")
    slope = float(np.polyfit(*np.log(np.array(points)).T, 1)[0])
    print(f"  slope {slope:.3f}     (target: at most 1.10)")
    return slope <= 1.1


def _pipeline_time(folder: Path, layers: int, repeat: int) -> tuple[int, float]:
    """Nodes of a Llama of that many layers, and the best time of the default pipeline on it."""
    import irpar
    from irpar import models
    from irpar.ir import clone_module
    from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

    path = folder / "llama.onnx"
    models.save(path, "llama", weights="none", layers=layers)
    module = irpar.load(path)
    irpar.annotate(module, models.annotations("llama", layers=layers))
    module.set_mesh(irpar.Mesh({"dp": 2, "tp": 2}))
    best = math.inf
    for _ in range(repeat):
        work = clone_module(module)
        gc.collect()
        start = time.perf_counter()
        irpar.PassManager.parse(DEFAULT_PIPELINE).run(work)
        best = min(best, time.perf_counter() - start)
    return len(module.graph), best


# -- llama --------------------------------------------------------------------------------------------------------

_COMMAND = """
import sys, time
start = time.perf_counter()
from irpar.cli import main
code = main()
with open("/proc/self/status") as status:
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print("measured", code, time.perf_counter() - start, int(peak) / 1024, file=sys.stderr)
"""


def _measured(*arguments: str) -> tuple[float, float]:
    """Seconds and peak MB of one irpar command in a fresh process, imports included."""
    # As installed: Python keeps what it compiled of the modules.
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    words = done.stderr.split()[-4:]
    if words[:2] != ["measured", "0"]:
        raise SystemExit(f"irpar {' '.join(arguments)} failed:\n{done.stderr}")
    return float(words[2]), float(words[3])


def llama_70b(folder: Path, repeat: int) -> bool:
    """Partition the shape of Llama 70B without weights; under 60 s and 1.5 GB is the target."""
    from irpar import models

    path, shardings = folder / "llama70b.onnx", folder / "shardings.json"
    size = models.save(path, "llama", "70b", weights="none")
    shardings.write_text(json.dumps({"tensors": models.annotations("llama", preset="70b")}))
    mesh = ["--mesh", "dp=2,tp=8", "--shardings", str(shardings), "--weights", "none"]
    best = min(
        _measured("partition", str(path), "-o", str(folder / f"out{n}"), *mesh, "--json", "--no-cache")
        for n in range(repeat)
    )
    plan = json.loads((folder / "out0" / "plan.json").read_text())
    share = plan["totals"]["flops_per_rank"] / plan["original"]["flops"]
    print(f"llama: 70B shape, {size.weight_bytes / 1e9:.0f} GB, tp=8 x dp=2, --weights none, best of {repeat}")
    print(f"  {best[0]:.1f} s, peak {best[1]:,.0f} MB     (target: under 60 s and 1,500 MB)")
    print(f"  {plan['totals']['collectives']} collectives, 1/{1 / share:.1f} of the FLOPs on each of 16 ranks")
    return best[0] < 60 and best[1] < 1500


# -- weights ------------------------------------------------------------------------------------------------------

WEIGHT_ROWS, WEIGHT_COLUMNS, WEIGHT_PAIRS = 4096, 16384, 8
"""A pair of weights has 0.54 GB."""


def weights_against_cp(folder: Path, repeat: int, pairs: int = WEIGHT_PAIRS) -> bool:
    """Rate of writing 4 GB of weights in two parts against cp of the same file; 70% and 500 MB are the targets."""
    path = folder / "wide.onnx"
    size = make_wide_model(path, pairs)
    shardings = folder / "wide.json"
    shardings.write_text(json.dumps({"tensors": {"up.*": [None, ["tp"]], "down.*": [["tp"], None]}}))
    ours, theirs, start, peak = [], [], [], 0.0
    for number in range(repeat):
        os.sync()  # What is still to be written would slow down whoever comes next.
        theirs.append(_copy_seconds(path.with_suffix(".data"), folder / "copy.data"))
        os.sync()
        out = folder / f"wide-out{number}"
        command = [
            "partition",
            str(path),
            "-o",
            str(out),
            "--mesh",
            "tp=2",
            "--shardings",
            str(shardings),
            "--json",
            "--no-cache",
        ]
        seconds, memory = _measured(*command)
        ours.append(seconds)
        peak = max(peak, memory)
        _check_wide(out, path.with_suffix(".data"))
        shutil.rmtree(out)
        start.append(_measured(*command, "--weights", "none")[0])
        shutil.rmtree(out)
    ratio = min(theirs) / min(ours)
    print(f"weights: {size / 1e9:.1f} GB over tp=2, best of {repeat}")
    print(f"  cp     {min(theirs):6.2f} s  {size / 1e9 / min(theirs):5.2f} GB/s")
    print(f"  irpar  {min(ours):6.2f} s  {size / 1e9 / min(ours):5.2f} GB/s   peak {peak:.0f} MB")
    print(f"  share of cp's rate {ratio:.2f}     (target: at least 0.70, under 500 MB)")
    whole, copied, before = map(statistics.median, (ours, theirs, start))
    print(f"  medians: cp {copied:.2f} s, irpar {whole:.2f} s, with --weights none {before:.2f} s;", end=" ")
    print(f"share of cp's rate {copied / whole:.2f}, of the writing alone {copied / max(whole - before, 1e-9):.2f}")
    return ratio >= 0.7 and peak < 500


def _copy_seconds(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(source), str(target)], check=True)
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def make_wide_model(path: Path, pairs: int) -> int:
    """Write that many pairs of MLP weights with random bytes; returns their size."""
    graph = onnx.GraphProto(name="wide")
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WEIGHT_ROWS]))
    current, offset = "x", 0
    for number in range(pairs):
        for name, shape in (("up", [WEIGHT_ROWS, WEIGHT_COLUMNS]), ("down", [WEIGHT_COLUMNS, WEIGHT_ROWS])):
            weight, result = f"{name}.{number}", f"{name}.{number}.out"
            offset = _external(graph, weight, shape, path.stem + ".data", offset)
            graph.node.append(helper.make_node("MatMul", [current, weight], [result], f"/{name}.{number}"))
            current = result
    graph.output.append(helper.make_tensor_value_info(current, TensorProto.FLOAT, [1, WEIGHT_ROWS]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    random = np.random.default_rng(0)
    with open(path.with_suffix(".data"), "wb") as file:
        for _ in range(0, offset, 64 << 20):
            file.write(random.bytes(64 << 20))
    return offset


def _check_wide(out: Path, data: Path) -> None:
    """The first weight's columns and the last one's rows are where they belong."""
    shape = (WEIGHT_ROWS, WEIGHT_COLUMNS)
    first = np.memmap(data, np.uint32, "r", 0, shape)
    last = np.memmap(data, np.uint32, "r", data.stat().st_size - 4 * math.prod(shape), shape[::-1])
    for part in (0, 1):
        weights = out / f"part{part}" / "weights.bin"
        half = WEIGHT_COLUMNS // 2
        held = np.memmap(weights, np.uint32, "r", 0, (WEIGHT_ROWS, half))
        assert (held[::997] == first[::997, part * half : (part + 1) * half]).all(), "wrong columns"
        end = np.memmap(weights, np.uint32, "r", weights.stat().st_size - 4 * half * WEIGHT_ROWS, (half, WEIGHT_ROWS))
        assert (end[::997] == last[part * half : (part + 1) * half][::997]).all(), "wrong rows"


SCENARIOS: dict[str, Callable[[Path, int], bool]] = {
    "import": import_against_onnx_ir,
    "pipeline": pipeline_slope,
    "llama": llama_70b,
    "weights": weights_against_cp,
}


if __name__ == "__main__":
    raise SystemExit(main())
