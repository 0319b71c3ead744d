"""recompute: what is computed again, where it stands, and what is refused."""

import re
import time

import numpy as np
import pytest

import irpar
from irpar.analysis.gathers import gathered
from irpar.analysis.memory.limit_search import LEAST_SECONDS
from irpar.analysis.memory.liveness import constant_bytes, held_bytes, peak_bytes
from irpar.analysis.recompute import FoundSchedules, GraphTree, RecomputeError, simulation, solve_tree
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.recompute.of_program import of_program
from irpar.analysis.recompute.rewriting import write
from irpar.analysis.recompute.saved_sets import on_demand
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module
from irpar.ops.effects import is_communication
from irpar.pass_manager.default_pipeline import with_recompute, with_zero
from irpar.passes.recompute import Recompute
from irpar.sharding import IrparError
from tests.budget import every, pairs
from tests.training.programs import MESHES, batch, classifier, on_mesh, same

from .golden import check, read, run, run_pipeline

HEAD = """
mesh @m = ["tp"=2]
graph local @g(%x: f32[8, 8] of [8, 8]) -> (%y) opset 21 ranks [0, 1] {
  %shape = constant : i64[2] [4, 16]
"""
BODY = """
  %a = Exp(%x) {| phase=forward} : f32[8, 8] of [8, 8] scope "body"
  %b = irpar.AllReduce(%a) {axes=["tp"], id=0, reduce="sum" | phase=forward} : f32[8, 8] of [8, 8] scope "body"
  %v = Reshape(%b, %shape) {| phase=forward} : f32[4, 16] of [4, 16] scope "body"
  %c = Tanh(%v) {| phase=forward} : f32[4, 16] of [4, 16] scope "head"
  %d = Neg(%c) {| phase=forward} : f32[4, 16] of [4, 16] scope "head"
  %e = irpar.AllReduce(%d) {axes=["tp"], id=1, reduce="sum" | phase=backward} : f32[4, 16] of [4, 16]
  %f = Mul(%e, %c) {| phase=backward} : f32[4, 16] of [4, 16]
  %h = Mul(%f, %v) {| phase=backward} : f32[4, 16] of [4, 16]
  %y = Mul(%h, %h) {| phase=backward} : f32[4, 16] of [4, 16]
}
"""
STEP = HEAD + BODY.removeprefix("\n")


def test_what_matches_is_computed_again_where_it_is_read() -> None:
    # A view of what is computed again is made again too; the collective gets an id of its own.
    check(
        "recompute{match=body}",
        STEP,
        HEAD
        + """\
  %a = Exp(%x) {| phase=forward} : f32[8, 8] of [8, 8] scope "body" meta {"irpar.recompute": "first"}
  %b = irpar.AllReduce(%a) {axes=["tp"], id=0, reduce="sum" | phase=forward} : f32[8, 8] of [8, 8] scope "body" meta {"irpar.recompute": "first"}
  %v = Reshape(%b, %shape) {| phase=forward} : f32[4, 16] of [4, 16] scope "body"
  %c = Tanh(%v) {| phase=forward} : f32[4, 16] of [4, 16] scope "head"
  %d = Neg(%c) {| phase=forward} : f32[4, 16] of [4, 16] scope "head"
  %e = irpar.AllReduce(%d) {axes=["tp"], id=1, reduce="sum" | phase=backward} : f32[4, 16] of [4, 16]
  %f = Mul(%e, %c) {| phase=backward} : f32[4, 16] of [4, 16]
  %a.again = Exp(%x) {| phase=backward} : f32[8, 8] of [8, 8] scope "body" meta {"irpar.recompute": "again"}
  %b.again = irpar.AllReduce(%a.again) {axes=["tp"], reduce="sum", id=2 | phase=backward} : f32[8, 8] of [8, 8] scope "body" meta {"irpar.recompute": "again"}
  %v.again = Reshape(%b.again, %shape) {| phase=backward} : f32[4, 16] of [4, 16] scope "body"
  %h = Mul(%f, %v.again) {| phase=backward} : f32[4, 16] of [4, 16]
  %y = Mul(%h, %h) {| phase=backward} : f32[4, 16] of [4, 16]
}
""",
    )


