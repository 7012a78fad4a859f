"""Data partitions: 2b.2 Partition, 2b.3 DataPartitioner, 2b.4 its use().

An example is a text that is drawn for the run and does not show its place: only looking it up gives the right one. The
sizes of partitions must have two properties: each is its share rounded up or down, and the shares that lose most by
rounding down are rounded up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.wire import drawn
from grader.wire.request import RankFunction
from grader.wire.values import Fields
from tests.task2b.mixing import check_mixed, check_orders_differ

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.task2b.partitions_in_rank import MORE_THAN_ANY, Data, Owned, draw_noise, examples_of, indices_of, text

graded = pytest.mark.graded
CRASHES = {  # torch's and Python's words -> what they mean here
    "pop index out of range": "a partition must stay in the list: use() is called again, with the same result",
    "IndexError ... raise IndexError(": "the index is a place in the partition, from 0 to its length - 1, and not the "
    "number of an example in the data",
    "IndexError ... self.index[": "the indices of a Partition are places in its data: give it the whole data set, and "
    "indices into that (does use() replace self.data?)",
    "Default process group has not been initialized": "the group is asked although a rank was given: use the arguments "
    "rank and world_size, and ask the group only for what is None",
}
FILE, IN_RANK = "common/data_partition.py", "tests/task2b/partitions_in_rank.py"
ROUNDING = 1e-6  # shares are products of floats
MORE = 5  # examples of a second data set
Case = tuple[int, list[float]]  # how many examples, and the sizes of the partitions
EXACT: list[Case] = [(24, [0.25] * 4), (30, [0.5, 0.5]), (9, [1.0])]  # shares that need no rounding, not even as floats
UNEVEN: list[Case] = [  # every wrong rule of rounding fails in one of these
    (10, [0.7, 0.2, 0.1]), (11, [0.7, 0.2, 0.1]), (100, [0.29, 0.71]), (9, [0.25] * 4), (3, [0.25] * 4),
    (6, [0.45, 0.45, 0.1]), (16, [0.16, 0.36, 0.48]),
]  # fmt: skip
SIZES = [[0.7, 0.2, 0.1], [1 / 3] * 3, [0.5, 0.5], [0.29, 0.71], [0.1] * 10, [1 / 7] * 7, [0.25] * 4, [1.0]]
OWN_GENERATOR = "shuffle with a generator of your own, random.Random(seed)"
UNSEEDED = (
    f"two runs with one seed give different partitions: {OWN_GENERATOR} (a generator's seed() is a method: call it, do "
    "not assign to it)"
)


# --- what a rank does; its inputs are the texts of its data ---


@in_rank(uses=[IN_RANK], join=False)
def partition(context: Context, lesson: ModuleType, inputs: list[str]) -> object:
    """Return the examples of Partition(data, index), one by one and in a loop."""
    for kind in (list, tuple, np.array):
        index: Any = kind(context.arguments["index"])
        owned = Owned(Data(inputs), [])
        part = lesson.Partition(owned.data, index)
        backwards = [text(part[place]) for place in reversed(range(len(index)))]
        looped = [text(example) for example in islice(part, MORE_THAN_ANY)]  # ends at the first IndexError
        try:
            part[len(index)]
            beyond = "an example"
        except Exception as error:  # of the student: which one it is, is looked at
            beyond = "IndexError" if isinstance(error, IndexError) else type(error).__name__
        left = {
            "examples": backwards[::-1],
            "looped": looped,
            "index": [int(place) for place in index],
            "beyond": beyond,
        }
        yield left | {"data": owned.changed()["data"]}


@in_rank(uses=[IN_RANK], join=False)
def partitioners(context: Context, lesson: ModuleType, inputs: list[str]) -> object:
    """Yield, for each of `cases`, a number of examples and the sizes: the partitions for several seeds, and what comes
    later: those of an `other` partitioner of more data, of a `second` like the first, and those that the first kept."""
    arguments = context.arguments
    first_seed, *other_seeds = arguments["seeds"]
    for length, sizes in arguments["cases"]:
        context.during = f"dividing {length} examples"
        draw_noise(arguments["noise"])
        owned, more = Owned(Data(inputs[:length]), list(sizes)), Data(inputs[: length + arguments["more"]])
        first = lesson.DataPartitioner(owned.data, owned.sizes, first_seed)
        others = [lesson.DataPartitioner(owned.data, list(sizes), seed) for seed in other_seeds]
        changed = owned.changed()
        partitions = [indices_of(each.partitions) for each in (first, *others)]
        other = indices_of(lesson.DataPartitioner(more, list(sizes), first_seed + 1).partitions)
        second = indices_of(lesson.DataPartitioner(owned.data, list(sizes), first_seed).partitions)
        later = {"other": other, "second": second, "kept": indices_of(first.partitions)}
        yield {"partitions": partitions, "changed": changed, **later}


@in_rank(uses=[IN_RANK], join=False)
def use(context: Context, lesson: ModuleType, inputs: list[str]) -> object:
    """Yield, for each of `cases`, the examples of use(k) for every partition, in two rounds, and the partitions before
    and after."""
    for length, sizes in context.arguments["cases"]:
        partitioner = lesson.DataPartitioner(Data(inputs[:length]), sizes, context.arguments["seed"])
        before = indices_of(partitioner.partitions)
        draw_noise(3)
        owned = Owned(partitioner.data, [])
        owned.data.reads = 0
        parts = [partitioner.use(k) for k in range(len(sizes))]
        changed, reads = owned.changed(), owned.data.reads
        rounds = [[examples_of(part) for part in parts]]
        draw_noise(3)
        rounds.append([examples_of(partitioner.use(k)) for k in reversed(range(len(sizes)))][::-1])
        after = indices_of(partitioner.partitions)
        yield {"rounds": rounds, "before": before, "after": after, "changed": changed, "reads": reads}


# --- data, and what the student's code makes of it ---


def texts(grade: Grade, count: int) -> list[str]:
    """Return the examples of a data set of this run; a longer data set begins with the examples of a shorter one."""
    return [f"text {number:012x}" for number in drawn.generator(grade.seed, 5).integers(0, 1 << 48, count)]


def on_data(grade: Grade, function: RankFunction, ranks: int, length: int, **arguments: Any) -> list[Any]:
    """Return what a function gives on each rank, on a data set of this length."""
    return run(grade, function, [texts(grade, length)] * ranks, **arguments).values


def numbered(grade: Grade, value: object) -> Any:
    """Replace each example in lists, nested to any depth, by its number, and anything else by -1."""
    places = {example: place for place, example in enumerate(texts(grade, 400))}

    def number(value: object) -> Any:
        return [number(item) for item in value] if isinstance(value, list) else places.get(str(value), -1)

    return number(value)


def partitions(grade: Grade, cases: Sequence[Case], seeds: list[int], noise: int = 0) -> list[Fields]:
    """Return what `partitioners` gives in each case; its partitions are lists of indices."""
    arguments = {"more": MORE, "cases": list(cases), "seeds": seeds, "noise": noise}
    (results,) = on_data(grade, partitioners, 1, max(length for length, _ in cases) + MORE, **arguments)
    for parts in (parts for result in results for parts in result["partitions"]):
        must_be_indices(grade, parts)
    return list(results)


def must_be_indices(grade: Grade, parts: object) -> None:
    if isinstance(parts, str):
        grade.fail(observed=f"self.partitions: expected a list of indices (whole numbers) for each size; got {parts}")


def draw_settings(grade: Grade, count: int) -> list[Case]:
    """Draw numbers of examples, and sizes that do not divide them."""
    return [(int(grade.draw.integers(5, 120)), SIZES[int(grade.draw.integers(len(SIZES)))]) for _ in range(count)]


def draw_seeds(grade: Grade, count: int) -> list[int]:
    """Draw seeds of which no two are equal."""
    return [int(seed) for seed in grade.draw.choice(10**6, count, replace=False)]


def check_unchanged(grade: Grade, changed: Fields, of: str) -> None:
    """Fail if a call has changed the caller's data, or moved a global random generator."""
    if changed["data"]:
        grade.fail(f"{of} changes the data set itself: shuffle a list of indices, not the data")
    if changed["generators"]:
        grade.fail(
            f"{of} seeds or uses the global generator of {' and '.join(changed['generators'])}, so what is drawn after "
            f"it (dropout, new weights) changes too: {OWN_GENERATOR}"
        )


