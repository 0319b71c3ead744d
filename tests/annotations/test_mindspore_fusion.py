"""What MindSpore says of merged collectives, fuse-communication does."""

import json
from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar import models
from irpar.analysis.communication_fusion import SAID, FusionMode, FusionSaid, fusion_said
from irpar.annotations.mindspore import set_auto_parallel_context, set_comm_fusion
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module, print_module
from irpar.sharding import IrparError
from tests.budget import every, pairs
from tests.passes.golden import read, run_pipeline
from tests.passes.test_fuse_communication import several


def sums(network: str = "h100-nvlink-ib") -> Module:
    """Six all-reduces of 160 bytes each, of %p0 to %p5."""
    text = several("AllReduce", ', reduce="sum"', [([2, 4, 5], [2, 4, 5])] * 6)
    return read(text.replace("h100-nvlink-ib", network))


def widths(module: Module) -> list[int]:
    """How many of the six each collective has, in their order."""
    run_pipeline("fuse-communication", module)
    return [node.inputs[0].type.nbytes // 160 for node in module.graph if node.domain == "irpar"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("said", "expected", "of_bytes"),
    [
        ({"mode": "auto", "config": None}, [6], [1] * 6),
        ({"mode": "auto"}, [6], [1] * 6),
        ({"mode": "size", "config": 1}, [6], [6]),
        ({"mode": "size", "config": 0.0005}, [3, 3], [3, 3]),  # 480 bytes of 160 each.
        ({"mode": "index", "config": [2, 3]}, [2, 1, 3], [2, 1, 3]),
        ({"mode": "index", "config": [1]}, [1, 5], [1, 5]),
    ],
)
def test_modes(said: dict[str, Any], expected: list[int], of_bytes: list[int]) -> None:
    for network, counts in (("h100-nvlink-ib", expected), ("bytes", of_bytes)):
        module = sums(network)
        set_auto_parallel_context(module, comm_fusion={"allreduce": said})
        assert widths(module) == counts


def test_nothing_is_merged_where_it_is_not_open() -> None:
    module = sums()
    set_auto_parallel_context(module, comm_fusion={"openstate": False, "allreduce": {"mode": "auto", "config": None}})
    assert widths(module) == [1] * 6


def test_other_kinds_are_merged_as_the_pass_is_told() -> None:
    module = sums()
    set_auto_parallel_context(module, comm_fusion={"openstate": True, "allgather": {"mode": "size", "config": 1}})
    assert fusion_said(module).kinds == {"all_gather": FusionMode("size", 1)}
    assert widths(module) == [6]


def test_text_and_clones_have_what_is_said() -> None:
    module = sums()
    set_auto_parallel_context(module, comm_fusion={"allreduce": {"mode": "index", "config": [2]}})
    for copy in (clone_module(module), parse_module(print_module(module).text)):
        assert fusion_said(copy) == FusionSaid({"all_reduce": FusionMode("index", indices=(2,))})
        assert widths(copy) == [2, 4]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "no dict of kinds"),
        ({}, "no dict of kinds"),
        ({"openstate": 1}, "openstate is 1"),
        ({"allreduced": {"mode": "auto"}}, "no kind 'allreduced'"),
        ({"alltoall": {"mode": "auto"}}, "no kind 'alltoall'"),
        ({"alltoall": {"mode": "auto"}}, r"for other kinds use fuse-communication{mode=\.\.\.}"),
        ({3: {"mode": "auto"}}, "no kind 3"),
        ({"allreduce": "auto"}, "'auto' is no"),
        ({"allreduce": {"config": 3}}, "is no"),
        ({"allreduce": {"mode": "auto", "size": 3}}, "is no"),
        ({"allreduce": {"mode": "off"}}, "no mode 'off'"),
        ({"allreduce": {"mode": ["auto"]}}, "no mode"),
        ({"allreduce": {"mode": "auto", "config": 3}}, "has the config 3"),
        ({"allreduce": {"mode": "size"}}, "has the config None"),
        ({"allreduce": {"mode": "size", "config": 0}}, "has the config 0"),
        ({"allreduce": {"mode": "size", "config": -0.5}}, "has the config -0.5"),
        ({"allreduce": {"mode": "size", "config": float("inf")}}, "has the config inf"),
        ({"allreduce": {"mode": "size", "config": True}}, "has the config True"),
        ({"allreduce": {"mode": "size", "config": [3]}}, "has the config"),
        ({"allreduce": {"mode": "index", "config": []}}, "has the config"),
        ({"allreduce": {"mode": "index", "config": [0, 3]}}, "has the config"),
        ({"allreduce": {"mode": "index", "config": [3, 3]}}, "has the config"),
        ({"allreduce": {"mode": "index", "config": [5, 3]}}, "has the config"),
        ({"allreduce": {"mode": "index", "config": ["3"]}}, "has the config"),
        ({"allgather": {"mode": "index", "config": [3]}}, "is of allreduce, not of allgather"),
    ],
)
def test_what_cannot_be_said(said: Any, message: str) -> None:
    module = sums()
    with pytest.raises(IrparError, match=message):
        set_auto_parallel_context(module, comm_fusion=said)
    assert not module.metadata


