"""ONNX's multi-device annotations: read as module.shard says it, written and read back, and refused where they cannot be."""

import logging

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser

import irpar
from irpar import models
from irpar.annotations.onnx_annotations import apply, complete, save_annotated
from irpar.onnx_io import to_module
from irpar.onnx_io.device_annotations import DeviceAnnotations
from irpar.sharding import IrparError, Mesh
from tests.budget import budget

TEXT = """<ir_version: 11, opset_import: ["" : 21]>
mlp (float[8, 64] x, float[64, 128] w, float[128, 64] v) => (float[8, 64] y)
<float[8, 128] a, float[8, 128] r> {
  [up] a = MatMul(x, w)
  [act] r = Relu(a)
  [down] y = MatMul(r, v)
}
"""


def model(*specs, devices=8, names=("c",)):
    """The model with specs as (node number, tensor, device list, groups, {axis: shards})."""
    made = parser.parse_model(TEXT)
    for name in names:
        made.configuration.add(name=name, num_devices=devices)
    for number, tensor, listed, groups, cuts in specs:
        node = made.graph.node[number]
        entry = node.device_configurations[0] if len(node.device_configurations) else node.device_configurations.add()
        entry.configuration_id = "c"
        spec = entry.sharding_spec.add(tensor_name=tensor, device=listed)
        for key, members in groups.items():
            spec.index_to_device_group_map.add(key=key, value=members)
        for axis, count in cuts.items():
            spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=count)
    return made


def read(made, mesh=None, chosen=None):
    devices = DeviceAnnotations(chosen)
    module = to_module(made, devices=devices)
    apply(module, devices, mesh)
    return module


def plain(annotations, mesh):
    made = to_module(model(names=()))
    made.set_mesh(mesh)
    for name, spec in annotations.items():
        made.shard(name, spec)
    return made


DP_TP = Mesh({"dp": 2, "tp": 4})
DP_GROUPS = {-1: [0, 1, 2, 3], -2: [4, 5, 6, 7]}
TP_GROUPS = {-1: [0, 4], -2: [1, 5], -3: [2, 6], -4: [3, 7]}
SPECS = (
    (0, "x", [-1, -2], DP_GROUPS, {0: 2}),
    (0, "w", [-1, -2, -3, -4], TP_GROUPS, {-1: 4}),
    (0, "a", list(range(8)), {}, {0: 2, 1: 4}),
    (2, "y", [9], {9: list(range(8))}, {}),
)


def test_the_same_ir():
    expected = {"x": ["dp", None], "w": [None, "tp"], "a": ["dp", "tp"], "y": [None, None]}
    assert str(read(model(*SPECS), DP_TP)) == str(plain(expected, DP_TP))


def test_a_mesh_of_the_cuts():
    expected = {"x": ["d0", None], "w": [None, "d1"], "a": ["d0", "d1"], "y": [None, None]}
    assert str(read(model(*SPECS))) == str(plain(expected, Mesh({"d0": 2, "d1": 4})))


def test_the_order_of_cut_dims_is_that_of_the_blocks():
    """The first entry of sharded_dim is the outermost, whatever its axis."""
    made = read(model((0, "a", list(range(8)), {}, {1: 4, 0: 2})), Mesh({"x": 4, "y": 2}))
    assert str(made) == str(plain({"a": ["y", "x"]}, Mesh({"x": 4, "y": 2})))


def test_devices_in_another_order():
    order = [3, 1, 0, 2]
    made = read(model((0, "a", order, {}, {0: 4}), (0, "x", [-1, -2], {-1: [1, 3], -2: [2, 0]}, {0: 2}), devices=4))
    mesh = Mesh({"d0": 2, "d1": 2}, devices=(3, 1, 0, 2))
    assert str(made) == str(plain({"a": [["d0", "d1"], None], "x": ["d0", None]}, mesh))


def test_cuts_that_do_not_nest_keep_one_axis():
    made = read(
        model(
            (0, "x", [-1, -2], {-1: [0, 1, 2], -2: [3, 4, 5]}, {0: 2}),
            (0, "w", [-1, -2, -3], {-1: [0, 1], -2: [2, 3], -3: [4, 5]}, {0: 3}),
            devices=6,
        )
    )
    assert str(made) == str(plain({"x": ["d0:(1)2", None], "w": ["d0:(1)3", None]}, Mesh({"d0": 6})))


