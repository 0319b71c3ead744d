"""What complete-sharding keeps on random programs: pins stay, a second run changes nothing, no order matters."""

import json
import random
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irpar
from irpar.annotations.shardings_file import read_shardings
from irpar.ir import Module
from irpar.onnx_io import to_module
from irpar.onnx_io.versions import upgrade
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import NORMALISE
from irpar.sharding import DimSharding, IrparError
from tests.budget import budget

from ..random_programs import REFUSALS, Program, Spec, programs
from .golden import through_text

PIPELINES = [
    "complete-sharding{strategy=propagate}",
    "complete-sharding{strategy=propagate, op-priorities=true}",
    "complete-sharding{strategy=cost}",
]
ANY_TIME = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]
FEW = settings(max_examples=budget(20), deadline=None, derandomize=True, database=None, suppress_health_check=ANY_TIME)
MANY = settings(FEW, max_examples=budget(400))


@st.composite
def prioritised(draw: st.DrawFn) -> Program:
    """A random program whose annotated dims have priorities, in half of the draws."""
    program = draw(programs())
    if draw(st.booleans()):
        for spec in program.annotations.values():
            for dim, said in enumerate(spec):
                priority = draw(st.sampled_from((0, 0, 1, 2)))
                if said and priority:
                    spec[dim] = [*said, f"priority={priority}"]
    return program


def normalised(program: Program, annotations: dict[str, Spec], seed: int | None = None) -> Module:
    """The module that completion gets, annotated in the order of `annotations`; `seed`: nodes in another order."""
    model = upgrade(program.model)
    module = to_module(model if seed is None else reordered(model, seed))
    PassManager.parse("infer-types").run(module)
    module.set_mesh(program.mesh)
    irpar.annotate(module, annotations)
    PassManager.parse(NORMALISE).run(module)
    return module


def complete(pipeline: str, module: Module) -> bool:
    """Run it; says whether it changed something."""
    return PassManager.parse(pipeline).run(module).changed


def pins(module: Module) -> dict[str, tuple[DimSharding, ...]]:
    """The dims of annotated values."""
    return {value.name: value.sharding.dims for value in module.graph.values() if value.sharding is not None}


def check_pins(before: dict[str, tuple[DimSharding, ...]], module: Module) -> None:
    """Closed dims are as they were, open ones have at most more axes; nothing is open or waits any more."""
    found = {value.name: value.sharding for value in module.graph.values()}
    for name, dims in before.items():
        sharding = found[name]
        assert sharding is not None
        assert sharding.is_settled
        for said, axes in zip(dims, sharding.axes, strict=True):
            assert axes[: len(said.axes)] == said.axes if said.is_open else axes == said.axes, f"{name}: {sharding}"


def shuffled(annotations: dict[str, Spec], seed: int) -> dict[str, Spec]:
    """The same annotations in another order."""
    names = list(annotations)
    random.Random(seed).shuffle(names)
    return {name: annotations[name] for name in names}


def reordered(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same model, its nodes in another order that keeps operands before their readers."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    chance = random.Random(seed)
    waiting = list(model.graph.node)
    made_here = {name for node in waiting for name in node.output if name}
    del made.graph.node[:]
    while waiting:
        ready = [node for node in waiting if not _reads(node) & made_here]
        node = chance.choice(ready)
        made.graph.node.append(node)
        made_here.difference_update(node.output)
        waiting.remove(node)
    return made


def _reads(node: onnx.NodeProto) -> set[str]:
    """The names that a node reads, in its bodies too."""
    bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    inner = (_reads(child) for body in bodies for child in body.node)
    outputs = ({output.name for output in body.output} for body in bodies)
    return set(node.input).union(*inner, *outputs)


def check_completion(program: Program, pipeline: str, seed: int, folder: Path) -> None:
    """All that must hold of one program."""
    try:
        module = normalised(program, program.annotations)
        before = pins(module)
        complete(pipeline, module)
    except IrparError as error:
        if not any(re.search(pattern, str(error)) for pattern in REFUSALS):
            raise
        return
    check_pins(before, module)
    text, decisions = str(module), module.decisions
    through_text(module)
    assert not complete(pipeline, module), "the second run says that it changed something"
    assert str(module) == text, "the second run changed something"

    other = normalised(program, shuffled(program.annotations, seed))
    complete(pipeline, other)
    assert str(other) == text, "the order of annotations matters"
    assert other.decisions == decisions

    from_file = _from_file(program, shuffled(program.annotations, seed + 1), folder)
    complete(pipeline, from_file)
    assert str(from_file) == text, "the order of the entries of the file matters"

    otherwise = normalised(program, program.annotations, seed)
    complete(pipeline, otherwise)
    check_pins(before, otherwise)


def _from_file(program: Program, annotations: dict[str, Spec], folder: Path) -> Module:
    """The module annotated by a file."""
    sections: list[tuple[str, Any]] = [("tensors", annotations), ("mesh", program.mesh.axes)]
    if program.mesh.devices is not None:
        sections[1] = ("mesh", {**program.mesh.axes, "devices": list(program.mesh.devices)})
    (folder / "shardings.json").write_text(json.dumps(dict(sections)), encoding="utf-8")
    module = to_module(upgrade(program.model))
    file = read_shardings(folder / "shardings.json")
    assert file.mesh is not None
    module.set_mesh(file.mesh)
    file.annotate(module)
    PassManager.parse(NORMALISE).run(module)
    return module


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pins_and_orders(pipeline: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @FEW
    @given(prioritised(), st.integers(0, 10**6))
    def check(program: Program, seed: int) -> None:
        check_completion(program, pipeline, seed, tmp_path_factory.getbasetemp())

    check()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pins_and_orders_of_many(pipeline: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @MANY
    @given(prioritised(), st.integers(0, 10**6))
    def check(program: Program, seed: int) -> None:
        check_completion(program, pipeline, seed, tmp_path_factory.getbasetemp())

    check()


BRANCHES = """
<ir_version: 10, opset_import: ["": 21]>
g (float[8,16] x, float[16,32] q, float[16,32] k, float[32,16] o, float[16] b) => (float[8,16] y, float[8,16] n) {
  l = MatMul(x, q)  r = MatMul(x, k)  lr = Relu(l)  rs = Sigmoid(r)  p = Mul(lr, rs)  f = MatMul(p, o)
  y = Add(f, b)  e = Exp(x)  n = Neg(e)
}
"""


@given(st.integers(0, 10**6), st.sampled_from(PIPELINES))
@settings(max_examples=budget(20), deadline=None, derandomize=True, database=None)
def test_where_annotations_agree_the_order_of_independent_nodes_does_not_matter(seed: int, pipeline: str) -> None:
    annotations: dict[str, Spec] = {"x": [["dp"], None], "k": [None, ["tp", "priority=1"]], "n": [["?"], None]}
    lies = []
    for model in (onnx.parser.parse_model(BRANCHES), reordered(onnx.parser.parse_model(BRANCHES), seed)):
        module = to_module(model)
        module.set_mesh(irpar.Mesh({"dp": 2, "tp": 4}))
        irpar.annotate(module, annotations)
        PassManager.parse("infer-types," + pipeline).run(module)
        lies.append({value.name: str(value.sharding) for value in module.graph.values()})
    assert lies[0] == lies[1]
    assert lies[0]["p"] == "[@dp, @tp]"
