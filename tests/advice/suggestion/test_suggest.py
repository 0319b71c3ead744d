"""What --suggest chooses: its cuts divide the work, give the right numbers, and cost what was predicted."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.advice.suggestion.cut_classes import CutClasses
from irpar.advice.suggestion.file import Spec, as_yaml
from irpar.advice.suggestion.minimum import fewest, without_needless
from irpar.advice.suggestion.readings import Readings
from irpar.advice.suggestion.report import Groups
from irpar.advice.suggestion.suggest import Suggestion, suggest
from irpar.advice.suggestion.trials import Estimate, Trials
from irpar.advice.suggestion.words import CutWords
from irpar.analysis.cost.figures import Figures
from irpar.analysis.types.symbols import UnboundSymbolError, free_symbols
from irpar.annotations.named import infer_undeclared_types
from irpar.annotations.shardings_file import read_shardings
from irpar.ir import Module
from irpar.sharding import Axis, IrparError, Mesh
from tests.budget import budget, every, of_each, pairs
from tests.written import model_of_text

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXCESS = 1.1
"""How much more than its share of the FLOPs a rank may have."""
SIZES = {"batch": 4}


def build(folder: Path, family: str, **overrides: Any) -> Module:
    path = folder / f"{family}.onnx"
    onnx.save(models.build(family, **overrides), path)
    return irpar.load(path)


def load(path: Path) -> Module:
    bind = {symbol: SIZES.get(symbol, 16) for symbol in free_symbols(irpar.load(path))}
    return irpar.load(path, bind=bind)


def partition(module: Module, found: Suggestion, folder: Path) -> irpar.Partition:
    """As `irpar partition --shardings FILE` does it."""
    path = folder / "suggested.yaml"
    path.write_text(as_yaml(found.mesh, found.lines, found.comments, "model.onnx"), encoding="utf-8")
    file = read_shardings(path)
    assert file.mesh is not None
    module.set_mesh(file.mesh)
    infer_undeclared_types(module)
    file.annotate(module)
    return irpar.partition(module)


def excess_of(found: Suggestion) -> float:
    return found.prediction.flops_per_rank / found.prediction.flops * found.mesh.size


def check(module: Module, mesh: dict[str, int], folder: Path, tolerance: float = 1e-4) -> Suggestion:
    """The suggestion is right, and costs what it says."""
    found = suggest(module, Mesh(mesh))
    made = partition(module, found, folder)
    made.verify(tolerance=tolerance).check()
    told = found.prediction
    assert made.plan.totals["flops_per_rank"] == told.flops_per_rank
    assert made.plan.totals["by_kind"] == told.by_kind
    assert max(part["weight_bytes"] for part in made.plan.parts) == told.weight_bytes_per_rank
    return found


MESHES = ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4})
TRANSFORMERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt", {}),
    ("gpt", {"fused_qkv": True}),
    ("gpt", {"tied": True}),
    ("llama", {}),
    ("llama", {"preset": "gqa"}),
    ("llama", {"preset": "gqa", "kv_heads": 2}),
    ("llama", {"preset": "fused"}),
    ("bert", {}),
    ("t5", {}),
    ("vit", {}),
    ("moe", {}),
    ("moe", {"routing": "gather"}),
)


@pytest.mark.parametrize(
    ("transformer", "mesh"), every(2, pairs(of_each(itemgetter(0), TRANSFORMERS), MESHES)), ids=str
)
def test_transformers_are_divided(
    transformer: tuple[str, dict[str, Any]], mesh: dict[str, int], tmp_path: Path
) -> None:
    family, overrides = transformer
    found = check(build(tmp_path, family, **overrides), mesh, tmp_path)
    assert excess_of(found) <= EXCESS


OTHERS = (
    ("mlp", {"gemm": True}, 1.01),
    ("resnet", {}, EXCESS),
    pytest.param("resnet", {"preset": "bottleneck"}, 1.2, marks=pytest.mark.slow),
    pytest.param("unet", {}, EXCESS, marks=pytest.mark.slow),
    ("dlrm", {}, EXCESS),
    ("recurrent", {}, EXCESS),
    ("control", {}, EXCESS),
)


@pytest.mark.parametrize(("family", "overrides", "most"), OTHERS, ids=str)
def test_other_families_are_right_too(family: str, overrides: dict[str, Any], most: float, tmp_path: Path) -> None:
    found = check(build(tmp_path, family, **overrides), {"tp": 2}, tmp_path)
    assert excess_of(found) <= most


NOT_DIVIDED = ("gru", "lstm")
"""Steps run replicated on every rank."""
MORE_THAN_ITS_SHARE: dict[str, tuple[float, str]] = {
    "dlrm": (1.2, "products of some hundred numbers are not worth a collective"),
    "resnet": (1.25, "the same, of 8 channels"),
    "unet": (1.2, "the same, of 8 channels"),
}
"""Exports of which a rank has more, at most how much, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.onnx")), ids=lambda path: path.stem)
def test_exports_are_divided(path: Path, mesh: dict[str, int], tmp_path: Path) -> None:
    kind = path.stem.split("_")[0]
    found = check(load(path), mesh, tmp_path, 3e-2 if "fp16" in kind else 1e-4)
    if kind not in NOT_DIVIDED:
        most, why = MORE_THAN_ITS_SHARE.get(kind, (EXCESS, "the work is divided"))
        assert excess_of(found) <= most, why