# --- 2b.2 ---


@graded("2b.2", weight=2)
def test_a_partition_gives_the_examples_at_its_indices(grade: Grade) -> None:
    """Check that place i of Partition(data, index) is data[index[i]], the example and not its number."""
    places = [1 + int(i) for i in grade.draw.permutation(19)[:7]]
    first = places.index(min(places))  # not 0, and with enough examples after it: see the mistakes
    index = places[first:] + places[:first]
    sentence = "for the indices {expected} expected these examples, got {got}"
    caller = "it belongs to the caller, so only read it"
    mistakes = {
        f"it returns something other than an example (shown as -1), for instance its index: {sentence}": [-1] * 7,
        "it uses the position as an index into the data: which example is at this position of the partition? "
        + sentence: list(range(7)),
        "it takes examples that follow each other in the data; the indices of a partition do not: look each one up. "
        + sentence: list(range(index[0], index[0] + 7)),
    }
    expected = {
        "examples": Expected(index, f"wrong example: {sentence}", mistakes=mistakes),
        "index": Expected(index, f"looking up an example changes the list of indices: {caller}"),
        "data": Expected(False, f"looking up an example changes the data: {caller}"),
        "looped": Expected(
            index, "`for example in partition` gives {got} or more, expected {expected}: an index of len(partition) "
            "or more must raise IndexError; otherwise the loop never ends",
        ),
        "beyond": Expected("IndexError", "partition[len(partition)] gives {got}; expected an {expected}, as in a list"),
    }  # fmt: skip
    for left in on_data(grade, partition, 1, 20, index=index)[0]:
        got = left | {name: numbered(grade, left[name][:10]) for name in ("examples", "looped")}
        check(grade, "", got, expected)


