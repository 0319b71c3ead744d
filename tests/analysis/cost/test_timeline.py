"""Copies in time: which are hidden behind what else a rank does."""

import pytest

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.timeline import copy_seconds
from irpar.ir import parse_module

SIZE = 1 << 20
"""f32 elements of a copy."""


def _seconds(lines: str, communication: float = 0.0) -> tuple[float, float, float]:
    """Total and exposed seconds of the copies of a program, and those of one copy."""
    text = (
        f'mesh @m = ["x"=1]\ngraph local @g(%x: f32[{SIZE}], %h: f32[{SIZE}] in host) -> (%y) opset 21 ranks [0] {{\n'
        f"{lines.replace('T', f'f32[{SIZE}]')}\n}}\n"
    )
    network = network_of("h100-nvlink-ib")
    assert network.host_link is not None
    found = copy_seconds(network, parse_module(text).graph, lambda node: communication)
    assert found is not None
    return found.total, found.exposed, network.host_link.latency + 4 * SIZE / network.host_link.bandwidth


STARTED = """\
  %s = irpar.CopyStart(%h) {id=0, to="device"} : inflight<T>
  %r = irpar.AllReduce(%x) {axes=["x"], reduce="sum", id=0} : T
  %d = irpar.Wait(%s) {id=0} : T
  %y = Add(%d, %r) : T"""


def test_a_copy_that_nobody_started_before_is_waited_for() -> None:
    total, exposed, one = _seconds('  %d = irpar.Copy(%h) {to="device"} : T\n  %y = Add(%d, %x) : T')
    assert total == exposed == pytest.approx(one)


def test_a_started_copy_is_hidden_behind_what_else_there_is() -> None:
    assert _seconds(STARTED, communication=1.0)[1] == 0.0
    total, exposed, one = _seconds(STARTED, communication=1e-5)
    assert (total, exposed) == pytest.approx((one, one - 1e-5))


def test_started_copies_run_one_after_the_other() -> None:
    lines = STARTED.replace("  %r", '  %t = irpar.CopyStart(%x) {id=1, to="host"} : inflight<T> in host\n  %r')
    total, exposed, one = _seconds(lines + "\n  %u = irpar.Wait(%t) {id=1} : T in host")
    assert total == pytest.approx(2 * one)
    # The second is hidden behind the Add alone, which takes part of it.
    assert one < exposed < 2 * one


def test_each_trip_of_a_loop_copies() -> None:
    lines = """\
  %n = constant : i64[] 3
  %true = constant : bool[] true
  %y = Loop(%n, %true, %x) {body=graph @body(%i: i64[], %go: bool[], %v: T) -> (%go, %out) {
    %down = irpar.Copy(%v) {to="host"} : T in host
    %sum = Add(%down, %h) {| place=host} : T in host
    %out = irpar.Copy(%sum) {to="device"} : T
  }} : T"""
    total, exposed, one = _seconds(lines)
    assert (total, exposed) == pytest.approx((6 * one, 6 * one))


def test_a_network_that_does_not_know_the_way_gives_none() -> None:
    text = 'mesh @m = ["x"=1]\ngraph local @g(%h: f32[4] in host) -> (%y) opset 21 ranks [0] {\n'
    module = parse_module(text + '  %y = irpar.Copy(%h) {to="device"} : f32[4]\n}\n')
    assert copy_seconds(network_of("bytes"), module.graph, lambda node: 0.0) is None