@pytest.mark.parametrize("name", ["gpt_torchscript_fixed", "llama_dynamo_dynamic"])
def test_exports_with_renamed_weights(name: str, tmp_path: Path) -> None:
    found = check(load(FIXTURES / f"{name}.onnx"), {"dp": 2, "tp": 4}, tmp_path)
    assert excess_of(found) <= EXCESS
    # Where names do not tell, the use does.
    assert any("attn" in comment for comment in found.comments.values())


@settings(
    max_examples=budget(12, least=2),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    heads=st.integers(1, 6),
    head=st.sampled_from([4, 6]),
    ffn=st.integers(3, 40),
    vocab=st.integers(5, 40),
    batch=st.integers(1, 4),
    layers=st.integers(1, 2),
    mesh=st.sampled_from([{"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}]),
    options=st.sampled_from([{}, {"tied": True}, {"fused_qkv": True}]),
)
def test_any_sizes_give_the_right_numbers(
    heads: int,
    head: int,
    ffn: int,
    vocab: int,
    batch: int,
    layers: int,
    mesh: dict[str, int],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    sizes = {"heads": heads, "hidden": heads * head, "ffn": ffn, "vocab": vocab, "layers": layers}
    module = build(tmp_path, "gpt", batch=batch, seq=8, **sizes, **options)
    found = check(module, mesh, tmp_path)
    assert 1 / prod(mesh.values()) <= found.prediction.flops_per_rank / found.prediction.flops <= 1


def cuts(found: Suggestion) -> dict[str, tuple[Any, ...]]:
    return {group.pattern: group.spec for group in found.cut}


def test_megatron_is_found_with_reasons(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "gpt"), Mesh({"dp": 2, "tp": 2}))
    columns, rows = (None, ("tp",)), (("tp",), None)
    assert {name: cut for name, cut in cuts(found).items() if name.endswith("weight")} == {
        "h.*.attn.q.weight": columns,
        "h.*.attn.k.weight": columns,
        "h.*.attn.v.weight": columns,
        "h.*.attn.proj.weight": rows,
        "h.*.mlp.c_fc.weight": columns,
        "h.*.mlp.proj.weight": rows,
        "lm_head.weight": columns,
    }
    assert cuts(found)["input_ids"] == (("dp",), None)
    reasons = {group.pattern: group.reason for group in (*found.cut, *found.whole)}
    assert reasons["h.*.attn.q.weight"] == "heads: 4, 2 a rank"
    assert reasons["h.*.attn.proj.weight"] == "rows: MatMul /h.*/attn/proj/MatMul sums over tp"
    assert reasons["h.*.ln_*.weight"] == "LayerNormalization needs it in full"
    assert reasons["h.*.mlp.proj.bias"] == "goes with dim 1 of h.*.mlp.proj.weight, which is sharded in dim 0"
    assert reasons["wte.weight"].startswith("sharding dim 0 would send 16.4 kB in every step")
    assert reasons["constants.causal_mask"] == "goes with dim 1 of the input input_ids"


def test_large_tables_are_cut_by_rows(tmp_path: Path) -> None:
    """Each rank looks up its own rows: what it holds less is worth the sum of the results."""
    found = check(build(tmp_path, "gpt", vocab=4096, layers=1), {"tp": 2}, tmp_path)
    assert cuts(found)["wte.weight"] == (("tp",), None)


def test_experts_go_to_ranks_as_a_whole(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "moe"), Mesh({"tp": 2}))
    assert cuts(found)["h.*.moe.experts.fc.weight"] == (("tp",), None, None)


def test_heads_that_only_a_part_of_the_axis_divides(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "llama", preset="gqa", kv_heads=2), Mesh({"tp": 4}))
    assert cuts(found)["layers.*.self_attn.k_proj.weight"] == (None, ("tp:(1)2",))
    assert "all_gather" not in found.prediction.by_kind


def test_heads_that_no_whole_axis_divides(tmp_path: Path) -> None:
    """6 heads over 4: three devices have two each."""
    found = check(build(tmp_path, "gpt", heads=6, hidden=48, seq=256, batch=1), {"tp": 4}, tmp_path)
    assert cuts(found)["h.*.attn.q.weight"] == (None, ("tp",))
    assert cuts(found)["h.*.mlp.c_fc.weight"] == (None, ("tp",))
    reasons = {group.pattern: group.reason for group in found.cut}
    assert reasons["h.*.attn.q.weight"] == "heads: 6, 2 a rank"
    assert reasons["h.*.attn.proj.weight"] == "rows: MatMul /h.*/attn/proj/MatMul sums over tp"
    assert list(found.prediction.by_kind) == ["all_reduce"]


def test_sections_of_a_fused_weight_are_cut_one_by_one(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "gpt", fused_qkv=True), Mesh({"tp": 2}))
    reasons = {group.pattern: group.reason for group in found.cut}
    assert reasons["h.*.attn.c_attn.weight"] == "heads: 4, 2 a rank"


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt", {"dp": 2, "tp": 2}),
        pytest.param("unet", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("unet", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_runs_say_the_same(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    module = build(tmp_path, family)
    first, second = (suggest(module, Mesh(mesh)) for _ in range(2))
    assert first == second


def test_the_module_stays_as_it_is(tmp_path: Path) -> None:
    module = build(tmp_path, "bert")
    before = str(module)
    suggest(module, Mesh({"tp": 2}))
    assert str(module) == before
    assert not module.annotations


def test_weights_are_not_read(tmp_path: Path) -> None:
    models.save(tmp_path / "llama.onnx", "llama", weights="external")
    module = irpar.load(tmp_path / "llama.onnx")
    (tmp_path / "llama.onnx.data").unlink()
    assert excess_of(suggest(module, Mesh({"tp": 2}))) <= EXCESS


def test_open_symbols_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnboundSymbolError, match="batch, seq"):
        suggest(build(tmp_path, "llama", dynamic=True), Mesh({"tp": 2}))


def test_a_partition_is_refused(tmp_path: Path) -> None:
    made = irpar.partition(build(tmp_path, "mlp"), {"dp": 2})
    assert made.module is not None
    with pytest.raises(IrparError, match="partition already"):
        suggest(made.module, Mesh({"tp": 2}))


# -- the batch --------------------------------------------------------------------------------------------------------


def text_model(text: str, folder: Path) -> Module:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "text.onnx")
    return irpar.load(folder / "text.onnx")


def test_the_batch_is_found_where_it_is(tmp_path: Path) -> None:
    """[seq, batch, d]: a cumulated sum runs over the first dim."""
    text = """g (float[5,4,8] x) => (float[5,4,8] y) <int64 axis = {0}> { s = CumSum(x, axis)  y = Relu(s) }"""
    found = check(text_model(text, tmp_path), {"dp": 2}, tmp_path)
    assert cuts(found) == {"x": (None, ("dp",), None)}
    assert excess_of(found) == 1


def test_batches_that_never_meet_are_both_cut(tmp_path: Path) -> None:
    text = """g (float[4] a, float[6] b) => (float[4] y, float[6] z) { y = Relu(a)  z = Relu(b) }"""
    found = check(text_model(text, tmp_path), {"data": 2}, tmp_path)
    assert cuts(found) == {"a": (("data",),), "b": (("data",),)}


def with_weights(text: str, tmp_path: Path) -> Module:
    """A model of two layers, whose weights are v and w."""
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for name in ("v", "w"):
        weight = random.standard_normal((64, 64)).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(model, tmp_path / "pairs.onnx")
    return irpar.load(tmp_path / "pairs.onnx")


def test_batches_that_are_compared_in_pairs_are_both_cut(tmp_path: Path) -> None:
    """Images and texts, each through a layer of its own: only the one side is brought together, for the products."""
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[64,64] a, float[64,64] b) => (float[64,64] y) {
      p = MatMul(a, v)  q = MatMul(b, w)  t = Transpose<perm=[1,0]>(q)  y = MatMul(p, t) }"""
    found = check(with_weights(text, tmp_path), {"dp": 2}, tmp_path)
    assert cuts(found) == {"a": (("dp",), None), "b": (("dp",), None)}
    assert excess_of(found) == 1


def test_batches_that_are_compared_go_before_rows_within_one_of_them(tmp_path: Path) -> None:
    """Rows of the images and the batch of the texts do not meet, and seem worth more than either batch."""
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[4,64,64] a, float[4,64] b) => (float[4,4] y)
      <int64[1] rows = {1}> {
      p = MatMul(a, v)  m = ReduceMean<keepdims=0>(p, rows)  q = MatMul(b, w)  t = Transpose<perm=[1,0]>(q)
      y = MatMul(m, t) }"""
    found = check(with_weights(text, tmp_path), {"dp": 2}, tmp_path)
    assert cuts(found) == {"a": (("dp",), None, None), "b": (("dp",), None)}
    assert excess_of(found) == pytest.approx(1, abs=0.01)


