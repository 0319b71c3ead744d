"""ONNX's own models over two devices: whatever is cut, the results are those of the cases."""

import pytest

from tests.budget import SHARE, of_each
from tests.conformance import partitions
from tests.conformance.cases import Case, all_cases

PARTS = 10
"""The cases take some minutes; each part, at most one on an idle machine."""
FEWEST_CUT = 150
"""Of each part, where all cases are tried."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_cut_over_two_devices(part: int) -> None:
    cuts = [partitions.cut(case, model) for case, model in partitions.ruled(chosen()[part::PARTS])]
    assert [f"{one.case}: {text}" for one in cuts for text in one.wrong] == []
    refused = [f"{one.case}: {text}" for one in cuts for text in one.refused]
    assert [text for text in refused if "draws random numbers" not in text] == []
    assert sum(one.runs["numpy"] > 0 for one in cuts) >= (FEWEST_CUT if SHARE >= 1 else 1)


def chosen() -> list[Case]:
    """All cases; of a smaller share one of each set of operators."""
    return of_each(operators, list(all_cases()))


def operators(case: Case) -> frozenset[str]:
    """Those that a case is about."""
    return frozenset(node.op_type for node in case.model.graph.node)
