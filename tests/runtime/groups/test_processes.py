"""Collectives of ranks that are processes, against those of threads: equal to the last bit."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.runtime.errors import MismatchError
from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.runtime.groups.shared_memory.rooted import QuickRooted
from irpar.runtime.groups.shared_memory.segment import SegmentLayout
from irpar.sharding import Axis, Mesh
from tests.budget import budget, every

from .collective_cases import cases, check
from .process_ranks import Given, Ranks, exchange_all, joined

SQUARE = Mesh({"a": 2, "b": 2})
LINE = Mesh({"a": 4})
MESHES = [
    (SQUARE, ["a"]),
    (SQUARE, ["b"]),
    (SQUARE, ["a", "b"]),
    (SQUARE, ["b", "a"]),
    (LINE, ["a"]),
    (LINE, ["a:(1)2"]),
    (LINE, ["a:(2)2"]),
]
FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
INTEGERS = [np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint32]
OTHERS = [np.bool_, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, np.complex64, np.complex128, np.object_]
REDUCED = {
    **dict.fromkeys(FLOATS, ("sum", "prod", "max", "min")),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "max", "min", "and", "or")),
    np.bool_: ("and", "or"),
    np.complex64: ("sum",),
}
TINY = SegmentLayout(4, ring=4096, slot=64, slots=4, pooled=1, cores=4)
"""Almost everything goes in parts, and slots are scarce."""
LAID = SegmentLayout(4, ring=3072, slot=4096, slots=4, pooled=1, cores=4)
"""Most operands that are reduced are laid into a slot, where one is free."""

SCARCE = SegmentLayout(4, ring=4096, slot=4096, slots=4, pooled=2, cores=4)
"""Small operands are laid into a slot, where one is free: rarely where collectives go over several axes."""

CROWDED = [replace(LAID, cores=1), replace(LAID, cores=2, pooled=2), replace(LAID, cores=3)]
"""Ranks share cores, so that not all of them reduce what is laid into a slot."""


SHARED = replace(SegmentLayout.of(4), cores=2)
"""Ranks share cores, and slots have room for what programs move."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def draw_operand(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Random numbers of a dtype, or texts."""
    source = np.random.default_rng(seed)
    if dtype == np.object_:
        return source.integers(0, 99, shape).astype("U").astype(object)
    if dtype in FLOATS or dtype in OTHERS[3:6]:
        return source.standard_normal(shape).astype(dtype)
    return source.integers(0 if np.dtype(dtype).kind == "u" else -8, 8, shape).astype(dtype)


@st.composite
def collectives(draw: Any, mesh: Mesh, axes: list[str], id_: int) -> list[Given]:
    """A collective, with the operand of each rank."""
    parsed = tuple(map(Axis.parse, axes))
    count = mesh.group_size(parsed)
    kind = draw(
        st.sampled_from(["AllReduce", "AllGather", "ReduceScatter", "AllToAll", "CollectivePermute", "Broadcast"])
    )
    reduces = kind in ("AllReduce", "ReduceScatter")
    dtype = draw(st.sampled_from(list(REDUCED) if reduces else FLOATS + INTEGERS + OTHERS))
    size = st.sampled_from([0, 1, 2, 3, 5, 24])
    shape = draw(
        st.lists(size, min_size=0 if kind in ("AllReduce", "Broadcast", "CollectivePermute") else 1, max_size=3)
    )
    more: dict[str, Any] = {"reduce": draw(st.sampled_from(REDUCED[dtype]))} if reduces else {}
    uneven = st.one_of(st.none(), st.lists(size, min_size=count, max_size=count).map(tuple))
    shapes = [shape] * count
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    if kind == "AllGather":
        more |= {"dim": dim, "sizes": draw(uneven)}
        shapes = [with_size(shape, dim, more["sizes"], place) for place in range(count)]
    elif kind == "ReduceScatter":
        more |= {"dim": dim, "sizes": draw(uneven)}
        whole = sum(more["sizes"]) if more["sizes"] else shape[dim] * count
        shapes = [[*shape[:dim], whole, *shape[dim + 1 :]]] * count
    elif kind == "AllToAll":
        concat = draw(st.integers(0, len(shape) - 1))
        more |= {"split_dim": dim, "concat_dim": concat, "split_sizes": draw(uneven)}
        whole = sum(more["split_sizes"]) if more["split_sizes"] else shape[dim] * count
        shape = [*shape[:dim], whole, *shape[dim + 1 :]]
        more["concat_sizes"] = draw(uneven) if concat != dim else None
        shapes = [with_size(shape, concat, more["concat_sizes"], place) for place in range(count)]
    elif kind == "CollectivePermute":
        targets = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
        more["pairs"] = tuple(each for target in targets for each in (draw(st.integers(0, count - 1)), target))
        if draw(st.booleans()):
            shapes = [[draw(size) for _ in shape] for _ in range(count)]
            more["shapes"] = tuple(each for one in shapes for each in one)
    elif kind == "Broadcast":
        more["root"] = draw(st.integers(0, count - 1))
    collective = Collective(kind, id_, parsed, **more)
    seed = draw(st.integers(0, 999))
    return [
        (collective, draw_operand(tuple(shapes[mesh.position(mesh.coords(rank), parsed)]), dtype, seed + rank))
        for rank in range(mesh.size)
    ]


