"""Sampling, 2a.2: which worker trains on which examples in which order. Each has its own share of every batch.

A rank reports which examples went through its model. The report counts only if the gradients of each step are those
that these examples give (check_trained_on).
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from grader.arithmetic import proportional
from grader.grading import Grade
from grader.in_rank import in_rank, run_alone
from grader.wire.values import Fields
from tests.training import loop_shared
from tests.training.loop_shared import CLIP, SMALL, Training, check_noise, glue, must_have_batches, must_step

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, torch

graded = pytest.mark.graded
CRASHES = loop_shared.CRASHES
EPOCHS = 2
Epochs = list[list[list[int]]]  # [epoch][step] -> examples, of one rank


def train(grade: Grade, ranks: int, examples: int, batch: int, **config: Any) -> Training:
    """Run train() without averaging: which examples a worker sees does not depend on it."""
    return glue(grade, ranks, train=examples, batch=batch, num_train_epochs=EPOCHS, synced=False, **config)


def epochs_of(training: Training) -> list[Epochs]:
    """Return on which examples each rank trained. Raises the verdict of the run if it did not end well."""
    training.grade.must_return(training.result)
    must_step(training)
    all_epochs = []
    for rank, trace in enumerate(training.ranks):
        must_have_batches(training, trace.steps)
        batches = [step.examples for step in trace.steps]
        if len(batches) % EPOCHS:
            training.grade.fail(
                observed=f"rank {rank} makes {len(batches)} steps in {EPOCHS} epochs, expected the same number in each"
            )
        count = len(batches) // EPOCHS
        all_epochs.append([batches[count * epoch : count * (epoch + 1)] for epoch in range(EPOCHS)])
    check_trained_on(training)
    return all_epochs


def check_trained_on(training: Training) -> None:
    """Check that every step uses the gradient of the rank's own examples or of all ranks', clipped or not."""
    for number in training.common_steps:
        for rank, gradients in training.step_gradients(number).items():
            got = [training.ranks[rank].steps[number].data["gradients"].get(name) for name in training.names]
            candidates = ([one[name] for name in training.names] for one in (gradients.own[rank], gradients.mean))
            if not any(proportional(got, right, 1e-3, SMALL) for right in candidates):
                training.grade.fail(
                    f"step {number + 1} on rank {rank} does not use the gradient of the examples that went through the "
                    "model: check your lines for 1.2 and 1.3 in this file"
                )


def check_every_example_once(training: Training) -> None:
    """Check that each example is on one worker in every epoch, but for repeats that give all workers equally many."""
    all_epochs, examples, fail = epochs_of(training), training.train, training.grade.fail
    ranks = len(all_epochs)
    for epoch in range(EPOCHS):
        parts = [Counter(itertools.chain(*epochs[epoch])) for epochs in all_epochs]
        sizes, total = [part.total() for part in parts], sum(parts, Counter())
        if len(set(sizes)) > 1:
            fail(f"expected equally many examples on all {ranks} workers, got {sizes}: one ends early, the others wait")
        if ranks > 1 and all(part == parts[0] for part in parts):
            cause = "each worker must take its own part"
            if len(parts[0]) == examples:  # the sampler is not used, or has one worker
                cause = "is sampler= passed by name (the loader's third argument is shuffle), made for all workers?"
            fail(f"all {ranks} workers train on the same {sizes[0]} examples: {cause}")
        if missing := examples - len(total):
            twice = total.total() - len(total)
            why = ": where they do not divide evenly, the sampler repeats some and drops none"
            drawn, batch = -(-examples // ranks), len(all_epochs[0][epoch][0])  # what the sampler gives each worker
            if sizes[0] == drawn - drawn % batch:
                why = ": every worker leaves out its last batch, which is short; is drop_last set in the loader?"
            why = f", and {twice} are on several: do all workers shuffle with the same seed?" if twice else why
            fail(f"with {ranks} workers, {missing} of {examples} examples are on no worker in epoch {epoch + 1}{why}")
        if (more := total.total() - examples) >= ranks:
            why = "some are on several workers" if ranks > 1 else "does a step run the model a second time?"
            fail(f"in epoch {epoch + 1}, {more} of {examples} examples are used twice: {why}")


def check_batch_size(training: Training, batch: int) -> None:
    """Check that every batch of a worker has `batch` examples; the last of an epoch may be shorter."""
    for rank, epochs in enumerate(epochs_of(training)):
        for batches in epochs:
            sizes = [len(examples) for examples in batches]
            last = len(sizes) - 1
            wrong = [size for i, size in enumerate(sizes) if size > batch or (size < batch and i < last)]
            if wrong:
                training.grade.fail(
                    observed=(
                        f"rank {rank} has batches of {wrong[0]} examples, expected {batch}, the batch of one worker "
                        "(config.per_gpu_train_batch_size)"
                    )
                )


@in_rank(join=False)
def draw_orders(context: Context, lesson: ModuleType, inputs: Fields) -> list[list[int]]:
    """Return the order of every epoch on one worker, see common/data/samplers.py. Runs beside no student's file."""
    a = context.arguments
    seeds = range(a["seed"], a["seed"] + a["epochs"])
    return [torch.randperm(a["length"], generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]


def orders_of_one_worker(grade: Grade, length: int, seed: int, epochs: int) -> list[list[int]]:
    """Return the examples in the order in which one worker trains on them, of every epoch."""
    return run_alone(grade, draw_orders, [None], length=length, seed=seed, epochs=epochs)[0]


SEED_TWICE = (
    "the sampler adds its seed to the epoch number, so the seed is in the order twice: set_epoch takes the number alone"
)
NEXT_EPOCH = "every epoch has the order of the next one: set_epoch takes the number as the loop counts it, from 0"


def check_whole_batch(training: Training, batch: int, seed: int) -> None:
    """Check that the workers' i-th batches together are the i-th batch that one worker would draw, in every epoch."""
    all_epochs = epochs_of(training)
    ranks = len(all_epochs)
    for epoch, order in enumerate(orders_of_one_worker(training.grade, training.train, seed, EPOCHS)):
        for number in range(training.train // (batch * ranks)):
            right = sorted(order[number * batch * ranks : (number + 1) * batch * ranks])
            got = sorted(
                itertools.chain(*(epochs[epoch][number] for epochs in all_epochs if number < len(epochs[epoch])))
            )
            if got != right:
                if epoch:  # the first one was right: a forgotten set_epoch is the likely cause
                    must_be_new_order(training)
                for wrong_seed, sentence in ((2 * seed, SEED_TWICE), (seed + 1, NEXT_EPOCH)):
                    order = orders_of_one_worker(training.grade, training.train, wrong_seed, EPOCHS)[epoch]
                    if got == sorted(order[number * batch * ranks : (number + 1) * batch * ranks]):
                        training.grade.fail(sentence)
                training.grade.fail(
                    f"epoch {epoch + 1}: batch {number + 1} of the {ranks} workers together has the examples {got}, "
                    f"one worker's batch {number + 1} has {right}: seed the sampler with config.seed, pass it the "
                    "epoch number, and use the same order on all workers"
                )


def must_follow_seed(training: Training, other: Training) -> None:
    if epochs_of(training) == epochs_of(other):
        training.grade.fail("a different config.seed gives the same order: seed the sampler with config.seed")


def must_be_new_order(training: Training) -> None:
    for rank, epochs in enumerate(epochs_of(training)):
        orders = [list(itertools.chain(*batches)) for batches in epochs]
        if orders[0] in orders[1:]:
            training.grade.fail(
                f"rank {rank} sees the same examples in the same order in every epoch: call set_epoch(epoch)"
            )


def check_orders_differ(training: Training) -> None:
    """Check that every epoch has another order, and the first one not that of the file."""
    must_be_new_order(training)
    for rank, epochs in enumerate(epochs_of(training)):
        order = list(itertools.chain(*epochs[0]))
        if order == sorted(order):
            training.grade.fail(f"rank {rank} sees the examples in the order of the file: shuffle them")


@graded("2a.2", weight=2)
def test_every_example_goes_to_one_worker(grade: Grade) -> None:
    check_every_example_once(train(grade, 2, 12, 3))
    check_every_example_once(train(grade, 3, 13, 3))  # 5 for each; 4 from a sampler that drops, 3 from such a loader


@graded("2a.2")
def test_a_worker_takes_its_part_of_the_batch(grade: Grade) -> None:
    check_batch_size(train(grade, 2, 12, 3), 3)
    check_batch_size(train(grade, 3, 13, 2), 2)
    seed = 1000 + grade.number("script", 1000)  # far from 0 and 1: no sum with the epoch looks like another one
    must_follow_seed(train(grade, 2, 12, 3, seed=seed), train(grade, 2, 12, 3, seed=0))
    check_whole_batch(train(grade, 2, 12, 3, seed=seed), 3, seed)
    check_whole_batch(train(grade, 1, 12, 4, seed=seed), 4, seed)


@graded("2a.2")
def test_every_epoch_has_another_order(grade: Grade) -> None:
    check_orders_differ(train(grade, 2, 12, 3))


@graded("2a.2")
def test_the_order_follows_the_seed(grade: Grade) -> None:
    first, again = train(grade, 2, 12, 3), train(grade, 2, 12, 3, max_grad_norm=CLIP)  # other gradients, one seed
    other = train(grade, 2, 12, 3, seed=0)  # torch's default: a sampler without a seed gives the same order twice
    if epochs_of(first) != epochs_of(again):
        grade.fail("two runs with one seed see the examples in different orders: seed the sampler")
    check_noise(first)
    must_follow_seed(first, other)
    check_whole_batch(other, 3, 0)  # 0 is a seed, too
