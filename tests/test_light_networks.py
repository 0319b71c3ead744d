"""The nine networks of the onnx wheel, with weights of seeded normals and a batch of 4: every intermediate compared."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import irpar

BATCH = 4
FOLDER = Path(onnx.__file__).parent / "backend/test/data/light"
NETWORKS = sorted(path.name for path in FOLDER.glob("light_*.onnx"))


def test_all_nine_are_here() -> None:
    assert len(NETWORKS) == 9


def seeded(name: str) -> onnx.ModelProto:
    """A network as the wheel has it computes zeros for one row; this one computes something."""
    model = onnx.load(FOLDER / name)
    graph = model.graph
    random = np.random.default_rng(0)
    known = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape" and node.input[0] in known]:
        shape = numpy_helper.to_array(known[node.input[0]]).tolist()
        numbers = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        # Vectors are gains, biases, means and variances; a variance is not negative.
        numbers = numbers if len(shape) > 1 else np.abs(numbers)
        graph.initializer.append(numpy_helper.from_array(numbers.astype(np.float32), node.output[0]))
        graph.node.remove(node)
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in known and dims:
            dims[0].dim_value = BATCH
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    for target in _reshape_targets(graph):
        numbers = numpy_helper.to_array(target).copy()
        if numbers[0] == 1:
            numbers[0] = BATCH
            target.CopyFrom(numpy_helper.from_array(numbers, target.name))
    del graph.value_info[:]
    return model


def _reshape_targets(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    names = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    return (tensor for tensor in graph.initializer if tensor.name in names)


def _annotate(module: irpar.Module, axis: str) -> None:
    """Rows over dp; or, over tp, the output channels of every other convolution and matrix, in order."""
    if axis == "dp":
        (image,) = module.graph.inputs
        module.shard(image.name, ["dp", *[None] * (len(image.shape) - 1)])
        return
    weights = {
        node.inputs[1]: node for node in module.graph if node.op_type in ("Conv", "Gemm") and node.inputs[1].is_constant
    }
    for weight, node in list(weights.items())[::2]:
        columns = 1 if node.op_type == "Gemm" and not node.attributes.get("transB") else 0
        module.shard(weight.name, [axis if dim == columns else None for dim in range(len(weight.shape))])


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_intermediate(name: str, axis: str, tmp_path: Path) -> None:
    onnx.save(seeded(name), tmp_path / name)
    module = irpar.load(tmp_path / name)
    _annotate(module, axis)
    partition = irpar.partition(module, irpar.Mesh({axis: 2}))
    partition.verify().check()
    bisection = partition.bisect()
    assert bisection.first is None, bisection
    assert bisection.compared > 20
    share = partition.plan.totals["flops_per_rank"] / partition.plan.original["flops"]
    print(f"{name} {axis}=2: {bisection.compared} compared, {share:.1%} of the FLOPs")
    assert share < (0.51 if axis == "dp" else 0.8)