def test_without_a_batch_the_user_is_told(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "gpt", batch=1), Mesh({"dp": 2}))
    assert not found.lines
    assert any(note.startswith("dp=2 shards nothing: the inputs (input_ids i64[1, 32])") for note in found.notes)


BRANCHES = """g (float[4,8] x, bool p) => (float[4,8] y) <float[8,16] w1 = {%s}, float[16,8] w2 = {%s}> {
  y = If(p) <then_branch = t () => (float[4,8] a) { h = MatMul(x, w1) r = Relu(h) a = MatMul(r, w2) },
             else_branch = e () => (float[4,8] b) { b = Neg(x) }>
}"""


def test_bodies_are_looked_into(tmp_path: Path) -> None:
    numbers = ", ".join(str(round(0.01 * n, 2)) for n in range(128))
    found = check(text_model(BRANCHES % (numbers, numbers), tmp_path), {"dp": 2, "tp": 2}, tmp_path)
    assert cuts(found) == {"x": (("dp",), None), "w1": (None, ("tp",)), "w2": (("tp",), None)}
    assert found.notes == ()
    assert excess_of(found) <= EXCESS


def test_the_file_says_nothing_that_follows_from_the_rest(tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "gpt", layers=2), Mesh({"dp": 2, "tp": 2}))
    assert list(found.lines) == ["input_ids", "h.*.attn.q.weight", "h.*.mlp.c_fc.weight", "lm_head.weight"]


