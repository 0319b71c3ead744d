"""Assertions in the tests' own helpers say what differs, as those in test files do."""

import pytest

for name in ("tests.passes.golden", "tests.conformance"):
    pytest.register_assert_rewrite(name)
