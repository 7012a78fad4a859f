"""Judges partition_dataset of task 2b: the loader and the batch size that every rank gets.

The rule for the tail is judged by literal cases, and for drawn sizes by its properties: all ranks have equally many
batches, no example comes twice, and what is left out would have been a batch of its own on a larger partition.
"""

from collections import Counter

import numpy as np

from grader.checks.mixing import check_mixed
from grader.checks.partitions import numbered, on_data, refuse_changes
from grader.grading import Grade
from grader.verdicts import Crashed

# (examples, total batch, workers): batches on every rank. Sizes that divide and that do not, a short last batch on all
# ranks, tails of one example, fewer examples than workers, one worker.
LOADS = {
    (24, 8, 2): 3, (11, 8, 2): 2, (9, 4, 2): 2, (14, 9, 3): 2, (10, 8, 4): 1, (13, 6, 3): 2, (7, 4, 4): 1, (3, 4, 4): 0,
    (17, 4, 2): 4, (7, 3, 1): 3, (8, 4, 1): 2,
}  # fmt: skip
MANY = (180, 12)  # examples and total batch: enough to see whether they were shuffled


def batches(
    grade: Grade, length: int, batch: int, world_size: int, collate: bool = True, given: object = None
) -> list[dict]:
    """What partition_dataset gives each rank; see probes.data. `given`: the partitions that it is made to find."""
    try:
        values = on_data(grade, "loader", world_size, length, batch=batch, collate=collate, given=given)
    except Crashed as crash:
        raise Crashed(f"{length} examples, total batch {batch}, {world_size} workers: {crash}") from None
    return _numbered(grade, length, values)


def _numbered(grade: Grade, length: int, values: list[dict]) -> list[dict]:
    """The same values, with examples as their numbers."""
    return [value | {name: numbered(grade, length, value[name]) for name in ("batches", "again")} for value in values]


def must_be_loader(grade: Grade, value: dict) -> None:
    if not value["is_loader"]:
        grade.fail(f"expected a DataLoader and the batch size of a worker, got {value['types']}")


def must_hold_examples(grade: Grade, values: list[dict]) -> None:
    """Numbers and sizes of batches count only where the batches hold examples of the data, each once on a rank."""
    for rank, value in enumerate(values):
        given = Counter(example for batch in value["batches"] for example in batch)
        if -1 in given:
            grade.fail("expected batches of examples, got something else, for example their indices")
        if repeated := [example for example, number in given.items() if number > 1]:
            grade.fail(f"{len(repeated)} examples appear more than once on rank {rank}, for example {min(repeated)}")


def must_be_divided_at_random(grade: Grade) -> None:
    """No test counts for parts of the data in its own order: these can be had without a partitioner."""
    (length, batch), ranks = MANY, 2
    first, *_ = _parts(batches(grade, length, batch, ranks), "batches")
    half = np.array([example in first for example in range(length)])
    if all(half) or not any(half):
        grade.fail(f"{length} examples on {ranks} workers: rank 0 has {'all' if all(half) else 'none'} of them")
    check_mixed(grade, [half])
    must_use_partitioner(grade)


