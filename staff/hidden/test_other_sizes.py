"""Hidden graders: the same properties as in tests/, for numbers of workers and sizes that the handout never shows.

Who solved the task passes them; who fitted a solution to the tests that came with it does not. What they count, and who
sees them: staff/grade/hidden_tests.py.
"""

from collections import Counter

import pytest

from tests.gradients import test_averaging as averaging
from tests.task2b import test_loaders as loaders
from tests.task2b import test_partitions as partitions
from tests.training import test_sampling as sampling

graded = pytest.mark.graded
WORKERS = 5  # the visible tests use 2, 3 and 4
LOADS = [(31, 15, 5), (52, 20, 5), (23, 12, 6)]  # examples, total batch, workers


def check_mean_of_many(grade, function):
    """Five workers, seven parameters of drawn shapes, each of two or three dimensions."""
    dimensions = grade.draw.integers(2, 4, size=7)
    shapes = tuple(tuple(grade.draw.integers(1, 7, count).tolist()) for count in dimensions)
    averaging.check_mean(grade, function, averaging.AveragingSetting(shapes), (WORKERS,))


@graded("2a.2")
def test_five_workers_share_the_examples(grade):
    training = sampling.train(grade, WORKERS, 22, 2)
    sampling.check_every_example_once(training)
    sampling.check_orders_differ(training)


@graded("2a.3", weight=2)
def test_gather_and_scatter_leave_the_mean_on_five_workers(grade):
    check_mean_of_many(grade, "sync_gradients")


@graded("2b.1", weight=2)
def test_all_reduce_leaves_the_mean_on_five_workers(grade):
    check_mean_of_many(grade, "sync_gradients")


@graded("2b.3")
def test_many_uneven_partitions_hold_every_example_once(grade):
    length = int(grade.draw.integers(200, 400))
    sizes = [size / 15 for size in (1, 2, 3, 4, 5)]
    (made,) = partitions.partitions(grade, [(length, sizes)], [int(grade.draw.integers(10**6))])
    (parts,) = made["partitions"]
    partitions.check_exactly_once(grade, length, sizes, parts)
    partitions.check_counts(grade, length, sizes, [len(part) for part in parts])


@graded("2b.5", weight=2)
def test_five_and_six_workers_get_equally_many_batches(grade):
    for (length, total, workers), values in loaders.all_loaders(grade, LOADS):
        counts = [len(value["batches"]) for value in values]
        times_used = Counter(example for value in values for batch in value["batches"] for example in batch)
        what = f"{length} examples, total batch {total}, {workers} workers"
        if len(set(counts)) > 1 or not counts[0]:
            grade.fail(f"{what}: expected the same number of batches on all ranks, got {counts}")
        if max(times_used.values()) > 1:
            grade.fail(f"{what}: an example is on two ranks")


@graded("2b.7", weight=2)
def test_average_gradients_leaves_the_mean_on_five_workers(grade):
    check_mean_of_many(grade, "average_gradients")