def test_results_stay_until_what_reads_them_first_has_run() -> None:
    found = str(run("recompute{match=head*}", STEP))
    assert "%e = irpar.AllReduce(%d.again)" in found
    assert "%f = Mul(%e, %c.again)" in found
    # %c and %d are there once in the forward pass and once in the backward pass.
    assert [line.split()[0] for line in found.splitlines() if "Tanh" in line or "Neg" in line] == [
        "%c",
        "%d",
        "%c.again",
        "%d.again",
    ]


def test_communication_is_not_repeated_where_that_is_said() -> None:
    module = read(STEP)
    (record,) = run_pipeline("recompute{match=body, mp-comm-recompute=false}", module)
    assert record.notes == ("nothing that the backward pass reads matches",)


def test_without_a_backward_pass_names_do_nothing() -> None:
    inference = STEP.replace(" | phase=forward", "").replace(" | phase=backward", "")
    inference = inference.replace(" {| phase=forward}", "").replace(" {| phase=backward}", "")
    (record,) = run_pipeline("recompute{match=body}", read(inference))
    assert record.notes == ("nothing is computed again: there is no backward pass (a budget needs none)",)


def test_chance_runs_once() -> None:
    text = STEP.replace("Exp(%x) {|", "RandomNormalLike(%x) {|").replace("irpar.AllReduce(%a)", "irpar.AllReduce(%a)")
    found = str(run("recompute{match=body}", text))
    assert found.count("RandomNormalLike") == 1
    assert "irpar.AllReduce(%a) {axes" in found
    assert found.count("%b.again") == 2


def chain(count: int) -> str:
    """A forward pass of so many nodes, all of whose results the backward pass reads."""
    lines = [f"  %f{place} = Tanh(%f{place - 1}) {{| phase=forward}} : f32[64]" for place in range(1, count)]
    lines += [
        f"  %b{place} = Mul(%b{place + 1}, %f{place}) {{| phase=backward}} : f32[64]"
        for place in reversed(range(count - 1))
    ]
    text = "\n".join(lines).replace("%f0 ", "%x ").replace("%f0)", "%x)").replace(f"%b{count - 1}", f"%f{count - 1}")
    return f'mesh @m = ["tp"=1]\ngraph local @g(%x: f32[64] of [64]) -> (%b0) opset 21 ranks [0] {{\n{text}\n}}\n'


@pytest.mark.parametrize("method", every(3, ["auto", "optimal", "chain", "sqrt", "sweep"]))
def test_a_budget_is_kept_by_later_passes(method: str) -> None:
    before = read(chain(12))
    for later in ("", ",cse", ",simplify-collectives", ",fuse-communication,group-segments"):
        module = clone_module(before)
        run_pipeline(f"recompute{{budget=0.7, method={method}, seconds=5}}{later}", module)
        assert module.memory_limit == int(peak_bytes(before) * 0.7)
        assert peak_bytes(module) <= module.memory_limit


def test_what_fits_stays_as_it_is() -> None:
    module = read(chain(6))
    text = str(module)
    (record,) = run_pipeline("recompute{budget=1}", module)
    assert str(module) == text.replace("mesh @m", "module {memory_limit=1792}\nmesh @m")
    assert record.notes == ("ranks hold 1.79 kB, which fits",)


def test_a_program_that_holds_nothing_has_a_limit_which_is_read_back_and_set_once() -> None:
    module = parse_module("graph local @g(%x: f32[0, 8]) -> (%y) opset 18 ranks [0] {\n%y = Tanh(%x) : f32[0, 8]\n}")
    for budget in (0.5, 1):
        run_pipeline(f"recompute{{budget={budget}}}", module)
        assert module.memory_limit == 0
    assert parse_module(str(module)).memory_limit == 0


def test_a_budget_in_gb() -> None:
    module = read(chain(12))
    (record,) = run_pipeline("recompute{budget-gb=0.0000025, seconds=5}", module)
    assert peak_bytes(module) <= 2500
    assert record.notes[0].startswith("4 nodes computed again: ranks hold 2.3 kB instead of 3.33 kB, for ")
    assert record.statistics["recomputed"] == 4


