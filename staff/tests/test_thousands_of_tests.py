"""The order in which two workers take test files, and the collector that is paused for them."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

from staff.tests.thousands_of_tests import (
    CHECKED,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_itemcollected,
)


def item(file, name, *markers):
    return SimpleNamespace(path=Path(file), name=name, get_closest_marker=lambda marker: marker in markers or None)


def grader_of(region):
    marks: list[str] = []
    closest = {"graded": SimpleNamespace(args=(region,))}
    return SimpleNamespace(get_closest_marker=closest.get, add_marker=marks.append, marks=marks)


def test_a_file_with_one_long_test_goes_first_as_a_whole_and_keeps_its_order():
    items = [item("a.py", "a1"), item("b.py", "b1"), item("b.py", "b2", "medium"), item("c.py", "c1", "real")]

    pytest_collection_modifyitems(items)

    assert [item.name for item in items] == ["b1", "b2", "c1", "a1"]


@pytest.mark.parametrize(("region", "is_left_out"), [(CHECKED, False), ("2a.3", True)])
def test_make_check_runs_the_graders_of_one_region(region, is_left_out):
    grader = grader_of(region)

    pytest_itemcollected(grader)

    assert grader.marks == (["medium"] if is_left_out else [])


def test_the_collector_is_paused_while_tests_are_collected_and_leaves_them_alone_afterwards():
    hook = pytest_collection()
    before = gc.get_freeze_count()

    next(hook)
    paused = not gc.isenabled()
    with pytest.raises(StopIteration):
        hook.send(None)

    assert paused
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
