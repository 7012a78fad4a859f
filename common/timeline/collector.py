"""Switches Python's garbage collector off while many small objects are made."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector from running. With torch loaded, each of its passes walks a million objects: reading a trace
    of 11,000 events takes 0.26 s with it and 0.06 s without."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
