"""The data goes on, b.20: the k-th batch does not depend on the number of ranks, and not on interruptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import pytest

from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.phrases import short
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch, unchanged

graded = pytest.mark.graded
SIZES = (1, 2, 3, 4, 5)
EPOCHS = 3
SHARE = "draw the batch for all ranks, in the same way on each, and take this rank's share of it"


class Batches(NamedTuple):
    """What all ranks got: `examples` has each batch, sorted, `places` the place in the data after it."""

    examples: list[list[int]]
    places: list[Fields]


# --- what a rank does ---


@in_rank
def batches(context: Context, lesson: ModuleType, inputs: int) -> object:
    """Yield this rank's examples of each batch, the place after it, and what else has changed."""
    torch.manual_seed(inputs)  # what a student draws from the global generator differs between ranks and runs
    a = context.arguments
    place = dict(a["place"])
    for _ in range(a["number"]):
        before = dict(place)
        with unchanged(nn.Module()) as changed:
            value = lesson.next_examples(place, a["count"], a["batch_size"])
        if not isinstance(value, tuple) or len(value) != 2 or not all(map(isinstance, value, (list, dict))):
            raise TypeError(f"next_examples must return a list and a dict, got {str(value)[:100]}")
        yield {"examples": value[0], "place": value[1], "changed": place != before, "surroundings": changed}
        place = dict(value[1])


# --- what is right ---


def serve(grade: Grade, ranks: int, place: Fields, number: int, count: int, batch_size: int) -> Batches:
    """Return what some ranks get from a place on. Each gets its share, and all get one place."""
    seeds = grade.draw.integers(2**31, size=ranks).tolist()
    where = f"{count} examples, batches of {batch_size}, world size {ranks}: "
    sizes: Fields = {"count": count, "batch_size": batch_size}
    values = run(grade, batches, seeds, where=where, place=place, number=number, **sizes).values
    served = Batches([], [])
    for shares in zip(*values, strict=True):
        lengths, places = [len(share["examples"]) for share in shares], [share["place"] for share in shares]
        together = [example for share in shares for example in share["examples"]]
        if any(share["changed"] for share in shares):
            grade.fail(f"{where}next_examples changes its argument: return a new dict")
        if moved := next((name for share in shares for name in share["surroundings"]), ""):
            grade.fail(f"{where}next_examples changes {moved}: draw with a generator of your own")
        if other := next((other for other in places if other != places[0]), None):
            grade.fail(f"{where}one rank returns the place {places[0]}, another {other}: it belongs to all ranks")
        if not all(type(example) is int and 0 <= example < count for example in together):
            grade.fail(f"{where}expected whole numbers below {count}, got {short(str(together))}")
        if max(lengths) > min(lengths) + 1 or sum(lengths) != batch_size:
            rule = f"expected {batch_size} in all, and equally many or one more on each"
            grade.fail(f"{where}the ranks get {lengths} examples of a batch: {rule}", kind="the shares of a batch")
        served.examples.append(sorted(together))
        served.places.append(places[0])
    return served


def check_same(grade: Grade, where: str, got: Sequence[list[int]], right: Sequence[list[int]], cause: str) -> None:
    for k, (one, other) in enumerate(zip(got, right, strict=True)):
        if one != other:
            shown = f"batch {k} has the examples {short(str(one), 60)}, expected {short(str(other), 60)}"
            grade.fail(f"{where}{shown}: {cause}", kind=cause)


def check_epochs(grade: Grade, examples: Sequence[list[int]], count: int) -> None:
    """Check that after each batch every example was served as often as any other, or once more."""
    times = Counter(dict.fromkeys(range(count), 0))
    for k, batch in enumerate(examples):
        times.update(batch)
        least, most = min(times.values()), max(times.values())
        if most > least + 1:
            rule = "an epoch has every example once, and a batch that reaches its end continues in the next one"
            found = f"after batch {k} of {count} examples, one was served {most} times and another {least} times"
            grade.fail(f"world size 1: {found}: {rule}", kind=rule)


def drawn_sizes(grade: Grade) -> tuple[int, int]:
    """Return the number of examples and the size of a batch, where an epoch ends inside of a batch."""
    return 12 * int(grade.draw.integers(3, 5)) + 5, 12


def start(grade: Grade) -> Fields:
    return {"seed": int(grade.draw.integers(1000)), "epoch": 0, "position": 0}


# --- the graded tests ---


@graded("b.20")
def test_a_batch_has_the_same_examples_with_any_number_of_ranks(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    (count, batch_size), place = drawn_sizes(grade), start(grade)
    number = EPOCHS * count // batch_size
    one = serve(grade, 1, place, number, count, batch_size)
    check_epochs(grade, one.examples, count)
    for ranks in SIZES[1:]:
        got = serve(grade, ranks, place, number, count, batch_size)
        check_same(grade, f"world size {ranks}, compared with 1: ", got.examples, one.examples, SHARE)
    tiny, by_one = serve(grade, 5, place, 4, 7, 3), serve(grade, 1, place, 4, 7, 3)  # two ranks get no example
    check_same(grade, "world size 5, compared with 1: ", tiny.examples, by_one.examples, SHARE)


@graded("b.20")
def test_a_run_that_is_interrupted_serves_the_examples_of_one_that_is_not(grade: Grade) -> None:
    (count, batch_size), place = drawn_sizes(grade), start(grade)
    number = EPOCHS * count // batch_size
    whole = serve(grade, 2, place, number, count, batch_size)
    cause = "what decides about the next batch must be in the place that next_examples returns"
    done, steps = 0, 3
    for ranks in grade.draw.permutation(SIZES).tolist():
        begin = whole.places[done - 1] if done else place
        got = serve(grade, ranks, begin, min(steps, number - done), count, batch_size)
        where = f"world size {ranks} after {done} batches, compared with a run without interruption: "
        check_same(grade, where, got.examples, whole.examples[done:][: len(got.examples)], cause)
        done += len(got.examples) - 1  # the last step was not saved: it is done again


@graded("b.20")
def test_every_epoch_and_every_seed_has_an_order_of_its_own(grade: Grade) -> None:
    count, batch_size, per_epoch = 48, 12, 4
    place = start(grade)
    own = serve(grade, 3, place, 3 * per_epoch, count, batch_size).examples
    epochs = [own[i * per_epoch :][:per_epoch] for i in range(3)]
    if epochs[0] == epochs[1] or epochs[1] == epochs[2]:
        grade.fail("two epochs have the same batches: the order depends on seed and epoch")
    other = serve(grade, 3, place | {"seed": place["seed"] + 1}, per_epoch, count, batch_size).examples
    if other == epochs[0]:
        grade.fail("two seeds give the same batches: the order depends on seed and epoch")
    if other == epochs[1]:
        grade.fail("epoch 1 of one seed is epoch 0 of the next seed: do not just add the two numbers")
