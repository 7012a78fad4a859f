"""Judges Pipe.forward and Pipe.compute, each called alone."""

from typing import Any

import numpy as np

from grader import pipeline_schedule
from grader.grading import Grade
from grader.outcome import Result
from grader.pipeline_waits import DEADLINE, PATIENCE, must_end, must_meet

# (split size, partitions, batches of one pipe in turn): even, with a rest, larger than the batch, small before large
FORWARDS = [(2, 2, [8]), (3, 3, [7, 6]), (8, 2, [5]), (4, 2, [3, 9]), (1, 1, [3])]


def _batch(grade: Grade, size: int, width: int = 2) -> np.ndarray:
    """(B, 1 + width): each example begins with its number."""
    return np.column_stack([np.arange(size), grade.draw.normal(size=(size, width))])


def split_sizes(batch: int, split_size: int) -> list[int]:
    """The sizes of the micro-batches."""
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


# --- Pipe.forward alone ---


def forwards(grade: Grade, last: str = "cpu") -> list[tuple[int, int, np.ndarray, dict[str, Any]]]:
    """(split size, partitions, batch, what was seen) of every call; see probes_pipeline.forward.

    What was seen has `first` as well: whether this is the first call of its pipe.
    """
    draw = grade.draw
    grade.draw = np.random.default_rng(grade.seed)  # all tests of p.3 look at the same runs
    calls = []
    for split_size, stages, sizes in FORWARDS:
        batches = [_batch(grade, size) for size in sizes]
        (told,) = grade.values(
            "grader.probes_pipeline:forward", 1, stages=stages, split_size=split_size,
            batches=[batch.tolist() for batch in batches], last=last,
        )  # fmt: skip
        told = [call | {"first": number == 0} for number, call in enumerate(told)]
        calls += [(split_size, stages, batch, call) for batch, call in zip(batches, told, strict=True)]
    grade.draw = draw
    return calls


