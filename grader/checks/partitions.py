"""Judges DataPartitioner and Partition of task 2b. The rule of the sizes is judged by its properties: no partition gets
a whole example more or less than its share, and none that lost more by rounding goes without an extra example.

An example is a text that is drawn for the run and says nothing about its place: who returns it has looked it up.
"""

from collections import Counter
from typing import Any

import numpy as np

from grader.checks.mixing import check_mixed, check_orders_differ
from grader.grading import Grade
from grader.wire import drawn as draws
from grader.wire.values import Fields

ROUNDING = 1e-6  # shares are products of floats
SEEDS = 6  # shuffles that are judged together
MORE = 5  # examples of a second data set, see probes.data.partitioner


def texts(grade: Grade, count: int) -> list[str]:
    """The examples of a data set of this run; longer ones begin with those of shorter ones."""
    return [f"text {number:012x}" for number in draws.generator(grade.seed, 5).integers(0, 1 << 48, count)]


def on_data(grade: Grade, probe: str, world_size: int, length: int, more: int = 0, **arguments: object) -> list[Any]:
    """What a probe of probes.data returns on each rank, on `length` texts that a rank gets after it has loaded."""
    each = [texts(grade, length + more)] * world_size
    return grade.values(f"grader.probes.data:{probe}", world_size, each=each, length=length, **arguments)


def numbered(grade: Grade, length: int, told: object) -> Any:
    """Texts in lists, however deep, as the numbers of their examples: -1 for anything else."""
    places = {text: place for place, text in enumerate(texts(grade, length))}

    def number(value: object) -> Any:
        return [number(item) for item in value] if isinstance(value, list) else places.get(str(value), -1)

    return number(told)


def partitions(grade: Grade, length: int, sizes: list[float], seed: int = 1234, noise: int = 0) -> Fields:
    """What DataPartitioner makes of `length` examples; see probes.data."""
    (value,) = on_data(grade, "partitioner", 1, length, MORE, sizes=sizes, partition_seed=seed, noise=noise)
    must_be_indices(grade, value["partitions"])
    return value


def must_be_indices(grade: Grade, partitions: object) -> None:
    if isinstance(partitions, str):
        grade.fail(f"self.partitions: expected a list of indices (whole numbers) for each size; got {partitions}")


EXACT = [(24, [0.25] * 4), (30, [0.5, 0.5]), (9, [1.0])]  # shares that need no rounding, in floats either
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


def check_partition(grade: Grade) -> None:
    """Place i of Partition(data, index) is data[index[i]], the example and not its number."""
    index = [int(i) for i in grade.draw.permutation(20)[:7]]
    for kind in ("list", "tuple", "array"):
        (value,) = on_data(grade, "partition", 1, 20, index=index, kind=kind)
        got, looped = (numbered(grade, 20, value[name]) for name in ("examples", "looped"))
        if got != index:
            cause = "wrong example"
            if -1 in got:
                cause = "it returns something other than an example (shown as -1), for instance its index"
            elif got == list(range(len(index))):
                cause = (
                    "it uses the position as an index into the data: which example is at this position of the "
                    "partition?"
                )
            grade.fail(f"{cause}: for the indices {index} expected these examples, got {got}")
        if value["index"] != index or value["changed"]["data"]:
            what = "the data" if value["changed"]["data"] else "the list of indices"
            grade.fail(f"looking up an example changes {what}: it belongs to the caller, so only read it")
        if looped != index:
            grade.fail(
                f"`for example in partition` gives {len(looped)} examples, expected {len(index)} (counted up "
                "to 200): an index of len(partition) or more must raise IndexError; otherwise the loop never ends"
            )