def with_size(shape: list[int], dim: int, sizes: tuple[int, ...] | None, place: int) -> list[int]:
    """The shape where a dim has another size."""
    return shape if sizes is None else [*shape[:dim], sizes[place], *shape[dim + 1 :]]


@st.composite
def programs(draw: Any, meshes: Any = MESHES) -> tuple[Mesh, list[list[Given]], list[list[int]] | None]:
    """A mesh, one to four collectives with the operands of all ranks, and in what order each rank waits for them."""
    mesh = draw(st.sampled_from(meshes))[0]
    axes = st.sampled_from([axes for other, axes in meshes if other is mesh])
    count = draw(st.integers(1, 4))
    drawn = [draw(collectives(mesh, draw(axes), id_)) for id_ in range(count)]
    orders = draw(st.one_of(st.none(), st.lists(st.permutations(range(count)), min_size=mesh.size, max_size=mesh.size)))
    return mesh, drawn, orders


def by_threads(mesh: Mesh, given: list[Given]) -> dict[int, np.ndarray]:
    """What a collective gives each rank."""
    calls = {
        rank: Call(rank, mesh.coords(rank), collective, operand) for rank, (collective, operand) in enumerate(given)
    }
    return ThreadGroup(mesh).exchange(calls)


def check_program(ranks: Ranks, program: Any, **options: Any) -> None:
    """Processes give what threads do."""
    mesh, drawn, orders = program
    expected = [by_threads(mesh, each) for each in drawn]
    found = ranks.run(
        exchange_all,
        [
            {"mesh": mesh, "given": [each[rank] for each in drawn], "order": orders and orders[rank], **options}
            for rank in range(mesh.size)
        ],
    )
    for rank, results in enumerate(found):
        for result, each in zip(results, expected, strict=True):
            check_equal(result, each[rank])


def check_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype == np.object_:
        assert found.tolist() == expected.tolist()
    else:
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", [None, TINY, LAID, CROWDED[1]], ids=["whole", "in parts", "laid", "crowded"])
@pytest.mark.parametrize("mesh", [SQUARE, LINE], ids=str)
def test_all_kinds_on_all_dtypes(ranks: Ranks, mesh: Mesh, layout: SegmentLayout | None) -> None:
    listed = list(cases(mesh, rows=64 if layout in (LAID, *CROWDED) else 8))
    given = [[(case.collective, case.operands[rank]) for case in listed] for rank in range(4)]
    found = ranks.run(exchange_all, [{"mesh": mesh, "given": each, "layout": layout} for each in given])
    for rank, results in enumerate(found):
        for case, result in zip(listed, results, strict=True):
            check(case, mesh, rank, result)


@settings(max_examples=budget(40), deadline=None)
@given(program=programs())
def test_what_threads_give_processes_give(ranks: Ranks, program: Any) -> None:
    check_program(ranks, program)


