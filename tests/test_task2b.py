"""Graders of task 2b: all_reduce (BERT), GPT-2 on several processes (a4_1_2)."""

import pytest

from grader.checks import start
from grader.checks.training import averaging, steps, updates

graded = pytest.mark.graded
GLUE, GPT2 = "task2b_allreduce/run_glue.py", "task2b_allreduce/run_gpt2.py"
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows


@graded("2b.1", needs=["2a.2"])
def test_task2b_averages_before_it_clips(grade):
    updates.check_steps(steps.glue(grade, 3, train=12, batch=2, num_train_epochs=2), 4)
    clipped = steps.glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP)
    updates.check_clipping(clipped, 4, CLIP)
    updates.check_sent_once(clipped)


@graded("2b.6")
def test_setup_joins_at_the_courses_address(grade):
    start.check_setup_address(grade)


@graded("2b.6")
def test_setup_joins_with_the_rank_size_and_backend_it_was_given(grade):
    start.check_setup(grade)


@graded("2b.8", weight=2)
def test_gpt2_averages_in_every_step_before_it_clips(grade):
    averaging.check_every_step(grade)
    averaging.check_kept(grade)


@graded("2b.9")
def test_every_worker_is_started_and_waited_for(grade):
    start.check_started(grade)


@graded("2b.9", network=True)
def test_the_script_trains_on_two_workers(grade):
    start.check_script(grade)


@graded("2b.9", absence=True)
def test_task2b_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(GLUE, GPT2)