OFF = {"mode": "off", "size_mb": 25, "indices": []}


def of_kind(**entries: Any) -> str:
    return json.dumps({"kinds": {"all_reduce": OFF | entries}, "numbers": {}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", r"it is \[\], no object"),
        ("{}", "it has not the entries kinds, numbers, and no others"),
        ('{"kinds": [], "numbers": {}}', r"kinds is \[\], no object"),
        ('{"kinds": {}, "numbers": 3}', "numbers is 3, no object"),
        ('{"kinds": {"all_reduce": 3}, "numbers": {}}', "kinds.all_reduce is 3, no object"),
        ('{"kinds": {"all_reduce": {"mode": "off"}}, "numbers": {}}', "kinds.all_reduce has not the entries mode, "),
        (json.dumps({"kinds": {"allreduce": OFF}, "numbers": {}}), "kinds.allreduce is of no kind"),
        (of_kind(size=3), "kinds.all_reduce has not the entries mode, size_mb, indices, and no others"),
        (of_kind(mode="none"), "in kinds.all_reduce there is no mode 'none'"),
        (of_kind(mode=["off"]), r"in kinds.all_reduce there is no mode \['off'\]"),
        (of_kind(size_mb="25"), "in kinds.all_reduce size_mb is '25'"),
        (of_kind(size_mb=0), "in kinds.all_reduce size_mb is 0"),
        (of_kind(size_mb=True), "in kinds.all_reduce size_mb is True"),
        (of_kind(size_mb=float("nan")), "in kinds.all_reduce size_mb is nan"),
        (of_kind(mode="size", size_mb=float("inf")), "in kinds.all_reduce size_mb is inf"),
        (of_kind(mode="index", indices=3), "kinds.all_reduce.indices is 3, no list"),
        (of_kind(mode="index", indices=[5, 3]), r"in kinds.all_reduce the indices are \[5, 3\]"),
        (of_kind(mode="index", indices=["3"]), r"in kinds.all_reduce the indices are \['3'\]"),
        (of_kind(mode="size", indices=[3]), r"in kinds.all_reduce there are indices \[3\] in mode size"),
        ('{"kinds": {}, "numbers": {"w": -1}}', "numbers.w is -1"),
        ('{"kinds": {}, "numbers": {"w": 1.5}}', "numbers.w is 1.5"),
    ],
)
def test_metadata_that_others_have_written(text: str, message: str) -> None:
    module = sums()
    module.metadata[SAID] = text
    with pytest.raises(IrparError, match=f"^the metadata {SAID} of the module cannot be read: {message}"):
        run_pipeline("fuse-communication", module)


# -- parameters -------------------------------------------------------------------------------------------------------


LOSS, BIAS1, BIAS2, WEIGHT = 1, 256, 64, 64 * 256
"""Elements of what a data-parallel step reduces: the loss, and the gradients of two biases and of two weights."""