def must_use_partitioner(grade: Grade) -> None:
    """Where DataPartitioner is used, a rank's batches hold the examples of the partition that it gives, here a drawn
    one. A partition_dataset that shuffles and deals out by itself uses none: then only the mixing is judged."""
    (length, batch), ranks = MANY, 2
    order = [int(index) for index in np.random.default_rng([grade.seed, 8]).permutation(length)]
    given = [sorted(order[: length // ranks]), sorted(order[length // ranks :])]
    values = batches(grade, length, batch, ranks, given=given)
    for rank, (value, part) in enumerate(zip(values, _parts(values, "batches"), strict=True)):
        must_be_loader(grade, value)
        if not value["shares"]:
            continue
        if not all(len(sizes) == ranks and np.allclose(sizes, 1 / ranks) for sizes in value["shares"]):
            grade.fail(
                f"on {ranks} workers, DataPartitioner is asked for shares of {value['shares'][0]}, expected "
                f"{ranks} shares of {1 / ranks}"
            )
        if sorted(part.elements()) != given[rank]:
            grade.fail(
                f"rank {rank} of {ranks}: the batches do not hold the examples of its partition; use the one that "
                "DataPartitioner gives for this rank"
            )


def check_share(grade: Grade) -> None:
    """The batch of a worker is the total divided by the number of workers; a loader and this number are returned."""
    for length, total, world_size in LOADS:
        values = batches(grade, length, total, world_size)
        for rank, value in enumerate(values):
            must_be_loader(grade, value)
            if value["batch"] != total // world_size:
                grade.fail(
                    f"total batch {total} on {world_size} workers: expected the batch size {total // world_size} for "
                    f"each, got {value['batch']} on rank {rank}"
                )
            sizes = [len(examples) for examples in value["batches"]]
            if any(size != total // world_size for size in sizes[:-1]) or max(sizes, default=0) > total // world_size:
                grade.fail(f"rank {rank} of {world_size}: expected batches of {total // world_size}, got {sizes}")
        must_hold_examples(grade, values)
    must_be_divided_at_random(grade)


def check_counts(grade: Grade) -> None:
    """All ranks have the same number of batches, in every epoch, as many as the smallest partition fills."""
    for (length, total, world_size), right in LOADS.items():
        values = batches(grade, length, total, world_size)
        counts = [len(value["batches"]) for value in values]
        what = f"{length} examples, total batch {total}, {world_size} workers"
        must_be_loader(grade, values[0])
        if len(set(counts)) > 1:
            grade.fail(f"{what}: the ranks have {counts} batches; a rank with more batches waits forever")
        if counts[0] != right:
            grade.fail(f"{what}: expected {right} batches on every rank, got {counts[0]}")
        if (lengths := [value["len"] for value in values]) != counts:
            grade.fail(f"{what}: len(loader) is {lengths}, but the loaders give {counts} batches")
        if (again := [len(value["again"]) for value in values]) != counts:
            grade.fail(
                f"{what}: the loaders give {counts} batches in the first epoch and {again} in the second: "
                "an iterator or a generator is used up after one pass; pass a list, a range or a data set"
            )
        must_hold_examples(grade, values)
    must_be_divided_at_random(grade)


def check_no_overlap(grade: Grade) -> None:
    """No example on two ranks or twice on one; only a batch of its own is left out, on a larger partition."""
    drawn = [(int(grade.draw.integers(20, 60)), 2 * n * int(grade.draw.integers(1, 4)), n) for n in (2, 3)]
    for length, total, world_size in [*LOADS, *drawn]:
        values = batches(grade, length, total, world_size)
        must_be_loader(grade, values[0])
        what = f"{length} examples on {world_size} workers"
        of_epochs = [_parts(values, "batches"), _parts(values, "again")]
        for parts in of_epochs:
            check_parts(grade, f"{what}, total batch {total}", length, parts)
        ever = [first | second for first, second in zip(*of_epochs, strict=True)]  # a loader may leave out another one
        check_parts(grade, f"{what}, in two epochs", length, ever)
        seen = of_epochs[0]
        full = [all(len(batch) == total // world_size for batch in value["batches"]) for value in values]
        left_out = length - sum(map(len, seen))
        if left_out > min(length % world_size, sum(full)) and length >= world_size:
            grade.fail(
                f"{what}, total batch {total}: {left_out} examples are in no batch; leave out only a batch that "
                "another rank cannot fill"
            )
        refuse_changes(grade, values[0]["changed"], "partition_dataset()")
    must_be_divided_at_random(grade)


def _parts(values: list[dict], epoch: str) -> list[Counter[int]]:
    """How often each rank saw which example."""
    return [Counter(example for batch in value[epoch] for example in batch) for value in values]


def check_parts(grade: Grade, what: str, length: int, parts: list[Counter[int]]) -> None:
    """Fails unless the ranks' examples are different ones, and some."""
    if len(parts) > 1 and parts[0] and all(part == parts[0] for part in parts):
        grade.fail(f"{what}: every rank has the same examples: which partition is this rank's?")
    seen = sum(parts, Counter())
    if not seen and length >= len(parts):
        grade.fail(f"{what}: expected a DataLoader with batches of examples, got no batch at all")
    twice = [example for example, number in seen.items() if number > 1]
    if set(seen) - set(range(length)):
        grade.fail(f"{what}: expected batches of examples, got something else")
    if twice:
        grade.fail(f"{what}: {len(twice)} examples appear more than once, for example {min(twice)}")


def check_group_and_collate(grade: Grade) -> None:
    """rank and world_size come from the process group or from the caller; collate_fn, if any, makes the batches."""
    in_group = batches(grade, 24, 6, 3)
    given, plain = (
        _numbered(grade, 24, on_data(grade, "loaders_asked", 1, 24, batch=6, workers=3, collate=collate)[0])
        for collate in (True, False)
    )
    for rank, (mine, other, default) in enumerate(zip(in_group, given, plain, strict=True)):
        for value in (mine, other, default):
            must_be_loader(grade, value)
            if not value["batches"]:
                grade.fail("24 examples, total batch 6, 3 workers: the loader gives no batch")
        if not (mine["collated"] and other["collated"]):
            grade.fail("collate_fn was given but not used: pass it to the DataLoader")
        first, second, third = (
            sorted(example for batch in value["batches"] for example in batch) for value in (mine, other, default)
        )
        if first != second:
            grade.fail(
                f"rank {rank} gets different examples with rank and world_size from the process group than with "
                f"rank={rank}, world_size=3 as arguments"
            )
        if third != second:
            grade.fail(
                f"without collate_fn, rank {rank} gets the batches {default['batches'][:2]}, expected the examples "
                f"{second}: pass None on, so that torch builds the batches"
            )
    for values in (in_group, given, plain):
        must_hold_examples(grade, values)
    must_be_divided_at_random(grade)
