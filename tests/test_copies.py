"""Copies of earlier regions in later scripts: they give no points; see grader/checks/copies.py."""

import pytest

from grader.checks import bert, joining
from grader.checks.copies import check_beyond, check_glue, check_pipeline

carried = pytest.mark.carried


@carried("task2a_gather_scatter/run_glue.py", "2a.3")
def test_what_task_2a_has_of_task_1_works(copies):
    copies(bert.check_weights)


@carried("task2b_allreduce/run_glue.py", "2b.1")
def test_what_task_2b_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("task3_ddp/run_glue.py", "3.1")
def test_what_task_3_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("task3_ddp/run_gpt2.py", "3.2")
def test_what_gpt2_of_task_3_has_of_earlier_tasks_works(copies):
    copies(joining.check_join)


@carried("task4_traffic/run_glue.py", "4.1")
def test_what_task_4_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("beyond/run_gpt2.py", "b.5")
def test_what_the_bonus_script_has_of_earlier_tasks_works(copies):
    copies(check_beyond)


@carried("pipeline/run_gpt2.py", "p.5")
def test_what_the_pipeline_has_of_earlier_tasks_works(copies):
    copies(check_pipeline)
