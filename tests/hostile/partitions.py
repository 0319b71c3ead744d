"""Damaged partitions of a GPT over dp=2,tp=2, by what the error must say of them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from ..older_plans import forget_programs

Damage = Callable[[Path], object]
Plan = dict[str, Any]


def edited(change: Callable[[Plan], object]) -> Damage:
    """Damage that changes plan.json by hand."""

    def damage(out: Path) -> None:
        plan = json.loads((out / "plan.json").read_text())
        change(plan)
        (out / "plan.json").write_text(json.dumps(plan))

    return damage


def replaced(old: str, new: str) -> Damage:
    """Damage that changes the text of plan.json."""

    def damage(out: Path) -> None:
        text = (out / "plan.json").read_text()
        assert old in text
        (out / "plan.json").write_text(text.replace(old, new, 1))

    return damage


def model_changed(statement: str) -> Damage:
    """Damage that changes the model `m` of part 0 by a statement."""

    def damage(out: Path) -> None:
        path = out / "part0" / "model.onnx"
        made = onnx.load(path, load_external_data=False)
        exec(statement, {"m": made, "g": made.graph, "onnx": onnx, "json": json})
        path.write_bytes(made.SerializeToString())
        forget_programs(out)

    return damage


def weights_link(out: Path) -> None:
    (out / "part0" / "weights.bin").rename(out.parent / "w")
    (out / "part0" / "weights.bin").symlink_to(out.parent / "w")


def swap_parts(out: Path) -> None:
    (out / "part0").rename(out / "x")
    (out / "part1").rename(out / "part0")
    (out / "x").rename(out / "part1")


def swap_files(name: str) -> Damage:
    def damage(out: Path) -> None:
        first, second = out / "part0" / name, out / "part1" / name
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)

    return damage


def swap_coords(plan: Plan) -> None:
    first, second = plan["ranks"][:2]
    first["coords"], second["coords"] = second["coords"], first["coords"]


def swap_ranks(plan: Plan) -> None:
    plan["ranks"][0]["part"], plan["ranks"][1]["part"] = plan["ranks"][1]["part"], plan["ranks"][0]["part"]


FILES: dict[str, Damage] = {
    "part0/weights.bin has 1,000 bytes, it was written with": lambda out: os.truncate(
        out / "part0" / "weights.bin", 1000
    ),
    "part0/weights.bin has 0 bytes, it was written with": lambda out: os.truncate(out / "part0" / "weights.bin", 0),
    "part0/weights.bin is not there": lambda out: (out / "part0" / "weights.bin").unlink(),
    "is a symbolic link that leaves": weights_link,
    " part1 (rank": lambda out: shutil.rmtree(out / "part1"),
    "not an ONNX model": lambda out: (
        (out / "part0" / "model.onnx").write_bytes(b"hello"),
        forget_programs(out),
    ),
    "not an ONNX model, or a damaged one": lambda out: (
        os.truncate(out / "part1" / "model.onnx", 3000),
        forget_programs(out),
    ),
    "part1/model.onnx is not the file that was written here": lambda out: os.truncate(
        out / "part1" / "model.onnx", 3000
    ),
    "part0/model.onnx is no part of a partition": lambda out: shutil.copy(
        out.parent / "gpt.onnx", out / "part0" / "model.onnx"
    ),
    "part0/model.onnx is part 1": swap_parts,
    "model.onnx is part 1, plan.json has it as part 0": swap_files("model.onnx"),
    "part0/weights.bin is not the file that was written here": swap_files("weights.bin"),
    "plan.json is not JSON": lambda out: (out / "plan.json").write_bytes(b"\xff\xfe"),
    "plan.json is not JSON: Expecting property name": lambda out: (out / "plan.json").write_text(
        (out / "plan.json").read_text()[:3]
    ),
    "cannot read the plan": lambda out: (out / "plan.json").unlink(),
    "cannot read the plan: Is a directory": lambda out: ((out / "plan.json").unlink(), (out / "plan.json").mkdir()),
    "plan.json is nested too deep": lambda out: (out / "plan.json").write_text("[" * 100_000),
    "part0/model.onnx is of another partition": model_changed(
        "[p.__setattr__('value', 'f' * 32) for p in m.metadata_props if 'partition' in p.key]"
    ),
    "metadata irpar.mesh cannot be read": model_changed(
        "[p.__setattr__('value', 'dp=0') for p in m.metadata_props if p.key == 'irpar.mesh']"
    ),
    "metadata irpar.sharding cannot be read": model_changed(
        "[p.__setattr__('value', '[1') for p in g.input[0].metadata_props if p.key == 'irpar.sharding']"
    ),
    "the nodes form a cycle": model_changed("g.node[0].input[0] = g.node[0].output[0]"),
    "is read, but nothing defines it": model_changed("g.node[1].input[0] = 'zzz'"),
    'location "../part1/weights.bin"': model_changed(
        "next(e for t in g.initializer for e in t.external_data if e.key == 'location').value = '../part1/weights.bin'"
    ),
    "has weights in other.bin, not in weights.bin": model_changed(
        "next(e for t in g.initializer for e in t.external_data if e.key == 'location').value = 'other.bin'"
    ),
    "bytes 1000000000 to": model_changed(
        "next(e for t in g.initializer for e in t.external_data if e.key == 'offset').value = '1000000000'"
    ),
    "irpar.AllReduce runs over axes that cannot be": model_changed(
        "a = next(a for n in g.node if n.domain == 'irpar' for a in n.attribute if a.name == 'axes'); a.strings[0] = b'zz'"
    ),
    "irpar.AllReduce has no attribute reduce": model_changed(
        "a = next(a for n in g.node if n.domain == 'irpar' for a in n.attribute if a.name == 'reduce'); a.s = b'xor'"
    ),
    "plan.json has none of that id: irpar.AllReduce 99": model_changed(
        "a = next(a for n in g.node if n.domain == 'irpar' for a in n.attribute if a.name == 'id'); a.i = 99"
    ),
    "irpar.Nonsense cannot be executed": model_changed(
        "next(n for n in g.node if n.domain == 'irpar').op_type = 'Nonsense'"
    ),
}

PLANS: dict[str, Damage] = {
    "plan.json has format 'irpar-plan/2'": edited(lambda plan: plan.update(format="irpar-plan/2")),
    "plan.json has format None": edited(lambda plan: plan.pop("format")),
    "plan.json has format 'list'": lambda out: (out / "plan.json").write_text("[]"),
    "the ranks are not those of mesh dp=2,tp=2": edited(lambda plan: plan.update(ranks=[])),
    "ranks[0].rank is -1": edited(lambda plan: plan["ranks"][0].update(rank=-1)),
    "the ranks are not those": edited(lambda plan: plan["ranks"].pop()),
    "the ranks are not those of mesh": edited(swap_coords),
    "a rank has a part outside 0 .. 1": edited(lambda plan: plan["ranks"][0].update(part=99)),
    "ranks[0].part is -1": edited(lambda plan: plan["ranks"][0].update(part=-1)),
    'ranks[0].part is "0"': edited(lambda plan: plan["ranks"][0].update(part="0")),
    "plan.json runs it on ranks [1, 2]": edited(swap_ranks),
    "mesh tp=2 has 2 places": edited(lambda plan: plan["mesh"].update(axes={"tp": 2})),
    'mesh is "tp=2", expected a table': edited(lambda plan: plan.update(mesh="tp=2")),
    "has 2,000,000,000 devices": edited(lambda plan: plan["mesh"].update(axes={"dp": 2, "tp": 10**9})),
    'mesh.axes["dp"] is 2.5': edited(lambda plan: plan["mesh"].update(axes={"dp": 2.5, "tp": 2})),
    "its device list is [0, 0, 1, 2]": edited(lambda plan: plan["mesh"].update(devices=[0, 0, 1, 2])),
    "parts is missing": edited(lambda plan: plan.pop("parts")),
    "a part is outside its folder: /etc/passwd": edited(lambda plan: plan["parts"][0].update(model="/etc/passwd")),
    "a part is outside its folder: ../gpt.onnx": edited(lambda plan: plan["parts"][0].update(model="../gpt.onnx")),
    "parts[0].model is null": edited(lambda plan: plan["parts"][0].update(model=None)),
    "inputs is null": edited(lambda plan: plan.update(inputs=None)),
    "other": edited(lambda plan: plan["inputs"][0].update(name="other")),
    "input_ids has the dtype f33": edited(lambda plan: plan["inputs"][0].update(dtype="f33")),
    "f32": edited(lambda plan: plan["inputs"][0].update(dtype="f32")),
    "inputs[0].shape[1] is -32": edited(lambda plan: plan["inputs"][0].update(shape=[4, -32])),
    "[4, 64]": edited(lambda plan: plan["inputs"][0].update(shape=[4, 64])),
    "sharding of input_ids has another number of dims": edited(lambda plan: plan["inputs"][0].update(shape=[4])),
    'no axis "xx" in mesh': edited(lambda plan: plan["inputs"][0].update(sharding=[["xx"], None])),
    "different inputs or outputs": edited(lambda plan: plan["inputs"][0].update(sharding=[["tp"], None])),
    "sharding of logits has another number of dims": edited(
        lambda plan: plan["outputs"][0].update(sharding=[["dp"], None])
    ),
    "plan: []": edited(lambda plan: plan.update(outputs=[])),
    "plan: [('other'": edited(lambda plan: plan["outputs"][0].update(name="other")),
    "collectives is a table": edited(lambda plan: plan.update(collectives={})),
    "plan.json has it as all_hands": edited(lambda plan: plan["collectives"][0].update(kind="all_hands")),
    "joins another number of ranks": edited(lambda plan: plan["collectives"][0].update(group_size=3)),
    'no axis "zz" in mesh': edited(lambda plan: plan["collectives"][0].update(axes=["zz"])),
    'collectives[0].id is "first"': edited(lambda plan: plan["collectives"][0].update(id="first")),
    "source.sha256 is 5": edited(lambda plan: plan["source"].update(sha256=5)),
    "plan.json is not JSON: Expecting": replaced('"rank": 1', '"rank": NaN1'),
    "ranks[1].rank is NaN": replaced('"rank": 1', '"rank": NaN'),
    "ranks[1].rank is Infinity": replaced('"rank": 1', '"rank": 1e999'),
    "parts[0].weights is 7": edited(lambda plan: plan["parts"][0].update(weights=7)),
}

PARTITIONS: dict[str, Damage] = {**FILES, **PLANS}
