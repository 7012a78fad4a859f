"""Graders of task 2a: workers join, share the examples, and average gradients with gather and scatter."""

import pytest

from grader.checks import joining
from grader.checks.training import sampling, steps, updates

graded = pytest.mark.graded
FILE = "task2a_gather_scatter/run_glue.py"
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows
EPOCHS = 2


def trained(grade, world_size, train, batch, **config):
    return steps.glue(grade, world_size, train=train, batch=batch, num_train_epochs=EPOCHS, **config)


def shared(grade, world_size, train, batch, **config):
    """The same for who only asks which examples a worker gets: the gradients are not averaged."""
    return trained(grade, world_size, train, batch, synced=False, **config)


def seed_of(grade):
    """The script's seed of a run, far from 0 and 1, so that no sum with the epoch looks like another."""
    return 1000 + grade.number("script", 1000)


@graded("2a.1", weight=2)
def test_the_group_is_joined_where_and_as_it_was_told(grade):
    joining.check_join(grade)


@graded("2a.1", absence=True)
def test_task2a_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(FILE)


@graded("2a.2", weight=2)
def test_every_example_goes_to_one_worker(grade):
    sampling.check_every_example_once(shared(grade, 2, 12, 3), EPOCHS, 12)
    sampling.check_every_example_once(shared(grade, 3, 13, 2), EPOCHS, 13)


@graded("2a.2")
def test_a_worker_takes_its_part_of_the_batch(grade):
    sampling.check_batch_size(shared(grade, 2, 12, 3), EPOCHS, 3)
    sampling.check_batch_size(shared(grade, 3, 13, 2), EPOCHS, 2)
    seed = seed_of(grade)
    sampling.check_whole_batch(shared(grade, 2, 12, 3, seed=seed), EPOCHS, 3, seed)
    sampling.check_whole_batch(shared(grade, 1, 12, 4, seed=seed), EPOCHS, 4, seed)


@graded("2a.2")
def test_every_epoch_has_another_order(grade):
    sampling.check_orders_differ(shared(grade, 2, 12, 3), EPOCHS)


@graded("2a.2")
def test_the_order_follows_the_seed(grade):
    other = shared(grade, 2, 12, 3, seed=0)  # torch's default: a sampler without a seed gives the same order twice
    sampling.check_order_follows_seed(
        shared(grade, 2, 12, 3), other, shared(grade, 2, 12, 3, max_grad_norm=CLIP), EPOCHS
    )


@graded("2a.3", needs=["2a.2"])
def test_task2a_averages_before_it_clips(grade):
    updates.check_steps(trained(grade, 2, 12, 3), 2 * EPOCHS)
    updates.check_clipping(trained(grade, 2, 12, 3, max_grad_norm=CLIP), 2 * EPOCHS, CLIP)
    updates.check_sent_once(trained(grade, 2, 12, 3))
