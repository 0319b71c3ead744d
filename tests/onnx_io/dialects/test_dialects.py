import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import defs, helper
from onnx.reference import ReferenceEvaluator

import irpar
from irpar.api_arguments import COLLECTIVES
from irpar.ir import Module, parse_module
from irpar.onnx_io import to_module, to_proto
from irpar.onnx_io.dialects import add_stubs, say_in
from irpar.ops.collectives import DIALECTS, OWN
from tests.budget import every

HEAD = 'mesh @m = ["x"=4]\ngraph @g(%a: {a}) -> (%r) opset 21 {{\n{body}\n}}\n'
CASES = {
    "gather": ("f32[8@x, 6] ", "%r = irpar.AllGather(%a) {axes=['x'], dim=0, id=0} : f32[8, 6] replicated"),
    "gather columns": ("f32[3, 8@x]", "%r = irpar.AllGather(%a) {axes=['x'], dim=1, id=0} : f32[3, 8] replicated"),
    "exchange": (
        "f32[8@x, 12]",
        "%r = irpar.AllToAll(%a) {axes=['x'], split_dim=1, concat_dim=0, id=0} : f32[8, 12@x]",
    ),
    "exchange back": (
        "f32[2, 8, 4, 12@x]",
        "%r = irpar.AllToAll(%a) {axes=['x'], split_dim=1, concat_dim=3, id=0} : f32[2, 8@x, 4, 12]",
    ),
    "reduce": (
        "f32[4, 8@x]",
        "%p = ReduceSum(%a, %d) : f32[4, 1] partial(sum: x)\n"
        "%r = irpar.AllReduce(%p) {axes=['x'], reduce='sum', id=0} : f32[4, 1] replicated",
    ),
    "greatest": (
        "f32[4, 8@x]",
        "%p = ReduceMax(%a, %d) : f32[4, 1] partial(max: x)\n"
        "%r = irpar.AllReduce(%p) {axes=['x'], reduce='max', id=0} : f32[4, 1] replicated",
    ),
    "scatter": (
        "f32[8@x, 4, 8]",
        "%p = ReduceSum(%a, %z) {keepdims=0} : f32[4, 8] partial(sum: x)\n"
        "%r = irpar.ReduceScatter(%p) {axes=['x'], dim=1, reduce='sum', id=0} : f32[4, 8@x]",
    ),
    "uneven": ("f32[6@x]", "%r = irpar.AllGather(%a) {axes=['x'], dim=0, id=0} : f32[6] replicated"),
    "permute": (
        "f32[8@x]",
        "%p = irpar.CollectivePermute(%a) {axes=['x'], pairs=[0, 1, 1, 2, 2, 3, 3, 0], id=0} : f32[8@x]\n"
        "%r = irpar.AllGather(%p) {axes=['x'], dim=0, id=1} : f32[8] replicated",
    ),
    "integers": ("i32[8@x]", "%r = irpar.AllGather(%a) {axes=['x'], dim=0, id=0} : i32[8] replicated"),
    "doubles": ("f64[8@x]", "%r = irpar.AllGather(%a) {axes=['x'], dim=0, id=0} : f64[8] replicated"),
}
FITTING = {
    "com.microsoft": ("gather", "gather columns", "exchange", "exchange back", "reduce", "doubles"),
    "tensorrt": ("gather", "gather columns", "exchange", "exchange back", "reduce", "greatest", "scatter", "integers"),
}
REFUSED = {
    ("com.microsoft", "greatest"): "it reduces by max, and ONNX Runtime by sum alone",
    ("com.microsoft", "scatter"): "ONNX Runtime has no ReduceScatter",
    ("com.microsoft", "uneven"): "its members' blocks differ in size",
    ("com.microsoft", "permute"): "ONNX Runtime has no CollectivePermute",
    ("com.microsoft", "integers"): "it is of i32",
    ("tensorrt", "uneven"): "its members' blocks differ in size",
    ("tensorrt", "permute"): "TensorRT has no CollectivePermute",
    ("tensorrt", "doubles"): "it is of f64",
}


def partition(case: str, mesh: str = '"x"=4') -> irpar.Partition:
    kind, body = CASES[case]
    constants = "%d = constant : i64[1] replicated [1]\n%z = constant : i64[1] replicated [0]\n"
    text = HEAD.format(a=kind.strip(), body=constants + body.replace("'", '"')).replace('"x"=4', mesh)
    return irpar.partition(parse_module(text), pipeline="dce,localize")