def test_inference_programs_recompute_too() -> None:
    # %a is large and cheap, read at both ends.
    text = """
    mesh @m = ["tp"=1]
    graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0] {
      %large = constant : i64[2] [64, 4]
      %a = Expand(%x, %large) : f32[64, 4]
      %b = ReduceSum(%a) : f32[1, 1]
      %c = Expand(%b, %large) : f32[64, 4]
      %d = Exp(%c) : f32[64, 4]
      %e = ReduceSum(%d) : f32[1, 1]
      %y = Mul(%a, %e) : f32[64, 4]
    }
    """
    module = run("recompute{budget=0.75, seconds=5}", text)
    assert [node.op_type for node in module.graph].count("Expand") == 3
    assert peak_bytes(module) <= peak_bytes(read(text)) * 0.75


def in_loop(nodes: str, around: str = "", behind: str = "%z = Neg(%y) : f32[64]") -> str:
    """A loop of three trips over micro-batches whose body has some nodes, the last of them %g, which is added up."""
    return f"""
mesh @m = ["tp"=2]
graph local @g(%x: f32[3, 64] of [3, 64], %s: f32[64] of [64]) -> (%z) opset 21 ranks [0, 1] {{
{around}
  %y = Scan(%s, %x) {{body=graph @body(%t: f32[64], %i: f32[64]) -> (%t1) {{
{nodes}
    %t1 = Add(%t, %g) {{| phase=backward}} : f32[64]
  }}, num_scan_inputs=1}} : f32[64]
  {behind}
}}
"""


LAYER = """
    %a = Exp(%i) {| phase=forward} : f32[64] scope "layer"
    %b = irpar.AllReduce(%a) {axes=["tp"], id=0, reduce="sum" | phase=forward} : f32[64] of [64] scope "layer"
    %c = Tanh(%b) {| phase=forward} : f32[64]
    %d = Tanh(%c) {| phase=forward} : f32[64]
    %e = Mul(%d, %c) {| phase=backward} : f32[64]
    %g = Mul(%e, %b) {| phase=backward} : f32[64]
"""


def test_what_matches_in_a_loop_is_computed_again_in_each_trip() -> None:
    behind = '%z = irpar.AllReduce(%y) {axes=["tp"], id=1, reduce="sum"} : f32[64] of [64]'
    module = run("recompute{match=layer}", in_loop(LAYER, behind=behind))
    found = [(node.op_type, node.results[0].name, node.attributes.get("id")) for node in module.graph.walk()]
    assert found == [
        ("Scan", "y", None),
        ("Exp", "a", None),
        ("AllReduce", "b", 0),
        ("Tanh", "c", None),
        ("Tanh", "d", None),
        ("Mul", "e", None),
        ("Exp", "a.again", None),
        ("AllReduce", "b.again", 1),
        ("Mul", "g", None),
        ("Add", "t1", None),
        ("AllReduce", "z", 2),
    ]
    assert [value.name for value in module.graph.value("g").node.inputs] == ["e", "b.again"]  # type: ignore[union-attr]


def deep(count: int) -> str:
    """So many nodes in the forward pass of a body, all of whose results its backward pass reads."""
    lines = [f"    %f{n} = Tanh(%f{n - 1}) {{| phase=forward}} : f32[64]" for n in range(1, count)]
    lines += [f"    %b{n} = Mul(%b{n + 1}, %f{n}) {{| phase=backward}} : f32[64]" for n in reversed(range(count - 1))]
    text = "\n".join(lines).replace("%f0 ", "%i ").replace("%f0)", "%i)").replace("%b0 ", "%g ")
    return text.replace(f"%b{count - 1}", f"%f{count - 1}")


def test_a_budget_of_the_step_is_kept_in_its_loop() -> None:
    before = read(in_loop(deep(10)))
    whole = peak_bytes(before)
    for later in ("", ",cse,simplify-collectives,fuse-communication,group-segments"):
        module = clone_module(before)
        run_pipeline(f"recompute{{budget=0.8, method=chain, seconds=5}}{later}", module)
        assert module.memory_limit == int(whole * 0.8)
        assert peak_bytes(module) <= module.memory_limit
        assert "again" in str(module)