@settings(max_examples=budget(40), deadline=None)
@given(program=programs(), layout=st.sampled_from([TINY, LAID, *CROWDED]))
def test_in_parts_the_same_comes_out(ranks: Ranks, program: Any, layout: SegmentLayout) -> None:
    check_program(ranks, program, layout=layout)


@settings(max_examples=budget(40), deadline=None)
@given(program=programs(), layout=st.sampled_from([None, SCARCE, LAID, *CROWDED]))
def test_again_and_again_the_same_comes_out(ranks: Ranks, program: Any, layout: SegmentLayout) -> None:
    check_program(ranks, program, layout=layout, times=4)


@pytest.mark.parametrize("layout", [LAID, *CROWDED], ids=str)
def test_a_member_that_came_early_without_a_slot(ranks: Ranks, layout: SegmentLayout) -> None:
    """Its parts came while another's slot was waited for, before the collective was known to be under way."""
    first, second = (Axis("a"),), (Axis("b"),)
    number, rows, many = np.ones((), np.float32), np.ones(3, np.float32), np.ones((24, 3), np.int32)
    listed = [
        (Collective("AllReduce", 0, second), number),
        (Collective("AllGather", 1, first), rows),
        (Collective("AllReduce", 2, first), number),
        (Collective("AllReduce", 3, (*first, *second)), many),
    ]
    check_program(ranks, (SQUARE, [[each] * 4 for each in listed], None), layout=layout, times=4)


@pytest.mark.parametrize("layout", [None, SCARCE], ids=["slots for all", "scarce slots"])
@pytest.mark.parametrize("mesh", [SQUARE, LINE], ids=str)
def test_all_kinds_on_all_dtypes_again(ranks: Ranks, mesh: Mesh, layout: SegmentLayout | None) -> None:
    listed = list(cases(mesh, seed=1))
    given = [[(case.collective, case.operands[rank]) for case in listed] for rank in range(4)]
    options = {"mesh": mesh, "layout": layout, "times": 3}
    found = ranks.run(exchange_all, [{"given": each, **options} for each in given])
    for rank, results in enumerate(found):
        for case, result in zip(listed, results, strict=True):
            check(case, mesh, rank, result)


def operand_in_columns(mesh: Mesh, times: int) -> list[bytes]:
    """All-reduces of an operand whose numbers do not lie in the order of its dims."""
    group = joined(mesh)
    collective = Collective("AllReduce", 0, (Axis("a"),))
    operand = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4) + group.rank)
    calls = [Call(group.rank, mesh.coords(group.rank), collective, operand) for _ in range(times)]
    results = [group.exchange({group.rank: call})[group.rank] for call in calls]
    assert all(result.flags.c_contiguous for result in results)
    return [result.tobytes() for result in results]


def test_results_lie_in_the_order_of_their_dims(ranks: Ranks) -> None:
    expected = (np.arange(12, dtype=np.float32) * 4 + 6).tobytes()
    assert ranks.run(operand_in_columns, [{"mesh": LINE, "times": 3}] * 4) == [[expected] * 3] * 4


def keep_all(mesh: Mesh, count: int) -> list[bool]:
    """Collectives whose results are all held to the end, and those of every third one no longer than the next."""
    group = joined(mesh, layout=SHARED)
    x = np.arange(4000, dtype=np.float32).reshape(40, 100) + group.rank
    reduce, gather = Collective("AllReduce", 0, (Axis("a"),)), Collective("AllGather", 1, (Axis("a"),), dim=1)
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for number in range(count):
        reduced, gathered = (exchange_one(group, each, x + number) for each in (reduce, gather))
        held.append((reduced, 4 * (x - group.rank + number) + 6))
        held.append((gathered, np.concatenate([x - group.rank + number + rank for rank in range(4)], 1)))
        if number % 3 == 2:
            del held[-2:]
    return [np.array_equal(found, expected) for found, expected in held]


def exchange_one(group: Any, collective: Collective, operand: np.ndarray) -> np.ndarray:
    call = Call(group.rank, group.mesh.coords(group.rank), collective, operand)
    result: np.ndarray = group.exchange({group.rank: call})[group.rank]
    return result


