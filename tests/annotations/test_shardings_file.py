"""--shardings files: what is read, and that every mistake is reported with its line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import irpar
from irpar.annotations.shardings_file import ShardingsError, read_shardings
from irpar.ir import Annotation
from irpar.ir.text.files import parse_module

TEXT = """\
graph @mlp(%x: f32[8, 64]) -> (%y) opset 18 {
  %"h.0.w" = constant : f32[64, 128] data("w.bin", 0, 32768)
  %"h.1.w" = constant : f32[128, 64] data("w.bin", 32768, 32768)
  %a = MatMul(%x, %"h.0.w") : ? name "up"
  %r = Relu(%a) : ? name "act"
  %y = MatMul(%r, %"h.1.w") : f32[8, 64] name "down"
}
"""


@pytest.fixture
def module():
    return parse_module(TEXT)


def read(tmp_path, text, name="s.yaml"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_shardings(tmp_path / name)


def shardings(module):
    return {value.name: str(value.sharding) for value in module.graph.values() if value.sharding is not None}


def annotate(module, file, mesh=None):
    module.set_mesh(file.agreed_mesh(mesh))
    file.annotate(module)
    return shardings(module)


# -- what is read -------------------------------------------------------------------------------------------------


def test_yaml_is_read_with_lines(tmp_path):
    file = read(
        tmp_path,
        """\
        # comment
        mesh: {dp: 2, tp: 4}
        tensors:
          x: [[dp], null]
          h.*.w:
            - null
            - [tp, "?"]
        """,
    )
    assert file.mesh == irpar.Mesh({"dp": 2, "tp": 4})
    assert file.tensors == (
        Annotation("x", (["dp"], None), "s.yaml, line 4"),
        Annotation("h.*.w", (None, ["tp", "?"]), "s.yaml, line 5"),
    )


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_read_however_it_is_indented(tmp_path, indent):
    table = {"mesh": {"dp": 2}, "tensors": {'a "b"\\c/😀': [["dp"], None], "x": ["dp", None]}}
    file = read(tmp_path, json.dumps(table, indent=indent), "s.json")
    assert [(entry.pattern, entry.spec) for entry in file.tensors] == [
        ('a "b"\\c/😀', (["dp"], None)),
        ("x", (["dp"], None)),
    ]


def test_an_anchor_may_be_given_again(tmp_path):
    file = read(tmp_path, "tensors:\n  a: &s [x, null]\n  b: *s\n  c: &s [null, x]\n  d: *s\n")
    assert [entry.spec for entry in file.tensors] == [(["x"], None), (["x"], None), (None, ["x"]), (None, ["x"])]


def test_numbers_and_null_are_names_too(tmp_path):
    file = read(tmp_path, "tensors:\n  12: [dp]\n  null: [dp]\n  on: [dp]\n  1.0: [dp]\n")
    assert [entry.pattern for entry in file.tensors] == ["12", "null", "on", "1.0"]


def test_sections_may_be_left_out(tmp_path):
    file = read(tmp_path, "mesh: {dp: 2}")
    assert (file.tensors, file.ops) == ((), ())
    assert read(tmp_path, "tensors: {}").mesh is None


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\x7f", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=200
)
DIMS = st.none() | st.lists(st.sampled_from(["dp", "tp"]), max_size=2, unique=True)


@given(st.dictionaries(NAMES.filter(bool), st.lists(DIMS, max_size=3), max_size=4))
def test_whatever_json_writes_is_read_back(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "random.json"
    path.write_text(json.dumps({"tensors": tensors}), encoding="utf-8")
    read_back = {entry.pattern: list(entry.spec) for entry in read_shardings(path).tensors}
    assert read_back == tensors


# -- what it does to a module -------------------------------------------------------------------------------------


def test_tensors_are_annotated_and_say_why(tmp_path, module):
    file = read(tmp_path, "mesh: {dp: 2, tp: 4}\ntensors:\n  x: [dp, null]\n  h.*.w: [null, tp]\n")
    assert annotate(module, file) == {"x": "[@dp, _]", "h.0.w": "[_, @tp]", "h.1.w": "[_, @tp]"}
    assert module.decision("h.1.w").why == 'annotated "h.*.w" in s.yaml, line 4'


def test_types_of_inner_values_are_inferred_when_they_are_named(tmp_path, module):
    file = read(tmp_path, "mesh: {dp: 2}\ntensors: {a: [dp, null]}")
    assert annotate(module, file) == {"a": "[@dp, _]"}


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ("{cut: [dp, null]}", "{cut: [null, tp]}"),
        ("{placements: [Shard(0), Replicate()]}", "{placements: [Replicate(), Shard(dim=1)]}"),
        ('{placements: "(Shard(dim=0), Replicate())"}', '{placements: "[R, S(-1)]"}'),
        ("{layout: [dp, unsharded]}", "{layout: [unsharded, tp]}"),
        ("{layout: [dp, null]}", '{layout: "sharding_specs:unsharded,tp, mesh:|dp=2,tp=4|0,1,2,3,4,5,6,7|"}'),
    ],
)
def test_placements_and_layouts_are_the_same_annotations(tmp_path, module, x, w):
    file = read(tmp_path, f"mesh: {{dp: 2, tp: 4}}\ntensors:\n  x: {x}\n  h.0.w: {w}\n")
    assert file.entries == 2
    assert annotate(module, file) == {"x": "[@dp, _]", "h.0.w": "[_, @tp]"}
    assert module.decision("x").why.endswith("in s.yaml, line 3")


def test_placements_and_layouts_have_priorities(tmp_path, module):
    text = "tensors:\n  x: {placements: [Shard(0)], priority: 2}\n  h.0.w: {layout: [unsharded, d], priority: 1}\n"
    assert annotate(module, read(tmp_path, "mesh: {d: 2}\n" + text)) == {"x": "[@d!2, _]", "h.0.w": "[_, @d!1]"}


def test_a_mesh_may_be_a_number_of_devices(tmp_path, module):
    text = "mesh: 8\nops:\n  up: {in: [[2, 1], [1, 4]]}\n"
    assert annotate(module, read(tmp_path, text)) == {"x": "[@d0:(1)2, _]", "h.0.w": "[_, @d0:(2)4]"}


def test_a_number_of_devices_agrees_with_every_mesh_of_so_many(tmp_path, module):
    file = read(tmp_path, "mesh: 8\nops:\n  up: {in: [[2, 1], [1, 4]]}\n")
    assert annotate(module, file, irpar.Mesh({"dp": 2, "tp": 4})) == {"x": "[@dp, _]", "h.0.w": "[_, @tp]"}
    with pytest.raises(ShardingsError, match="--mesh dp=2 does not agree with the mesh d0=8"):
        file.agreed_mesh(irpar.Mesh({"dp": 2}))


def test_cut_counts_of_ops_are_matched_to_axes(tmp_path, module):
    file = read(
        tmp_path,
        'mesh: {dp: 2, tp: 4}\nops:\n  "up": {in: [[2, 1], [1, 4]], out: [[2, 4]]}\n  down: {in: [null, [4, 1]]}',
    )
    assert annotate(module, file) == {"x": "[@dp, _]", "h.0.w": "[_, @tp]", "a": "[@dp, @tp]", "h.1.w": "[@tp, _]"}


def test_ops_by_axes(tmp_path, module):
    text = "mesh: {dp: 2, tp: 4}\nops:\n  up: {in: [[dp, null], [null, [tp]]], out: [[2, 4]]}\n"
    assert annotate(module, read(tmp_path, text)) == {"x": "[@dp, _]", "h.0.w": "[_, @tp]", "a": "[@dp, @tp]"}


def test_priorities(tmp_path, module):
    text = """mesh: {dp: 2, tp: 4}
