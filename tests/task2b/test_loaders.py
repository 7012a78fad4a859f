"""Data partitions, 2b.5: partition_dataset, the loader and the batch size that every rank gets.

The rule for the last batches is checked with literal cases, and with properties for drawn sizes: all ranks have equally
many batches, no example appears twice, and only a batch that some ranks cannot fill is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.grading import Grade
from grader.in_rank import in_rank
from grader.verdicts import Crashed
from grader.wire.values import Fields
from tests.task2b import test_partitions
from tests.task2b.mixing import check_mixed
from tests.task2b.test_partitions import IN_RANK, check_unchanged, numbered, on_data

if TYPE_CHECKING:  # what a function finds in a rank
    import operator

    from torch.utils.data import DataLoader

    from grader.inside.tools import Context
    from tests.task2b.partitions_in_rank import MORE_THAN_ANY, Data, GivenPartitions, Owned, draw_noise, in_words, text

graded = pytest.mark.graded
CRASHES = test_partitions.CRASHES | {
    "IndexError ... self.index[": "an index is too large: does the last batch reach beyond len(partition)? Or are the "
    "indices of use() no places in the whole data set?",
}
Setting = tuple[int, int, int]  # examples, total batch, workers
# Setting -> batches on every rank. Sizes that divide evenly and that do not, a short last
# batch on all ranks, a last batch of one example, fewer examples than workers, one worker.
LOADS: dict[Setting, int] = {
    (24, 8, 2): 3, (11, 8, 2): 2, (9, 4, 2): 2, (14, 9, 3): 2, (10, 8, 4): 1, (13, 6, 3): 2, (7, 4, 4): 1, (3, 4, 4): 0,
    (17, 4, 2): 4, (7, 3, 1): 3, (8, 4, 1): 2,
}  # fmt: skip
MANY = (180, 12)  # examples and total batch: enough to see whether they were shuffled
Loaded = Fields  # what one rank returns, see loaded()
NO_BATCH: Loaded = {"instead": "", "batches": [], "again": [], "changed": {"data": False, "generators": []}}


# --- what a rank does; its inputs are the texts of its data ---


def loaded(lesson: ModuleType, inputs: list[str], batch: int, collates: bool, place: dict[str, int]) -> Fields:
    """Return what partition_dataset returns, and the batches of two epochs."""
    collated: list[int] = []

    def collate(examples: list[object]) -> list[object]:
        collated.append(len(examples))
        return list(examples)

    def epoch(loader: DataLoader) -> list[list[str]]:
        return [[text(example) for example in examples] for examples in islice(loader, MORE_THAN_ANY)]

    owned = Owned(Data(inputs), [])
    result = lesson.partition_dataset(owned.data, batch, *([collate] if collates else []), **place)
    changed = owned.changed()
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != 2 or not isinstance(parts[0], DataLoader):
        return {"instead": " and ".join(type(part).__name__ for part in parts)}
    loader, size = parts
    batches, again = epoch(loader), epoch(loader)
    whole = hasattr(size, "__index__") and not isinstance(size, bool)
    return {
        "instead": "",
        "batch": operator.index(size) if whole else in_words(size),  # type: ignore[arg-type]
        "batches": batches,
        "again": again,
        "collated": bool(batches) and len(collated) == len(batches) + len(again),
        "changed": changed,
    }


@in_rank(uses=[IN_RANK, loaded])
def load(context: Context, lesson: Any, inputs: list[str]) -> object:
    """Yield what partition_dataset gives this rank of a process group for each of `cases`, a number of examples and a
    total batch. `given`: partitions that it must use."""
    arguments = context.arguments
    partitioner = GivenPartitions(arguments["given"])
    if arguments["given"]:
        lesson.DataPartitioner = partitioner
    for length, batch in arguments["cases"]:
        context.during = f"loading {length} examples, total batch {batch}"
        draw_noise(context.rank)
        yield loaded(lesson, inputs[:length], batch, True, {}) | {"asked_partitioner": partitioner.asked}


@in_rank(uses=[IN_RANK, loaded], join=False)
def load_for_each(context: Context, lesson: ModuleType, inputs: list[str]) -> object:
    """Yield what partition_dataset gives each rank that is passed to it, without a process group."""
    arguments = context.arguments
    for rank in range(arguments["workers"]):
        place = {"rank": rank, "world_size": arguments["workers"]}
        yield loaded(lesson, inputs, arguments["batch"], arguments["collates"], place)


# --- what the ranks get ---


def all_loaders(grade: Grade, settings: Iterable[Setting]) -> Iterator[tuple[Setting, list[Loaded]]]:
    """Yield each setting with what partition_dataset gives each rank. One run has all settings of as many workers."""
    settings = list(settings)
    runs: dict[tuple[int, bool], list[Setting]] = {}
    for setting in settings:
        length, _, ranks = setting
        runs.setdefault((ranks, length < ranks), []).append(setting)
    loaded_of: dict[Setting, list[Loaded]] = {}
    for (ranks, too_few), same in runs.items():
        try:
            by_rank = by_case(grade, same)
        except Crashed as crash:
            if not (too_few and "num_samples=0" in str(crash)):
                raise
            # Torch's shuffle=True raises where a rank has no example. Then no rank has a batch, so this is right, too.
            by_rank = [[NO_BATCH | {"batch": batch // ranks}] * ranks for _, batch, _ in same]
        loaded_of |= dict(zip(same, by_rank, strict=True))
    return ((setting, loaded_of[setting]) for setting in settings)


def by_case(grade: Grade, settings: Sequence[Setting], given: Sequence[Sequence[int]] = ()) -> list[list[Loaded]]:
    """Return what partition_dataset gives each rank, [setting][rank], with the numbers of the examples.

    All settings have as many workers. `given`: see load().
    """
    cases = [(length, batch) for length, batch, _ in settings]
    longest, ranks = max(length for length, _ in cases), settings[0][2]
    by_rank = on_data(grade, load, ranks, longest, cases=cases, given=given)
    return [with_numbers(grade, list(one)) for one in zip(*by_rank, strict=True)]


def with_numbers(grade: Grade, by_rank: list[Loaded]) -> list[Loaded]:
    """Return the same with the numbers of the examples, -1 for anything else; fail if a rank got no loader."""
    for one in by_rank:
        if one["instead"]:
            grade.fail(observed=f"expected a DataLoader and the batch size of a worker, got {one['instead']}")
    return [one | {name: numbered(grade, one[name]) for name in ("batches", "again")} for one in by_rank]


def in_words_of(length: int, batch: int, ranks: int) -> str:
    return f"{length} examples, total batch {batch}, {ranks} workers"


def examples_of_ranks(by_rank: list[Loaded], epoch: str = "batches") -> list[Counter[int]]:
    """Return how often each example is in the batches of each rank."""
    return [Counter(example for batch in one[epoch] for example in batch) for one in by_rank]


def check_examples(grade: Grade, by_rank: list[Loaded]) -> None:
    """Check that batches hold examples of the data, each once on a rank: else their number and sizes do not count."""
    for rank, examples in enumerate(examples_of_ranks(by_rank)):
        if -1 in examples:
            grade.fail(observed="expected batches of examples, got something else, for example their indices")
        if repeated := [example for example, number in examples.items() if number > 1]:
            grade.fail(
                observed=f"{len(repeated)} examples appear more than once on rank {rank}, for example {min(repeated)}"
            )


def check_divided_at_random(grade: Grade) -> None:
    """Check that partition_dataset divides the data at random, with DataPartitioner or by itself.

    Every check of this file ends with this one, so that parts in the order of the data pass no test. First,
    DataPartitioner is replaced by one that gives a drawn division: whoever asks it must use that. Then, with the
    student's own, rank 0's examples must be mixed. Every part fills its batches, so no example is left out.
    """
    (length, batch), ranks = MANY, 2
    order = [int(index) for index in np.random.default_rng([grade.seed, 8]).permutation(length)]
    given = [sorted(order[: length // ranks]), sorted(order[length // ranks :])]
    (by_rank,) = by_case(grade, [(length, batch, ranks)], given)
    for rank, (one, examples) in enumerate(zip(by_rank, examples_of_ranks(by_rank), strict=True)):
        if one["asked_partitioner"] and sorted(examples.elements()) != given[rank]:
            grade.fail(
                f"rank {rank} of {ranks}: the batches do not hold the examples of its partition; use the one that "
                "DataPartitioner gives for this rank"
            )
    (by_rank,) = by_case(grade, [(length, batch, ranks)])
    half = np.isin(np.arange(length), list(examples_of_ranks(by_rank)[0]))
    if all(half) or not any(half):
        grade.fail(f"{length} examples on {ranks} workers: rank 0 has {'all' if all(half) else 'none'} of them")
    check_mixed(grade, [half])


@graded("2b.5")
def test_a_worker_gets_its_share_of_the_batch(grade: Grade) -> None:
    """Check that a worker's batch is the total divided by the number of workers, and that this number is returned.

    Also that the loader has batches of this size from partitions that were divided at random.
    """
    for (_, total, ranks), by_rank in all_loaders(grade, LOADS):
        share = total // ranks
        for rank, one in enumerate(by_rank):
            if one["batch"] != share:
                what = f"total batch {total} on {ranks} workers: expected the batch size {share} for each"
                grade.fail(observed=f"{what}, got {one['batch']} on rank {rank}")
            sizes = [len(examples) for examples in one["batches"]]
            if any(size != share for size in sizes[:-1]) or max(sizes, default=0) > share:
                cause = f": {total} is the total batch, take that of one worker" if sizes[0] == total else ""
                grade.fail(observed=f"rank {rank} of {ranks}: expected batches of {share}, got {sizes}{cause}")
        check_examples(grade, by_rank)
    check_divided_at_random(grade)


@graded("2b.5")
def test_all_workers_have_the_same_number_of_batches(grade: Grade) -> None:
    """Check that all ranks have the same number of batches, as many as the smallest partition fills, in two epochs."""
    for setting, by_rank in all_loaders(grade, LOADS):
        right, (_, total, ranks) = LOADS[setting], setting
        counts, again = ([len(one[epoch]) for one in by_rank] for epoch in ("batches", "again"))
        what = in_words_of(*setting)
        lacking = [one for one in by_rank if len(one["batches"]) == right - 1]
        is_full = all(len(examples) == total // ranks for one in lacking for examples in one["batches"])
        cause = ""
        if is_full and set(counts) <= {right - 1, right}:
            cause = ": the short last batch is missing. Every rank can fill it, so keep it (no drop_last)"
        if len(set(counts)) > 1:
            more = ": take the number that the smallest partition fills; a rank with more batches waits forever"
            grade.fail(f"{what}: the ranks have {counts} batches{cause or more}")
        if counts[0] != right:
            grade.fail(observed=f"{what}: expected {right} batches on every rank, got {counts[0]}{cause}")
        if again != counts:
            grade.fail(
                f"{what}: the loaders give {counts} batches in the first epoch and {again} in the second: an iterator "
                "or a generator is used up after one pass; pass a list, a range or a data set"
            )
        check_examples(grade, by_rank)
    check_divided_at_random(grade)


@graded("2b.5")
def test_no_example_is_on_two_workers_or_lost(grade: Grade) -> None:
    """Check that no example is on two ranks or twice on one, and that only a batch that some rank cannot fill is left
    out."""
    drawn = [(int(grade.draw.integers(20, 60)), 2 * n * int(grade.draw.integers(1, 4)), n) for n in (2, 3)]
    for (length, total, ranks), by_rank in chain(all_loaders(grade, LOADS), all_loaders(grade, drawn)):
        what = in_words_of(length, total, ranks)
        first, second = (examples_of_ranks(by_rank, epoch) for epoch in ("batches", "again"))
        for parts in (first, second):
            check_parts(grade, what, length, parts)
        ever = [
            one | other for one, other in zip(first, second, strict=True)
        ]  # the second epoch may leave out another example
        check_parts(grade, f"{what}, in two epochs", length, ever)
        full = [all(len(batch) == total // ranks for batch in one["batches"]) for one in by_rank]
        left_out = length - sum(map(len, first))
        if left_out > min(length % ranks, sum(full)) and length >= ranks:
            advice = "the ranks need equally many batches, not examples, and the last one may be short"
            grade.fail(f"{what}: {left_out} examples are in no batch; {advice}")
        check_unchanged(grade, by_rank[0]["changed"], "partition_dataset()")
    check_divided_at_random(grade)


def check_parts(grade: Grade, what: str, length: int, parts: list[Counter[int]]) -> None:
    """Fail unless the ranks have examples, and no example twice."""
    if len(parts) > 1 and parts[0] and all(part == parts[0] for part in parts):
        grade.fail(f"{what}: every rank has the same examples: which partition is this rank's?")
    total = sum(parts, Counter[int]())
    if not total and length >= len(parts):
        grade.fail(observed=f"{what}: expected a DataLoader with batches of examples, got no batch at all")
    if set(total) - set(range(length)):
        grade.fail(observed=f"{what}: expected batches of examples, got something else")
    if twice := [example for example, number in total.items() if number > 1]:
        seed = "; do all ranks shuffle with the same seed?" if len(parts) > 1 else ""
        grade.fail(observed=f"{what}: {len(twice)} examples appear more than once, for example {min(twice)}{seed}")


@graded("2b.5")
def test_partition_dataset_asks_the_process_group_and_collates(grade: Grade) -> None:
    """Check that rank and world_size may come from the process group or the caller, and that collate_fn is used."""
    (length, batch, ranks), place = (24, 6, 3), {"workers": 3, "batch": 6}
    (in_group,) = by_case(grade, [(length, batch, ranks)])
    by_arguments, plain = (
        with_numbers(grade, on_data(grade, load_for_each, 1, length, collates=collates, **place)[0])
        for collates in (True, False)
    )
    for by_rank in (in_group, by_arguments, plain):
        if not all(one["batches"] for one in by_rank):
            grade.fail(observed=f"{in_words_of(length, batch, ranks)}: the loader gives no batch")
    if not all(one["collated"] for one in (*in_group, *by_arguments)):
        grade.fail("collate_fn was given but not used: pass it to the DataLoader by name, collate_fn=...")
    each = [
        [sorted(examples.elements()) for examples in examples_of_ranks(by_rank)]
        for by_rank in (in_group, by_arguments, plain)
    ]
    for rank, (of_group, of_caller, default) in enumerate(zip(*each, strict=True)):
        if of_group != of_caller:
            grade.fail(
                observed=(
                    f"rank {rank} gets different examples with rank and world_size from the process group than with "
                    f"rank={rank}, world_size={ranks} as arguments"
                )
            )
        if default != of_caller:
            advice = "pass None on, so that torch builds the batches"
            grade.fail(f"without collate_fn, rank {rank} gets {default}, expected the examples {of_caller}: {advice}")
    for by_rank in (in_group, by_arguments, plain):
        check_examples(grade, by_rank)
    check_divided_at_random(grade)
