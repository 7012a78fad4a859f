"""Graders of 1.1: the pretrained weights, and a head for the task. The other regions of task 1: tests/training."""

import pytest

from grader.checks import bert

graded = pytest.mark.graded
FILE = "task1_single/run_glue.py"


@graded("1.1")
def test_the_pretrained_weights_are_loaded(grade):
    bert.check_weights(grade)


@graded("1.1")
def test_the_head_fits_the_task(grade):
    bert.check_head(grade)


@graded("1.1", absence=True)
def test_task1_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(FILE)
