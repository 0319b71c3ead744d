"""Verifying models whose inputs and outputs are no tensors."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irpar import api
from irpar.sharding import IrparError

ONE = np.ones((2, 3), np.float32)


def sequences(path: Path) -> Path:
    """A model that takes a sequence, and gives one of two tensors of different shapes, and an optional."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    s = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2, 3])
    t = helper.make_tensor_sequence_value_info("t", TensorProto.FLOAT, None)
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [4, 6]))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("SequenceConstruct", ["x", "h"], ["t"]),
        helper.make_node("Optional", ["h"], ["o"]),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), "w")
    outputs = [t, helper.make_value_info("o", kind), helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", [x, s], outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_models_with_sequences_and_optionals(tmp_path: Path, engine: api.Engine) -> None:
    module = api.load(sequences(tmp_path / "m.onnx"))
    module.shard("w", [None, "tp"])
    made = api.partition(module, "tp=2")
    inputs = {"x": np.ones((4, 8), np.float32), "s": [ONE, 2 * ONE]}
    made.verify(inputs, engine=engine).check()
    assert made.bisect(inputs, engine=engine).first is None
    with pytest.raises(IrparError, match="cannot make up input s") as caught:
        made.verify(engine=engine)
    assert "partition.verify({" in caught.value.do
    with pytest.raises(IrparError, match="s is a tensor, expected a sequence"):
        made.run({**inputs, "s": ONE}, engine=engine)
    with pytest.raises(IrparError, match="x is a sequence, expected"):
        made.run({**inputs, "x": [np.ones((4, 8), np.float32), ONE]}, engine=engine)
