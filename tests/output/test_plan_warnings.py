"""What a plan warns of: it is slower than one device, too large for one, or ranks are idle."""

import textwrap
from pathlib import Path

import onnx
import pytest

import irpar
from irpar.ir import parse_module
from irpar.output.plan_warnings import warnings
from tests.written import Specs, model_of_text

DEVICE = """
name: slow links
launch: 1e-3
links: [{name: l, latency: 1e-3, bandwidth: 25e9}]
device: {flops: {f32: 20e12}, memory_bandwidth: 1e12, memory: MEMORY, launch: 1e-6}
"""


def warned(folder: Path, specs: Specs, mesh: str, memory: str = "") -> list[str]:
    """The warnings about x w, with x of 6 rows."""
    text = "g (float[6, 64] x, float[64, 64] w) => (float[6, 64] y) { y = MatMul(x, w) }"
    onnx.save(model_of_text(text, ["w"]), folder / "model.onnx")
    network = None
    if memory:
        network = folder / "network.yaml"
        network.write_text(DEVICE.replace("MEMORY", memory))
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, specs)
    return warnings(irpar.partition(module, mesh, network=network).plan)


def test_a_good_partition_has_none(tmp_path: Path) -> None:
    assert warned(tmp_path, {"x": ["dp", None], "w": [None, "tp"]}, "dp=2,tp=4") == []


def test_slower_than_one_device(tmp_path: Path) -> None:
    specs: Specs = {"w": ["tp", None], "y": [None, None]}
    (told,) = warned(tmp_path, specs, "tp=4", memory="1e9")
    assert told.startswith("predicted ")
    assert "which one device does in" in told
    assert warned(tmp_path, {"w": [None, "tp"]}, "tp=4", memory="1e9") == []


def test_more_than_a_device_has(tmp_path: Path) -> None:
    specs: Specs = {"w": [None, "tp"]}
    assert [told.split(" at its peak")[1] for told in warned(tmp_path, specs, "tp=4", memory="1000")] == [
        ", and a device has 1 kB"
    ]


def test_more_than_its_shares_of_host_and_disk(tmp_path: Path) -> None:
    """Eight numbers lie on the host, and four of them on the disk, too."""
    network = tmp_path / "network.yaml"
    rates = "flops: {f32: 20e12}, memory_bandwidth: 1e12"
    network.write_text(
        DEVICE.replace("MEMORY", "1e9")
        + f"host: {{{rates}, memory: 31}}\ndisk: {{read: 1e9, write: 1e9, capacity: 15}}\n"
    )
    text = """
        mesh @m = ["x"=1]
        graph local @g(%h: f32[4] in host) -> (%y) opset 21 ranks [0] {
          %g = Neg(%h) {| place=host} : f32[4] in host
          %d = irpar.Copy(%g) {to="disk"} : f32[4] in disk
          %y = irpar.Copy(%d) {to="device"} : f32[4]
        }
        """
    partition = irpar.partition(parse_module(textwrap.dedent(text)), pipeline="group-segments", network=network)
    assert [told.split(" at its peak")[1] for told in warnings(partition.plan)] == [
        ", and its share of the host is 31 B",
        ", and its share of the disk is 15 B",
    ]


@pytest.mark.parametrize(
    ("specs", "mesh", "told"),
    [
        ({"x": ["dp", None]}, "dp=8", "2 of 8 ranks hold no elements of any tensor that is sharded"),
        ({"x": ["dp", None]}, "dp=2,tp=4", "6 of 8 ranks hold the same blocks as another, and do the same work"),
        (
            {"x": ["dp", None], "w": [None, "dp"], "y": [None, "dp"]},
            "dp=8",
            "2 of 8 ranks hold no elements of x [6@dp, 64], which has fewer than there are ranks to shard it",
        ),
    ],
)
def test_idle_ranks(tmp_path: Path, specs: Specs, mesh: str, told: str) -> None:
    assert warned(tmp_path, specs, mesh) == [told]
