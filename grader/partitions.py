"""Judges the data partitions of task 2b: the partitioner alone, and the loader that each rank gets."""

import math
from collections import Counter
from typing import Any

import numpy as np

from grader.grading import Grade
from grader.verdicts import Crashed


def partitions(grade: Grade, length: int, sizes: list[float], seed: int = 1234, noise: int = 0) -> dict[str, Any]:
    """What DataPartitioner makes of `length` examples; see probes_data."""
    (value,) = grade.values(
        "grader.probes_data:partitioner", 1, length=length, sizes=sizes, partition_seed=seed, noise=noise
    )
    must_be_indices(grade, value["partitions"])
    return value


def must_be_indices(grade: Grade, partitions: Any) -> None:
    if isinstance(partitions, str):
        grade.fail(f"self.partitions must hold a list of indices for each size, whole numbers; got {partitions}")


SIZES = [[0.7, 0.2, 0.1], [1 / 3] * 3, [0.5, 0.5], [0.29, 0.71], [0.1] * 10, [1 / 7] * 7, [0.25] * 4, [1.0]]


def draw_settings(grade: Grade, count: int = 6) -> list[tuple[int, list[float]]]:
    """Numbers of examples and sizes that do not divide, some of them drawn."""
    fixed = [(10, [0.7, 0.2, 0.1]), (11, [0.7, 0.2, 0.1]), (100, [0.29, 0.71]), (9, [0.25] * 4), (3, [0.25] * 4)]
    fixed += [(6, [0.45, 0.45, 0.1]), (16, [0.16, 0.36, 0.48])]  # every other rule of rounding shows in one of these
    drawn = []
    for _ in range(count):
        sizes = SIZES[int(grade.draw.integers(len(SIZES)))]
        drawn.append((int(grade.draw.integers(5, 120)), sizes))
    return [*fixed, *drawn]


def counts_allowed(length: int, sizes: list[float]) -> list[set[int]]:
    """The sizes that largest remainders allows each part: rounded down or one more, either where remainders tie."""
    shares = [round(size * length, 9) for size in sizes]
    floors = [math.floor(share) for share in shares]
    lost = [share - floor for share, floor in zip(shares, floors, strict=True)]
    left = length - sum(floors)
    limit = sorted(lost, reverse=True)[left - 1] if left else math.inf
    allowed = []
    for floor, loss in zip(floors, lost, strict=True):
        tied = abs(loss - limit) <= 1e-7
        allowed.append({floor, floor + 1} if tied else {floor + (loss > limit)})
    return allowed


def check_partition(grade: Grade) -> None:
    """Place i of Partition(data, index) is data[index[i]], the example and not its number."""
    index = [int(i) for i in grade.draw.permutation(20)[:7]]
    for kind in ("list", "tuple", "array"):
        (got,) = grade.values("grader.probes_data:partition", 1, length=20, index=index, kind=kind)
        if got != index:
            cause = (
                "it returns something else than an example (-1 below), for instance its index"
                if -1 in got
                else "wrong example"
            )
            if got == list(range(len(index))):
                cause = "it looks up the place itself: which example stands at this place of the partition?"
            grade.fail(f"{cause}: for the indices {index} expected these examples, got {got}")


def check_use(grade: Grade) -> None:
    """use(k) gives the examples of partitions[k], in their order, each time it is asked."""
    for length, sizes in draw_settings(grade, 3)[-5:]:
        first, second, indices = grade.values(
            "grader.probes_data:use", 1, length=length, sizes=sizes, partition_seed=grade.seed % 1000
        )[0]
        must_be_indices(grade, indices)
        if first != second:
            grade.fail("asking twice for one partition gives different examples: cut once, in the constructor")
        if first != indices:
            wrong = next(k for k, part in enumerate(indices) if first[k] != part)
            grade.fail(f"use({wrong}) gives the examples {first[wrong][:6]}, expected those of partitions[{wrong}]")


def check_once(grade: Grade) -> None:
    """Every index is in exactly one partition, and there are as many partitions as sizes."""
    for length, sizes in draw_settings(grade):
        parts = partitions(grade, length, sizes)["partitions"]
        total = Counter(index for part in parts for index in part)
        of = f"of {length} examples cut by {[round(size, 3) for size in sizes]}"
        if len(parts) != len(sizes):
            grade.fail(f"expected {len(sizes)} partitions, got {len(parts)}")
        twice = [index for index, number in total.items() if number > 1]
        missing, strange = set(range(length)) - set(total), set(total) - set(range(length))
        if strange:
            grade.fail(f"{of}, a partition holds the index {min(strange)}, expected 0 to {length - 1}")
        if twice:  # said first: what overlaps often leaves holes too, but rounding does not mend it
            grade.fail(
                f"{of}, {len(twice)} are in a partition more than once, for instance {min(twice)}"
                + (f", and {len(missing)} in none" if missing else "")
                + ": each partition is to begin where the one before it ended"
            )
        if missing:
            grade.fail(
                f"{of}, {len(missing)} are in no partition, for instance {min(missing)}: round so that none is lost"
            )


def check_sizes(grade: Grade) -> None:
    """Sizes are rounded by largest remainder."""
    for length, sizes in draw_settings(grade):
        got = [len(part) for part in partitions(grade, length, sizes)["partitions"]]
        allowed = counts_allowed(length, sizes)
        right = len(got) == len(sizes) and sum(got) == length
        if not (right and all(count in either for count, either in zip(got, allowed, strict=True))):
            shares = [round(size * length, 2) for size in sizes]
            grade.fail(
                f"{length} examples in shares of {shares}: got partitions of {got}, see the rule in the docstring"
            )


