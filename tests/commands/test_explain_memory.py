"""irpar explain OUT --memory: what is held at the peak, what would lower it, the picture; and each mistake."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import irpar
from irpar.pass_manager.default_pipeline import composed, with_recompute
from irpar.passes.place import Place
from tests.advice.test_lower_peak import MODEL, step
from tests.command_line import Capture, call, refused
from tests.training.programs import with_weights

PEAK = """\
the peak of rank 0: 33.5 kB, in step 13 of 62: Sub of %forward, forward
layer       parameters  activations      all
h.0              256 B      10.2 kB  10.5 kB
h.2              260 B      8.19 kB  8.45 kB
h.1              256 B      8.19 kB  8.45 kB
(no layer)     2.05 kB       4.1 kB  6.15 kB

most at the peak               values    bytes
h.*/act (3)       activations       6  12.3 kB
h.*/fc (3)        activations       4  8.19 kB
h.* (3)           activations       3  6.14 kB
(no layer)        activations       3   4.1 kB
(no layer)        parameters        1  2.05 kB
h.*/fc (3)        parameters        3    768 B
h.2/act           parameters        1      4 B

ZeRO, micro-batches and other shardings are not tried: the plan does not say which file the model came from
   would lower the peak                              to     by  time a step
1  compute h.*/* again in the backward pass     19.2 kB  42.7%       +14.5%
2  compute h.*/act* again in the backward pass  23.3 kB  30.5%        +9.7%
3  compute h.*/fc* again in the backward pass   27.4 kB  18.3%        +4.8%
1  --recompute 'h.*/*'
2  --recompute 'h.*/act*'
3  --recompute 'h.*/fc*'
each tried by itself; 124 us a step by h100-nvlink-ib: bytes, the network of the partition, does not know all times
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain_memory")
    irpar.partition(step(), "dp=2").save(folder / "plain")
    irpar.partition(step(), "dp=2", pipeline=with_recompute("recompute{budget=0.8, method=sqrt}")).save(folder / "less")
    irpar.partition(with_weights(MODEL), "dp=2").save(folder / "inference")
    return folder


def explained(capsys: Capture, folder: Path, *words: object) -> dict[str, object]:
    """The JSON of `irpar explain OUT --memory`."""
    code, printed, _ = call(capsys, "explain", folder, "--memory", "--json", *words)
    assert code == 0
    found = json.loads(printed)
    assert isinstance(found, dict)
    return found


def test_what_is_held_at_the_peak_and_what_would_lower_it(folder: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "explain", folder / "plain", "--memory")
    assert code == 0
    # Some releases of rich have a blank more before the last column.
    shown, found = (re.sub(" +", " ", text) for text in (PEAK, printed))
    assert shown in found
    assert call(capsys, "explain", folder / "plain", "--memory")[1] == printed


def test_json_has_all_that_is_held(folder: Path, capsys: Capture) -> None:
    found = explained(capsys, folder / "less", "--rank", 1)
    peak = found["peak"]
    assert isinstance(peak, dict)
    planned = json.loads((folder / "less" / "plan.json").read_text())["ranks"][1]
    assert peak["rank"] == 1
    assert peak["bytes"] == sum(each["bytes"] for each in peak["held"]) == planned["peak_bytes"]
    assert {"layer": "h.0", "scope": "h.0/fc", "use": "parameters", "bytes": 256} in peak["held"]
    assert peak["node"]
    assert peak["phase"] in ("forward", "backward", "optimizer")
    assert isinstance(found["changes"], list)
    assert all(each["peak_bytes"] < peak["bytes"] for each in found["changes"])


@pytest.mark.parametrize(("name", "panels"), [("plain", 1), ("less", 2), ("inference", 1)])
def test_the_picture(name: str, panels: int, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "memory.svg"
    code, printed, _ = call(capsys, "explain", folder / name, "--memory", "--svg", path)
    assert code == 0
    assert f"picture: {path}" in printed
    said = [each.text or "" for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert sum(each.startswith("peak ") for each in said) == panels
    assert any(each.startswith("memory budget: ") for each in said) == (name == "less")
    if name == "less":
        before, after = (json.loads((folder / each / "plan.json").read_text()) for each in ("plain", "less"))
        held = [f"{plan['ranks'][0]['peak_bytes'] / 1e3:.1f} kB" for plan in (before, after)]
        assert [each.split(",")[0] for each in said if each.startswith("peak ")] == [f"peak {each}" for each in held]
    text = path.read_bytes()
    refused(capsys, "the file exists", "explain", folder / name, "--memory", "--svg", path)
    assert call(capsys, "explain", folder / name, "--memory", "--svg", path, "--force", "--json")[0] == 0
    assert path.read_bytes() == text


def test_without_a_backward_pass_it_says_so(folder: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "explain", folder / "inference", "--memory")
    assert code == 0
    assert "the peak of rank 0" in printed
    assert "there is no backward pass" in printed


def test_without_the_programs_it_tells_what_the_plan_has(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "plan.json").write_bytes((folder / "plain" / "plan.json").read_bytes())
    code, printed, _ = call(capsys, "explain", tmp_path, "--memory")
    assert code == 0
    assert "what is held at the peak is in the programs: not here: part0" in printed
    bare, full = explained(capsys, tmp_path), explained(capsys, folder / "plain")
    assert bare["peak"] is None
    assert "part0" in bare["missing"]
    assert bare.keys() == full.keys()
    refused(capsys, "not here: part0", "explain", tmp_path, "--memory", "--rank", 0)
    refused(capsys, "not here: part0", "explain", tmp_path, "--memory", "--svg", tmp_path / "no.svg")


def test_weights_need_not_be_there(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    irpar.partition(step(), "dp=2").save(tmp_path / "none", weights="none")
    assert explained(capsys, tmp_path / "none")["peak"] == explained(capsys, folder / "plain")["peak"]
    code, printed, _ = call(capsys, "plan-memory", tmp_path / "none")
    assert code == 0
    assert call(capsys, "plan-memory", folder / "plain")[1] == printed


def test_mistakes(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ("explain", folder / "plain")
    refused(capsys, "--rank is for --memory alone", *given, "--rank", 0)
    refused(capsys, "--svg is for --memory alone", *given, "--svg", tmp_path / "a.svg", "--conflicts")
    refused(capsys, "--force is for --svg alone", *given, "--memory", "--force")
    refused(capsys, "there is no rank 7", *given, "--memory", "--rank", 7)
    refused(capsys, "the picture is SVG", *given, "--memory", "--svg", tmp_path / "a.png")
    refused(capsys, "cannot write the picture", *given, "--memory", "--svg", tmp_path / "none" / "a.svg")
    (tmp_path / "folder.svg").mkdir()
    refused(capsys, "the target is a folder", *given, "--memory", "--svg", tmp_path / "folder.svg", "--force")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.svg"]


def test_a_device_that_holds_nothing(tmp_path: Path, capsys: Capture) -> None:
    pipeline = composed(programs=[Place(host=("*",))])
    irpar.partition(with_weights(MODEL), "dp=2", pipeline=pipeline).save(tmp_path / "out")
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "--memory")
    assert code == 0
    assert printed.splitlines()[-1] == "the device holds nothing"
