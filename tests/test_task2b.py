"""Graders of 2b.6 and 2b.9: GPT-2 on several processes (a4_1_2). Other regions: tests/gradients, training, task2b."""

import pytest

from grader.checks import start

graded = pytest.mark.graded
GLUE, GPT2 = "task2b_allreduce/run_glue.py", "task2b_allreduce/run_gpt2.py"


@graded("2b.6")
def test_setup_joins_at_the_courses_address(grade):
    start.check_setup_address(grade)


@graded("2b.6")
def test_setup_joins_with_the_rank_size_and_backend_it_was_given(grade):
    start.check_setup(grade)


@graded("2b.9")
def test_every_worker_is_started_and_waited_for(grade):
    start.check_started(grade)


@graded("2b.9", network=True)
def test_the_script_trains_on_two_workers(grade):
    start.check_script(grade)


@graded("2b.9", absence=True)
def test_task2b_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(GLUE, GPT2)
