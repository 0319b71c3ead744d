"""What all tests share: assertions that say what differs, bytecode that is kept, and what one of several processes runs."""

import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

from tests.budget import budget
from tests.distribution import Distribution, in_part, place

# How long examples take says how busy the machine is.
settings.register_profile(
    "irpar", max_examples=budget(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("irpar")

PART = os.environ.get("IRPAR_TEST_PART", "1/1")
"""Of several runs that together run all tests: which one, and how many there are."""

# A process of several gets the width of the terminal; what a command prints into a pipe depends on it.
os.environ.pop("COLUMNS", None)

# Of processes beside each other each would compute with as many threads as there are cores, which wait for one another
# and keep the cores busy meanwhile: half of the time. Nothing has imported NumPy yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests start hundreds of processes, each of which would compile irpar anew where the environment keeps no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nothing is read from the cache of whoever runs the tests, and nothing is kept there.
os.environ["IRPAR_CACHE_LIMIT"] = "0"

for name in ("tests.passes.golden", "tests.conformance"):
    pytest.register_assert_rewrite(name)


@pytest.fixture(scope="session", autouse=True)
def no_word_of_progress() -> Iterator[None]:
    """Commands tell how far they are where they take long, which says how busy the machine is."""
    from irpar.commands import progress_report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_report, "QUIET_SECONDS", math.inf)
        yield


def pytest_configure() -> None:
    """What cannot be read ends the run before others are started for it."""
    in_part([], PART)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: some tests wait for ranks that are dead, hang or dawdle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Several processes get whole files."""
    return Distribution(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each process of several begins with files of its own: what one has compiled the others read, in a fresh clone."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    root = session.config.rootpath
    files = sorted(path for place in session.config.args for path in (root / place).rglob("test_*.py"))
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # The collection tells.
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long files first, so that no process waits for another in the end; of one part, where several runs take all."""
    chosen = in_part([item.nodeid for item in items], PART)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = sorted((item for item in items if item.nodeid in chosen), key=lambda item: place(item.nodeid))


def pytest_collection_finish() -> None:
    """The tests themselves are no garbage: nothing looks through all of them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # Tests end soon: what they leave in cycles need not go at once.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object | None:
    """One process of several tells the first no more of a test than its result: to tell all of it takes longer than most."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