def check_use(grade: Grade) -> None:
    """use(k) gives the examples of partitions[k], in their order, each time it is called."""
    for length, sizes in draw_settings(grade, 3)[-5:]:
        (value,) = on_data(grade, "use", 1, length, sizes=sizes, partition_seed=grade.number("partitions", 1000))
        must_be_indices(grade, value["before"])
        if not any(value["before"]):
            grade.fail(f"the partitions of {length} examples are all empty, so use() has nothing to give")
        for k, examples in enumerate(value["rounds"][0]):
            if isinstance(examples, str):
                grade.fail(f"use({k}): expected a Partition; {examples}")
        first, second = numbered(grade, length, value["rounds"])
        if first != second or value["after"] != value["before"]:
            grade.fail(
                "calling use() twice for one partition gives different examples: partition the data once, in the "
                "constructor"
            )
        if first != value["before"]:
            wrong = next(k for k, part in enumerate(value["before"]) if first[k] != part)
            grade.fail(f"use({wrong}) gives the examples {first[wrong][:6]}, expected those of partitions[{wrong}]")
        refuse_changes(grade, value["changed"], "use()")
        if value["reads"]:
            grade.fail(
                f"use() reads {value['reads']} examples, expected none: do not copy the data. Give Partition the "
                "data and a list of indices; it looks up each example when it is needed"
            )


def check_once(grade: Grade) -> None:
    """Every index is in exactly one partition, and there are as many partitions as sizes."""
    for length, sizes in [*draw_settings(grade, 3), *EXACT]:
        check_exactly_once(grade, length, sizes, partitions(grade, length, sizes)["partitions"])
    for length, sizes in EXACT:
        check_counts(grade, length, sizes, lengths_of(partitions(grade, length, sizes)["partitions"]))


def check_exactly_once(grade: Grade, length: int, sizes: list[float], parts: list[list[int]]) -> None:
    """Fails unless each of `length` indices is in one of as many partitions as there are sizes."""
    total = Counter(index for part in parts for index in part)
    of = f"of {length} examples cut by {[round(size, 3) for size in sizes]}"
    if len(parts) != len(sizes):
        grade.fail(f"self.partitions: expected {len(sizes)} partitions, one for each size, got {len(parts)}")
    twice = [index for index, number in total.items() if number > 1]
    missing, strange = set(range(length)) - set(total), set(total) - set(range(length))
    if strange:
        grade.fail(f"{of}, a partition holds the index {min(strange)}, expected 0 to {length - 1}")
    if twice:  # said first: what overlaps often leaves holes too, and other rounding does not repair it
        grade.fail(
            f"{of}, {len(twice)} are in a partition more than once, for instance {min(twice)}"
            + (f", and {len(missing)} in none" if missing else "")
            + ": each partition must begin where the one before it ended"
        )
    if missing:
        grade.fail(f"{of}, {len(missing)} are in no partition, for instance {min(missing)}: round without losing any")


def check_sizes(grade: Grade) -> None:
    """Sizes are rounded by largest remainder, the first of equal sizes up, in every partitioner made of them."""
    for length, sizes in [*draw_settings(grade), (7, [0.5, 0.0, 0.5]), (5, [1 / 3] * 3)]:
        value = partitions(grade, length, sizes)
        if value["changed"]["sizes"] is not None:
            before, after = ([float(f"{size:.4g}") for size in of] for of in (sizes, value["changed"]["sizes"]))
            grade.fail(f"the list of sizes belongs to the caller and was changed: from {before} to {after}; copy it")
        check_counts(grade, length, sizes, [len(part) for part in value["partitions"]])
        if value["second"] != value["partitions"] or value["kept"] != value["partitions"]:
            grade.fail(
                f"a second DataPartitioner of the same data, sizes and seed makes partitions of "
                f"{lengths_of(value['second'])}, the first made {lengths_of(value['partitions'])}: do not share state "
                "between partitioners"
            )
        lost = length + MORE - sum(lengths_of(value["other"]))
        if 0 < lost < min(len(sizes), MORE):  # rounded down; who keeps the first one's indices lacks MORE
            grade.fail(
                f"of {length + MORE} examples cut by {[round(size, 3) for size in sizes]}, {lost} are in no partition: "
                "round without losing any"
            )
        if lost:
            grade.fail(
                f"a second DataPartitioner, of {length + MORE} examples, makes partitions of "
                f"{lengths_of(value['other'])} after one of {length}: do not share state between partitioners"
            )


def lengths_of(partitions: Any) -> list[int]:
    """Their lengths; none for what is no list of indices."""
    return [] if isinstance(partitions, str) else [len(part) for part in partitions]


