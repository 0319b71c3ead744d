"""Sends of equal pairs and the Recvs that take them become one: the same values, and no rank waits forever."""

import random

import numpy as np
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.verifier import verify
from irpar.output.plan_entries import collective_entries
from irpar.pass_manager import PassManager
from irpar.runtime.executor import Executor
from tests.budget import budget
from tests.runtime.groups.spmd_threads import run_ranks

from .golden import check, read
from .test_communication_waves import Before, Kinds, fewest

TWO = """
    module {network="h100-nvlink-ib"}
    mesh @m = ["x"=2]
    graph local @first(%a: f32[4] of [4]) -> (%s) opset 21 ranks [0] {
      %b = Neg(%a) : f32[4] of [4]
      irpar.Send(%b) {channel=3, pairs=[0, 1], id=0} doc "one"
      MIDDLE_FIRST
      %s = Abs(%a) : f32[4] of [4]
      irpar.Send(%s) {channel=CHANNEL, pairs=[0, 1], id=4} doc "two"
    }
    graph local @second(%a: f32[4] of [4]) -> (%s) opset 21 ranks [1] {
      %c = irpar.Recv() {channel=3, pairs=[0, 1], dtype="f32", shape=[4], id=1} : f32[4] of [4]
      MIDDLE_SECOND
      %d = irpar.Recv() {channel=CHANNEL, pairs=[0, 1], dtype="f32", shape=[4], id=5} : f32[4] of [4]
      %n = Neg(%c) : f32[4] of [4]
      %s = Max(%n, %d) : f32[4] of [4]
    }
"""


def two(channel: int = 3, first: str = "", second: str = "") -> str:
    lines = TWO.replace("CHANNEL", str(channel)).replace("MIDDLE_FIRST", first).replace("MIDDLE_SECOND", second)
    return "\n".join(line for line in lines.splitlines() if line.strip())


def counts(module: Module) -> tuple[int, int]:
    """Sends and Recvs."""
    nodes = [node.op_type for graph in module.graphs for node in graph.walk()]
    return nodes.count("Send"), nodes.count("Recv")


def fused(text: str, options: str = "") -> Module:
    module = read(text)
    PassManager.parse(f"fuse-communication{options}").run(module)
    verify(module)
    return module


def test_two_sends_and_the_recvs_that_take_them() -> None:
    check(
        "fuse-communication",
        two(),
        """
        module {network="h100-nvlink-ib"}
        mesh @m = ["x"=2]
        graph local @first(%a: f32[4] of [4]) -> (%s) opset 21 ranks [0] {
          %shape = constant : i64[2] [1, 4]
          %shape_1 = constant : i64[2] [1, 4]
          %b = Neg(%a) : f32[4] of [4]
          %s = Abs(%a) : f32[4] of [4]
          %fused = Reshape(%b, %shape) : f32[1, 4]
          %fused_1 = Reshape(%s, %shape_1) : f32[1, 4]
          %fused_2 = Concat(%fused, %fused_1) {axis=1} : f32[1, 8]
          irpar.Send(%fused_2) {channel=0, pairs=[0, 1], id=0} doc "one; two"
        }
        graph local @second(%a: f32[4] of [4]) -> (%s) opset 21 ranks [1] {
          %widths = constant : i64[2] [4, 4]
          %shape = constant : i64[1] [4]
          %shape_1 = constant : i64[1] [4]
          %fused = irpar.Recv() {channel=0, pairs=[0, 1], dtype="f32", shape=[1, 8], id=1} : f32[1, 8]
          %piece, %piece_1 = Split(%fused, %widths) {axis=1} : f32[1, 4], f32[1, 4]
          %c = Reshape(%piece, %shape) : f32[4] of [4]
          %d = Reshape(%piece_1, %shape_1) : f32[4] of [4]
          %n = Neg(%c) : f32[4] of [4]
          %s = Max(%n, %d) : f32[4] of [4]
        }
        """,
    )


