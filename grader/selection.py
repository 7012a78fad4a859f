"""Decides which test files pytest opens: with --region, or with -m and the course's markers, only those that can match.

The table in course.toml says which files these are. Files of other folders, and files named on the command line, are
opened in any case. plugin.py selects the tests inside the files.
"""

import re
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import Course, load_course

WANTED = pytest.StashKey[set[str] | None]()


def files_to_open(course: Course, region: str | None, markers: str) -> set[str] | None:
    """Return the test files of the table that hold what is asked for; None, for all files, if the table cannot tell."""
    rows = list(course.regions.values())
    if region:
        rows = [row for row in rows if row.id == region]
    elif markers:
        names = set(re.split(r"\s+or\s+", markers.strip()))
        rows = [row for row in rows if {row.marker, course.tasks[row.task].marker} & names]
        known = {marker for row in rows for marker in (row.marker, course.tasks[row.task].marker)}
        if not names <= known:
            return None
    else:
        return None
    whole = {file for row in rows for file in course.tasks[row.task].whole} if not region else set()
    return whole.union(*(row.tests for row in rows)) or None


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a test file that is beside wanted ones, but is not wanted itself. None lets pytest decide."""
    if WANTED not in config.stash:
        config.stash[WANTED] = _wanted(config)
    wanted = config.stash[WANTED]
    if wanted is None or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    folders = {ROOT / Path(file).parts[0] for file in wanted}
    in_their_folders = not folders.isdisjoint(collection_path.parents)
    is_wanted = collection_path in {ROOT / file for file in wanted}
    return True if in_their_folders and not is_wanted else None


def _wanted(config: pytest.Config) -> set[str] | None:
    try:
        return files_to_open(load_course(), config.getoption("--region"), config.getoption("-m"))
    except InputError:  # grader/plugin.py reports it
        return None