def test_what_is_held_stays_where_one_member_makes_the_result(ranks: Ranks) -> None:
    assert ranks.run(keep_all, [{"mesh": LINE, "count": 20}] * 4) == [[True] * 28] * 4


def count_slow(mesh: Mesh, late: int) -> list[int]:
    """How many of some collectives were not quick: at first, then with one rank late, and afterwards."""
    group = joined(mesh, layout=SHARED)
    begun, found = group.begin, []
    collective = Collective("AllReduce", 7, (Axis("a"),))
    for pause in (0.0, 0.2, 0.0):
        slow: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QuickRooted, "_go_on", noted(QuickRooted._go_on, slow))
            patch.setattr(group, "begin", lambda meeting, slow=slow: (slow.append(meeting), begun(meeting))[1])
            for _ in range(5):
                time.sleep(pause if group.rank == late else 0)
                exchange_one(group, collective, np.ones(1000, np.float32))
        found.append(len(slow))
    return found


def noted(function: Any, calls: list[Any]) -> Any:
    """A method that notes its calls."""

    def run(self: Any, *args: Any) -> Any:
        calls.append(args)
        return function(self, *args)

    return run


def test_ranks_that_waited_long_for_one_are_quick_again(ranks: Ranks) -> None:
    """Where all are ready; a machine with much else to do may let them wait again."""
    for _ in range(5):
        found = ranks.run(count_slow, [{"mesh": LINE, "late": 3}] * 4)
        assert all(with_late for _, with_late, _ in found)
        if not any(afterwards for _, _, afterwards in found):
            return
    raise AssertionError(found)


@pytest.mark.slow
@settings(max_examples=budget(1500), deadline=None)
@given(program=programs(), layout=st.sampled_from([None, TINY, LAID, *CROWDED]))
def test_many_programs(ranks: Ranks, program: Any, layout: SegmentLayout | None) -> None:
    check_program(ranks, program, layout=layout)


@pytest.mark.slow
@settings(max_examples=budget(200), deadline=None)
@given(
    program=programs([(Mesh({"x": 2, "y": 3}), axes) for axes in (["x"], ["y"], ["x", "y"], ["y", "x"])]),
    layout=st.sampled_from([replace(each, count=6) for each in (TINY, LAID, *CROWDED)]),
)
def test_groups_of_three_and_six(six_ranks: Ranks, program: Any, layout: SegmentLayout) -> None:
    check_program(six_ranks, program, layout=layout)


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[Ranks]:
    with Ranks(6) as started:
        yield started


@pytest.mark.parametrize(
    "kind", every(2, ["AllReduce", "AllGather", "ReduceScatter", "AllToAll", "CollectivePermute", "Broadcast"])
)
def test_operands_larger_than_the_shared_memory(ranks: Ranks, kind: str) -> None:
    more: dict[str, Any] = {
        "AllReduce": {"reduce": "sum"},
        "AllGather": {"dim": 1},
        "ReduceScatter": {"reduce": "max", "dim": 1},
        "AllToAll": {"split_dim": 1, "concat_dim": 0},
        "CollectivePermute": {"pairs": (0, 1, 1, 0, 2, 3)},
        "Broadcast": {"root": 2},
    }[kind]
    collective = Collective(kind, 0, (Axis("a"),), **more)
    given = [(collective, draw_operand((1030, 2600), np.float32, rank)) for rank in range(4)]
    assert given[0][1].nbytes > 10 << 20
    check_program(ranks, (LINE, [given], None))


def test_long_texts(ranks: Ranks) -> None:
    collective = Collective("AllGather", 0, (Axis("a"),))
    given = [(collective, np.array([str(rank) * 300_000, b"\xff\x00", "é"], object)) for rank in range(4)]
    check_program(ranks, (LINE, [given], None))


