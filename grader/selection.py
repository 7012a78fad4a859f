"""Decides which test files pytest opens: with --region, or with -m and the course's markers, only those that can match.

The table in course.toml says which files these are. Other folders and files on the command line are opened in any case.
plugin.py selects the tests inside the files.
"""

import re

import pytest

from common.paths import ROOT
from course.table import Course


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


def narrow(config: pytest.Config, course: Course) -> None:
    """Let pytest open the wanted test files in place of the folders on its command line that hold them."""
    wanted = files_to_open(course, config.getoption("--region"), config.getoption("-m"))
    files = sorted(ROOT / file for file in wanted or ())
    args = []
    for arg in config.args:
        folder = (config.invocation_params.dir / arg).resolve()
        args += [str(file) for file in files if file.is_relative_to(folder)] or [arg]
    config.args = args
