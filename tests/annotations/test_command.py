"""irpar partition: layout rules by symbolic dims, --annotate, --configuration."""

import json

import onnx
import pytest

import irpar
from irpar.cli import main
from irpar.models import annotations, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save(folder / "gpt.onnx", "gpt")
    (folder / "gpt.json").write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}, "tensors": annotations("gpt")}))
    words = ["--shardings", folder / "gpt.json", "--annotate", folder / "whole.onnx"]
    assert run("partition", folder / "gpt.onnx", "-o", folder / "out", *words, "--json") == 0
    return folder


def run(*words):
    return main([str(word) for word in words])


def plan(out):
    return json.loads((out / "plan.json").read_text())


def test_the_annotated_model_makes_the_same_partition(folder, tmp_path, capsys):
    assert run("partition", folder / "whole.onnx", "-o", tmp_path / "out") == 0
    assert "no tensor was annotated" not in capsys.readouterr().out
    first, second = plan(folder / "out"), plan(tmp_path / "out")
    assert second["mesh"] == first["mesh"]
    assert second["totals"] == first["totals"]
    for kind in ("inputs", "outputs"):
        assert second[kind] == first[kind]
    assert run("verify", tmp_path / "out") == 0


def test_another_view_of_its_devices(folder, tmp_path):
    assert run("partition", folder / "whole.onnx", "-o", tmp_path / "out", "--mesh", "all=4") == 0
    assert plan(tmp_path / "out")["totals"] == plan(folder / "out")["totals"]
    assert plan(tmp_path / "out")["inputs"][0]["sharding"] == [["all:(1)2"], None]


def test_annotations_may_be_left_unread(folder, tmp_path, capsys):
    words = ["-o", tmp_path / "out", "--mesh", "tp=8"]
    assert run("partition", folder / "whole.onnx", *words) == 2
    assert "the mesh tp=8 has 8 devices, configuration irpar has 4" in capsys.readouterr().err
    assert run("partition", folder / "whole.onnx", *words, "--configuration", "nope") == 2
    assert 'no device configuration "nope"' in capsys.readouterr().err


def test_configuration_none(tmp_path, folder):
    model = onnx.load(folder / "whole.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "m.onnx")
    words = ["-o", tmp_path / "out", "--mesh", "tp=8", "--configuration", "none"]
    assert run("partition", tmp_path / "m.onnx", *words) == 0
    assert plan(tmp_path / "out")["totals"]["collectives"] == 0


def test_a_broken_annotation_is_told_with_its_node(tmp_path, folder, capsys):
    model = onnx.load(folder / "whole.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if len(node.device_configurations))
    node.device_configurations[0].sharding_spec[0].device.append(77)
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "whole.onnx.data").write_bytes((folder / "whole.onnx.data").read_bytes())
    assert run("partition", tmp_path / "m.onnx", "-o", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "there is no device 77" in message
    assert node.name in message
    # Other commands do not read them.
    assert run("inspect", tmp_path / "m.onnx") == 0


def test_annotate_replaces_nothing_by_itself(folder, tmp_path, capsys):
    words = ["partition", folder / "gpt.onnx", "-o", tmp_path / "out", "--shardings", folder / "gpt.json"]
    for target, told in (
        (folder / "whole.onnx", "the file exists"),
        (folder / "gpt.onnx", "one of the files that are read"),
        (folder / "gpt.json", "one of the files that are read"),
        (tmp_path / "out" / "a.onnx", "which holds the partition alone"),
        (folder, "the target is a folder"),
    ):
        assert run(*words, "--annotate", target) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    pipeline = "infer-types,localize"
    assert run(*words, "--annotate", tmp_path / "a.onnx", "--pipeline", pipeline) == 2
    assert "the pipeline has no complete-sharding" in capsys.readouterr().err
    assert run(*words, "--annotate", folder / "whole.onnx", "--force") == 0


def test_symbolic_dims_are_names_for_layout_rules(tmp_path):
    save(tmp_path / "gpt.onnx", "gpt", dynamic=True)
    (tmp_path / "rules.yaml").write_text(
        "mesh: {dp: 2, tp: 2}\n"
        "layout:\n"
        "  rules: {batch: dp, heads: tp, ffn: tp}\n"
        "  names: {h.*.attn.q.weight: [hidden, heads], h.*.mlp.c_fc.weight: [hidden, ffn]}\n"
    )
    words = ["--bind", "batch=4,seq=32", "--shardings", tmp_path / "rules.yaml"]
    assert run("partition", tmp_path / "gpt.onnx", "-o", tmp_path / "out", *words) == 0
    done = plan(tmp_path / "out")
    assert done["inputs"][0]["sharding"] == [["dp"], None]
    assert [entry["axes"] for entry in done["collectives"]] == [["tp"]] * 4
    module = irpar.load(tmp_path / "gpt.onnx", bind={"batch": 4, "seq": 32})
    assert module.dim_names["input_ids"] == ("batch", "seq")
