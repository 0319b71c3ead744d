"""A plugin of pytest: a share of the tests that it collects, of which none begins too late.

--share 2/8    the third of eight shares
--until T      when to stop, by `time.monotonic`; how many tests were not begun by then is told at the end
"""

import time

import pytest

LATE = "tests were not begun in time"
_BEGUN = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    parser.addoption("--share", default="0/1")
    parser.addoption("--until", type=float, default=float("inf"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of what -m has left."""
    share, shares = (int(number) for number in config.getoption("--share").split("/"))
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % shares != share])
    items[:] = items[share::shares]
    config.stash[_BEGUN] = 0


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let a test be the last that begins before the deadline."""
    item.config.stash[_BEGUN] += 1
    if time.monotonic() >= item.config.getoption("--until"):
        item.session.shouldstop = LATE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell how many tests were left out."""
    session = terminalreporter._session
    left = len(session.items) - config.stash.get(_BEGUN, 0) if session is not None else 0
    if left > 0:
        terminalreporter.write_line(f"{left} {LATE}")