def exchange_with_pauses(mesh: Mesh, seed: int, count: int) -> list[float]:
    """All-reduces of all sizes over all axes, with pauses that differ between the ranks."""
    group = joined(mesh)
    pauses, drawn = random.Random(seed + group.rank), random.Random(seed)
    found = []
    for id_ in range(count):
        axes = tuple(map(Axis, drawn.choice([["a"], ["b"], ["a", "b"]])))
        collective = Collective("AllReduce", id_, axes)
        operand = np.full(drawn.choice([1, 1000, 100_000]), group.rank + id_, np.float32)
        time.sleep(pauses.choice([0, 0, 0, 1e-3]))
        call = Call(group.rank, mesh.coords(group.rank), collective, operand)
        result = group.exchange({group.rank: call})[group.rank]
        assert (result == result[0]).all()
        found.append(float(result[0]))
    return found


def test_ranks_that_run_ahead_wait_for_the_slow(ranks: Ranks) -> None:
    drawn = random.Random(7)
    found = ranks.run(exchange_with_pauses, [{"mesh": SQUARE, "seed": 7, "count": 100}] * 4)
    for id_ in range(100):
        axes = drawn.choice([["a"], ["b"], ["a", "b"]])
        drawn.choice([1, 1000, 100_000])
        for group in SQUARE.groups(list(map(Axis, axes))):
            for rank in group:
                assert found[rank][id_] == sum(member + id_ for member in group)


def start_many_and_leave(mesh: Mesh, count: int, elements: int) -> int:
    """Start many collectives, wait for all, and do nothing more for the others."""
    group = joined(mesh, 5, TINY)
    calls = [
        Call(
            group.rank,
            mesh.coords(group.rank),
            Collective("AllReduce", id_, (Axis("a"),)),
            np.ones(elements, np.float32),
        )
        for id_ in range(count)
    ]
    for call in calls:
        group.start(call)
    return sum(int(group.exchange({group.rank: call})[group.rank][0] == mesh.size) for call in reversed(calls))


@pytest.mark.parametrize("elements", [20, 700])
def test_a_rank_that_is_done_owes_the_others_nothing(ranks: Ranks, elements: int) -> None:
    """A ring has room for three or four of the small ones, and the slots for a part of a large one."""
    given = {"mesh": LINE, "count": 30 if elements < 100 else 5, "elements": elements}
    for _ in range(10):
        assert ranks.run(start_many_and_leave, [given] * 4) == [given["count"]] * 4


def echo(mesh: Mesh, sizes: list[int]) -> list[int]:
    """Rank 0 sends messages to all, which send them back."""
    group = joined(mesh)
    others = range(1, mesh.size)
    messages = [np.random.default_rng(size).bytes(size) for size in sizes]
    if group.rank:
        for _ in sizes:
            group.send(0, group.receive(0))
        return []
    for message in messages:
        for rank in others:
            group.send(rank, message)
        for rank in others:
            assert group.receive(rank) == message
    for rank in others:
        for message in messages[:3]:
            group.send(rank, message)
    return [rank for rank in others for message in messages[:3] if group.receive(rank) != message]


def test_messages_of_any_size_come_in_order(ranks: Ranks) -> None:
    sizes = [0, 1, 100, 20_000, 300_000, 30 << 20]
    options = [{"mesh": SQUARE, "sizes": sizes if rank == 0 else [*sizes, 0, 0, 0]} for rank in range(4)]
    assert ranks.run(echo, options)[0] == []


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"dim": 0}, {"dim": 1}, "one collective has different attributes"),
        ({"sizes": (2, 2)}, {}, "one collective has different attributes"),
        ({}, {"id": 8}, "are at different collectives"),
    ],
)
def test_ranks_that_do_not_agree_are_told_apart(first: Any, second: Any, told: str) -> None:
    mesh = Mesh({"a": 2})
    made = [
        Collective("AllGather", **{"id": 7, "axes": (Axis("a"),), "label": f"op {rank}", **more})
        for rank, more in enumerate((first, second))
    ]
    with Ranks(2) as two:
        two.start(
            exchange_all,
            [{"mesh": mesh, "given": [(each, np.zeros((2, 2), np.float32))], "seconds": 2} for each in made],
        )
        found = two.answers()
    errors = [each for each in found if isinstance(each, MismatchError)]
    assert errors
    assert told in str(errors[0])
    assert "rank 0 (a=0) is at AllGather id=7 over a with f32[2, 2]    op 0" in str(errors[0])
    assert "op 1" in str(errors[0])