def parts(made: irpar.Partition) -> Iterator[tuple[Module, "irpar.output.parts.Part"]]:  # type: ignore[name-defined]
    assert made.module is not None
    for part in made.parts:
        yield made.module, part


def text_of(model: onnx.ModelProto) -> str:
    return str(to_module(model))


FormalParameter = defs.OpSchema.FormalParameter
Attribute, Kind = defs.OpSchema.Attribute, defs.OpSchema.AttrType


def _schema(name: str, domain: str, attributes: list[defs.OpSchema.Attribute]) -> defs.OpSchema:
    types = [("T", ["tensor(float)", "tensor(double)", "tensor(int32)", "tensor(int64)"], "")]
    operands, results = [FormalParameter("input", "T")], [FormalParameter("output", "T")]
    return defs.OpSchema(
        name, domain, 1, inputs=operands, outputs=results, type_constraints=types, attributes=attributes
    )


@pytest.fixture
def _others_operators() -> Iterator[None]:
    """ONNX's registry with the operators of other runtimes, by their documentation."""
    size = Attribute("group_size", helper.make_attribute("group_size", 1))
    schemas = [
        _schema("AllReduce", "com.microsoft", []),
        _schema("AllGather", "com.microsoft", [Attribute("axis", helper.make_attribute("axis", 1)), size]),
        _schema("AllToAll", "com.microsoft", [size]),
        _schema(
            "DistCollective",
            "",
            [
                Attribute("collective_operation", Kind.STRING, "", required=True),
                Attribute("reduce_op", Kind.STRING, "", required=True),
                Attribute("root", helper.make_attribute("root", -1)),
                Attribute("nb_rank", helper.make_attribute("nb_rank", 1)),
                Attribute("groups", Kind.INTS, "", required=False),
                Attribute("group_size", helper.make_attribute("group_size", 0)),
            ],
        ),
    ]
    for schema in schemas:
        defs.register_schema(schema)
    yield
    for schema in schemas:
        defs.deregister_schema(schema.name, 1, schema.domain)


@pytest.mark.usefixtures("_others_operators")
@pytest.mark.parametrize(("dialect", "case"), [(name, case) for name, cases in FITTING.items() for case in cases])
def test_the_checker_knows_what_is_said_and_it_reads_back_as_it_was(dialect: str, case: str) -> None:
    for module, part in parts(partition(case)):
        model = to_proto(module, part.graph)
        before = text_of(model)
        say_in(DIALECTS[dialect], model, module, part.graph, part.ranks)
        onnx.checker.check_model(model, full_check=True)
        assert "irpar" not in {node.domain for node in model.graph.node}
        assert "irpar" not in {entry.domain for entry in model.opset_import}
        assert text_of(model) == before


@pytest.mark.parametrize(("dialect", "case"), [(name, case) for name, cases in FITTING.items() for case in cases])
def test_what_is_said_computes_what_irpars_own_does(dialect: str, case: str) -> None:
    """The operators do what their documentation says, in NumPy; what is around them in ONNX's reference evaluator."""
    made = partition(case)
    whole = (
        np.random.default_rng(0)
        .integers(0, 9, made.plan.inputs[0]["shape"])
        .astype(made.parts[0].graph.inputs[0].dtype.numpy)
    )
    expected = made.run({"a": whole}, engine="numpy")["r"]
    models = []
    for module, part in parts(made):
        model = to_proto(module, part.graph)
        say_in(DIALECTS[dialect], model, module, part.graph, part.ranks)
        models += [model] * len(part.ranks)
    blocks = _cut(whole, made.plan.inputs[0]["sharding"], 4)
    results = _run(models, blocks)
    rows = [dim for dim, axes in enumerate(made.plan.outputs[0]["sharding"]) if axes]
    found = np.concatenate(results, rows[0]) if rows else results[0]
    np.testing.assert_array_equal(found, expected)


def _cut(array: np.ndarray, sharding: list[list[str] | None], count: int) -> list[np.ndarray]:
    (dim,) = [dim for dim, axes in enumerate(sharding) if axes]
    return np.split(array, count, dim)


