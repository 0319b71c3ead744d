"""What would lower a peak: what is said of a change is what a partition with that change has."""

import re

import irpar
from irpar.advice.lower_peak import Change, Programs, changes, lowering
from irpar.analysis.memory.liveness import peak_bytes
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, with_recompute
from tests.training.programs import with_weights

LAYER = """
  %f{0} = MatMul(%x{0}, %w{0}) : f32[64, 8] scope "h.{0}/fc"
  %s{0} = Sigmoid(%f{0}) : f32[64, 8] scope "h.{0}/act"
  %t{0} = Tanh(%s{0}) : f32[64, 8] scope "h.{0}/act"
  %x{1} = Mul(%t{0}, %f{0}) : f32[64, 8] scope "h.{0}"
"""
WEIGHTS = ", ".join(f'%w{number}: f32[8, 8] from "h.{number}.w"' for number in range(3))
LAYERS = "".join(LAYER.format(number, number + 1) for number in range(3))
MODEL = f"graph @g(%x0: f32[64, 8], {WEIGHTS}) -> (%x3) opset 21 {{{LAYERS}}}"


def step() -> irpar.Module:
    return irpar.train_step(with_weights(MODEL), loss="mse", optimizer="sgd")


def programs(pipeline: str = DEFAULT_PIPELINE, mesh: str = "dp=2") -> Programs:
    made = irpar.partition(step(), mesh, pipeline=pipeline)
    assert made.module is not None
    return Programs(made.module, made.plan.pipeline)


def test_what_is_promised_is_what_a_partition_has() -> None:
    now = programs()
    found = lowering(now, changes(now))
    assert found
    for each in found:
        option, given = each.option.split(" ", 1)
        given = given.strip("'")
        if option == "--pipeline":
            made = programs(given)
        else:
            name = {"--recompute": "match", "--memory-budget": "budget"}[option]
            made = programs(with_recompute(f"recompute{{{name}={given}}}"))
        peak, more = peak_bytes(made.now), made.seconds(made.now) - now.seconds(now.now)
        if each.is_most:
            assert peak <= each.peak_bytes or peak <= float(given) * peak_bytes(now.now)
            assert more <= each.more_seconds + 1e-12
        else:
            assert (peak, round(more, 15)) == (each.peak_bytes, round(each.more_seconds, 15))


def test_changes_begin_without_the_recompute_that_there_is() -> None:
    plain, again = programs(), programs(with_recompute("recompute{match=h.1/act}"))
    assert again.repeated
    assert plain.repeated == 0
    assert peak_bytes(again.plain) == peak_bytes(plain.now) > peak_bytes(again.now)
    by_option = {each.option: each for each in lowering(plain, changes(plain))}
    for each in lowering(again, changes(again)):
        assert each.peak_bytes < peak_bytes(again.now)
        if each.option in by_option:
            assert each.peak_bytes == by_option[each.option].peak_bytes
            assert each.more_seconds < by_option[each.option].more_seconds


def test_a_pipeline_of_ones_own_is_said_as_one() -> None:
    own = DEFAULT_PIPELINE.replace("fold-constants,", "")
    found = [each for each in changes(programs(own)) if "again" in each.what]
    assert found
    assert all("join-weights,recompute{match=" in each.option for each in found)


def test_the_limit_is_that_of_the_last_budget() -> None:
    assert programs().limit() is None
    assert programs(with_recompute("recompute{match=*}")).limit() is None
    share = programs(with_recompute("recompute{budget=0.9, method=sqrt}"))
    assert share.limit() == int(0.9 * peak_bytes(programs().now))
    assert (
        programs(with_recompute("recompute{budget-gb=0.001, method=sqrt}", "zero{threshold-kb=0}")).limit() == 1_000_000
    )


def test_what_cannot_be_tried_is_said() -> None:
    made = irpar.partition(with_weights(MODEL), "dp=2")
    assert made.module is not None
    found = Programs(made.module, made.plan.pipeline)
    (said,) = found.untried()
    assert "there is no backward pass" in said
    assert not any("again" in each.what for each in changes(found))


def test_the_loop_over_micro_batches_is_looked_into() -> None:
    micro_batches = irpar.train_step(with_weights(MODEL), loss="mse", optimizer="sgd", micro_batches=2)
    made = irpar.partition(micro_batches, "dp=2", pipeline=with_recompute("recompute{match=h.1/act}"))
    assert made.module is not None
    found = Programs(made.module, made.plan.pipeline)
    assert found.repeated
    assert peak_bytes(found.plain) > peak_bytes(found.now)
    assert not list(found.untried())
    again = [each for each in lowering(found, changes(found)) if "again" in each.what]
    assert again
    assert all(each.peak_bytes < peak_bytes(found.now) and each.more_seconds > 0 for each in again)


def test_segments_of_the_loop_over_micro_batches_meet_the_budget_that_is_told() -> None:
    without_scopes = re.sub(r' scope ".*"', "", MODEL)
    micro_batches = irpar.train_step(with_weights(without_scopes), loss="mse", optimizer="sgd", micro_batches=2)
    made = irpar.partition(micro_batches, "dp=2")
    assert made.module is not None
    (told,) = (each for each in changes(Programs(made.module, made.plan.pipeline)) if "--memory-budget" in each.option)
    assert told.peak_bytes < peak_bytes(made.module)
    share = told.option.split()[1]
    less = irpar.partition(micro_batches, "dp=2", pipeline=with_recompute(f"recompute{{budget={share}, method=sqrt}}"))
    assert less.module is not None
    assert peak_bytes(less.module) <= told.peak_bytes


def test_what_another_change_beats_is_left_out() -> None:
    now = programs()
    most = peak_bytes(now.now)
    given = {"a": (0.5, 2), "b": (0.4, 2), "c": (0.6, 1), "d": (0.4, 3), "e": (0.995, 0), "f": (1.2, -1)}
    made = [Change("", name, int(share * most), seconds) for name, (share, seconds) in given.items()]
    assert [each.option for each in lowering(now, made)] == ["b", "c"]
