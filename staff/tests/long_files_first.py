"""pytest -p staff.tests.long_files_first: files that start many processes run first: both workers end together."""

import pytest


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