SMALL: dict[str, Callable[[], Module]] = {
    "mlp": lambda: irpar.load(models.build("mlp")),
    "gpt": lambda: irpar.load(models.build("gpt", layers=2)),
    "moe": lambda: irpar.load(models.build("moe")),
    "lstm": lambda: irpar.load(models.build("recurrent", cell="lstm", bidirectional=True)),
    "gru": lambda: irpar.load(models.build("recurrent", cell="gru")),
    "resnet": lambda: irpar.load(FIXTURES / "resnet_torchscript_fixed.onnx"),
}


@pytest.mark.parametrize(("name", "mesh"), every(2, pairs(list(SMALL), [{"tp": 2}, {"dp": 2, "tp": 2}])), ids=str)
def test_no_line_can_be_left_out(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Without any of them a rank holds, computes, or sends more, or in more collectives, by more than a hundredth."""
    found = suggest(SMALL[name](), Mesh(mesh))
    assert found.lines
    for line in found.lines:
        rest = replace(found, lines={name: spec for name, spec in found.lines.items() if name != line})
        totals = (plan := partition(SMALL[name](), rest, tmp_path).plan).totals
        weight_bytes = max(part["weight_bytes"] for part in plan.parts)
        figures = Figures(weight_bytes, totals["flops_per_rank"], totals["sent_bytes"], totals["collectives"])
        assert not figures.is_as_good(found.prediction.figures), line


@pytest.mark.parametrize("name", every(2, SMALL))
def test_fewer_lines_are_no_worse_in_any_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Spec]] = []
    estimate = Trials.estimate

    def noted(self: Trials, tensors: Mapping[str, Spec], least: float = -inf) -> Estimate:
        asked.append(dict(tensors))
        return estimate(self, tensors, least)

    monkeypatch.setattr(Trials, "estimate", noted)
    module, mesh = SMALL[name](), Mesh({"tp": 2})
    found = suggest(module, mesh)
    all_of_them = max((tried for tried in asked if tried.items() >= found.tensors.items()), key=len)
    assert len(all_of_them) > len(found.tensors)
    whole = Trials(module, mesh, None).exact(all_of_them)
    assert found.prediction.figures.is_as_good(whole.prediction.figures)


def test_estimates_are_what_comes_of_it() -> None:
    """But for collectives, which are joined later."""
    for name in ("mlp", "gpt", "resnet"):
        trials = Trials(SMALL[name](), Mesh({"tp": 2}), None)
        tensors = suggest(SMALL[name](), Mesh({"tp": 2})).tensors
        told, real = trials.estimate(tensors).figures, trials.exact(tensors).prediction.figures
        assert told.weight_bytes == pytest.approx(real.weight_bytes, rel=0.02), name
        assert told.flops == pytest.approx(real.flops, rel=0.02), name
        assert told.sent_bytes == pytest.approx(real.sent_bytes, rel=0.02), name


def test_what_cannot_gain_enough_is_not_refined() -> None:
    trials = Trials(SMALL["gpt"](), Mesh({"tp": 2}), None)
    tensors = suggest(SMALL["gpt"](), Mesh({"tp": 2})).tensors
    refine = trials._refine
    refined = 0

    def counted(*args: Any) -> Any:
        nonlocal refined
        refined += 1
        return refine(*args)

    trials._refine = counted
    gain = trials.gain(Trials(SMALL["gpt"](), Mesh({"tp": 2}), None).estimate(tensors).figures)
    assert trials.gain(trials.estimate(tensors, 10 * gain).figures) <= gain
    assert refined == 0
    assert trials.gain(trials.estimate(tensors, gain).figures) == gain
    assert refined == 1


def test_entries_are_left_out_as_far_as_tries_suffice() -> None:
    entries: dict[str, Spec] = dict.fromkeys("abcdefgh", (("tp",),))
    needed = {"b", "e"}
    for tries, left in ((12, "be"), (5, "bdefgh"), (1, "bcdefgh"), (0, "abcdefgh")):
        asked: list[set[str]] = []

        def is_enough(some: dict[str, Spec], asked: list[set[str]] = asked) -> bool:
            asked.append(set(some))
            return needed <= set(some)

        assert set(without_needless(entries, list(entries), is_enough, tries)) == set(left)
        assert len(asked) <= tries


def test_a_rank_that_needs_more_memory_than_one_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh({"tp": 2})
    assert not any("peak" in note for note in suggest(SMALL["mlp"](), mesh).notes)
    exact = Trials.exact
    monkeypatch.setattr(Trials, "exact", lambda self, tensors: replace(exact(self, tensors), peak_bytes=10**9))
    (note,) = (note for note in suggest(SMALL["mlp"](), mesh).notes if "peak" in note)
    assert note.startswith("a rank holds 1 GB at its peak, one device would ")


def test_reasons_are_what_the_partition_does(tmp_path: Path) -> None:
    """Of rows that are sent together for their reader nobody says that it sums over them."""
    found = suggest(SMALL["resnet"](), Mesh({"tp": 2}))
    made = partition(SMALL["resnet"](), found, tmp_path).module.graph
    readers = {value.source_name: value.users for value in made.constants}
    said = {line: reason for line, reason in found.comments.items() if "channels" in reason}
    sent = {line for line, reason in said.items() if "its blocks are sent for Conv" in reason}
    assert sent
    for line, reason in said.items():
        assert any(node.domain == "irpar" for node in readers[line]) == (line in sent), reason
        is_summed = any(result.sharding.partial for node in readers[line] for result in node.results if result.sharding)
        assert ("sums over tp" in reason) == is_summed, reason


def test_a_result_that_needs_more_entries_gets_them() -> None:
    tensors: dict[str, Spec] = dict.fromkeys(("a1", "a2", "a3", "b1", "b2"), (("tp",),))
    keys = {name: name[0] for name in tensors}
    tried: list[set[str]] = []

    def run(entries: dict[str, Spec]) -> set[str]:
        tried.append(set(entries))
        return set(entries)

    def missing(found: set[str]) -> list[str] | None:
        return None if "a3" in found else ["a3"]

    assert fewest(tensors, keys, run, missing) == {"a1", "a3", "b1"}
    assert tried == [{"a1", "b1"}, {"a1", "a3", "b1"}]
    assert fewest(tensors, keys, run, lambda found: []) is None


def test_entries_that_do_not_follow_come_back_in_few_rounds() -> None:
    names = [f"w{number}" for number in range(100)]
    tensors: dict[str, Spec] = dict.fromkeys(names, (("tp",),))
    needed = set(names[:60])
    tried: list[set[str]] = []

    def run(entries: dict[str, Spec]) -> set[str]:
        tried.append(set(entries))
        return set(entries)

    found = fewest(tensors, dict.fromkeys(names, "one"), run, lambda found: sorted(needed - found) or None)
    assert found == needed
    assert len(tried) < 8


NO_BATCH = {
    "g (float[1,1] x) => (float[1,1] y) { y = Relu(x) }": "the inputs (x f32[1, 1]) have no dim of 2 elements or more",
    "g (float[1,4] x) => (float[1,4] y) { y = CumSum(x, a) }": "dim 1 of x: CumSum needs it in full",
    "g (float[4,4] x) => (float[4,4] y) { y = MatMul(x, x) }": "would shard two dims of x at once",
    "g (float[4] x) => (int64[n] y) { i = NonZero(x) y = Reshape(i, s) }": "dim 0 of x: shape unknown behind NonZero",
}


@pytest.mark.parametrize("graph", NO_BATCH, ids=range(len(NO_BATCH)))
def test_why_there_is_no_batch(graph: str, tmp_path: Path) -> None:
    constants = graph.replace("{ ", "{ a = Constant<value = int64 {1}>() s = Constant<value = int64[1] {-1}>() ", 1)
    (note, *_) = suggest(text_model(constants, tmp_path), Mesh({"dp": 2})).notes
    assert NO_BATCH[graph] in note


@pytest.mark.parametrize(
    ("mesh", "data"), [({"dp": 2}, "dp"), ({"data_1": 2}, "data_1"), ({"batch2": 2}, "batch2"), ({"x": 2}, None)]
)
def test_names_of_axes_say_what_they_cut(mesh: dict[str, int], data: str | None, tmp_path: Path) -> None:
    found = suggest(build(tmp_path, "mlp"), Mesh(mesh))
    assert cuts(found).get("x") == (((data,), None) if data else None)


def test_several_axes_for_weights_are_one(tmp_path: Path) -> None:
    found = check(build(tmp_path, "gpt"), {"dp": 2, "a": 2, "b": 2}, tmp_path)
    assert cuts(found)["h.*.mlp.c_fc.weight"] == (None, ("a", "b"))
    assert excess_of(found) <= EXCESS


def test_where_nothing_is_worth_cutting_it_says_so(tmp_path: Path) -> None:
    text = """g (float[2,512] x) => (float[2,512] y)
      <float[512] w = {%s}> { y = LayerNormalization(x, w) }""" % ", ".join(["1.0"] * 512)  # noqa: UP031
    found = suggest(text_model(text, tmp_path), Mesh({"tp": 2}))
    assert not found.lines
    assert [group.reason for group in found.whole] == ["LayerNormalization needs it in full"]
    assert found.notes[0].startswith("tp shards nothing")


def test_of_a_training_step_it_names_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    step = irpar.train_step(build(tmp_path, "gpt"))
    assert any("ask for the model that it was made of" in note for note in suggest(step, Mesh({"tp": 2})).notes)


STEM = """g (float[5,3,48,48] x, float[48,3,3,3] a, float[96,48,3,3] b, float[192,96,2,2] c) => (float[5,192,6,6] y) {
  p = Conv<strides=[2,2], pads=[1,1,1,1]>(x, a)
  q = Relu(p)
  r = Conv<strides=[2,2], pads=[1,1,1,1]>(q, b)
  s = Relu(r)
  y = Conv<strides=[2,2]>(s, c)
}"""


def test_a_line_whose_tensor_lies_otherwise_in_the_end_says_so(tmp_path: Path) -> None:
    onnx.save(model_of_text(STEM, ["a", "b", "c"]), tmp_path / "stem.onnx")
    found = suggest(irpar.load(tmp_path / "stem.onnx"), Mesh({"tp": 3}))
    (group,) = (group for group in found.cut if group.pattern == "c")
    assert found.lines["c"] == (("tp",), None, None, None)
    assert group.spec == (None, ("tp",), None, None)
    assert found.comments["c"] == (
        "dim 0 is sharded, so that its readers can run in parts; each rank then holds what they read, sharded in dim 1: "
        "input channels: Conv of %y sums over tp"
    )
    assert found.comments["a"] == "output channels: 48, 16 a rank"


def test_a_line_whose_tensor_is_whole_in_the_end_says_what_it_cuts(tmp_path: Path) -> None:
    text = "g (float[4,8] x, float[8,8] w, float[8,8] v) => (float[4,8] y) { h = MatMul(x, w)  y = MatMul(h, v) }"
    onnx.save(model_of_text(text, ["w", "v"]), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    mesh = Mesh({"tp": 2})
    words = CutWords(CutClasses(module.graph, mesh, (Axis("tp"),)), {}, (Axis("tp"),), Readings(module.graph, {}))
    groups = Groups(module.graph, {"w", "v"}, words)
    annotated: dict[str, Spec] = {"w": (None, ("tp",)), "v": (None, None)}
    cut, whole = groups.made({"w": (None, None), "v": (None, None)}, annotated, {})
    told = "dim 1 is sharded, so that its readers can run in parts; small enough that each rank then holds it in full"
    assert not cut
    assert {group.pattern: group.reason == told for group in whole} == {"w": True, "v": False}
    assert groups.comments(annotated, cut) == {"w": told, "v": "replicated, so that the sharding ends here"}


def test_an_input_that_axes_of_weights_cut_is_no_batch(tmp_path: Path) -> None:
    module = build(tmp_path, "mlp")
    classes = CutClasses(module.graph, Mesh({"dp": 2, "tp": 2}), (Axis("tp"),))
    words = CutWords(classes, {}, (Axis("tp"),), Readings(module.graph, {}))
    for axis, reason in (("dp", "batch"), ("tp", "follows the weights that meet it")):
        cut, _ = Groups(module.graph, (), words).made({"x": (None, (axis,))}, {}, {})
        assert [(group.pattern, group.reason) for group in cut] == [("x", reason)]


def test_directions_of_a_recurrent_layer_go_to_ranks(tmp_path: Path) -> None:
    text = """g (float[7,4,6] x, float[2,20,6] w, float[2,20,5] r) => (float[7,2,4,5] y) {
        y = LSTM<hidden_size=5, direction="bidirectional">(x, w, r) }"""
    onnx.save(model_of_text(text, ["w", "r"]), tmp_path / "lstm.onnx")
    found = check(irpar.load(tmp_path / "lstm.onnx"), {"dp": 2, "tp": 2}, tmp_path)
    assert cuts(found)["x"] == (None, ("dp",), None)
    assert cuts(found)["w"] == (("tp",), None, None)
    assert list(found.lines) == ["x", "w"]  # What r and the bias are follows.
    assert found.prediction.by_kind == {}
    assert excess_of(found) == 1


def test_shapes_are_known_behind_a_quantised_lstm(tmp_path: Path) -> None:
    nodes = """l = com.microsoft.DynamicQuantizeLSTM<hidden_size=5>(x, w, r, , , , , , s, z, s, z)
        y = MatMul(l, v)"""
    text = f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[7,4,6] x, float[5,8] v) => (float[7,1,4,8] y)
        <uint8[1,6,20] w = {{{", ".join(["1"] * 120)}}}, uint8[1,5,20] r = {{{", ".join(["2"] * 100)}}},
         float[1] s = {{0.01}}, uint8[1] z = {{1}}> {{ {nodes} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "quantised.onnx")
    module = irpar.load(tmp_path / "quantised.onnx")
    irpar.PassManager.parse("infer-types").run(module)
    assert str(module.graph.value("l").type) == "f32[7, 1, 4, 5]"


def test_a_batch_goes_through_what_quantizes_by_all_numbers(tmp_path: Path) -> None:
    """Its scale comes from the greatest and the least of all devices: two numbers, however many images."""
    text = """g (float[4,3,8,8] x) => (float[4,6,6,6] y) <uint8[6,3,3,3] w> {
      q, s, z = DynamicQuantizeLinear(x)  c = ConvInteger(q, w, z)  f = Cast<to = 1>(c)  y = Mul(f, s) }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    weights = np.random.default_rng(0).integers(0, 255, (6, 3, 3, 3)).astype(np.uint8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "model.onnx")
    found = check(irpar.load(tmp_path / "model.onnx"), {"dp": 2}, tmp_path)
    assert cuts(found)["x"] == (("dp",), None, None, None)
    assert found.prediction.by_kind["all_reduce"]["sent_bytes"] == 8


def test_a_model_in_training_mode_is_looked_at_as_it_is_used(tmp_path: Path) -> None:
    text = """g (float[4,8] x) => (float[4,6] y) <bool t = {1}, float r = {0.5}> {
      h = MatMul(x, w)  d, m = Dropout(h, r, t)  y = Relu(d) }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 6), np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    before = str(module)
    found = suggest(module, Mesh({"dp": 2}))
    assert cuts(found)["x"] == (("dp",), None)
    assert any("the model is in training mode" in note for note in found.notes)
    assert str(module) == before