def _run(models: list[onnx.ModelProto], operands: list[np.ndarray]) -> list[np.ndarray]:
    """All ranks, node by node."""
    ranks = [{"a": operand} for operand in operands]
    for model, known in zip(models, ranks, strict=True):
        known |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for nodes in zip(*(model.graph.node for model in models), strict=True):
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in nodes[0].attribute}
        if nodes[0].op_type in _SENT:
            given = [known[node.input[0]] for node, known in zip(nodes, ranks, strict=True)]
            sent = _SENT[nodes[0].op_type](given, attributes)
        else:
            sent = [_alone(node, known) for node, known in zip(nodes, ranks, strict=True)]
        for node, known, value in zip(nodes, ranks, sent, strict=True):
            known[node.output[0]] = value
    return [known[model.graph.output[0].name] for model, known in zip(models, ranks, strict=True)]


def _alone(node: onnx.NodeProto, known: dict[str, np.ndarray]) -> np.ndarray:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(known[name].dtype), None)
        for name in node.input
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 21)]
    )
    return ReferenceEvaluator(model).run(None, {name: known[name] for name in node.input})[0]


def _exchanged(given: list[np.ndarray]) -> list[np.ndarray]:
    blocks = [np.split(each, len(given)) for each in given]
    return [np.concatenate([of[place] for of in blocks]) for place in range(len(given))]


def _dist_collective(given: list[np.ndarray], said: dict[str, object]) -> list[np.ndarray]:
    assert said["nb_rank"] == len(given)
    assert said["group_size"] == 0
    reduce = {b"sum": sum, b"max": lambda all_: np.max(all_, axis=0), b"none": lambda all_: None}[said["reduce_op"]]  # type: ignore[index]
    reduced = reduce(given)
    operation: dict[bytes, Callable[[], list[np.ndarray]]] = {
        b"all_reduce": lambda: [reduced] * len(given),
        b"reduce_scatter": lambda: np.split(reduced, len(given)),
        b"all_gather": lambda: [np.concatenate(given)] * len(given),
        b"all_to_all": lambda: _exchanged(given),
    }
    return operation[said["collective_operation"]]()  # type: ignore[index]


_SENT: dict[str, Callable[[list[np.ndarray], dict[str, object]], list[np.ndarray]]] = {
    "AllReduce": lambda given, _: [sum(given)] * len(given),  # type: ignore[list-item]
    "AllGather": lambda given, said: [np.concatenate(given, said["axis"])] * len(given),  # type: ignore[call-overload]
    "AllToAll": lambda given, _: _exchanged(given),
    "DistCollective": _dist_collective,
}


@pytest.mark.parametrize(("dialect", "case"), REFUSED)
def test_what_a_dialect_cannot_say_is_refused(dialect: str, case: str, tmp_path: Path) -> None:
    made = partition(case)
    with pytest.raises(irpar.IrparError) as caught:
        made.save(tmp_path / "out", collectives=dialect)
    assert REFUSED[dialect, case] in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_first_that_does_not_fit_is_named_with_its_reason(tmp_path: Path) -> None:
    made = partition("gather", '"y"=2, "x"=4')
    with pytest.raises(irpar.IrparError) as caught:
        made.save(tmp_path / "out", collectives="com.microsoft")
    assert str(caught.value).splitlines() == [
        'collectives="com.microsoft": it runs over 4 of 8 ranks, and ONNX Runtime\'s over all alone',
        "  collective 0, AllGather of %r over x",
        '  do: write collectives="irpar", or shard so that it is not needed (irpar explain shows all)',
    ]


