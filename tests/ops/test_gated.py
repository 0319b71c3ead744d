"""com.microsoft's router of experts where it gives all scores, which no sample node can: a result is left out then."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import irpar

KNOWN = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) >= (1, 32)
EXPERTS, WIDTH, ROWS = 6, 256, 4


def _router(*, is_projected: bool) -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    names, shape = ["x", "bias"], [ROWS, EXPERTS]
    constants = [onnx.numpy_helper.from_array(rng.normal(size=EXPERTS).astype(np.float32), "bias")]
    if is_projected:
        names, shape = [*names, "projection"], [ROWS, WIDTH]
        weight = rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32)
        constants.append(onnx.numpy_helper.from_array(weight, "projection"))
    outputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [ROWS, EXPERTS]) for name in ("scores", "weights")
    ]
    node = helper.make_node("MoEGroupRouter", names, ["", "scores", "weights"], domain="com.microsoft", top_k=2)
    data = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph([node], "router", [data], outputs, constants), ir_version=10, opset_imports=imports
    )


@pytest.mark.skipif(not KNOWN, reason="ONNX Runtime has it from 1.32 on")
@pytest.mark.parametrize("is_projected", [False, True])
def test_all_scores_of_rows_that_are_cut(is_projected: bool, tmp_path: Path) -> None:
    path = f"{tmp_path}/router.onnx"
    onnx.save(_router(is_projected=is_projected), path)
    module = irpar.load(path)
    module.shard("x", ["dp", None])
    partition = irpar.partition(module, irpar.Mesh({"dp": 2}))
    assert not partition.plan.collectives
    assert not [row for row in partition.plan.replicated if "op" in row]
    partition.verify().check()
