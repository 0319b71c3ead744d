"""Facts about a model."""

import json
from pathlib import Path

import pytest

import irpar
from irpar.advice.inspection import as_json, inspect, tensors
from irpar.ir.text.files import parse_module
from irpar.models import save

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspection") / "gpt.onnx"
    save(path, "gpt", layers=3)
    return irpar.load(path)


def test_parameters_are_grouped_over_layers(gpt):
    groups = {group.pattern: group for group in inspect(gpt).parameters}
    fc = groups["h.*.mlp.c_fc.weight"]
    assert (fc.tensors, fc.type, fc.elements, fc.bytes) == (3, "f32[64, 256]", 3 * 64 * 256, 3 * 64 * 256 * 4)
    assert groups["wte.weight"].tensors == 1


def test_groups_hold_every_constant_once(gpt):
    found = inspect(gpt)
    assert sum(group.tensors for group in found.parameters) == len(gpt.graph.constants)
    assert found.parameter_bytes == sum(value.tensor_type.nbytes for value in gpt.graph.constants)


def test_operators_are_counted_with_their_costs(gpt):
    found = inspect(gpt)
    matmul = next(fact for fact in found.operators if fact.op == "MatMul")
    tokens, hidden, vocab, seq = 4 * 32, 64, 256, 32
    layer = 4 * hidden * hidden + 2 * hidden * 4 * hidden + 2 * seq * hidden
    assert matmul.flops == 2 * tokens * (3 * layer + hidden * vocab)
    assert matmul.nodes == 3 * 8 + 1
    assert found.nodes_in_file == len(gpt.graph)
    assert found.flops == sum(fact.flops for fact in found.operators)


def test_memory_is_that_of_the_whole_model(gpt):
    found = inspect(gpt)
    memory = found.memory
    # Folding makes a few small constants more.
    assert 0 <= memory.weights - found.parameter_bytes < 1000
    assert memory.activations >= 4 * 32 * 256 * 4
    assert memory.peak == memory.weights + memory.activations


def test_the_module_stays_as_it_is(gpt):
    before = str(gpt)
    inspect(gpt)
    tensors(gpt, "*")
    assert str(gpt) == before


def test_open_symbols_are_listed_and_leave_costs_unknown(tmp_path):
    save(tmp_path / "llama.onnx", "llama", dynamic=True)
    found = inspect(irpar.load(tmp_path / "llama.onnx"))
    assert found.symbols == {"batch": ["input_ids"], "seq": ["input_ids"]}
    assert (found.memory, found.flops) == (None, None)
    assert all(fact.flops is None for fact in found.operators)
    bound = inspect(irpar.load(tmp_path / "llama.onnx", bind={"batch": 2, "seq": 8}))
    assert bound.symbols == {}
    assert bound.flops > 0


def test_ops_without_a_rule_are_named_with_the_reason():
    module = parse_module(
        """\
graph @g(%x: f32[4, 8]) -> (%y, %n) opset 18 {
  %n = NonZero(%x) : i64[2, _]
  %z = custom.Thing(%x) : f32[4, 8]
  %y = Relu(%z) : f32[4, 8]
}
"""
    )
    inspected = inspect(module)
    assert {entry.op: entry.why for entry in inspected.unsharded} == {
        "NonZero": "the size of its result depends on data",
        "custom.Thing": "custom.Thing has no sharding rule yet, and no engine knows it",
    }
    assert [note.split(" (")[0] for note in inspected.notes] == ["warning: no engine can run custom.Thing"]


def test_tensors_are_listed_with_inferred_types(gpt):
    found = {fact.name: fact.type for fact in tensors(gpt, "/h.1/mlp/*")}
    assert found["/h.1/mlp/c_fc/MatMul_output_0"] == "f32[4, 32, 256]"
    with pytest.raises(irpar.IrparError, match='no tensor matches "nope"'):
        tensors(gpt, "nope")


def test_the_facts_are_plain_data(gpt):
    found = json.loads(json.dumps(as_json(inspect(gpt))))
    assert found["opsets"] == {"ai.onnx": 18}
    assert found["parameter_elements"] == sum(group["elements"] for group in found["parameters"])


def test_parameters_say_where_they_are_used(gpt):
    groups = {group.pattern: group for group in inspect(gpt).parameters}
    fc, wte = groups["h.*.mlp.c_fc.weight"], groups["wte.weight"]
    assert (fc.scope, fc.uses) == ("h.*/mlp/c_fc", ("B of MatMul /h.*/mlp/c_fc/MatMul: [in 64, out 256]",))
    assert fc.names == ("h.0.mlp.c_fc.weight", "h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight")
    assert (wte.scope, wte.uses) == ("wte", ("data of Gather /wte/Gather: [rows 256, 64]",))


