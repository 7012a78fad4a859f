"""pytest -p staff.tests.thousands_of_tests: what `make test` needs beside the tests, so that nobody waits for long.

Files that start many processes run first: both workers end together. And the garbage collector is paused while tests
are collected, and later leaves alone what was made then: torch, transformers and thousands of tests. It takes four of
ten seconds of each worker otherwise.
"""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Graders start ranks: `make check` leaves them out."""
    if item.get_closest_marker("graded"):
        item.add_marker("medium")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests marked medium, slow or bank, then the others; the order inside a file stays."""
    long = {
        item.path
        for item in items
        if any(item.get_closest_marker(name) for name in ("medium", "proof", "slow", "bank"))
    }
    items.sort(key=lambda item: item.path not in long)