# --- 2b.3 ---


@graded("2b.3", weight=2)
def test_every_example_is_in_one_partition(grade: Grade) -> None:
    """Check that every index is in exactly one partition, and that there are as many partitions as sizes."""
    cases = [*UNEVEN, *draw_settings(grade, 3), *EXACT]
    for (length, sizes), result in zip(cases, partitions(grade, cases, [1234]), strict=True):
        (parts,) = result["partitions"]
        check_exactly_once(grade, length, sizes, parts)
        if (length, sizes) in EXACT:
            check_counts(grade, length, sizes, lengths_of(parts))


def check_exactly_once(grade: Grade, length: int, sizes: list[float], parts: list[list[int]]) -> None:
    """Fail unless each of `length` indices is in one of as many partitions as there are sizes."""
    total = Counter(index for part in parts for index in part)
    of = f"of {length} examples cut by {[round(size, 3) for size in sizes]}"
    if len(parts) != len(sizes):
        grade.fail(observed=f"self.partitions: expected {len(sizes)} partitions, one for each size, got {len(parts)}")
    twice = [index for index, number in total.items() if number > 1]
    missing, strange = set(range(length)) - set(total), set(total) - set(range(length))
    if strange:
        grade.fail(observed=f"{of}, a partition holds the index {min(strange)}, expected 0 to {length - 1}")
    if twice:  # before `missing`: overlapping partitions often leave holes, and better rounding does not repair them
        holes = f", and {len(missing)} in none" if missing else ""
        grade.fail(
            f"{of}, {len(twice)} are in a partition more than once, for instance {min(twice)}{holes}: each partition "
            "must begin where the one before it ended"
        )
    if missing:
        grade.fail(f"{of}, {len(missing)} are in no partition, for instance {min(missing)}: round without losing any")


def lengths_of(parts: list[list[int]] | str) -> list[int]:
    """Return the lengths of partitions; an empty list if they are no lists of indices."""
    return [] if isinstance(parts, str) else [len(part) for part in parts]


