"""Plans of exchanges are kept while they are small together."""

import numpy as np

from irpar.ops.local_programs.exchange import _Plans


def test_an_exchange_is_planned_once_and_forgotten_when_others_need_its_room() -> None:
    plans = _Plans(most_bytes=3 * 64 * 8)
    rows = [np.arange(32), np.arange(32, 64)]

    first = plans.plan([64], rows, zero_fill=True)
    assert plans.plan([64], [row.copy() for row in rows], zero_fill=True) is first
    assert plans.plan([64], rows, zero_fill=False) is not first
    assert plans.plan([64], rows[::-1], zero_fill=True) is not first
    assert plans.held <= plans.most_bytes
    assert plans.plan([64], rows, zero_fill=True) is not first
