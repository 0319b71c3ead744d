"""Python's garbage collector, kept out of the way while a large graph is made or rewritten."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector from walking a growing graph, in which nothing is garbage, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collector_off_for_good() -> Iterator[None]:
    """The same in a process that ends soon after: what was made in here is not looked at even then."""
    with collector_off():
        yield
        gc.freeze()
