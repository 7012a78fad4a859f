"""Graders of 2a.1: workers join a process group. The other regions of task 2a: tests/gradients and tests/training."""

import pytest

from grader.checks import joining

graded = pytest.mark.graded
FILE = "task2a_gather_scatter/run_glue.py"


@graded("2a.1", weight=2)
def test_the_group_is_joined_where_and_as_it_was_told(grade):
    joining.check_join(grade)


@graded("2a.1", absence=True)
def test_task2a_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(FILE)
