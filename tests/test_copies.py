"""Copies of earlier regions in later scripts that differ from the original. They give no points; grader/carried.py."""

from __future__ import annotations

import pytest

from grader.grading import Grade
from tests.start import test_joining
from tests.task1 import test_bert
from tests.training import loop_shared, test_loop, test_sampling

carried = pytest.mark.carried
CRASHES = loop_shared.CRASHES


def check_glue(grade: Grade) -> None:
    """Check load_model(), join() and train() of a run_glue.py: the examples of two workers, then each step and
    evaluation of one."""
    test_bert.check_weights(grade)
    test_joining.check_join(grade)
    seed = 1000 + grade.number("script", 1000)
    shared = test_sampling.train(grade, 2, 13, 3, seed=seed)
    test_sampling.check_every_example_once(shared)
    test_sampling.check_batch_size(shared, 3)
    test_sampling.check_whole_batch(shared, 3, seed)
    alone = test_sampling.train(grade, 1, 6, 3, do_eval=True)
    test_loop.check_steps(alone, 4)
    test_loop.check_evaluations(alone, 2, 4)
    test_loop.check_clipping(test_sampling.train(grade, 1, 6, 3, max_grad_norm=loop_shared.CLIP), 4)


def check_pipeline(grade: Grade) -> None:
    """Check train() of pipeline/run_gpt2.py, with the whole model on one device."""
    setting = {"train": 6, "batch": 2, "n_epochs": 2, "loaded": False}
    test_loop.check_steps(loop_shared.gpt2(grade, 1, **setting), 6)
    test_loop.check_clipping(loop_shared.gpt2(grade, 1, max_grad_norm=loop_shared.CLIP, **setting), 6)


def check_beyond(grade: Grade) -> None:
    """Check join() and train() of beyond/run_gpt2.py for one worker; the bonus lessons judge their averaging."""
    test_joining.check_join(grade)
    test_loop.check_steps(loop_shared.gpt2(grade, 1, train=6, batch=2, n_epochs=2), 6)


@carried("task2a_gather_scatter/run_glue.py", "2a.3")
def test_what_task_2a_has_of_task_1_works(copies):
    copies(test_bert.check_weights)


@carried("task2b_allreduce/run_glue.py", "2b.1")
def test_what_task_2b_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("task3_ddp/run_glue.py", "3.1")
def test_what_task_3_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("task3_ddp/run_gpt2.py", "3.2")
def test_what_gpt2_of_task_3_has_of_earlier_tasks_works(copies):
    copies(test_joining.check_join)


@carried("task4_traffic/run_glue.py", "4.1")
def test_what_task_4_has_of_earlier_tasks_works(copies):
    copies(check_glue)


@carried("beyond/run_gpt2.py", "b.5")
def test_what_the_bonus_script_has_of_earlier_tasks_works(copies):
    copies(check_beyond)


@carried("pipeline/run_gpt2.py", "p.5")
def test_what_the_pipeline_has_of_earlier_tasks_works(copies):
    copies(check_pipeline)
