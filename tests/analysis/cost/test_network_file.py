"""The file of --network: what is read, and errors that name the line."""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.cost.network import Disk, Speed
from irpar.analysis.cost.network_file import NetworkError, find_network, read_network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.network_presets import PRESETS
from irpar.sharding import Axis, IrparError, Mesh
from tests.budget import budget

TEXT = """\
name: two workstations
launch: 1e-6
links:
  - {name: pcie, devices: 2, latency: 6e-6, bandwidth: 25e9}
  - name: ethernet
    latency: 30e-6
    bandwidth: 1250000000
    algorithms: {all_reduce: [ring, doubling], all_to_all: direct}
    kinds:
      broadcast: {latency: 1e-5, bandwidth: 1e9}
axes: {tp: pcie}
device:
  flops: {f32: 20e12, f16: 4.0e+13}
  memory_bandwidth: .9e12
  memory: 24e9
  efficiency: 1
  launch: 0
  uses_tf32: true
"""


def write(folder: Path, text: str, name: str = "net.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_what_is_read(tmp_path: Path) -> None:
    network = read_network(write(tmp_path, TEXT))
    assert (network.name, network.launch, dict(network.axes)) == ("two workstations", 1e-6, {"tp": "pcie"})
    pcie, ethernet = network.links
    assert (pcie.devices, pcie.speed.latency, pcie.speed.bandwidth) == (2, 6e-6, 25e9)
    assert (ethernet.devices, ethernet.speed.bandwidth) == (None, 1.25e9)
    assert ethernet.algorithms_of("all_reduce") == ("ring", "doubling")
    assert ethernet.algorithms_of("all_to_all") == ("direct",)
    assert ethernet.speed_of("broadcast").latency == 1e-5
    assert network.device is not None
    assert (network.device.flops["f16"], network.device.memory_bandwidth) == (4e13, 9e11)
    assert (network.device.uses_tf32, network.device.memory) == (True, 24e9)
    mesh, tp = Mesh({"tp": 4}), [Axis("tp")]
    assert network.seconds("all_gather", tp, 1e6, mesh) == network_of(network.text).seconds("all_gather", tp, 1e6, mesh)


def test_json_and_the_name_of_the_file(tmp_path: Path) -> None:
    link = {"name": "l", "latency": 1e-6, "bandwidth": 1e9}
    network = read_network(write(tmp_path, json.dumps({"links": [link]}, indent="\t"), "lab.json"))
    assert (network.name, network.device) == ("lab", None)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "bytes"])