@graded("2b.3")
def test_partitions_have_the_sizes_asked_for(grade: Grade) -> None:
    """Check that sizes are rounded by largest remainder, the first of equal sizes up, in every partitioner."""
    cases = [*UNEVEN, *draw_settings(grade, 6), (7, [0.5, 0.0, 0.5]), (5, [1 / 3] * 3)]
    again = partitions(grade, cases, [1234], noise=1)
    for (length, sizes), result, repeated in zip(cases, partitions(grade, cases, [1234]), again, strict=True):
        (parts,) = result["partitions"]
        if result["changed"]["sizes"] is not None:
            before, after = ([float(f"{size:.4g}") for size in each] for each in (sizes, result["changed"]["sizes"]))
            grade.fail(f"the list of sizes belongs to the caller and was changed: from {before} to {after}; copy it")
        check_counts(grade, length, sizes, lengths_of(parts))
        advice = "do not share state between partitioners"
        # `second`, `kept` and `other` are explained in `partitioners`; `repeated`: after other random numbers.
        if result["second"] != parts and repeated["partitions"] != [parts]:
            grade.fail(UNSEEDED)
        if result["second"] != parts or result["kept"] != parts:
            grade.fail(f"a second DataPartitioner of the same data, sizes and seed divides them differently: {advice}")
        others = lengths_of(result["other"])
        if sum(others) != length + MORE:
            what = f"a second DataPartitioner, of {length + MORE} examples after one of {length}"
            grade.fail(f"{what}, makes partitions of {others}: {advice}")


def check_counts(grade: Grade, length: int, sizes: list[float], got: list[int]) -> None:
    """Fail unless these sizes of partitions follow the rule in the docstring of DataPartitioner."""
    shares = [size * length for size in sizes]
    rule = "see the rule in the docstring of DataPartitioner"
    what = f"{length} examples in shares of {[round(share, 2) for share in shares]}: got partitions of {got}, {rule}"
    if sum(map(math.floor, shares)) == length:
        what += " (none remains to be distributed here: is your slice empty then? [-0:] takes all)"
    if len(got) != len(sizes) or sum(got) != length:
        grade.fail(what)
    gains = [count - share for count, share in zip(got, shares, strict=True)]  # above 0: rounded up
    if any(abs(gain) > 1 - ROUNDING for gain in gains):
        far = max(range(len(gains)), key=lambda k: abs(gains[k]))
        grade.fail(f"{what}: partition {far} is not its share rounded up or down (each gets at most one of the rest)")
    up = [k for k, gain in enumerate(gains) if gain > ROUNDING]
    down = [k for k, gain in enumerate(gains) if gain < -ROUNDING]
    fractions = {k: 1 - gains[k] for k in up} | {k: -gains[k] for k in down}  # of an example, lost by rounding down
    for more, less in ((more, less) for more in up for less in down):
        loses_more = fractions[less] > fractions[more] + ROUNDING
        comes_first = sizes[more] == sizes[less] and less < more
        if (loses_more or comes_first) and got == between_rounded_boundaries(shares):
            grade.fail(f"{what}: round the number of examples of each partition, not the places where partitions begin")
        if loses_more:
            lost = f"{fractions[less]:.2f} against {fractions[more]:.2f} of an example (not of the partition)"
            grade.fail(f"{what}: partition {less} loses more by rounding down than partition {more} would, {lost}")
        if comes_first:
            grade.fail(f"{what}: of equal sizes the first ones are rounded up, here {less} before {more}")


def between_rounded_boundaries(shares: list[float]) -> list[int]:
    """Return the sizes that follow if not the shares are rounded, but the places where one ends and the next begins."""
    boundaries = [0, *(round(sum(shares[: k + 1])) for k in range(len(shares)))]
    return [end - begin for begin, end in pairwise(boundaries)]


