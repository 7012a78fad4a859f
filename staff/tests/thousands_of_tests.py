"""A pytest plugin that shortens `make test`, with its thousands of tests: `pytest -p staff.tests.thousands_of_tests`.

Files that start many processes run first, so that both workers end at the same time. The garbage collector is paused
while tests are collected, and afterwards skips what was made then: torch, transformers and the tests. Without the pause
it takes four of the ten seconds that each worker needs to collect them.
"""

import gc
from collections.abc import Generator

import pytest

CHECKED = "1.3"  # the region: its graders see steps, epochs and losses of a whole training loop
LONG = ("medium", "proof", "slow", "bank", "real", "graded")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Graders start ranks: `make check` runs those of one region, and leaves out the others."""
    graded = item.get_closest_marker("graded")
    if graded and graded.args[0] != CHECKED:
        item.add_marker("medium")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that start processes, then the others; the order inside a file stays."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in LONG)}
    items.sort(key=lambda item: item.path not in long)