@pytest.mark.parametrize("listed", [[], list(range(8))])
def test_lists_of_all_devices(listed):
    """Without cuts a list names the holders of copies; without a list block i lies on device i."""
    assert str(read(model((0, "x", listed, {}, {})), DP_TP)) == str(plain({"x": [None, None]}, DP_TP))
    assert str(read(model((0, "x", listed, {}, {0: 8})), DP_TP)) == str(plain({"x": [["dp", "tp"], None]}, DP_TP))


def test_several_specs_that_agree():
    """In other groups, in another order of devices, and with a negative axis."""
    made = model(
        (0, "a", [-1, -2], DP_GROUPS, {0: 2}), (1, "a", [7, 8], {7: [3, 2, 1, 0], 8: [7, 6, 5, 4]}, {-2: 2, 1: 1})
    )
    assert str(read(made, DP_TP)) == str(plain({"a": ["dp", None]}, DP_TP))


def fused(*parts):
    made = model((0, "w", [-1, -2, -3, -4], TP_GROUPS, {}))
    dim = made.graph.node[0].device_configurations[0].sharding_spec[0].sharded_dim.add(axis=0)
    for size, count in parts:
        part = dim.simple_sharding.add(num_shards=count)
        if size is not None:
            part.dim_value = size
    return made


@pytest.mark.parametrize("parts", [[(64, 4)], [(None, 4)], [(4, 4), (16, 1)], [(2, 2), (32, 2)], [(1, 1), (64, 4)]])
def test_dims_that_were_several(parts):
    assert str(read(fused(*parts), DP_TP)) == str(plain({"w": ["tp", None]}, DP_TP))


@pytest.mark.parametrize("parts", [[(4, 2), (16, 2)], [(4, 1), (16, 4)], [(None, 2), (32, 2)], [(6, 4), (16, 1)]])
def test_blocks_that_are_not_in_a_row(parts):
    with pytest.raises(IrparError, match="not in a row"):
        read(fused(*parts), DP_TP)


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((0, "x", list(range(7)), {}, {0: 8}), "sharded into 8 blocks, but has 7 devices"),
        ((0, "x", [0], {}, {0: 8}), "has 1 device or group"),
        ((0, "x", [], {}, {0: 2}), "sharded into 2 blocks, but has 0"),
        ((0, "x", [0, 1, 2, 3], {}, {0: 2, 1: 2}), "4 of the 8 devices hold no block of it: 4, 5, 6, 7"),
        ((0, "x", [0], {}, {}), "7 of the 8 devices hold no block"),
        ((0, "x", [0, 1, 2, 3, 4, 5, 6, 8], {}, {0: 8}), "there is no device 8"),
        ((0, "x", [-1, -2], {-1: [0, 1, 2, 3]}, {0: 2}), "there is no device -2"),
        ((0, "x", [0, 1, 2, 3, 4, 5, 6, 6], {}, {0: 8}), "device 6 is listed 2 times"),
        ((0, "x", [-1, -2], {-1: [0, 1, 2, 3], -2: [3, 4, 5, 6, 7]}, {0: 2}), "device 3 is listed 2 times"),
        ((0, "x", [-1, -2], {-1: [0, 1, 2, 3], -2: []}, {0: 2}), "the device group -2 is empty"),
        ((0, "x", list(range(8)), {}, {2: 8}), "axis 2 of a tensor of 2"),
        ((0, "x", list(range(8)), {}, {-3: 8}), "axis -3 of a tensor of 2"),
        ((0, "x", list(range(8)), {}, {9223372036854775807: 8}), "axis 9223372036854775807"),
        ((0, "x", list(range(8)), {}, {1: 2, -1: 4}), "dim 1 is sharded twice"),
        ((0, "x", list(range(8)), {}, {0: 0}), "sharded into 0 shards"),
        ((0, "x", list(range(8)), {}, {0: -8}), "sharded into -8 shards"),
        ((0, "x", list(range(8)), {}, {0: 2**62, 1: 4}), "sharded into 18446744073709551616 blocks"),
        ((0, "v", list(range(8)), {}, {0: 8}), '"v" is neither an operand nor a result'),
        ((0, "", list(range(8)), {}, {0: 8}), '"" is neither an operand nor a result'),
        ((0, "x", [7, 1, 2, 3, 4, 5, 6, 0], {}, {0: 8}), "no axes, nor parts of axes, of the mesh dp=2,tp=4"),
    ],
)
def test_specs_that_cannot_be(spec, message):
    made = model(spec)
    onnx.checker.check_model(made)
    with pytest.raises(IrparError, match=message) as raised:
        read(made, DP_TP)
    assert "node up" in raised.value.where
    assert raised.value.do