@pytest.mark.parametrize("channel", [3, 7])
@pytest.mark.parametrize("network", ["h100-nvlink-ib", "bytes"])
def test_modes(channel: int, network: str) -> None:
    text = two(channel).replace("h100-nvlink-ib", network)
    for options, count in (("", 1 if network != "bytes" else 2), ("{mode=size}", 1), ("{mode=index}", 1)):
        assert counts(fused(text, options)) == (count, count)
    for options in ("{mode=off}", "{mode=size, size-mb=0.00002}", "{mode=index, indices=[1]}"):
        assert counts(fused(text, options)) == (2, 2)


def of_transfers(*channels: int) -> str:
    """Two all-reduces that merge, and two transfers on each of some channels that do."""
    sends: list[str] = []
    takes: list[str] = []
    results = []
    for place in range(2 * len(channels)):
        facts = f"channel={channels[place // 2]}, pairs={[0, 1] if place < 2 else [1, 0]}"
        end = (sends, takes) if place < 2 else (takes, sends)
        end[0].append(f"  %k{place} = constant : f32[] {2 + place}")
        end[0].append(f"  %m{place} = Mul(%b, %k{place}) : f32[4] of [4]")
        end[0].append(f"  irpar.Send(%m{place}) {{{facts}, id={2 + 2 * place}}}")
        end[1].append(
            f'  %r{place} = irpar.Recv() {{{facts}, dtype="f32", shape=[4], id={3 + 2 * place}}} : f32[4] of [4]'
        )
        results.append(f"%r{place}")
    lines = ['module {network="h100-nvlink-ib"}', 'mesh @m = ["x"=2]']
    for rank, (name, transfers) in enumerate((("first", sends), ("second", takes))):
        taken = [each for each in results if any(each in line for line in transfers)]
        lines += [
            f"graph local @{name}(%a: f32[4] of [4]) -> (%s) opset 21 ranks [{rank}] {{",
            "  %b = Neg(%a) : f32[4] of [4]",
            "  %u = Relu(%a) : f32[4] of [4] partial(sum: x)",
            '  %p = irpar.AllReduce(%b) {axes=["x"], reduce="sum", id=0} : f32[4] of [4]',
            '  %q = irpar.AllReduce(%u) {axes=["x"], reduce="sum", id=1} : f32[4] of [4]',
            *transfers,
            f"  %s = Sum({', '.join(['%p', '%q', *taken])}) : f32[4] of [4]",
            "}",
        ]
    return "\n".join(lines)