def test_a_tied_embedding_shows_both_uses(tmp_path):
    save(tmp_path / "gpt.onnx", "gpt", tied=True)
    groups = {group.pattern: group for group in inspect(irpar.load(tmp_path / "gpt.onnx")).parameters}
    assert groups["wte.weight"].uses == (
        "data of Gather /wte/Gather: [rows 256, 64]",
        "B of MatMul /lm_head/MatMul: [out 256, in 64], transposed",
    )


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_renamed_weights_are_found_by_scope_shape_and_use(exporter):
    found = inspect(irpar.load(FIXTURES / f"gpt_{exporter}_fixed.onnx")).parameters
    (query,) = (group for group in found if group.scope == "h.*/attn/q" and group.type == "f32[32, 32]")
    (use,) = query.uses
    assert query.tensors == 2
    assert use.startswith("B of MatMul")
    assert "h.*/attn/q" in use
    assert use.endswith(": [in 32, out 32]")


def test_scopes_hold_every_parameter_and_every_flop(gpt):
    found = inspect(gpt)
    assert sum(fact.parameter_bytes for fact in found.scopes) == found.parameter_bytes
    assert sum(fact.flops for fact in found.scopes) == found.flops
    scopes = {fact.scope: fact for fact in found.scopes}
    assert scopes["h.*/mlp/c_fc"].parameter_bytes == 3 * (64 * 256 + 256) * 4
    assert scopes["h.*/mlp/c_fc"].within(2) == "h.*/mlp"


def test_layers_are_told_with_what_they_differ_in(gpt):
    (fact,) = inspect(gpt).layers
    assert (fact.count, fact.nodes) == (3, 37)
    assert fact.first == "/h.0/ln_1/LayerNormalization"
    assert fact.parameters == 12 * 64 * 64 + 13 * 64
    assert fact.differ == ("16 weights",)
    assert "from /h.0/ln_1/LayerNormalization" in str(inspect(gpt))


def test_numbers_of_layers_that_differ_are_told():
    layers = "".join(
        f"""
        %m{n} = Tanh(%x{n}) : f32[2] from "/l{n}"
        %b{n} = Mul(%m{n}, %s{n}) : f32[2]
        %t{n} = Exp(%b{n}) : f32[2]
        %x{n + 1} = Add(%t{n}, %x{n}) : f32[2]
        """
        for n in range(3)
    )
    scales = "".join(f"%s{n} = constant : f32[] {0.5 * n} \n" for n in range(3))
    module = parse_module(f"graph @g(%x0: f32[2]) -> (%x3) opset 21 {{\n{scales}{layers}}}")
    (fact,) = inspect(module).layers
    assert (fact.count, fact.parameters, fact.differ) == (3, 0, ("s0 0.0, 0.5, 1.0",))
    assert as_json(inspect(module))["layers"][0]["count"] == 3


def test_scopes_of_open_sizes_have_no_costs(tmp_path):
    save(tmp_path / "llama.onnx", "llama", dynamic=True)
    assert all(fact.flops is None for fact in inspect(irpar.load(tmp_path / "llama.onnx")).scopes)


def test_states(tmp_path):
    module = parse_module("""
graph @step(%x: f32[batch, 6], state statistic %mean: f32[6], state cache %seen: f32[batch, 6], state counter %n: i64[] in host) -> (%y, %mean_1 replaces %mean) opset 21 {
  %mean_1 = Add(%mean, %mean) : f32[6]
  %first = Add(%x, %seen) : f32[batch, 6]
  %y = Sub(%first, %mean_1) : f32[batch, 6]
}
""")
    found = inspect(module)
    assert [
        (fact.name, fact.kind, fact.replaced_by, fact.dtype, fact.shape, fact.memory, fact.bytes)
        for fact in found.states
    ] == [
        ("mean", "statistic", "mean_1", "f32", (6,), "device", 24),
        ("seen", "cache", None, "f32", ("batch", 6), "device", None),
        ("n", "counter", None, "i64", (), "host", 8),
    ]
    assert as_json(found)["states"][0]["bytes"] == 24
    lines = [line.split() for line in str(found).splitlines()]
    assert ["state", "kind", "replaced", "by", "dtype", "shape", "memory", "bytes"] in lines
    assert ["mean", "statistic", "mean_1", "f32", "[6]", "device", "24", "B"] in lines
    assert ["seen", "cache", "f32", "[batch,", "6]", "device", "?"] in lines


def test_a_model_without_states_has_no_table_of_them(gpt):
    assert inspect(gpt).states == ()
    assert "replaced by" not in str(inspect(gpt))