def changed(change, *specs):
    made = model(*(specs or SPECS))
    change(made)
    return made


def entry(made):
    return made.graph.node[0].device_configurations[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: setattr(entry(made), "configuration_id", "d"), 'no device configuration "d"'),
        (lambda made: made.ClearField("configuration"), 'no device configuration "c"'),
        (lambda made: made.configuration.add(name="c", num_devices=2), 'two device configurations are called "c"'),
        (lambda made: setattr(made.configuration[0], "name", ""), "a device configuration has no name"),
        (lambda made: setattr(made.configuration[0], "num_devices", 0), "it has 0 devices"),
        (lambda made: setattr(made.configuration[0], "num_devices", -1), "it has -1 devices"),
        (lambda made: setattr(made.configuration[0], "num_devices", 2**31 - 1), "it has 2,147,483,647 devices"),
        (lambda made: made.configuration[0].device.extend(["a", "b"]), "8 devices, but 2 different names"),
        (lambda made: made.configuration[0].device.extend(["a"] * 8), "8 devices, but 1 different names"),
        (lambda made: made.graph.node[0].device_configurations.append(entry(made)), 'configuration "c" twice'),
        (lambda made: setattr(entry(made), "pipeline_stage", -1), "the pipeline stage is -1"),
        (lambda made: entry(made).sharding_spec[2].sharded_dim[0].ClearField("axis"), "no axis, or no sharding"),
        (
            lambda made: entry(made).sharding_spec[2].sharded_dim[0].ClearField("simple_sharding"),
            "no axis, or no shard",
        ),
        (
            lambda made: setattr(entry(made).sharding_spec[2].sharded_dim[0].simple_sharding[0], "dim_value", 9),
            "size 9, it",
        ),
        (
            lambda made: setattr(entry(made).sharding_spec[2].sharded_dim[0].simple_sharding[0], "dim_value", -8),
            "shards",
        ),
        (
            lambda made: entry(made).sharding_spec[0].index_to_device_group_map.add(key=-1, value=[0]),
            "-1 is there twice",
        ),
    ],
)
def test_models_that_cannot_be(change, message):
    made = changed(change)
    with pytest.raises(IrparError, match=message):
        read(made)


def test_a_tensor_that_lies_in_two_ways():
    made = model((0, "a", list(range(8)), {}, {0: 8}), (1, "a", list(range(8)), {}, {1: 8}))
    with pytest.raises(IrparError, match=r"%a lies in two ways.*\n  node act\n  the other: node up"):
        read(made)


def test_groups_that_are_no_grid():
    made = model(
        (0, "x", [-1, -2], {-1: [0, 1], -2: [2, 3]}, {0: 2}),
        (0, "w", [-1, -2], {-1: [0, 3], -2: [1, 2]}, {0: 2}),
        (0, "a", [-1, -2], {-1: [0, 2], -2: [1, 3]}, {0: 2}),
        devices=4,
    )
    with pytest.raises(IrparError, match="no axes, nor parts of axes, of one mesh of 4 devices"):
        read(made)


def test_a_mesh_of_another_size():
    with pytest.raises(IrparError, match="the mesh dp=2 has 2 devices, configuration c has 8"):
        read(model(*SPECS), Mesh({"dp": 2}))


def test_nodes_in_bodies_and_functions_are_refused():
    made = parser.parse_model(
        """<ir_version: 11, opset_import: ["" : 21, "local" : 1]>
        g (float[8] x) => (float[8] y) { y = local.f(x) }
        <domain: "local", opset_import: ["" : 21]> f (a) => (b) { b = Relu(a) }"""
    )
    made.configuration.add(name="c", num_devices=2)
    made.functions[0].node[0].device_configurations.add(configuration_id="c")
    with pytest.raises(IrparError, match="a node in a function"):
        read(made)
    body = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "body", [], [onnx.ValueInfoProto(name="z")])
    body.node[0].device_configurations.add(configuration_id="c")
    made = parser.parse_model('<ir_version: 11, opset_import: ["" : 21]> g (bool c, float[8] x) => (float[8] y) {}')
    made.configuration.add(name="c", num_devices=2)
    made.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body))
    with pytest.raises(IrparError, match="a node in a body"):
        read(made)