def test_the_least_beside_a_loop_can_be_had() -> None:
    # What is around the loop has to be computed again too: %v and %w are read behind it.
    around = "  %w = Exp(%s) : f32[64]\n  %v = Neg(%w) : f32[64]"
    before = read(in_loop(deep(4), around, "%u = Mul(%y, %w) : f32[64]\n  %z = Mul(%u, %v) : f32[64]"))
    with pytest.raises(RecomputeError, match="at least") as error:
        run_pipeline("recompute{budget=0.1, seconds=10}", clone_module(before))
    least = int(str(error.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert least < peak_bytes(before)
    module = clone_module(before)
    run_pipeline(f"recompute{{budget-gb={least / 1e9!r}, seconds=10}}", module)
    assert peak_bytes(module) <= least
    assert "v.again" in str(module) or "w.again" in str(module)


def test_branches_are_recomputed_too() -> None:
    text = f"""
mesh @m = ["tp"=1]
graph local @g(%x: f32[64] of [64], %on: bool[] of []) -> (%y) opset 21 ranks [0] {{
  %y = If(%on) {{then_branch=graph @a() -> (%g) {{
{deep(10).replace("%i", "%x")}
  }}, else_branch=graph @b() -> (%n) {{
    %n = Neg(%x) : f32[64]
  }}}} : f32[64]
}}
"""
    before = read(text)
    module = clone_module(before)
    run_pipeline("recompute{budget=0.7, seconds=5}", module)
    assert peak_bytes(module) <= int(peak_bytes(before) * 0.7)


REFUSED = [
    ("recompute", "recompute needs one of match, budget and budget-gb"),
    ("recompute{match=body, budget=0.5}", "recompute needs one of match, budget and budget-gb"),
    ("recompute{budget=1.5}", "the budget of recompute is no share and no size"),
    ("recompute{budget-gb=-1}", "the budget of recompute is no share and no size"),
    ("recompute{budget=0.5, seconds=0}", "recompute needs time to search"),
    ("recompute{match=bodie}", 'no scope, no node and no value is "bodie"'),
]


def test_a_pattern_that_resembles_nothing_is_told_what_there_is() -> None:
    with pytest.raises(IrparError) as found:
        run("recompute{match=layers.*}", STEP)
    assert [note for note in found.value.notes if note.startswith("names are ")]


@pytest.mark.parametrize(("pipeline", "said"), REFUSED)
def test_refusals(pipeline: str, said: str) -> None:
    with pytest.raises(IrparError, match=said):
        run(pipeline, STEP)


def test_a_budget_that_cannot_be_met_says_the_least() -> None:
    with pytest.raises(RecomputeError, match="give a budget of at least 1,040 bytes"):
        run("recompute{budget=0.5, seconds=2}", STEP)


def test_the_least_that_is_said_is_found_again_in_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short searches for the least find it here, and no others."""

    def search(tree: GraphTree, budget: int, method: str, end: float) -> FoundSchedules:
        is_short = not budget and end - time.monotonic() < 2 * LEAST_SECONDS
        return solve_tree(tree, 2500 if is_short else 2700, method, end)

    monkeypatch.setattr("irpar.passes.recompute.solve_tree", search)
    with pytest.raises(RecomputeError, match=r"give a budget of at least [\d,]+ bytes") as told:
        run_pipeline("recompute{budget-gb=0.000002, seconds=1}", read(chain(12)))
    said = re.search(r"at least ([\d,]+) bytes", str(told.value))
    assert said is not None
    least = int(said[1].replace(",", ""))
    assert least <= 2500
    module = read(chain(12))
    run_pipeline(f"recompute{{budget-gb={least / 1e9!r}, seconds=4}}", module)
    assert peak_bytes(module) <= least


def test_the_global_view_is_refused() -> None:
    with pytest.raises(IrparError, match="recompute needs the local view"):
        run("recompute{budget=0.5}", "graph @g(%x: f32[4]) -> (%x) opset 21 {\n}")


def test_the_mark_is_read_back() -> None:
    module = run("recompute{match=body}", STEP)
    again = parse_module(str(module))
    assert [node.metadata for node in again.graph] == [node.metadata for node in module.graph]


def with_cuts(module: Module, mesh: str) -> Module:
    known = {value.source_name for value in module.graph.inputs}
    for name, cut in MESHES[mesh].items():
        if name in known:
            module.shard(name, cut)
    return module


@pytest.mark.parametrize(("mesh", "engine"), pairs(list(MESHES), ["numpy", "ort"]))
def test_ranks_whose_blocks_differ_compute_the_same_bits(mesh: str, engine: str) -> None:
    step = classifier()
    found = []
    recomputed = irpar.partition(
        with_cuts(clone_module(step), mesh), mesh, pipeline=with_recompute("recompute{match=[*]}")
    )
    for partition in (on_mesh(step, mesh), recomputed):
        with partition.trainer(engine=engine) as trainer:  # type: ignore[arg-type]
            losses = [trainer.step(batch(number)) for number in range(3)]
            found.append({"loss": np.asarray(losses), **trainer.read_all()})
    assert "again" in str(recomputed.module)
    same(*found)


@pytest.mark.parametrize("later", ["simplify-collectives", "cse"])
def test_no_later_pass_merges_what_is_computed_again(later: str) -> None:
    # No phases tell the computations apart, and no limit is left that would keep a pass from merging them.
    text = """
    mesh @m = ["tp"=2]
    graph local @g(%x: f32[4] of [4]) -> (%y) opset 21 ranks [0, 1] {
      %large = constant : i64[2] [64, 4]
      %e = Expand(%x, %large) : f32[64, 4] of [64, 4]
      %a = irpar.AllReduce(%e) {axes=["tp"], id=0, reduce="sum"} : f32[64, 4] of [64, 4]
      %b = ReduceSum(%a) : f32[1, 1] of [1, 1]
      %c = Expand(%b, %large) : f32[64, 4] of [64, 4]
      %d = Exp(%c) : f32[64, 4] of [64, 4]
      %f = ReduceSum(%d) : f32[1, 1] of [1, 1]
      %y = Mul(%a, %f) : f32[64, 4] of [64, 4]
    }
    """
    module = run("recompute{budget=0.75, seconds=5}", text)
    assert [node.op_type for node in module.graph].count("AllReduce") == 2
    module.memory_limit = None
    before = str(module)
    run_pipeline(later, module)
    assert str(module) == before


def test_ranks_that_hold_most_at_different_nodes_all_fit() -> None:
    first, second = (_unequal(sizes, rank) for rank, sizes in enumerate(((64, 128), (128, 64))))
    before = read(f'mesh @m = ["tp"=2]\n{first}{second}')
    whole = peak_bytes(before)
    fitted = 0
    for share in every(3, (0.95, 0.9, 0.85, 0.8, 0.75)):
        module = clone_module(before)
        try:
            run_pipeline(f"recompute{{budget={share}, seconds=5}}", module)
        except RecomputeError:
            continue
        fitted += 1
        assert peak_bytes(module) <= int(whole * share)
    assert fitted


def _unequal(sizes: tuple[int, int], rank: int) -> str:
    """A forward pass of six results of one size and six of another, all of which the backward pass reads."""
    lines, types = [], []
    for half, size in enumerate(sizes):
        types += [f"f32[{size}]"] * 6
        lines += [f"  %f{half}_0 = Expand(%x, %size{half}) {{| phase=forward}} : f32[{size}]"]
        lines += [f"  %f{half}_{n} = Tanh(%f{half}_{n - 1}) {{| phase=forward}} : f32[{size}]" for n in range(1, 6)]
    for half in (1, 0):
        size = sizes[half]
        lines += [f"  %b{half}_5 = Neg(%f{half}_5) {{| phase=backward}} : f32[{size}]"]
        lines += [
            f"  %b{half}_{n} = Mul(%b{half}_{n + 1}, %f{half}_{n}) {{| phase=backward}} : f32[{size}]"
            for n in reversed(range(5))
        ]
        lines += [f"  %s{half} = ReduceSum(%b{half}_0) {{| phase=backward}} : f32[1]"]
    lines += ["  %y = Add(%s0, %s1) {| phase=backward} : f32[1]"]
    constants = [f"  %size{half} = constant : i64[1] [{size}]" for half, size in enumerate(sizes)]
    body = "\n".join((*constants, *lines))
    return f"graph local @g{rank}(%x: f32[1] of [1]) -> (%y) opset 21 ranks [{rank}] {{\n{body}\n}}\n"


@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_training_graph_holds_what_its_program_does(mesh: str) -> None:
    # Also where an update is written over the state that it replaces.
    module = on_mesh(classifier(), mesh).module
    assert module is not None
    for graph in module.graphs:
        program = of_program(graph, lambda node: 1, lambda node: True)
        held = simulation.held_bytes(program.graph, range(len(program.nodes)))
        found = {node: most for node, most in zip(program.nodes, held, strict=True) if node is not None}
        live = {node: most + constant_bytes(graph) for node, most in held_bytes(graph)}
        assert found == {node: live[node] for node in found}


@pytest.mark.parametrize(("parameters", "others"), [(True, False), (False, True)])
def test_gathers_of_parameters_are_repeated_where_that_is_said(parameters: bool, others: bool) -> None:
    module = irpar.partition(
        with_cuts(classifier(), "dp=2"), "dp=2", pipeline=with_zero("zero{stage=3, threshold-kb=0}")
    ).module
    assert module is not None
    chosen = Recompute(mp_comm_recompute=others, parallel_optimizer_comm_recompute=parameters)
    for graph, program in zip(module.graphs, chosen._programs(module, Costs(module)), strict=True):
        gathers = {node for node, _ in gathered(graph)}
        sent = {
            node: training
            for node, training in zip(program.nodes, program.graph.nodes, strict=True)
            if node is not None and is_communication(node) and node.phase != "optimizer"
        }
        # Each is gathered in both passes, the second time as well as the first.
        assert len(gathers & sent.keys()) > len({value for _, value in gathered(graph)})
        assert sent.keys() - gathers
        for node, training in sent.items():
            assert training.norec == (not (parameters if node in gathers else others))


TWO_RESULTS = """
mesh @m = ["tp"=1]
graph local @g(%x: f32[8, 64] of [8, 64]) -> (%y) opset 21 ranks [0] {
  %a = Tanh(%x) {| phase=forward} : f32[8, 64]
  %b, %c = Split(%a) {axis=0, num_outputs=2 | phase=forward} : f32[4, 64], f32[4, 64]
  %d = Exp(%a) {| phase=forward} : f32[8, 64]
  %e = Neg(%d) {| phase=forward} : f32[8, 64]
  %f = Mul(%e, %e) {| phase=backward} : f32[8, 64]
  %g, %h = Split(%f) {axis=0, num_outputs=2 | phase=backward} : f32[4, 64], f32[4, 64]
  %i = Mul(%g, %b) {| phase=backward} : f32[4, 64]
  %j = Add(%i, %h) {| phase=backward} : f32[4, 64]
  %y = Mul(%j, %c) {| phase=backward} : f32[4, 64]
}
"""


def test_results_of_a_node_are_computed_again_together() -> None:
    module = read(TWO_RESULTS)
    program = of_program(module.graph, lambda node: 10, lambda node: True)
    split = [place for place, node in enumerate(program.nodes) if node is not None and node.op_type == "Split"]
    assert [program.graph.nodes[place].cost for place in split] == [10, 0, 10, 0]
    everything = frozenset(range(len(program.nodes)))
    for held in (everything - {split[0]}, everything - {split[1]}, everything - {*split}, frozenset[int]()):
        schedule = on_demand(program.graph, held)
        outcome = simulation.simulate(program.graph, schedule)
        trial = clone_module(module)
        count = write(of_program(trial.graph, lambda node: 10, lambda node: True), [schedule], 0)
        assert count
        assert outcome.peak == peak_bytes(trial)
        assert outcome.cost == program.graph.cost + 10 * count
