"""Graders of task 3: DistributedDataParallel averages the gradients, and each of them travels once."""

import pytest

from grader.checks.training import ddp, steps, updates

graded = pytest.mark.graded
GLUE, GPT2 = "task3_ddp/run_glue.py", "task3_ddp/run_gpt2.py"
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows


def glue(grade):
    return steps.glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP)


def gpt2(grade):
    return steps.gpt2(grade, 2, train=6, batch=2, n_epochs=2, max_grad_norm=CLIP)


@graded("3.1")
def test_the_wrapped_model_averages_in_its_backward_pass(grade):
    ddp.check_wrapped(grade, "classifier")


@graded("3.1")
def test_task3_trains_through_the_wrapped_model(grade):
    updates.check_steps(steps.glue(grade, 3, train=12, batch=2, num_train_epochs=2), 4)
    updates.check_clipping(glue(grade), 4, CLIP)
    ddp.must_be_averaged_by_reducer(glue(grade))


@graded("3.1")
def test_every_gradient_travels_once(grade):
    ddp.check_traffic(glue(grade))


@graded("3.2")
def test_the_wrapped_gpt2_averages_in_its_backward_pass(grade):
    ddp.check_wrapped(grade, "language model")


@graded("3.2", needs=["1.3"])
def test_gpt2_trains_through_the_wrapped_model(grade):
    updates.check_steps(steps.gpt2(grade, 3, train=4, batch=2, n_epochs=1), 2)
    updates.check_clipping(gpt2(grade), 6, CLIP)
    ddp.check_traffic(gpt2(grade))


@graded("3.2", absence=True)
def test_task3_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(GLUE, GPT2)