@pytest.mark.parametrize(("free", "sends"), [(0, 4), (1, 3), (2, 2)])
def test_what_finds_no_channel_is_sent_as_it_was(free: int, sends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is merged, and what is told is what was done."""
    monkeypatch.setattr("irpar.passes.fuse_communication.transfers.CHANNELS", 2 + free)
    module = read(of_transfers(0, 1))
    result = PassManager.parse("fuse-communication").run(module)
    verify(module)
    assert counts(module) == (sends, sends)
    assert [node.op_type for node in module.graph].count("AllReduce") == 1
    note = "fuse-communication: {} more Sends and their Recvs would be merged, but no channel is left that nothing is sent on"
    assert result.notes == ((note.format(2 - free),) if free < 2 else ())
    assert result.records[0].statistics == {"merged collectives": 2 + 2 * free, "into": 1 + free}
    given = np.arange(4, dtype=np.float32)
    with (
        Executor(module, module.mesh, engine="numpy") as executor,
        Executor(plain := read(of_transfers(0, 1)), plain.mesh, engine="numpy") as before,
    ):
        np.testing.assert_array_equal(executor.run({"a": given})["s"], before.run({"a": given})["s"])


def test_where_no_channel_is_left_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.passes.fuse_communication.transfers.CHANNELS", 1)
    module = read(two(0).replace("channel=3", "channel=0"))
    result = PassManager.parse("fuse-communication").run(module)
    assert counts(module) == (2, 2)
    assert not result.records[0].statistics
    assert "no channel is left" in result.notes[0]


ASKED = '%r = irpar.Recv() {channel=5, pairs=[1, 0], dtype="f32", shape=[4], id=3} : f32[4] of [4]'
ANSWERED = "irpar.Send(%c) {channel=5, pairs=[1, 0], id=2}"


def ran(module: Module) -> dict[str, np.ndarray]:
    """What each rank has, and whether it has done what the plan says."""
    for graph in module.graphs:
        for value in graph.outputs:
            value.sharding = irpar.Sharding.of_spec(module.mesh, [["x"]])
            value.global_shape = (value.shape[0] * module.mesh.size,)
    entries = collective_entries(module, module.mesh)
    given = np.random.default_rng(0).standard_normal(4).astype(np.float32)
    with Executor(module, module.mesh, engine="numpy") as executor:
        found = executor.run({"a": given})
        assert executor.log.differences(entries) == []
    return found


def test_an_answer_in_between_comes_after_both() -> None:
    """The first rank sends both before it takes the answer to the first, for which the other waits for both."""
    text = two(3, ASKED, ANSWERED)
    module = fused(text)
    assert counts(module) == (2, 2)
    assert ran(module)["s"].tobytes() == ran(read(text))["s"].tobytes()


def test_an_answer_that_the_second_needs_keeps_them_apart() -> None:
    text = two(3, ASKED, ANSWERED).replace("%s = Abs(%a)", "%s = Abs(%r)")
    assert counts(fused(text)) == (3, 3)


def test_other_pairs_stay_apart() -> None:
    """Two ranks that send to each other, by one node or by two."""
    text = """
    module {network="h100-nvlink-ib"}
    mesh @m = ["x"=2]
    graph local @g(%a: f32[4] of [4]) -> (%s) opset 21 ranks [0, 1] {
      irpar.Send(%a) {channel=3, pairs=[0, 1, 1, 0], id=0}
      %b = irpar.Recv() {channel=3, pairs=[0, 1, 1, 0], dtype="f32", shape=[4], id=1} : f32[4] of [4]
      %c = Neg(%a) : f32[4] of [4]
      irpar.Send(%c) {channel=4, pairs=[0, 1, 1, 0], id=2}
      %d = irpar.Recv() {channel=4, pairs=[0, 1, 1, 0], dtype="f32", shape=[4], id=3} : f32[4] of [4]
      %s = Max(%b, %d) : f32[4] of [4]
    }
    """
    module = fused(text)
    assert counts(module) == (1, 1)
    assert ran(module)["s"].tobytes() == ran(read(text))["s"].tobytes()
    other = text.replace("channel=4, pairs=[0, 1, 1, 0]", "channel=4, pairs=[1, 0]")
    assert counts(fused(other)) == (2, 2)


def test_what_is_sent_in_a_body_leaves_all_as_it_is() -> None:
    text = """
    module {network="h100-nvlink-ib"}
    mesh @m = ["x"=2]
    graph local @g(%n: i64[] of [], %a: f32[1] of [2@x]) -> (%y) opset 21 ranks [0, 1] {
      %y = Loop(%n, _, %a) {body=graph @body(%i: i64[] of [], %c: bool[] of [], %v: f32[1] of [2@x]) -> (%c, %s) {
        irpar.Send(%v) {channel=0, pairs=[0, 1, 1, 0], id=0}
        %r = irpar.Recv() {channel=0, pairs=[0, 1, 1, 0], dtype="f32", shape=[1], id=1} : f32[1] of [2@x]
        irpar.Send(%v) {channel=1, pairs=[0, 1, 1, 0], id=2}
        %q = irpar.Recv() {channel=1, pairs=[0, 1, 1, 0], dtype="f32", shape=[1], id=3} : f32[1] of [2@x]
        %s = Add(%r, %q) : f32[1] of [2@x]
      }} : f32[1] of [2@x]
    }
    """
    assert counts(fused(text)) == (2, 2)


def test_channels_with_unequal_ends_leave_all_as_it_is() -> None:
    """Three are sent on a channel on which two are taken: nobody knows which."""
    text = two().replace('id=0} doc "one"', "id=0}\n      irpar.Send(%b) {channel=3, pairs=[0, 1], id=2}")
    assert counts(fused(text)) == (3, 2)


# -- random programs --------------------------------------------------------------------------------------------------


def stages(seed: int) -> tuple[str, Kinds, Before]:
    """Three ranks, each with a program of its own, that send to each other and reduce together."""
    drawn = random.Random(seed)
    held: list[list[tuple[str, set[int]]]] = [[("a", set())] for _ in range(3)]
    lines: list[list[str]] = [[] for _ in range(3)]
    kinds: Kinds = {}
    before: Before = {}
    pairs = drawn.sample([(0, 1), (1, 2), (2, 0), (1, 0)], drawn.randint(1, 3))

    def operand(rank: int, item: int) -> str:
        """The sum of some that the rank has, times a number."""
        some = drawn.sample(held[rank], min(len(held[rank]), drawn.choice([1, 1, 2])))
        before[item] = before.get(item, set()).union(*(behind for _, behind in some))
        name = f"o{item}_{rank}"
        lines[rank].append(f"%n{name} = Sum({', '.join(f'%{known}' for known, _ in some)}) : f32[4] of [4]")
        lines[rank].append(f"%{name} = Mul(%n{name}, %k{rank}) : f32[4] of [4]")
        return name

    for item in range(0, 2 * drawn.randint(2, 7), 2):
        if drawn.random() < 0.3:
            kinds[item] = "all"
            for rank, name in enumerate([operand(rank, item) for rank in range(3)]):
                facts = f'axes=["x"], reduce="sum", id={item}'
                lines[rank].append(f"%y{item}_{rank} = irpar.AllReduce(%{name}) {{{facts}}} : f32[4] of [4]")
                held[rank].append((f"y{item}_{rank}", {item}))
            continue
        source, target = drawn.choice(pairs)
        kinds[item] = f"{source}{target}"
        name = operand(source, item)
        facts = f"channel={10 * source + target + 100 * drawn.randint(0, 1)}, pairs=[{source}, {target}]"
        lines[source].append(f"irpar.Send(%{name}) {{{facts}, id={item}}}")
        taken = f'{facts}, dtype="f32", shape=[4], id={item + 1}'
        lines[target].append(f"%y{item} = irpar.Recv() {{{taken}}} : f32[4] of [4]")
        held[target].append((f"y{item}", {item}))
    text = 'module {network="h100-nvlink-ib"}\nmesh @m = ["x"=3]\n'
    for rank in range(3):
        total = f"%s = Sum({', '.join(f'%{name}' for name, _ in held[rank])}) : f32[4] of [4]"
        constant = f"%k{rank} = constant : f32[] of [] whole {1.1 + rank}"
        body = "\n  ".join([constant, *lines[rank], total])
        text += f"graph local @p{rank}(%a: f32[4] of [4]) -> (%s) opset 21 ranks [{rank}] {{\n  {body}\n}}\n"
    return text, kinds, before


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_random_programs(first: int) -> None:
    """As few as brute force finds, the same numbers to the last bit, and nobody waits for ever."""
    for seed in range(first, first + budget(250)):
        text, kinds, before = stages(seed)
        module = fused(text)
        nodes = [node.op_type for graph in module.graphs for node in graph]
        assert nodes.count("Send") == nodes.count("Recv")
        assert nodes.count("Send") + nodes.count("AllReduce") // 3 == fewest(kinds, before), text
        if seed % 5 == 0:
            expected = ran(read(text))["s"]
            assert ran(module)["s"].tobytes() == expected.tobytes(), text
            if seed % 50 == 0:
                check_with_drivers(module, expected)


def check_with_drivers(module: Module, expected: np.ndarray) -> None:
    """The same where each rank has a driver of its own, as in processes."""

    def check(executor: Executor) -> None:
        assert executor.run({"a": given})["s"].tobytes() == expected.tobytes()

    given = np.random.default_rng(0).standard_normal(4).astype(np.float32)
    _, raised = run_ranks(module.mesh, lambda group: Executor(module, module.mesh, engine="numpy", group=group), check)
    assert raised == {}