def reduced(tmp_path: Path, numbers: dict[str, int], *, before: bool) -> list[int]:
    """Elements of each all-reduce of such a step, smallest first; the numbers are said of the model or of the step."""
    models.save(tmp_path / "m.onnx", "mlp", batch=4096)
    module = irpar.load(tmp_path / "m.onnx")
    module.shard("x", ["dp", None])
    for value in module.graph.constants:
        module.shard(value.name, [None] * len(value.shape))
    for name, number in numbers.items() if before else ():
        assert set_comm_fusion(module, name, number)
    step = irpar.train_step(module, optimizer="sgd", loss="mse")
    for name, number in numbers.items() if not before else ():
        assert set_comm_fusion(step, name, number)
    partition = irpar.partition(step, {"dp": 2})
    partition.verify(engine="numpy").check()
    assert {entry["kind"] for entry in partition.plan.collectives} == {"all_reduce"}
    return sorted(entry["bytes"] // 4 for entry in partition.plan.collectives)


NUMBERED = (
    ({}, [LOSS, BIAS2, BIAS1, WEIGHT, WEIGHT]),
    ({"fc*": 1}, [LOSS, BIAS1 + BIAS2 + 2 * WEIGHT]),
    ({"fc1.*": 1, "fc2.*": 2}, [LOSS, BIAS2 + WEIGHT, BIAS1 + WEIGHT]),
    ({"fc*": 1, "fc2.weight": 0}, [LOSS, WEIGHT, BIAS1 + BIAS2 + WEIGHT]),
    ({"*.bias": 3}, [LOSS, BIAS1 + BIAS2, WEIGHT, WEIGHT]),
)
"""Numbers of parameters, to the elements that all-reduces then send."""


@pytest.mark.parametrize(("numbered", "before"), every(2, pairs(NUMBERED, [True, False])))
def test_gradients_of_one_number_go_together(
    numbered: tuple[dict[str, int], list[int]], before: bool, tmp_path: Path
) -> None:
    """Of the model's parameters, numbered before it becomes a step or after."""
    numbers, expected = numbered
    assert reduced(tmp_path, numbers, before=before) == sorted(expected)


def test_weights_that_are_gathered_go_with_their_number(tmp_path: Path) -> None:
    """Three that the network would send at once."""
    text = several(
        "AllGather", ", dim={dim}", [([2, 4, 5], [6, 4, 5]), ([2, 4, 5], [2, 12, 5]), ([2, 4, 5], [2, 4, 15])]
    )
    for numbers, count in (({}, 1), ({"x0": 1, "x1": 1}, 2), ({"x0": 0, "x1": 0}, 3)):
        module = read(text)
        for place, value in enumerate(module.graph.inputs):
            value.source = f"x{place}"
        for node in [node for node in module.graph if node.op_type == "Neg"]:
            node.result.replace_uses(node.inputs[0])
            node.erase()
        module.metadata[SAID] = json.dumps({"kinds": {}, "numbers": numbers})
        run_pipeline("fuse-communication", module)
        assert sum(node.domain == "irpar" for node in module.graph) == count


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("fc1.*", -1, "-1 is no number from 0"),
        ("fc1.*", 1.0, "1.0 is no number"),
        ("fc1.*", True, "True is no number"),
        ("fc9.*", 1, 'no tensor matches "fc9'),
        ("x", 1, '"x" matches no weight\\n.*\\n  it matches %x, which is an input, no weight'),
        ("y", 1, "it matches %y, which is what [A-Za-z]+ gives, no weight"),
    ],
)
def test_numbers_that_cannot_be(name: str, number: Any, message: str, tmp_path: Path) -> None:
    models.save(tmp_path / "m.onnx", "mlp")
    module = irpar.load(tmp_path / "m.onnx")
    with pytest.raises(IrparError, match=message):
        set_comm_fusion(module, name, number)


def test_what_is_said_last_holds(tmp_path: Path) -> None:
    models.save(tmp_path / "m.onnx", "mlp")
    module = irpar.load(tmp_path / "m.onnx")
    assert set_comm_fusion(module, "fc1.*", 1) == 2
    assert set_comm_fusion(module, "*.bias", 0) == 2
    set_auto_parallel_context(module, comm_fusion={"allreduce": {"mode": "size", "config": 8}})
    assert fusion_said(module).numbers == {"fc1.weight": 1, "fc1.bias": 0, "fc2.bias": 0}