def test_old_opsets_lose_annotations():
    made = model(*SPECS)
    made.opset_import[0].version = 11
    with pytest.raises(IrparError, match="converted first, which drops them"):
        read(made)


# -- configurations and stages --------------------------------------------------------------------------------------


def test_one_of_several_configurations(caplog):
    made = model(*SPECS, names=("c", "d"))
    with caplog.at_level(logging.WARNING):
        assert not read(made).annotated
    assert "the device configurations c, d; choose one" in caplog.text
    assert set(read(made, chosen="c").annotated) == {"x", "w", "a", "y"}
    assert not read(made, chosen="d").annotated
    with pytest.raises(IrparError, match='no device configuration "e"'):
        read(made, chosen="e")


def test_pipeline_stages(caplog):
    made = model(names=("c",))
    for number, stage in enumerate((0, 1, 1)):
        made.graph.node[number].device_configurations.add(configuration_id="c", pipeline_stage=stage)
    with caplog.at_level(logging.WARNING):
        module = read(made)
    assert [node.stage for node in module.graph] == [0, 1, 1]
    assert "no pass shards by them yet" in caplog.text
    made.graph.node[1].device_configurations[0].pipeline_stage = 2
    with pytest.raises(IrparError, match="of pipeline stage 1, but reads %r of stage 2"):
        read(made)


def test_load_reads_them_or_not(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model(*SPECS), path)
    assert irpar.load(path).mesh == Mesh({"d0": 2, "d1": 4})
    assert irpar.load(path, mesh=DP_TP).mesh == DP_TP
    assert not irpar.load(path, configuration="none").meshes


# -- writing ------------------------------------------------------------------------------------------------------


def shardings(module):
    return {value.name: str(value.sharding) for value in module.graph.values() if value.sharding is not None}


def without_irpar(path):
    """The file without irpar's own metadata: what another tool would have written."""
    made = onnx.load(path, load_external_data=False)
    assert [entry.key for entry in made.metadata_props if entry.key.startswith("irpar.mesh")]
    del made.metadata_props[:]
    assert "irpar.sharding" not in str(made)
    onnx.save(made, path)