def test_presets_are_files_too(tmp_path: Path, name: str) -> None:
    network = read_network(write(tmp_path, json.dumps(PRESETS[name]), "preset.json"))
    mesh, axes = Mesh({"dp": 4, "tp": 4}), [Axis("dp"), Axis("tp")]
    assert network.seconds("all_reduce", axes, 1e6, mesh) == network_of(name).seconds("all_reduce", axes, 1e6, mesh)


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("devices: 2", "devices: two", 4, 'devices is "two"'),
        ("latency: 30e-6", "latency: '30e-6'", 6, 'latency is "30e-6"'),
        ("bandwidth: 1250000000", "bandwidth: .inf", 7, "no number"),
        ("bandwidth: 1250000000", "bandwidth: 0x10", 7, "no number"),
        ("doubling", "dubling", 8, 'all_reduce is "dubling"'),
        ("broadcast:", "brodcast:", 10, 'no kind of collective "brodcast"'),
        ("tp: pcie", "tp: nvlink", 11, 'tp is "nvlink"'),
        ("f16:", "fp16:", 13, 'no type "fp16"'),
        ("efficiency: 1", "efficiency: 1.5", 16, "efficiency is 1.5"),
        ("uses_tf32: true", "uses_tf32: maybe", 18, 'uses_tf32 is "maybe"'),
        ("launch: 1e-6", "lunch: 1e-6", 2, 'no field "lunch"'),
        ("  memory: 24e9", "  launch: 24e9", 17, '"launch" comes twice, first in line 15'),
        ("  memory_bandwidth: .9e12\n", "", 12, "memory_bandwidth is missing"),
        ("axes: {tp: pcie}", "axes: {tp: pcie", 12, "not YAML"),
        ("name: two", "name: !odd two", 1, "tag"),
        ("    latency: 30e-6\n", "", 5, "latency is missing"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, old: str, new: str, line: int, what: str) -> None:
    assert old in TEXT
    path = write(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(NetworkError) as caught:
        read_network(path)
    assert what in caught.value.what
    assert f"line {line}" in caught.value.where, caught.value.where
    assert caught.value.do


@pytest.mark.parametrize(
    "text", ["", "3", "[1, 2]", "links: &a [*a]", "links: [[[[[[[[[[[1]]]]]]]]]]]", "a: " + "[" * 2000]
)
def test_other_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(NetworkError):
        read_network(write(tmp_path, text))


HOST = {
    "links": [{"name": "net", "latency": 1e-6, "bandwidth": 1e9}],
    "host": {"flops": {"f32": 1e12}, "memory_bandwidth": 5e10, "memory": 64e9},
    "host_link": {"latency": 6e-6, "bandwidth": 25e9},
    "disk": {"read": 5e9, "write": 3e9},
}


def test_the_host_and_its_disk(tmp_path: Path) -> None:
    network = read_network(write(tmp_path, json.dumps(HOST)))
    assert network.host is not None
    assert (network.host.rate("f64"), network.host.memory) == (1e12, 64e9)
    assert network.host_link == Speed(6e-6, 25e9)
    assert network.disk == Disk(5e9, 3e9, None)
    plain = read_network(write(tmp_path, json.dumps({"links": HOST["links"]}), "plain.json"))
    assert (plain.host, plain.host_link, plain.disk) == (None, None, None)


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        ("host", {"flops": {"f64": 1e12}, "memory_bandwidth": 5e10}, "the host has no rate for f32"),
        ("host", {"flops": {"f32": 1e12}}, "memory_bandwidth is missing"),
        ("host_link", {"latency": 6e-6}, "bandwidth is missing"),
        ("host_link", {"latency": 6e-6, "bandwidth": 1e9, "devices": 2}, 'no field "devices" here'),
        ("disk", {"read": 5e9}, "write is missing"),
        ("disk", {"read": 0, "write": 1}, "read is 0"),
        ("disk", {"read": 1, "write": 1, "capacity": -1}, "capacity is -1"),
        ("disk", 5e9, "disk is 5000000000.0"),
    ],
)
def test_what_a_host_cannot_be(place: str, value: object, what: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=re.escape(what)):
        read_network(write(tmp_path, json.dumps({**HOST, place: value})))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "bytes"])
def test_presets_know_their_hosts(name: str) -> None:
    network = network_of(name)
    assert network.disk is not None
    assert network.disk.write < network.disk.read
    has_host = name != "cpu-ethernet"  # There the device is the host.
    assert (network.host is not None, network.host_link is not None) == (has_host, has_host)


def test_many_aliases_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 7)]
    with pytest.raises(NetworkError, match="too many fields"):
        read_network(write(tmp_path, "\n".join(lines)))


@given(
    st.integers(0, len(TEXT) - 1),
    st.sampled_from(["", "x", "0", "-", ":", "{", "}", "\n", " ", '"', "[", "~", "&", "*"]),
)
@settings(max_examples=budget(200), deadline=None)
def test_changed_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, put: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), TEXT[:place] + put + TEXT[place + 1 :], "changed.yaml")
    with suppress(NetworkError):
        read_network(path)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    assert find_network("net.yaml") == find_network(path) == find_network(find_network(path))
    assert find_network("a100-pcie") is network_of("a100-pcie")
    (tmp_path / "plain").write_text(TEXT)
    assert find_network("plain").links
    for wrong, note in (("h100", "nearest names: h100-nvlink-ib"), ("cpu-etherent", "nearest names: cpu-ethernet")):
        with pytest.raises(IrparError, match=note):
            find_network(wrong)
    with pytest.raises(NetworkError, match="cannot read the network file"):
        find_network("none.yaml")