def check_counts(grade: Grade, length: int, sizes: list[float], got: list[int]) -> None:
    """Fails unless these sizes of partitions follow the rule in the docstring of DataPartitioner."""
    shares = [size * length for size in sizes]
    rule = "see the rule in the docstring of DataPartitioner"
    what = f"{length} examples in shares of {[round(share, 2) for share in shares]}: got partitions of {got}, {rule}"
    if len(got) != len(sizes) or sum(got) != length:
        grade.fail(what)
    gains = [count - share for count, share in zip(got, shares, strict=True)]  # of rounding, above 0: rounded up
    if any(abs(gain) > 1 - ROUNDING for gain in gains):
        far = max(range(len(gains)), key=lambda k: abs(gains[k]))
        grade.fail(f"{what}: partition {far} is not its share rounded up or down")
    up = [k for k, gain in enumerate(gains) if gain > ROUNDING]
    down = [k for k, gain in enumerate(gains) if gain < -ROUNDING]
    for more in up:
        for less in down:
            if gains[more] - gains[less] > 1 + ROUNDING:
                grade.fail(f"{what}: partition {less} loses more by rounding down than partition {more} would")
            if sizes[more] == sizes[less] and less < more:
                grade.fail(f"{what}: of equal sizes the first ones are rounded up, here {less} before {more}")


def check_seed(grade: Grade) -> None:
    """The partitions depend on the seed and on nothing else, and nothing else depends on them."""
    length, sizes = 4 * int(grade.draw.integers(10, 20)), [0.25] * 4
    seeds = draw_seeds(grade, 2)
    one = partitions(grade, length, sizes, seeds[0], 1)
    again = partitions(grade, length, sizes, seeds[0], 2)["partitions"]
    other = partitions(grade, length, sizes, seeds[1], 1)["partitions"]
    if one["partitions"] != again:
        grade.fail(
            "equal seeds give different partitions once something else has drawn random numbers: "
            "shuffle with a generator of your own, random.Random(seed)"
        )
    if one["partitions"] == other:
        in_order = all(part == list(range(part[0], part[0] + len(part))) for part in other if part)
        blocks = ", blocks in the order of the data" if in_order else ""
        grade.fail(
            f"the seeds {seeds[0]} and {seeds[1]} give the same partitions{blocks}: shuffle the indices with a "
            "generator made from seed"
        )
    refuse_changes(grade, one["changed"], "DataPartitioner()")
    for parts in (one["partitions"], other):
        _must_be_exact(grade, length, sizes, parts)
    halves = [np.isin(np.arange(length), parts[0] + parts[1]) for parts in (one["partitions"], other)]
    check_orders_differ(grade, halves)


def _must_be_exact(grade: Grade, length: int, sizes: list[float], parts: list[list[int]]) -> None:
    """An order counts only if it is that of partitions: each example once, and equal parts where nothing is rounded."""
    check_exactly_once(grade, length, sizes, parts)
    check_counts(grade, length, sizes, lengths_of(parts))


def refuse_changes(grade: Grade, changed: Fields, of: str) -> None:
    """Fails if a call has changed the caller's data, or moved a global random generator."""
    if changed["data"]:
        grade.fail(f"{of} changes the data set itself: shuffle a list of indices, not the data")
    if changed["generators"]:
        grade.fail(
            f"{of} seeds or uses the global generator of {' and '.join(changed['generators'])}, so what is drawn "
            "after it (dropout, new weights) changes too: shuffle with a generator of your own, random.Random(seed)"
        )


def check_shuffled(grade: Grade) -> None:
    """Indices are shuffled, by the seed; the data is neither moved nor copied. Judged over several seeds together."""
    length, sizes = 60, [0.5, 0.5]
    (value,) = on_data(grade, "shuffles", 1, length, sizes=sizes, partition_seeds=draw_seeds(grade, SEEDS))
    for parts in value["partitions"]:
        must_be_indices(grade, parts)
    if value["changed"]["data"]:
        grade.fail("the data set itself was changed: shuffle a list of indices, not the data")
    halves = []
    for parts in value["partitions"]:
        _must_be_exact(grade, length, sizes, parts)
        halves.append(np.isin(np.arange(length), parts[0]))
    check_mixed(grade, halves)
    check_orders_differ(grade, halves)


def draw_seeds(grade: Grade, count: int) -> list[int]:
    """Seeds of which no two are alike."""
    return [int(seed) for seed in grade.draw.choice(10**6, count, replace=False)]