@graded("2b.3")
def test_partitions_follow_the_seed_and_nothing_else(grade: Grade) -> None:
    """Check that the partitions depend on the seed and on nothing else, and that they change nothing else."""
    length, sizes = 4 * int(grade.draw.integers(10, 20)), [0.25] * 4
    seeds = [*draw_seeds(grade, 2), 0, 1, 1234]  # 0 is a seed like all others; 1234 is the default
    (result,) = partitions(grade, [(length, sizes)], seeds, 1)
    (repeated,) = partitions(grade, [(length, sizes)], seeds, 2)
    one, other, of_seed_0, *of_seeds_1_and_1234 = result["partitions"]
    if result["partitions"] != repeated["partitions"]:
        grade.fail(UNSEEDED)
    if one != other and of_seed_0 in of_seeds_1_and_1234:
        grade.fail("seed 0 gives the partitions of another seed: 0 is a seed, too (`seed or ...` takes it for none)")
    if one == other:
        grade.fail(f"the seeds {seeds} give the same partitions: shuffle the indices with a generator made from seed")
    if sorted(map(sorted, one)) == sorted(map(sorted, other)):
        grade.fail(
            "every seed puts the same examples together, only in another order: shuffle the indices before the cut"
        )
    check_unchanged(grade, result["changed"], "DataPartitioner()")
    check_orders_differ(grade, [first_half(grade, length, sizes, parts) for parts in (one, other)])


def first_half(grade: Grade, length: int, sizes: list[float], parts: list[list[int]]) -> np.ndarray:
    """Return which indices are in the first half of the partitions; fail if these are no partitions."""
    must_be_exact(grade, length, sizes, parts)
    return np.isin(np.arange(length), np.concatenate(parts[: len(parts) // 2]))


def must_be_exact(grade: Grade, length: int, sizes: list[float], parts: list[list[int]]) -> None:
    """Fail unless each example is in one partition, and the sizes follow the rule."""
    check_exactly_once(grade, length, sizes, parts)
    check_counts(grade, length, sizes, lengths_of(parts))


@graded("2b.3")
def test_partitions_are_shuffled_and_the_data_is_not(grade: Grade) -> None:
    """Check, over several seeds together, that the seed shuffles the indices and that the data does not move."""
    length, sizes = 60, [0.5, 0.5]
    (result,) = partitions(grade, [(length, sizes)], draw_seeds(grade, 6))
    if result["changed"]["data"]:
        grade.fail("the data set itself was changed: shuffle a list of indices, not the data")
    halves = [first_half(grade, length, sizes, parts) for parts in result["partitions"]]
    check_mixed(grade, halves[:1])  # one at first: one order for all seeds, counted six times, can look unmixed
    check_orders_differ(grade, halves)
    check_mixed(grade, halves)


# --- 2b.4 ---


@graded("2b.4", weight=2)
def test_use_gives_the_same_partition_every_time(grade: Grade) -> None:
    """Check that use(k) gives the examples of partitions[k], in their order, each time it is called."""
    cases, seed = [*UNEVEN[-3:], *draw_settings(grade, 3)], grade.number("partitions", 1000)  # one partition is empty
    (results,) = on_data(grade, use, 1, max(length for length, _ in cases), cases=cases, seed=seed)
    for (length, _), result in zip(cases, results, strict=True):
        before = result["before"]
        must_be_indices(grade, before)
        if not any(before):
            grade.fail(observed=f"the partitions of {length} examples are all empty, so use() has nothing to give")
        for k, examples in enumerate(result["rounds"][0]):
            if isinstance(examples, str):
                grade.fail(observed=f"use({k}): expected a Partition; {examples}")
        first, second = numbered(grade, result["rounds"])
        if first != second and [sorted(part) for part in first] == [sorted(part) for part in second]:
            grade.fail(
                "calling use() twice for one partition gives its examples in another order: do not shuffle in use()"
            )
        if first != second or result["after"] != before:
            grade.fail("calling use() twice for one partition gives different examples: divide the data once, in "
                       "the constructor")  # fmt: skip
        for k, part in enumerate(before):
            if first[k] != part:
                order = ", in their order" if sorted(first[k]) == sorted(part) else ""
                expected = f"those of partitions[{k}]{order}: {part[:6]}"
                grade.fail(observed=f"use({k}) gives the examples {first[k][:6]}, expected {expected}")
        check_unchanged(grade, result["changed"], "use()")
        if result["reads"]:
            grade.fail(
                f"use() reads {result['reads']} examples, expected none: do not copy the data. Give Partition the data "
                "and a list of indices; it looks up each example when it is needed"
            )


# --- the graded tests ---


@graded("2b.3", absence=True)
def test_data_partition_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(FILE)
