"""ConvTranspose over sharded places: the borders of the result are sent where that is less, and the numbers are right."""

import itertools
from random import Random

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from tests.budget import budget


def model(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], outputs: int) -> Module:
    reach = dilation * (kernel - 1) + 1
    made = (size - 1) * stride + reach - sum(pads)
    numbers = np.arange(4 * outputs * kernel, dtype=np.float32) % 7 - 3
    values = numbers.reshape(4, outputs, kernel).tolist()
    return parse_module(
        f"""
        graph @g(%x: f32[2, 4, {size}]) -> (%y) opset 21 {{
          %w = constant : f32[4, {outputs}, {kernel}] {values} from "w"
          %y = ConvTranspose(%x, %w) {{strides=[{stride}], dilations=[{dilation}], pads=[{pads[0]}, {pads[1]}], """
        f"""kernel_shape=[{kernel}]}} : f32[2, {outputs}, {made}]
        }}
        """
    )


CASES = [
    (size, kernel, stride, dilation, pads, outputs)
    for size, kernel, stride, dilation, outputs in itertools.product((8, 10), (2, 3, 4), (1, 2), (1, 2), (1, 2, 4))
    for pads in ((0, 0), (1, 1), (1, 0), (0, 2))
    if (size - 1) * stride + dilation * (kernel - 1) + 1 - sum(pads) > 0
]


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_numbers(parts: int) -> None:
    random = Random(0)
    for case in random.sample(CASES, budget(len(CASES))):
        module = model(*case)
        x = np.float32([random.randrange(-4, 5) for _ in range(8 * case[0])]).reshape(2, 4, case[0])
        expected = irpar.partition(module, "one=1").run({"x": x}, engine="numpy")["y"]
        module.shard("x", [None, None, ["sp"]])
        module.shard("y", [None, None, ["sp"]])
        found = irpar.partition(module, {"sp": parts}).run({"x": x}, engine="numpy")["y"]
        np.testing.assert_array_equal(found, expected, err_msg=str(case))


@pytest.mark.parametrize(("outputs", "sent"), [(1, 2 * 8), (4, 2 * 32), (8, 2 * 32)])
def test_what_has_fewer_channels_is_sent(outputs: int, sent: int) -> None:
    module = model(8, 3, 1, 1, (1, 1), outputs)
    module.shard("x", [None, None, ["sp"]])
    module.shard("y", [None, None, ["sp"]])
    plan = irpar.partition(module, {"sp": 4}).plan
    assert {entry["kind"] for entry in plan.collectives} == {"permute"}
    assert plan.totals["sent_bytes"] == sent