def check_seed(grade: Grade) -> None:
    """The partitions depend on the seed and on nothing else."""
    length = int(grade.draw.integers(40, 80))
    sizes = [1 / 3] * 3
    seeds = [int(seed) for seed in grade.draw.integers(1, 10**6, 2)]
    one = partitions(grade, length, sizes, seeds[0], 1)["partitions"]
    if one != partitions(grade, length, sizes, seeds[0], 2)["partitions"]:
        grade.fail(
            "equal seeds give different partitions once something else has drawn random numbers: "
            "shuffle with a generator of your own, random.Random(seed)"
        )
    if one == partitions(grade, length, sizes, seeds[1], 1)["partitions"]:
        grade.fail(
            f"the seeds {seeds[0]} and {seeds[1]} give the same partitions: shuffle with a generator made from seed"
        )


def check_shuffled(grade: Grade) -> None:
    """Indices are shuffled, the data is neither moved nor copied."""
    value = partitions(grade, 60, [0.5, 0.5])
    flat = [index for part in value["partitions"] for index in part]
    if value["data_changed"]:
        grade.fail("the data set itself was changed: shuffle a list of indices, not the data")
    if flat == sorted(flat) or _blocks(value):
        grade.fail("the partitions are blocks in the order of the data: shuffle the indices, or labels stay together")


def _blocks(value: dict) -> bool:
    return all(part and max(part) - min(part) == len(part) - 1 for part in value["partitions"])


def batches(grade: Grade, length: int, batch: int, world_size: int) -> list[dict]:
    """What partition_dataset gives each rank; see probes_data."""
    try:
        return grade.values("grader.probes_data:loader", world_size, length=length, batch=batch)
    except Crashed as crash:
        raise Crashed(f"{length} examples, total batch {batch}, {world_size} workers: {crash}") from None


# (examples, total batch, workers): sizes that divide and that do not, a short last batch on all ranks, tails of one
# example, fewer examples than workers.
LOADS = [(24, 8, 2), (11, 8, 2), (9, 4, 2), (14, 9, 3), (10, 8, 4), (13, 6, 3), (7, 4, 4), (3, 4, 4), (17, 4, 2)]


def check_share(grade: Grade) -> None:
    """The batch of a worker is the total divided by the number of workers; what is returned is a loader and it."""
    for length, total, world_size in LOADS[:5]:
        for rank, value in enumerate(batches(grade, length, total, world_size)):
            if not value["is_loader"]:
                grade.fail(f"expected a DataLoader and the batch size of a worker, got {value['types']}")
            if value["batch"] != total // world_size:
                grade.fail(
                    f"total batch {total} on {world_size} workers: expected {total // world_size} for each, "
                    f"got {value['batch']} on rank {rank}"
                )
            sizes = [len(examples) for examples in value["batches"]]
            if any(size != total // world_size for size in sizes[:-1]) or max(sizes, default=0) > total // world_size:
                grade.fail(f"rank {rank} of {world_size}: expected batches of {total // world_size}, got {sizes}")


def check_counts(grade: Grade) -> None:
    """All ranks have ceil(floor(examples / workers) / batch of a worker) batches."""
    for length, total, world_size in LOADS:
        got = [len(value["batches"]) for value in batches(grade, length, total, world_size)]
        told = [value["len"] for value in batches(grade, length, total, world_size)]
        right = math.ceil(length // world_size / (total // world_size))
        what = f"{length} examples, total batch {total}, {world_size} workers"
        if len(set(got)) > 1:
            grade.fail(f"{what}: the ranks have {got} batches; one with more waits for the others for ever")
        if got[0] != right:
            grade.fail(f"{what}: expected {right} batches on every rank, got {got[0]}")
        if told != got:
            grade.fail(f"{what}: len(loader) is {told}, but {got} batches come")


def check_no_overlap(grade: Grade) -> None:
    """No example on two ranks or twice on one; at most one example of a rank is left out."""
    for length, total, world_size in LOADS:
        values = batches(grade, length, total, world_size)
        parts = [Counter(example for batch in value["batches"] for example in batch) for value in values]
        what = f"{length} examples on {world_size} workers"
        if world_size > 1 and parts[0] and all(part == parts[0] for part in parts):
            grade.fail(f"{what}: every rank has the same examples: which partition is this rank's?")
        seen = sum(parts, Counter())
        if not seen and length >= world_size:
            grade.fail(f"{what}: expected a DataLoader with batches of examples, got no batch at all")
        twice = [example for example, number in seen.items() if number > 1]
        if twice:
            grade.fail(f"{what}: {len(twice)} examples come twice, for instance {min(twice)}")
        if set(seen) - set(range(length)):
            grade.fail(f"{what}: expected the examples themselves, got others")
        per_worker, kept = total // world_size, len(values[0]["batches"])
        lost = sum(max(0, size - kept * per_worker) for size in _sizes(length, world_size))
        if length - len(seen) != lost:
            grade.fail(f"{what}, total batch {total}: {length - len(seen)} examples come nowhere, expected {lost}")


def _sizes(length: int, world_size: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(length), world_size)]


def check_group_and_collate(grade: Grade) -> None:
    """rank and world_size come from the process group or from the caller; collate_fn makes the batches."""
    asked = batches(grade, 24, 6, 3)
    told = grade.values("grader.probes_data:loaders_told", 1, length=24, batch=6, workers=3)[0]
    for rank, (mine, other) in enumerate(zip(asked, told, strict=True)):
        if not mine["collated"]:
            grade.fail("collate_fn was given and not used: hand it on to the DataLoader")
        first, second = (sorted(example for batch in value["batches"] for example in batch) for value in (mine, other))
        if first != second:
            grade.fail(f"rank {rank} gets other examples from the process group than with rank={rank}, world_size=3")
