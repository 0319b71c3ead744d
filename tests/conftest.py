"""What all tests share: assertions that say what differs, and which tests one of several processes runs together."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import budget

# How long examples take says how busy the machine is.
settings.register_profile(
    "irpar", max_examples=budget(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("irpar")

# A process of several gets the width of the terminal; what a command prints into a pipe depends on it.
os.environ.pop("COLUMNS", None)

for name in ("tests.passes.golden", "tests.conformance"):
    pytest.register_assert_rewrite(name)

WITH_CASES = {
    "tests/kernels/test_conformance.py",
    "tests/onnx_io/test_backend_cases.py",
    "tests/ops/test_infer.py",
    "tests/runtime/test_conformance.py",
}
"""Files with ONNX's own cases, which take some ten seconds to make: one process makes them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, which makes once what they share."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("cases of ONNX" if file in WITH_CASES else file))


def pytest_collection_finish() -> None:
    """The tests themselves are no garbage: nothing looks through all of them again and again."""
    gc.collect()
    gc.freeze()
