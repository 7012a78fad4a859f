"""Judges who trains on which examples in which order: the samplers of tasks 1 and 2a.

Which examples went through a model is what the rank says. It counts where the gradients of each step are those that
these examples give, computed here.
"""

import itertools
from collections import Counter

import numpy as np

from grader.checks import reference
from grader.checks.reference import Arrays
from grader.checks.training.steps import SMALL, Training
from grader.checks.training.updates import check_noise

CLOSE = 1e-3  # of a gradient's norm: its direction counts here, and regions 1.2 and 1.3 judge the rest
Epochs = list[list[list[int]]]  # epoch -> step -> examples, of one rank


def epochs_of(training: Training, count: int) -> list[Epochs]:
    """Which examples each rank's forward passes really saw. The verdict of the run if it did not end well."""
    training.grade.must_return(training.result)
    of_ranks = []
    for rank, trace in enumerate(training.ranks):
        for step in trace.steps:
            training.refuse_dev(step)
        batches = [step.examples for step in trace.steps]
        if not batches:
            training.grade.fail(f"rank {rank} took no optimizer step in {count} epochs (region 1.3)")
        if len(batches) % count:
            training.grade.fail(
                f"rank {rank} makes {len(batches)} steps in {count} epochs, expected the same number in each"
            )
        each = len(batches) // count
        of_ranks.append([batches[each * epoch : each * (epoch + 1)] for epoch in range(count)])
    return of_ranks


def check_trained_on(training: Training) -> None:
    """In every step the optimizer has the gradient of the rank's own examples or of all ranks', clipped or not."""
    for number in range(min(len(trace.steps) for trace in training.ranks)):
        own = training.own_gradients(number)
        for rank, trace in enumerate(training.ranks):
            if not any(_along(trace.steps[number].grads or {}, right) for right in (own[rank], reference.mean(own))):
                training.grade.fail(
                    f"step {number + 1} on rank {rank} does not use the gradient of the examples that went through the "
                    "model: check your lines for 1.2 and 1.3 in this file"
                )


def _along(got: dict, right: Arrays) -> bool:
    """Whether these gradients are `right` times one factor."""
    if any(got.get(name) is None or np.shape(got[name]) != array.shape for name, array in right.items()):
        return False
    mine, wanted = (
        np.concatenate([np.ravel(np.asarray(of[name], np.float64)) for name in right]) for of in (got, right)
    )
    factor = mine @ wanted / max(wanted @ wanted, 1e-30)
    limit = CLOSE * factor * max(float(np.linalg.norm(wanted)), SMALL)
    return bool(factor > 0 and np.linalg.norm(mine - factor * wanted) <= limit)


def check_every_example_once(training: Training, count: int, examples: int) -> None:
    """In every epoch each example is on one worker; only so many are repeated as make the workers' numbers equal."""
    of_ranks = epochs_of(training, count)
    n, fail = len(of_ranks), training.grade.fail
    for epoch in range(count):
        parts = [Counter(example for batch in mine[epoch] for example in batch) for mine in of_ranks]
        sizes = [sum(part.values()) for part in parts]
        if len(set(sizes)) > 1:
            fail(
                f"expected the same number of examples on all {n} workers, got {sizes}: a worker with fewer makes the "
                "others wait"
            )
        total = sum(parts, Counter())
        if n > 1 and all(part == parts[0] for part in parts):
            fail(f"all {n} workers train on the same {sizes[0]} examples: each worker must take its own part")
        missing = examples - len(total)
        if missing:
            fail(f"with {n} workers, {missing} of {examples} examples are on no worker in epoch {epoch + 1}")
        extra = sum(total.values()) - examples
        if extra >= n:
            fail(
                f"in epoch {epoch + 1}, {extra} more examples are used than the {examples} that exist: some are on "
                "several workers"
            )
    check_trained_on(training)


def check_batch_size(training: Training, count: int, batch: int) -> None:
    """Every batch of a worker has `batch` examples but the last of an epoch, which may be shorter."""
    for rank, epochs in enumerate(epochs_of(training, count)):
        for batches in epochs:
            sizes = [len(examples) for examples in batches]
            wrong = [size for size in sizes[:-1] if size != batch] + [size for size in sizes[-1:] if size > batch]
            if wrong:
                training.grade.fail(
                    f"rank {rank} has batches of {wrong[0]} examples, expected {batch}, the batch of one worker "
                    "(config.per_gpu_train_batch_size)"
                )
    check_trained_on(training)


def check_whole_batch(training: Training, count: int, batch: int, seed: int) -> None:
    """In every epoch the workers' i-th batches together are the i-th batch that one worker would draw."""
    of_ranks = epochs_of(training, count)
    size, length = batch * len(of_ranks), training.setting.train
    arguments = {"length": length, "seed": seed, "epochs": count}
    (orders,) = training.grade.session.run("grader.probes.trusted:orders", 1, arguments).values
    for epoch, order in enumerate(orders):
        for number in range(length // size):
            right = sorted(order[number * size : (number + 1) * size])
            parts = [mine[epoch][number] for mine in of_ranks if number < len(mine[epoch])]
            got = sorted(itertools.chain(*parts))
            if got != right:
                if epoch > 0:  # where the first epoch was right, a forgotten set_epoch is the likely cause
                    _must_be_new_order(training, of_ranks)
                training.grade.fail(
                    f"epoch {epoch + 1}: batch {number + 1} of the {len(of_ranks)} workers together has the examples "
                    f"{got}, one worker's batch {number + 1} has {right}: seed the sampler with config.seed, pass it "
                    "the epoch number, and use the same order on all workers"
                )
    check_trained_on(training)


def check_orders_differ(training: Training, count: int) -> None:
    """Another order in every epoch."""
    of_ranks = epochs_of(training, count)
    _must_be_new_order(training, of_ranks)
    for rank, epochs in enumerate(of_ranks):
        first = list(itertools.chain(*epochs[0]))
        if first == sorted(first):
            training.grade.fail(f"rank {rank} sees the examples in the order of the file: shuffle them")
    check_trained_on(training)


def _must_be_new_order(training: Training, of_ranks: list[Epochs]) -> None:
    for rank, epochs in enumerate(of_ranks):
        orders = [list(itertools.chain(*batches)) for batches in epochs]
        if any(order == orders[0] for order in orders[1:]):
            training.grade.fail(
                f"rank {rank} sees the same examples in the same order in every epoch: call set_epoch(epoch)"
            )


def check_order_follows_seed(first: Training, other_seed: Training, again: Training, count: int) -> None:
    """Equal seeds give equal orders whatever drew random numbers before, another seed another one."""
    if epochs_of(first, count) != epochs_of(again, count):
        first.grade.fail("two runs with one seed see the examples in different orders: seed the sampler")
    check_noise(first)
    if epochs_of(first, count) == epochs_of(other_seed, count):
        first.grade.fail("a different config.seed gives the same order: seed the sampler with config.seed")
    for training in (first, other_seed, again):
        check_trained_on(training)