def check_sizes(grade: Grade) -> None:
    """split_size is the number of examples in a micro-batch; the last may be smaller, and no example is lost."""
    for split_size, _, batch, told in forwards(grade):
        expected, setting = split_sizes(len(batch), split_size), f"a batch of {len(batch)} with split_size={split_size}"
        if not told["calls"]:
            grade.fail(f"{setting}: self.compute was never called: the partitions get their work from it")
        got = told["calls"][0]["sizes"]
        if got == expected:
            continue
        if not told["first"] and 0 < max(got) < min(split_size, len(batch)):
            cause = "the micro-batches are smaller than asked for: does an earlier, smaller batch still count?"
        elif got == split_sizes(len(batch), -(-len(batch) // split_size)):
            cause = "split_size is the number of examples in a micro-batch, not the number of micro-batches"
        elif sum(got) < len(batch):
            cause = f"{len(batch) - sum(got)} examples are in no micro-batch"
        else:
            cause = "every micro-batch but the last has split_size examples"
        grade.fail(f"{setting}: expected micro-batches of {expected}, got {got}: {cause}")


def check_clocks(grade: Grade) -> None:
    """compute is called once for each clock cycle, with its pairs, in the order of the schedule."""
    for split_size, stages, batch, told in forwards(grade):
        count = len(split_sizes(len(batch), split_size))
        given = [[[i, j] for i in range(count)] for j in range(stages)]
        got = [call["pairs"] for call in told["calls"]]
        setting = f"{count} micro-batches on {stages} partitions"
        if not told["asked"]:
            _own_schedule(grade, count, stages, got)
            continue
        if told["asked"][0] != [count, stages]:
            m, n = told["asked"][0]
            swapped = ", the other way round" if [n, m] == [count, stages] else ""
            grade.fail(f"{setting}: _clock_cycles was asked for {m} micro-batches and {n} partitions{swapped}")
        if [sorted(pairs) for pairs in got] != given:
            grade.fail(f"{setting}: {_wrong_calls(got, given)}")


def _own_schedule(grade: Grade, m: int, n: int, got: list) -> None:
    """A forward that does not ask _clock_cycles: any schedule will do that keeps its rules."""
    cycles = [[(i, j) for i, j in pairs] for pairs in got]
    for rule in (
        pipeline_schedule.once,
        pipeline_schedule.in_order,
        pipeline_schedule.one_at_a_time,
        pipeline_schedule.as_short_as_can_be,
    ):
        words, cells = rule(m, n, cycles)
        if words:
            pipeline_schedule.fail(grade, (m, n), f"_clock_cycles was not asked, and {words}", cycles, cells)


def _wrong_calls(got: list, given: list) -> str:
    flat, wanted = ([pair for pairs in calls for pair in pairs] for calls in (got, given))
    if len(got) == 1 < len(given) and sorted(flat) == sorted(wanted):
        return "compute was called once with the whole schedule, expected one call for each clock cycle"
    if len(got) == len(wanted) > len(given):
        return (
            f"compute was called {len(got)} times with one pair each: give it all pairs of a clock cycle at once, "
            "or only one partition works at a time"
        )
    if sorted(flat) == sorted(wanted):
        return f"expected compute to be called with {given}, got {got}: one call per clock cycle, in their order"
    missing = [tuple(pair) for pair in wanted if pair not in flat]
    return (
        f"expected one call of compute for each of {len(given)} clock cycles, got {len(got)}; {missing[:3]} never came"
    )


def check_output(grade: Grade) -> None:
    """The output has the micro-batches in their order, on the last device; the input is left alone."""
    for _, stages, batch, told in forwards(grade):
        expected = batch
        for j in range(stages):
            expected = 2 * expected + j
        got = told["output"]
        if got is None:
            grade.fail("expected a tensor as the output of forward, got something else: concatenate the micro-batches")
        if got.shape != expected.shape:
            grade.fail(f"a batch of shape {batch.shape}: expected an output of that shape, got {got.shape}")
        if not np.allclose(got, expected):
            rows = np.array_equal(np.sort(got[:, 0]), np.sort(expected[:, 0]))
            first = int(np.argmax(~np.isclose(got, expected).all(axis=1)))
            order = ": the examples are there, in another order than they came in" if rows else ""
            if np.allclose(got, batch):
                order = ": this is the input, take what compute has put into the list"
            grade.fail(f"example {first}: expected {_few(expected[first])}, got {_few(got[first])}{order}")
        if told["changed"]:
            grade.fail("the caller's batch was changed: results replace micro-batches in the list, not in the input")
    for _, _, _, told in forwards(grade, last="meta"):
        if told["moved"]:
            grade.fail("forward moves the output away from the last device: the result stays where it was computed")


def _few(row: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in row]


# --- Pipe.compute alone ---


def computed(grade: Grade, pairs: list[list[int]], devices: list[str], **options: Any) -> tuple[Result, np.ndarray]:
    """One call of compute on as many micro-batches as there are partitions; returns the run and the batches."""
    batches = np.stack([_batch(grade, 2) for _ in devices])
    batches[:, 0, 0] = np.arange(len(devices))  # a micro-batch is known by its first number
    arguments = {"meet": False, "patience": PATIENCE * grade.session.slowness, "trouble": -1, "words": ""} | options
    result = grade.run(
        "grader.probes_pipeline:compute",
        1,
        DEADLINE,
        batches=batches.tolist(),
        pairs=pairs,
        devices=devices,
        **arguments,
    )
    return result, batches


def _shuffled_cycle(grade: Grade, partitions: int) -> list[list[int]]:
    """One clock cycle in which all partitions work, in any order: micro-batch n-1-j is in partition j."""
    return [[partitions - 1 - int(j), int(j)] for j in grade.draw.permutation(partitions)]


def check_results(grade: Grade) -> None:
    """Each result replaces its micro-batch; those that are not in the cycle stay as they were."""
    drawn = [(partitions, _shuffled_cycle(grade, partitions)[:-1]) for partitions in (3, 2, 4)]
    for partitions, pairs in [(4, [[2, 3], [0, 1], [3, 0]]), *drawn]:
        result, batches = computed(grade, pairs, [f"cpu:{j}" for j in range(partitions)])
        must_end(grade, result, pairs)
        got = result.values[0]["batches"]
        partition_of = {pair[0]: pair[1] for pair in pairs}
        for i in range(partitions):
            j = partition_of.get(i)
            factor = 1 if j is None else j + 2
            if got[i] is not None and got[i].shape == batches[i].shape and np.allclose(got[i], batches[i] * factor):
                continue
            places = [event.data["place"] for event in result.ranks[0].events if event.name == "enter"]
            kind = result.values[0]["devices"][i]
            grade.fail(_wrong_result(i, j, got, kind, batches, pairs) + _late_binding(places, pairs))


def _wrong_result(i: int, j: int | None, got: list, kind: str, batches: np.ndarray, pairs: list) -> str:
    start = f"cycle {[tuple(pair) for pair in pairs]}: "
    if got[i] is None:
        return f"{start}batches[{i}] holds a {kind}, expected the tensor that partition {j} made from micro-batch {i}"
    if j is None:
        return f"{start}micro-batch {i} is not in it, and was changed"
    if np.allclose(got[i], batches[i]):
        return f"{start}micro-batch {i} is unchanged: the result of partition {j} is to be stored in batches[{i}]"
    for other_i, batch in enumerate(batches):
        for other_j in range(len(batches)):
            if got[i].shape == batch.shape and np.allclose(got[i], batch * (other_j + 2)):
                who = f"partition {other_j} made from micro-batch {other_i}"
                return f"{start}batches[{i}] holds what {who}, expected that of partition {j} from micro-batch {i}"
    return f"{start}batches[{i}] holds something else than what partition {j} made from micro-batch {i}"


def _late_binding(places: list, pairs: list) -> str:
    """Two tasks of one cycle took the same micro-batch or the same partition."""
    micro_batches, partitions = (sorted({place[k] for place in places}) for k in (0, 1))
    if len(places) < len(pairs) or min(len(micro_batches), len(partitions)) >= len(pairs):
        return ""
    twice = "micro-batch" if len(micro_batches) < len(pairs) else "partition"
    return f". Two tasks took the same {twice}: what a lambda takes from a loop it looks up when it runs; bind it first"


def check_same_time(grade: Grade) -> None:
    """All partitions of a cycle are inside at the same time: each stays until it has met all the others."""
    for partitions in (2, 3):
        pairs = _shuffled_cycle(grade, partitions)
        result, _ = computed(grade, pairs, [f"cpu:{j}" for j in range(partitions)], meet=True)
        must_meet(grade, result)
        must_end(grade, result, pairs)


def check_workers(grade: Grade) -> None:
    """Each partition works in the thread of its worker, on its device, and each result comes from its own queue."""
    pairs = _shuffled_cycle(grade, 3)
    result, _ = computed(grade, pairs, ["cpu:0", "cpu:1", "cpu:2"])
    must_end(grade, result, pairs)
    enters = [event.data for event in result.ranks[0].events if event.name == "enter"]
    if any(enter["in_caller"] for enter in enters):
        grade.fail("a partition works in the caller's own thread: put a Task into its in-queue")
    threads = {tuple(enter["place"])[1]: enter["thread"] for enter in enters}
    if len(set(threads.values())) < len(threads):
        grade.fail("two partitions work in one thread: each has a worker of its own, behind in_queues[partition]")
    for devices, j in ((["cpu:0", "meta"], 1), (["meta", "cpu:0"], 0)):  # the last device, and not the last
        _check_place(grade, devices, j)


def _check_place(grade: Grade, devices: list[str], j: int) -> None:
    """A micro-batch on the CPU goes to partition `j`, whose device is meta."""
    result, _ = computed(grade, [[0, j]], devices)
    must_end(grade, result, [[0, 1]])
    device = next(event.data["device"] for event in result.ranks[0].events if event.name == "enter")
    if device != "meta":
        grade.fail(
            f"partition {j} lies on the device meta and was given a micro-batch on {device}: move it there first"
        )
    if result.values[0]["devices"][0] != "meta":
        grade.fail(f"the result of partition {j} was moved away from its device, meta: the next partition fetches it")


def check_errors(grade: Grade) -> None:
    """What a worker raises arrives as it was raised, and no thread is left."""
    for trouble, place in ((0, 1), (2, 2), (1, 0)):  # in the middle of the cycle, last, and first
        pairs, words = _shuffled_cycle(grade, 3), f"drawn words {int(grade.draw.integers(10**6))}"
        now = [j for _, j in pairs].index(trouble)
        pairs[now], pairs[place] = pairs[place], pairs[now]
        result, _ = computed(grade, pairs, ["cpu:0", "cpu:1", "cpu:2"], trouble=trouble, words=words)
        must_end(grade, result, pairs)
        caught = result.values[0]["caught"]
        start = f"partition {trouble} raised Trouble({words!r}), and "
        if caught is None:
            grade.fail(
                f"{start}compute returned as if nothing had happened: look at the first half of each result, and "
                "whether every task runs the partition that it is meant for"
            )
        if not caught["same"] and caught["type"] == "SystemExit":
            grade.fail(f"{start}compute ended the program: raise the exception, the caller decides what to do")
        if not caught["same"]:
            kind = "a copy of it" if caught["type"] == "Trouble" else f"{caught['type']}: {caught['words'][:100]}"
            grade.fail(f"{start}compute raised {kind}: raise the very exception, it is the second of exc_info")
        if "forward" not in caught["frames"]:
            grade.fail(f"{start}its traceback has lost the layer: raise the exception with the traceback it came with")
        if left := result.values[0]["left"]:
            grade.fail(f"{left} threads go on after the pipe is gone: who keeps a queue, or has started more threads?")
