"""The order in which two workers take test files."""

from pathlib import Path
from types import SimpleNamespace

from staff.tests.long_files_first import pytest_collection_modifyitems


def item(file, name, *markers):
    return SimpleNamespace(path=Path(file), name=name, get_closest_marker=lambda marker: marker in markers or None)


def test_a_file_with_one_long_test_goes_first_as_a_whole_and_keeps_its_order():
    items = [item("a.py", "a1"), item("b.py", "b1"), item("b.py", "b2", "medium"), item("c.py", "c1", "bank")]

    pytest_collection_modifyitems(items)

    assert [item.name for item in items] == ["b1", "b2", "c1", "a1"]