def test_programs_that_name_ranks_are_as_many_as_there_are_groups(tmp_path: Path) -> None:
    made = partition("gather", '"y"=2, "x"=4')
    assert len(made.parts) == 1
    made.save(tmp_path / "out", collectives="tensorrt")
    groups = []
    for index in range(2):
        model = onnx.load(tmp_path / "out" / f"part{index}" / "model.onnx")
        (node,) = [node for node in model.graph.node if node.op_type == "DistCollective"]
        groups.append({entry.name: helper.get_attribute_value(entry) for entry in node.attribute})
    assert [said["groups"] for said in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [said["group_size"] for said in groups] == [4, 4]
    opened = irpar.Partition.open(tmp_path / "out")
    assert opened.plan.dialect == "tensorrt"
    assert [rank["part"] for rank in opened.plan.ranks] == [0] * 4 + [1] * 4
    a = np.arange(48, dtype=np.float32).reshape(8, 6)
    np.testing.assert_array_equal(opened.run({"a": a})["r"], a)
    made.save(tmp_path / "again")
    np.testing.assert_array_equal(made.run({"a": a})["r"], a)


def test_ranks_out_of_order_are_refused(tmp_path: Path) -> None:
    kind = 'mesh @m = ["x"=2, "y"=2]\ngraph @g(%a: f32[8@(y,x)]) -> (%r) opset 21 {\n'
    body = '%r = irpar.AllGather(%a) {axes=["y", "x"], dim=0, id=0} : f32[8] replicated\n}\n'
    made = irpar.partition(parse_module(kind + body), pipeline="localize")
    with pytest.raises(irpar.IrparError, match="its ranks are in the order 0, 2, 1, 3"):
        made.save(tmp_path / "out", collectives="tensorrt")


def test_a_node_that_was_changed_is_refused() -> None:
    module, part = next(parts(partition("reduce")))
    model = to_proto(module, part.graph)
    say_in(DIALECTS["tensorrt"], model, module, part.graph, part.ranks)
    (node,) = [node for node in model.graph.node if node.op_type == "DistCollective"]
    (entry,) = [entry for entry in node.attribute if entry.name == "reduce_op"]
    entry.s = b"max"
    with pytest.raises(irpar.IrparError, match=r"its reduce_op is not sum"):
        to_module(model)
    entry.s = b"sum"
    (entry,) = [entry for entry in node.metadata_props if entry.key == "irpar.collective"]
    for text in ("{", "[]", "{}", json.dumps({"op": "AllReduce", "id": {}}), json.dumps({"op": "X", "id": 0})):
        entry.value = text
        with pytest.raises(irpar.IrparError, match=r"irpar\.collective"):
            to_module(model)
    model.metadata_props.add(key="irpar.collectives", value="x")
    entries = [entry for entry in model.metadata_props if entry.key == "irpar.collectives"]
    entries[0].value = "klingon"
    with pytest.raises(irpar.IrparError, match='the dialect "klingon"'):
        to_module(model)


KNOWS_NO_IRPAR = """
import sys
import onnx
import onnxruntime
model = onnx.load(sys.argv[1])
del model.graph.value_info[:]
onnx.checker.check_model(model, full_check=True)
inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
print([[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in inferred.graph.value_info])
print([[str(value.name), list(value.shape)] for value in onnxruntime.InferenceSession(sys.argv[1]).get_outputs()])
assert not any(name.startswith("irpar") for name in sys.modules)
"""


@pytest.mark.parametrize("case", every(3, [case for case in CASES if case != "exchange back"]))
def test_stubs_give_others_the_types_and_irpar_does_not_see_them(case: str, tmp_path: Path) -> None:
    made = partition(case)
    for module, part in parts(made):
        model = to_proto(module, part.graph)
        before = text_of(model)
        add_stubs(model, module, part.graph)
        assert text_of(model) == before
    made.save(tmp_path / "out", stubs=True)
    path = tmp_path / "out" / "part0" / "model.onnx"
    told = subprocess.run([sys.executable, "-c", KNOWS_NO_IRPAR, path], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    shape = list(made.parts[0].graph.outputs[0].shape)
    assert told.stdout.splitlines()[1] == str([["r", shape]])
    assert irpar.Partition.open(tmp_path / "out").plan.dialect == "irpar"


def test_what_may_be_asked_for_is_what_there_is() -> None:
    assert (OWN, *DIALECTS) == COLLECTIVES


def test_stubs_are_irpars_own(tmp_path: Path) -> None:
    with pytest.raises(irpar.IrparError, match="leave one of the two out"):
        partition("gather").save(tmp_path / "out", stubs=True, collectives="tensorrt")
    with pytest.raises(irpar.IrparError, match='collectives="tensorrt"'):
        partition("gather").save(tmp_path / "out", collectives="nccl")


def test_a_model_is_verified_and_explained_in_any_dialect(tmp_path: Path) -> None:
    from irpar import models

    models.save(tmp_path / "gpt.onnx", "gpt")
    module = irpar.load(tmp_path / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt"))
    made = irpar.partition(module, irpar.Mesh({"dp": 1, "tp": 2}))
    texts = []
    for name in ("irpar", *DIALECTS):
        made.save(tmp_path / name, collectives=name)
        opened = irpar.Partition.open(tmp_path / name)
        assert opened.verify()
        text = str(irpar.load(tmp_path / name / "part0" / "model.onnx"))
        texts.append(text.replace(opened.plan.id or "", "ID").splitlines())
    assert texts[0] == texts[1] == texts[2], "\n".join(difflib.unified_diff(texts[0], texts[1]))
