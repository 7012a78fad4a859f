"""Graders of task 1: load BERT, compute gradients, take steps, evaluate; on a model small enough to check by hand."""

import pytest

from grader.checks import bert
from grader.checks.training import recorded, sampling, steps, updates

graded = pytest.mark.graded
FILE = "task1_single/run_glue.py"
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows


def trained(grade, **other):
    """Two epochs of 7 examples in batches of 3: the third batch is short."""
    setting = {"train": 7, "batch": 3, "joined": False, "num_train_epochs": 2}
    return steps.glue(grade, 1, **setting | other)


@graded("1.1")
def test_the_pretrained_weights_are_loaded(grade):
    bert.check_weights(grade)


@graded("1.1")
def test_the_head_fits_the_task(grade):
    bert.check_head(grade)


@graded("1.1", absence=True)
def test_task1_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(FILE)


@graded("1.2", weight=2)
def test_backward_gives_the_gradient_of_the_batch(grade):
    updates.check_backward(trained(grade))


@graded("1.2")
def test_every_batch_has_a_gradient_of_its_own(grade):
    updates.check_every_backward(trained(grade, learning_rate=0.0))  # steps, right or wrong, move nothing


@graded("1.3")
def test_every_step_moves_the_parameters_by_the_gradient_of_a_new_batch(grade):
    updates.check_steps(trained(grade, batch=2), 8)  # the batch size of the evaluation is 3
    sampling.check_every_example_once(trained(grade), 2, 7)
    sampling.check_orders_differ(trained(grade), 2)


@graded("1.3")
def test_gradients_are_clipped_before_the_step(grade):
    updates.check_clipping(trained(grade, max_grad_norm=CLIP), 6, CLIP)


@graded("1.3")
def test_the_learning_rate_changes_after_the_step(grade):
    updates.check_rates(trained(grade, train=10), steps.RATE)  # 4 steps in an epoch: a number that nothing else has


@graded("1.3")
def test_the_loss_is_recorded_before_the_update(grade):
    recorded.check_losses(trained(grade))


@graded("1.4", weight=2)
def test_the_dev_set_is_evaluated_after_every_epoch(grade):
    recorded.check_evaluations(trained(grade, do_eval=True), 2, 4)
    # Trained so little that the answers stay what they were, in batches of 3, 3 and 2: with all of them right every
    # other count is lower, and with the first one wrong neither the last batch nor the mean of the batches has 7/8.
    for right in (8, 7):
        still = trained(grade, dev=8, right=right, learning_rate=1e-9, do_eval=True)
        recorded.check_evaluations(still, 2, 8)
    for task in ("mnli", "sts-b"):  # three labels, and a score
        recorded.check_evaluations(trained(grade, dev=8, task=task, do_eval=True), 2, 8)


@graded("1.4", absence=True)
def test_training_continues_in_train_mode(grade):
    recorded.check_train_mode(trained(grade, num_train_epochs=3, do_eval=True))