tensors:
  x: {cut: [[dp, "?"], null], priority: 1}
  h.0.w: [["?", "priority=3"], [tp, priority=2]]
ops:
  down: {in: [null, [4, 1]], priority: 2}
"""
    expected = {"x": "[@dp?!1, _]", "h.0.w": "[?!3, @tp!2]", "h.1.w": "[@tp!2, _]"}
    assert annotate(module, read(tmp_path, text)) == expected


def test_layout_rules(tmp_path, module):
    text = (
        "mesh: {dp: 2, tp: 2}\ntensors:\n  y: [null, dp]\n"
        "layout:\n  rules: {batch: dp, hidden: [tp], wide: [dp, tp]}\n"
        "  names:\n    x: [batch, null]\n    h.*.w: [hidden, io]\n    h.1.w: [wide, io]\n"
    )
    file = read(tmp_path, text)
    assert file.entries == 4
    expected = {"y": "[_, @dp]", "x": "[@dp, _]", "h.0.w": "[@tp, _]", "h.1.w": "[@(dp,tp), _]"}
    assert annotate(module, file) == expected
    assert module.decision("h.0.w").why == 'annotated "h.*.w" [hidden, io] by the layout rules in s.yaml, line 8'


def test_layout_rules_as_mesh_tensorflow_writes_them(tmp_path):
    assert read(tmp_path, 'layout: "batch:dp;hidden:tp"').layout.rules == {"batch": ("dp",), "hidden": ("tp",)}
    assert read(tmp_path, '{"layout": {"rules": "batch:dp"}}', "s.json").layout.rules == {"batch": ("dp",)}


def test_device_ids_of_the_mesh(tmp_path):
    mesh = read(tmp_path, "mesh: {dp: 2, tp: 2, devices: [3, 1, 0, 2]}").mesh
    assert mesh == irpar.Mesh({"dp": 2, "tp": 2}, devices=(3, 1, 0, 2))
    # An axis may be called so.
    assert read(tmp_path, "mesh: {devices: 2}").mesh == irpar.Mesh({"devices": 2})


def test_the_mesh_may_come_from_either_side(tmp_path):
    mesh = irpar.Mesh({"dp": 2})
    assert read(tmp_path, "tensors: {}").agreed_mesh(mesh) == mesh
    assert read(tmp_path, "mesh: {dp: 2}").agreed_mesh(None) == mesh
    assert read(tmp_path, "mesh: {dp: 2}").agreed_mesh(mesh) == mesh
    assert read(tmp_path, "tensors: {}").agreed_mesh(None) is None
    with pytest.raises(ShardingsError, match=r"--mesh dp=2 does not agree with the mesh dp=4.*\n  s.yaml, line 2"):
        read(tmp_path, "\nmesh: {dp: 4}").agreed_mesh(mesh)


# -- mistakes -----------------------------------------------------------------------------------------------------

UNREADABLE = [
    ("", "the shardings file is empty", ""),
    ("# nothing\n", "the shardings file is empty", ""),
    ("- a\n", "must be a table", "line 1"),
    ("tensors: {}\nmehs: {dp: 2}\n", 'there is no section "mehs"', "line 2"),
    ("tensors: {}\ntensors: {}\n", '"tensors" comes twice, first in line 1', "line 2"),
    ("tensors: {x: [dp], x: [tp]}\n", '"x" comes twice, first in line 1', "line 1"),
    ("mesh:\n  dp: two\n", 'mesh axis dp has the size "two"', "line 2"),
    ("mesh:\n  dp: 2.0\n", "mesh axis dp has the size 2.0", "line 2"),
    ("mesh:\n  dp: true\n", "mesh axis dp has the size true", "line 2"),
    ("mesh:\n  dp: 0\n", "mesh axis dp has size 0", "line 2"),
    ("mesh:\n  d-p: 2\n", '"d-p" cannot name a mesh axis', "line 2"),
    ("mesh: {}\n", "the mesh has no axes", "line 1"),
    ("mesh: [dp, 2]\n", "the mesh must be a table", "line 1"),
    ("mesh: null\n", "the mesh must be a table, not null", "line 1"),
    ("tensors: [x]\n", "tensors must be a table", "line 1"),
    ("tensors:\n  x: dp\n", '"x" has no list of dims', "line 2"),
    ("tensors:\n  x:\n    - 3\n", "3 is no mesh axis", "line 3"),
    ("tensors:\n  x: [[[dp]]]\n", '["dp"] is no mesh axis', "line 2"),
    ("tensors:\n  x: [[tp, ?]]\n", 'put the question mark in quotes: "?"', "line 2"),
    ("tensors:\n  [x]: [dp]\n", '["x"] is no name', "line 2"),
    ("tensors:\n  *.w: [dp]\n", 'names that begin with "*"', "line 2"),
    ("tensors: {x: [dp}\n", "not YAML", "line 1"),
    ("a: 1\n---\nb: 2\n", "not YAML", "line 2"),
    ("a: \x01\n", "not YAML", ""),
    ("tensors: " + "[" * 5000, "nested too deep", ""),
    ("tensors: {x: &a [*a]}\n", "is no mesh axis", "line 1"),
    ("tensors:\n  x: {cut: [dp], priority: -1}\n", "-1 is no priority", "line 2"),
    ("tensors:\n  x:\n    cut: [dp]\n    priority: first\n", '"first" is no priority', "line 4"),
    ("tensors:\n  x:\n    cut: [dp]\n    priority: 1\n    priority: 2\n", '"priority" comes twice', "line 5"),
    ("tensors:\n  x: {priority: 1}\n", '"x" has no "cut"', "line 2"),
    ("tensors:\n  x: {cut: dp, priority: 1}\n", '"x" has no list of dims', "line 2"),
    ("tensors:\n  x: {cut: [dp], order: 1}\n", '"x" has no "order"', "line 2"),
    ("tensors:\n  x: {cut: [dp], layout: [dp]}\n", '"x" has cut and layout', "line 2"),
    ("tensors:\n  x: {placements: 3}\n", '"placements" of "x" is no list', "line 2"),
    ("tensors:\n  x: {placements: [[Shard(0)]]}\n", '"placements" of "x" is no list', "line 2"),
    ("tensors:\n  x: {placements: [dp]}\n", "'dp' is no placement", "line 2"),
    ("tensors:\n  x: {placements: [Shard(0), Partial()]}\n", "Partial(): no input and no weight holds parts", "line 2"),
    ("tensors:\n  x: {placements: '(_StridedShard(dim=0, sf=2), S(0))'}\n", "strided blocks", "line 2"),
    ("tensors:\n  x: {layout: 'dp, unsharded'}\n", "'dp, unsharded' is no layout", "line 2"),
    ("mesh: 0\n", "mesh axis d0 has size 0", "line 1"),
    ("mesh: many\n", "the mesh must be a table", "line 1"),
    ("ops:\n  up: {in: [[2, 1]], priority: [1]}\n", "[1] is no priority", "line 2"),
    ("layout:\n  rules: {a: [dp, priority=1]}\n", 'the rule of "a" is no axis', "line 2"),
    ("ops:\n  up: [[2, 1]]\n", '"up" must be a table', "line 2"),
    ("ops:\n  up: {}\n", '"up" has no cuts', "line 2"),
    ("ops:\n  up: {inn: [[1]]}\n", '"up" has no "inn"', "line 2"),
    ("ops:\n  up: {in: 3}\n", '"in" of "up" is no list', "line 2"),
    ("ops:\n  up:\n    in: [[2, 0]]\n", "[2, 0] is no list of cuts", "line 3"),
    ("ops:\n  up:\n    in: [[2, x]]\n", "is no list of cuts", "line 3"),
    ("ops:\n  up:\n    in: [2]\n", "2 is no list of cuts", "line 3"),
    ("ops:\n  up:\n    in: [[dp, 1.5]]\n", "1.5 is no mesh axis", "line 3"),
    ("layout: [a]\n", "layout must be a table", "line 1"),
    ("layout: 3\n", "layout must be a table", "line 1"),
    ("layout: {}\n", "layout has no rules", "line 1"),
    ("layout: {names: {x: [a, b]}}\n", "layout has no rules", "line 1"),
    ("layout:\n  rules: {}\n", "layout has no rules", "line 2"),
    ("layout:\n  rule: {a: dp}\n", 'layout has no "rule"', "line 2"),
    ("layout:\n  rules: {a: null}\n", 'the rule of "a" is no axis: null', "line 2"),
    ("layout:\n  rules: {a: ['?']}\n", 'the rule of "a" is no axis', "line 2"),
    ("layout:\n  rules: {a: 2}\n", "2 is no mesh axis", "line 2"),
    ("layout:\n  rules: 'a:dp;a:tp'\n", "names a twice", "line 2"),
    ("layout:\n  rules: {a: dp}\n  names:\n    x: a\n", '"x" has no list of names', "line 4"),
    ("layout:\n  rules: {a: dp}\n  names:\n    x: [[a]]\n", '["a"] is no name of a dim', "line 4"),
    ("mesh: {dp: 2, devices: [0, a]}\n", 'the mesh has the devices [0, "a"]', "line 1"),
    ("mesh: {dp: 2, devices: [0, 0]}\n", "its device list is [0, 0]", "line 1"),
    ("mesh: {dp: 2, devices: [0]}\n", "its device list is [0]", "line 1"),
]


@pytest.mark.parametrize(("text", "told", "line"), UNREADABLE)
def test_what_cannot_be_read_is_told_with_its_line(tmp_path, text, told, line):
    with pytest.raises(ShardingsError) as raised:
        read(tmp_path, text)
    message = str(raised.value)
    assert told in message
    assert "s.yaml" in message
    assert line in message
    assert "\n  do: " in message


@pytest.mark.parametrize("text", ['{"tensors": {}\n,}', '{"tensors": {}}\n{', "tensors: {}"])
def test_broken_json_is_told_with_its_line(tmp_path, text):
    with pytest.raises(ShardingsError, match=r"not JSON: .*\n  .*s.json, line \d"):
        read(tmp_path, text, "s.json")


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(ShardingsError, match="cannot read the shardings: No such file"):
        read_shardings(tmp_path / "nope.yaml")
    with pytest.raises(ShardingsError, match="cannot read the shardings: Is a directory"):
        read_shardings(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShardingsError, match="not UTF-8 text: byte 0"):
        read_shardings(tmp_path / "bytes.yaml")


UNFITTING = [
    ("tensors:\n  z: [dp]\n", 'no tensor matches "z"', '"z": [["dp"]]      s.yaml, line 3'),
    (
        "tensors:\n  h.*.w: [null, mp]\n",
        'no axis "mp" in mesh dp=2,tp=2',
        '"h.*.w": [null, ["mp"]]      s.yaml, line 3',
    ),
    ("tensors:\n  x: [[dp, priority=-1], null]\n", '"-1" is no priority', "s.yaml, line 3"),
    ("tensors:\n  x: [[dp, priority=1, priority=2], null]\n", "has 2 priorities", "s.yaml, line 3"),
    (
        "tensors:\n  x: [[dp, priority=1], null]\nops:\n  up: {in: [[dp, null], null]}\n",
        "%x is annotated twice: [@dp!1, _] and [@dp, _]",
        "s.yaml, line 5",
    ),
    ("layout: 'batch:dp'\n", 'no tensor has a dim called "batch"', "s.yaml, line 2"),
    ("layout: {rules: {a: dp}, names: {x: [a]}}\n", "1 names for the dims of x, which is f32[8, 64]", "s.yaml, line 2"),
    ("layout: {rules: {a: mp}, names: {x: [a, b]}}\n", 'no axis "mp" in mesh dp=2,tp=2', "s.yaml, line 2"),
    ("layout: {rules: {a: dp}, names: {z: [a, b]}}\n", 'no tensor matches "z"', "s.yaml, line 2"),
    ("tensors: {x: [tp, null]}\nlayout: {rules: {a: dp}, names: {x: [a, b]}}\n", "annotated twice", "s.yaml, line 3"),
    ("tensors:\n  x: [dp, tp, null]\n", "the annotation has 3 dims, but x is f32[8, 64]", "s.yaml, line 3"),
    ("tensors:\n  'x*': [dp, null]\n  '[xz]': [tp, null]\n", "%x is annotated twice", "s.yaml, line 4"),
    ("ops:\n  upp: {in: [[2, 1], [1, 2]]}\n", 'no op is called "upp"', "nearest names: up"),
    ("ops:\n  up: {in: [[2, 1]]}\n", "up has 2 operands, the entry has cuts for 1", "x f32[8, 64], h.0.w f32[64, 128]"),
    ("ops:\n  up: {in: [[2], [1, 2]]}\n", "the cuts [2] are for 1 dims, but x is f32[8, 64]", "s.yaml, line 3"),
    ("ops:\n  up: {in: [[1, 2], [4, 1]]}\n", "dim 1 of x is sharded into 2, dim 0 of h.0.w into 4", "s.yaml, line 3"),
    ("ops:\n  up: {in: [[3, 1], [1, 1]]}\n", "no axes of the mesh dp=2,tp=2", "sub-axes"),
    ("tensors:\n  x: {placements: [Shard(2), Replicate()]}\n", "Shard(2) is out of range", "s.yaml, line 3"),
    ("tensors:\n  x: {placements: [Shard(0)]}\n", "there are 1 placements, the mesh dp=2,tp=2 has 2", "line 3"),
    ("tensors:\n  z: {placements: [Shard(0), Replicate()]}\n", 'no tensor matches "z"', "s.yaml, line 3"),
    ("tensors:\n  x: {layout: [mp, unsharded]}\n", 'no axis "mp" in mesh dp=2,tp=2', "s.yaml, line 3"),
    ("tensors:\n  x: {layout: [dp]}\n", "the annotation has 1 dims, but x is f32[8, 64]", "s.yaml, line 3"),
    (
        "tensors:\n  'x*': {layout: [dp, unsharded]}\n  '[xz]': {placements: [Replicate(), Shard(0)]}\n",
        "%x is annotated twice: [@dp, _] and [@tp, _]",
        "s.yaml, line 4",
    ),
    (
        "ops:\n  up: {in: [null, [1, 2]]}\n",
        "the cuts [1, 2] of up fit the mesh dp=2,tp=2 in 2 ways",
        '  "h.0.w": [null, ["dp"]]\n  "h.0.w": [null, ["tp"]]\n',
    ),
]


@pytest.mark.parametrize(("text", "told", "also"), UNFITTING)
def test_what_does_not_fit_the_model_is_told_with_its_line(tmp_path, module, text, told, also):
    file = read(tmp_path, "mesh: {dp: 2, tp: 2}\n" + text)
    with pytest.raises(irpar.IrparError) as raised:
        annotate(module, file)
    assert told in str(raised.value)
    assert also in str(raised.value)
    assert "s.yaml, line" in str(raised.value)