MESHES = [Mesh({"dp": 2, "tp": 4}), Mesh({"a": 2, "b": 2, "c": 2}, devices=(5, 2, 7, 0, 1, 6, 3, 4)), Mesh({"x": 6})]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(max_examples=budget(25), deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again(tmp_path_factory, mesh, data):
    folder = tmp_path_factory.mktemp("m")
    module = to_module(model(names=()))
    module.set_mesh(mesh)
    parts = {"x": ["x:(1)2", "x:(2)3", "x:(1)3", "x:(3)2"]}
    axes = [part for axis in mesh.axes for part in parts.get(axis, [axis])]
    for name in "xwvary":
        drawn = data.draw(st.lists(st.sampled_from(axes), unique=True, max_size=3))
        place = data.draw(st.integers(0, len(drawn)))
        try:
            module.shard(name, [drawn[:place] or None, drawn[place:] or None])
        except IrparError:
            continue  # parts of an axis that cross
    path = folder / "m.onnx"
    assert save_annotated(module, path) == {}
    onnx.checker.check_model(path)
    assert onnx.load(path).ir_version >= 11
    again = irpar.load(path)
    assert again.mesh == mesh
    lies = {value.name: regions(value) for value in module.graph.values() if value.sharding is not None}
    assert {value.name: regions(value) for value in again.graph.values() if value.sharding is not None} == lies
    # The annotations alone carry it, whatever the axes are called.
    without_irpar(path)
    foreign = irpar.load(path)
    assert {value.name: regions(value) for value in foreign.graph.values() if value.sharding is not None} == lies


def regions(value):
    """Device id to the block that it holds."""
    from irpar.sharding import local_region

    mesh = value.sharding.mesh
    return {
        mesh.device(rank): local_region(value.sharding, value.shape, coords)
        for rank, coords in enumerate(mesh.all_coords())
    }


def test_what_onnx_has_no_word_for_is_told(tmp_path):
    module = to_module(model(names=()))
    module.set_mesh(DP_TP)
    module.shard("x", ["dp", ["?"]])
    module.shard("w", [None, "tp"])
    module.graph.outputs[0].sharding = module.graph.inputs[1].sharding.with_partial([irpar.sharding.Axis("dp")])
    left = save_annotated(module, tmp_path / "m.onnx")
    assert left == {"x": "ONNX has no word for open dims and priorities", "y": "ONNX has no word for partial values"}
    assert shardings(irpar.load(tmp_path / "m.onnx")) == {"w": "[_, @tp]"}


def test_device_ids_with_gaps_are_refused(tmp_path):
    module = to_module(model(names=()))
    module.set_mesh(Mesh({"x": 2}, devices=(0, 5)))
    with pytest.raises(IrparError, match="are not 0 to 1"):
        save_annotated(module, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_stages_are_written(tmp_path):
    module = to_module(model(names=()))
    module.set_mesh(DP_TP)
    next(iter(module.graph)).stage = 3
    save_annotated(module, tmp_path / "m.onnx")
    assert next(iter(irpar.load(tmp_path / "m.onnx").graph)).stage == 3


@pytest.mark.parametrize("family", ["mlp", "gpt", "moe"])
def test_a_whole_completed_model(tmp_path, family):
    models.save(tmp_path / "m.onnx", family)
    module = irpar.load(tmp_path / "m.onnx")
    irpar.annotate(module, models.annotations(family))
    mesh = Mesh({"dp": 2, "tp": 2})
    done = complete(module, mesh)
    assert not module.meshes
    left = save_annotated(done, tmp_path / "a.onnx")
    onnx.checker.check_model(tmp_path / "a.onnx", full_check=True)
    again = irpar.load(tmp_path / "a.onnx")
    expected = {name: text for name, text in shardings(done).items() if name not in left}
    assert shardings(again) == expected
    assert len(expected) > len(models.annotations(family))
    first, second = irpar.partition(module, mesh), irpar.partition(again)
    assert first.plan.totals == second.plan.totals
    without_irpar(tmp_path / "a.onnx")
    assert irpar.partition(irpar.load(tmp_path / "a.onnx")).plan.totals == first.plan.totals


def test_sections_of_a_weight_are_a_cut_of_it(tmp_path):
    """Of q, k and v in one matrix each is cut alike; that is written as a cut of the matrix, and read as the same."""
    models.save(tmp_path / "gpt.onnx", "gpt", fused_qkv=True)
    module = irpar.load(tmp_path / "gpt.onnx")
    irpar.annotate(module, {"input_ids": ["dp", None], "h.*.attn.proj.weight": ["tp", None]})
    mesh = Mesh({"dp": 2, "tp": 2})
    made = complete(module, mesh)
    assert made.graph.value("h.1.attn.c_attn.weight").sharding.spec() == [None, ["tp"]]
    save_annotated(made, tmp_path / "annotated.onnx")
    again = irpar.load(tmp_path / "annotated.onnx")
    assert again.graph.value("h.1.attn.c_attn.weight").sharding.spec() == [None, ["tp"]]


def test_onnx_ir_reads_what_is_written_and_is_read(tmp_path):
    ir = pytest.importorskip("onnx_ir", minversion="1.0")
    module = to_module(model(names=()))
    module.set_mesh(Mesh({"tp": 4}))
    module.shard("w", [None, "tp"])
    save_annotated(module, tmp_path / "m.onnx")
    loaded = ir.load(tmp_path / "m.onnx")
    (configured,) = loaded.graph[0].device_configurations
    assert [(spec.value.name, spec.device) for spec in configured.sharding_specs] == [("w", (0, 1, 2, 3))]
    # And the other way round.
    plan = loaded.add_device_configuration("own", num_devices=4)
    node = loaded.graph[0]
    node.shard(node.inputs[0], configuration=plan, axis=0, num_shards=4, device_indices=(0, 1, 2, 3))
    ir.save(loaded, tmp_path / "n.onnx")
    assert shardings(irpar.load(tmp_path / "n.onnx", configuration="own")) == {"x": "[@tp, _]"}
