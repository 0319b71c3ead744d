"""--network, network= and what plan.json predicts, from the outside."""

import json
from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from irpar.analysis.cost.network_lookup import network_of
from irpar.ir import parse_module, read_text
from irpar.output.plan_reading import read_plan
from irpar.pass_manager.reproducer import read_reproducer, write_reproducer
from irpar.sharding import IrparError
from tests.command_line import call

FILE = """\
name: two links
links:
  - {name: fast, devices: 2, latency: 1e-6, bandwidth: 1e12}
  - {name: slow, latency: 1e-3, bandwidth: 1e6}
"""
MOVE = """\
mesh @m = ["x"=2, "y"=2]
graph @g(%x: f32[32@y, 64@x]) -> (%y) opset 21 {
  %y = Relu(%x) : f32[32, 64] replicated
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    onnx.save(models.build("mlp"), folder / "mlp.onnx")
    tensors = models.annotations("mlp")
    (folder / "mlp.json").write_text(json.dumps({"mesh": {"dp": 2, "tp": 4}, "tensors": tensors}))
    (folder / "net.yaml").write_text(FILE)
    return folder


def annotated(folder: Path) -> irpar.Module:
    module = irpar.load(folder / "mlp.onnx")
    irpar.annotate(module, models.annotations("mlp"))
    return module


def test_prediction_by_hand(folder: Path) -> None:
    """One all-reduce of 4 x 64 floats over tp=4, inside a node; three matmuls' worth of nodes."""
    module = annotated(folder)
    plan = irpar.partition(module, "dp=2,tp=4", network="h100-nvlink-ib").plan
    assert plan.predicted is not None
    device = network_of("h100-nvlink-ib").device
    assert device is not None
    communication = 8.4e-6 + 2 * 2 * 3.4e-6 + 1536 / 450e9
    assert plan.predicted["communication_seconds"] == pytest.approx(communication)
    assert plan.predicted["exposed_communication_seconds"] == plan.predicted["communication_seconds"]
    compute = plan.predicted["compute_seconds"]
    assert compute >= max(plan.totals["flops_per_rank"] / device.rate("f32"), 3 * device.launch)
    assert plan.predicted["step_seconds"] == compute + plan.predicted["communication_seconds"]
    assert plan.network == "h100-nvlink-ib"


def test_bytes_predicts_nothing_and_is_the_default(folder: Path) -> None:
    module = annotated(folder)
    plan, explicit = (irpar.partition(module, "dp=2,tp=4", network=network).plan for network in (None, "bytes"))
    assert plan == explicit
    assert (plan.network, plan.predicted) == ("bytes", None)


def test_a_file_without_a_device(folder: Path) -> None:
    plan = irpar.partition(annotated(folder), "dp=2,tp=4", network=folder / "net.yaml").plan
    assert plan.predicted is not None
    assert plan.predicted["compute_seconds"] is plan.predicted["step_seconds"] is None
    # tp is 2 x 2 over nodes of 2: halving inside, doubling across, of 1024 bytes.
    expected = 2e-6 + 1024 / 1e12 + 1e-3 + 512 / 1e6
    assert plan.predicted["communication_seconds"] == pytest.approx(expected)
    assert json.loads(plan.network)["name"] == "two links"


def test_the_module_keeps_what_it_was_told(folder: Path) -> None:
    module = annotated(folder)
    module.network = "a100-pcie"
    assert irpar.partition(module, "dp=2,tp=4").plan.network == "a100-pcie"
    assert irpar.partition(module, "dp=2,tp=4", network="bytes").plan.network == "bytes"
    assert module.network == "a100-pcie"
    module.network = "a100"
    with pytest.raises(IrparError, match='no network "a100"'):
        irpar.partition(module, "dp=2,tp=4")


def test_partition_and_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("partition", folder / "mlp.onnx", "--shardings", folder / "mlp.json", "--force", "-o", folder / "out")
    code, out, err = call(capsys, *words, "--network", "a100-pcie")
    assert code == 0, err
    (line,) = (line for line in out.splitlines() if line.startswith("predicted"))
    assert line.startswith("predicted (a100-pcie): ")
    assert "communication" in line
    code, out, _ = call(capsys, "explain", folder / "out")
    assert line in out.splitlines()
    _, out, _ = call(capsys, "explain", folder / "out", "--json")
    plan = read_plan(folder / "out")
    assert (json.loads(out)["network"], json.loads(out)["predicted"]) == ("a100-pcie", plan.predicted)
    assert call(capsys, *words, "--network", folder / "net.yaml")[0] == 0
    code, out, _ = call(capsys, "explain", folder / "out")
    assert "predicted (two links): communication" in out
    assert call(capsys, *words)[0] == 0
    assert "predicted" not in call(capsys, "explain", folder / "out")[1]


@pytest.mark.parametrize(
    ("network", "told"),
    [
        ("h100", "nearest names: h100-nvlink-ib"),
        ("missing.yaml", "cannot read the network file"),
        ("mlp.json", 'no field "mesh"'),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], network: str, told: str) -> None:
    given = folder / network if "." in network else network
    words = ("partition", folder / "mlp.onnx", "--shardings", folder / "mlp.json", "-o", folder / "never")
    code, _, err = call(capsys, *words, "--network", given)
    assert code == 2
    assert told in err
    assert "do: " in err
    assert not (folder / "never").exists()


def gathered(text: str) -> list[str]:
    """The axes of the gathers of a program, in its order."""
    return [str(node.attributes["axes"][0]) for node in parse_module(text).graph if node.op_type == "AllGather"]


def test_opt_takes_and_keeps_the_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """x is slow: it is gathered first, while the blocks are small. The text names the network, and replays it."""
    (folder / "move.irpar").write_text(MOVE)
    words = ("opt", folder / "move.irpar", "--pipeline", "insert-redistribution")
    code, by_bytes, err = call(capsys, *words)
    assert code == 0, err
    code, text, err = call(capsys, *words, "--network", folder / "net.yaml")
    assert code == 0, err
    assert (gathered(by_bytes), gathered(text)) == (["y", "x"], ["x", "y"])
    assert text.startswith("module {network=")
    assert str(parse_module(text)) == text
    fresh = parse_module(f"{text.splitlines()[0]}\n{MOVE}")
    irpar.PassManager.parse("insert-redistribution").run(fresh)
    assert str(fresh) == text
    assert call(capsys, *words, "--network", folder / "net.yaml", "-o", folder / "moved.irpar")[0] == 0
    assert read_text(folder / "moved.irpar").network == fresh.network


def test_a_reproducer_brings_its_network(folder: Path, tmp_path: Path) -> None:
    module = parse_module(MOVE)
    module.network = "a100-pcie"
    passes = irpar.PassManager.parse("insert-redistribution").passes
    path = write_reproducer(tmp_path, module, passes, ValueError("no"))
    again, pipeline = read_reproducer(path)
    assert (again.network, pipeline) == ("a100-pcie", "insert-redistribution")
