"""Exchanges of elements of a dim: everybody gets what it wants, in as few rounds as possible."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from irpar.sharding.blocks import block_range
from irpar.sharding.exchange import FILL, Exchange, plan_exchange


def performed(exchange: Exchange, sources: list[int], parts: int, fill: int) -> list[np.ndarray]:
    """What each device then has, of sources whose elements are their numbers from 1 on."""
    numbers = np.split(np.arange(1, sum(sources) + 1), np.cumsum(sources)[:-1])
    held = [
        np.concatenate([source[slice(*block_range(len(source), parts, at))] for source in numbers])
        for at in range(parts)
    ]
    has = list(held)
    for step in exchange.rounds:
        assert len({sender for sender, _ in step.pairs}) == len(step.pairs)
        assert len({target for _, target in step.pairs}) == len(step.pairs)
        came = [np.zeros(step.size, np.int64) for _ in range(parts)]
        for sender, target in step.pairs:
            row = step.rows[sender]
            assert row is not None
            assert len(row) == step.size
            came[target] = held[sender][row]
        has = [np.concatenate([mine, theirs]) for mine, theirs in zip(has, came, strict=True)]
    return [np.append(mine, fill)[row] for mine, row in zip(has, exchange.rows, strict=True)]


def owners_of(size: int, parts: int) -> list[int]:
    return [at for at in range(parts) for _ in range(*block_range(size, parts, at))]


@given(data=st.data())
def test_everybody_gets_what_it_wants(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 5))
    sources = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    size = data.draw(st.integers(0, 8))
    ids = st.lists(st.integers(FILL, sum(sources) - 1), min_size=size, max_size=size)
    wanted = [np.array(data.draw(ids), np.int64) for _ in range(parts)]
    zero_fill = data.draw(st.booleans())
    fill = 0 if zero_fill else 99
    exchange = plan_exchange(sources, wanted, zero_fill=zero_fill)
    for got, asked in zip(performed(exchange, sources, parts, fill), wanted, strict=True):
        assert got.tolist() == [fill if number == FILL else number + 1 for number in asked]
    # König: as many rounds as the busiest device sends or receives.
    owners = [number for size in sources for number in owners_of(size, parts)]
    pairs = {(owners[number], at) for at, asked in enumerate(wanted) for number in asked if number != FILL}
    pairs = {(sender, receiver) for sender, receiver in pairs if sender != receiver}
    assert {pair for step in exchange.rounds for pair in step.pairs} == pairs
    busiest = max((sum(pair[side] == at for pair in pairs) for side in (0, 1) for at in range(parts)), default=0)
    assert len(exchange.rounds) == busiest


def test_neighbours_send_their_borders() -> None:
    """Rows 8 over 4 devices, each wants one more on both sides: two rounds, and equal rows but for nothing at the edges."""
    wanted = [np.array([row if 0 <= row < 8 else FILL for row in range(2 * at - 1, 2 * at + 3)]) for at in range(4)]
    exchange = plan_exchange([8], wanted, zero_fill=True)
    assert [step.size for step in exchange.rounds] == [1, 1]
    assert {tuple(row) for row in exchange.rows} == {tuple(exchange.rows[1])}


def test_blocks_of_two_sources_side_by_side() -> None:
    """Of a and b, 4 rows each over 4 devices, side by side: each device fetches two rows at most, in two rounds."""
    wanted = [np.arange(2 * at, 2 * at + 2) for at in range(4)]
    exchange = plan_exchange([4, 4], wanted, zero_fill=True)
    assert len(exchange.rounds) == 2
