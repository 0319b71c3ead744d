"""Traits of operators; an operator of irpar's own that is no collective is one like any other."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.analysis.cost.device import Device, node_seconds
from irpar.ir import DOMAIN, Node, parse_module
from irpar.kernels import registry
from irpar.ops import OpDef, define, definitions
from irpar.ops.collectives import FREE, KINDS, POINT_TO_POINT, STARTED, WAIT
from irpar.ops.effects import draws_random_numbers, is_communication, is_compute, is_deterministic
from irpar.ops.elementwise import rule_broadcast, same_type
from irpar.ops.op_def import DEFINITIONS, traits_of_operator
from irpar.pass_manager import PassManager

TEXT = """\
graph @main(%x: f32[8, 4]) -> (%z) opset 21 {
  %one = constant : f32[] 1.0
  %two = irpar.Twice(%one) : f32[]
  %a = Mul(%x, %two) : f32[8, 4]
  %y = irpar.Twice(%a) : f32[8, 4]
  %same = irpar.Twice(%a) : f32[8, 4]
  %unused = irpar.Twice(%x) : f32[8, 4]
  %z = Add(%y, %same) : f32[8, 4]
}
"""


@pytest.fixture
def twice() -> Iterator[None]:
    """An operator in irpar's own domain, with all that an operator has."""

    def function(xp: Any, x: Any) -> Any:
        return x + x

    definitions()
    key = (DOMAIN, "Twice")
    define(OpDef(*key, same_type, rule_broadcast, lambda node: node.result.tensor_type.size, is_elementwise=True))
    registry.register("Twice", 1, function, DOMAIN)
    try:
        yield
    finally:
        del DEFINITIONS[key], registry._TABLE.entries[key]


@pytest.mark.usefixtures("twice")
def test_an_operator_of_ours_that_is_no_collective_is_folded_merged_and_removed() -> None:
    module = parse_module(TEXT)
    PassManager.parse("fold-constants,cse,dce").run(module)
    assert [node.op_type for node in module.graph] == ["Mul", "Twice", "Add"]
    (two,) = module.graph.constants
    assert two.data is not None
    assert two.data.numpy() == 2.0


@pytest.mark.usefixtures("twice")
def test_and_is_sharded_priced_and_run() -> None:
    module = parse_module(TEXT)
    module.shard("x", ["tp", None])
    partition = irpar.partition(module, {"tp": 2})
    assert partition.plan.collectives == []
    (node,) = (node for node in partition.module.graph if node.op_type == "Twice")
    assert is_compute(node)
    assert node.result.shape == (4, 4)
    assert node_seconds(node, Device({"f32": 1e9}, 1e9, launch=1e-6)) > 1e-6
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    found = partition.run({"x": x}, engine="numpy")
    np.testing.assert_array_equal(found["z"], 8 * x)


def test_what_nobody_knows_in_our_domain_may_be_waited_for() -> None:
    node = Node("FromAnotherVersion", domain=DOMAIN)
    assert is_communication(node)
    assert not is_compute(node)
    assert is_compute(Node("FromAnotherVersion", domain="com.example"))


@pytest.mark.parametrize("name", [*KINDS, *sorted(FREE), *STARTED, WAIT])
def test_traits_of_collectives(name: str) -> None:
    known = traits_of_operator(DOMAIN, name)
    assert known.collective == ((name in KINDS or name in FREE) and name not in POINT_TO_POINT)
    assert known.point_to_point == (name in POINT_TO_POINT)
    assert known.communicates == (name not in FREE)
    assert known.starts == (name in STARTED)
    assert known.waits == (name == WAIT)
    assert not known.is_compute


@pytest.mark.parametrize(
    ("name", "domain", "is_random"),
    [
        ("RandomNormal", "", True),
        ("BiasDropout", "com.microsoft", False),  # training_mode is left out
        ("Add", "", False),
        ("BiasGelu", "com.microsoft", False),
        ("AllReduce", DOMAIN, False),
    ],
)
def test_chance(name: str, domain: str, is_random: bool) -> None:
    node = Node(name, domain=domain)
    assert draws_random_numbers(node) == is_random
    assert is_deterministic(node) != is_random


def test_nobody_can_say_of_an_operator_that_nobody_knows() -> None:
    node = Node("Roll", domain="com.example")
    assert not is_deterministic(node)
    assert not draws_random_numbers(node)


def test_every_view_moves_elements_only() -> None:
    views = [found for found in definitions() if found.view]
    assert {found.name for found in views} >= {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
    assert all(found.moves_elements for found in views)
    assert all(found.moves_elements for found in definitions() if found.looks_up)
