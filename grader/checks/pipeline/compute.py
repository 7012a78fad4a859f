"""Judges Pipe.compute called alone, for one clock cycle and for several in turn."""

from typing import Any

import numpy as np

from grader.checks.pipeline.forward import numbered
from grader.checks.pipeline.waits import (
    PATIENCE,
    Alone,
    Pairs,
    draw_permits,
    late_binding,
    mark,
    must_end,
    must_have_permits,
    must_meet,
    run_once,
)
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.ranks.referee import PermitReferee
from grader.ranks.thread_times import ThreadTimes
from grader.wire.values import Fields

PROBE = "grader.probes.pipeline.pipe:compute"
EXAMPLES = 2  # in a micro-batch
WORKERS = 3  # partitions that work at the same time


def drawn_batches(draw: np.random.Generator, count: int) -> np.ndarray:
    """(count, B, D): a micro-batch is known by its first number."""
    batches = np.stack([numbered(draw, EXAMPLES) for _ in range(count)])
    batches[:, 0, 0] = np.arange(count)
    return batches


def run_compute(grade: Grade, cycles: list[Any], devices: list[str], **options: object) -> tuple[Result, np.ndarray]:
    """One pipe, and a call of compute for each cycle, on as many micro-batches as there are partitions."""
    batches = drawn_batches(grade.draw, len(devices))
    return run_on(grade, [[*batches]], cycles, devices, **options), batches


def run_on(grade: Grade, each: list[Any], cycles: list[Any], devices: list[str], **options: object) -> Result:
    """The same on the given micro-batches, where asked for with a referee."""
    arguments = {"meet": False, "slow": False, "reshape": False, "trouble": -1, "words": "", "cycles": cycles} | options
    patience = PATIENCE * grade.session.slowness
    return run_once(
        grade, PROBE, len(each), each=each, mark=mark(each), devices=devices, patience=patience, **arguments
    )


def computed(grade: Grade, cycles: list[Any], devices: list[str], **options: object) -> tuple[Result, np.ndarray]:
    """The same; the verdict if a call did not return."""
    result, batches = run_compute(grade, cycles, devices, **options)
    must_end(grade, result, [pair for pairs in cycles for pair in pairs])
    return result, batches


def cpus(count: int) -> list[str]:
    return [f"cpu:{j}" for j in range(count)]


def shuffled_cycle(grade: Grade, partitions: int) -> list[list[int]]:
    """One clock cycle in which all partitions work, in any order: micro-batch n-1-j is in partition j."""
    return [[partitions - 1 - int(j), int(j)] for j in grade.draw.permutation(partitions)]


def check_results(grade: Grade) -> None:
    """Each result replaces its micro-batch; those that are not in the cycle stay as they were."""
    cases: list[tuple[int, list[Any], Fields]] = [(4, [[[2, 3], [0, 1], [3, 0]]], {})]
    cases += [(n, [shuffled_cycle(grade, n)[:-1]], {}) for n in (3, 2, 4)]
    cases.append((3, [[[0, 0]], [[0, 1], [1, 0]], [[0, 2], [1, 1], [2, 0]]], {}))  # one pipe, several calls
    cases.append((3, [shuffled_cycle(grade, 3)], {"reshape": True}))
    cases.append((3, [shuffled_cycle(grade, 3)], {"slow": True}))
    for partitions, cycles, options in cases:
        result, batches = computed(grade, cycles, cpus(partitions), **options)
        if result.values[0]["schedule_changed"]:
            grade.fail("compute changed the list `schedule` or the length of `batches`: they belong to the caller")
        for i in range(partitions):
            _check_batch(grade, i, result, batches, cycles, options)
    check_same_time(grade)


def _check_batch(grade: Grade, i: int, result: Result, batches: np.ndarray, cycles: list[Any], options: Any) -> None:
    """What `batches[i]` holds in the end, and that backward() finds the way back."""
    value = result.values[0]
    got, passed = value["batches"][i], [j for pairs in cycles for micro_batch, j in pairs if micro_batch == i]
    factor = float(np.prod([j + 2 for j in passed]))
    expected = batches[i] * factor
    reshaped = options.get("reshape") and bool(passed)
    if reshaped:
        expected = np.stack([expected, 3 * expected], axis=-1)
    if got is None or got.shape != expected.shape or not np.allclose(got, expected):
        words = _wrong_result(i, passed, value, expected, batches, cycles)
        gave_up = any(event.name == "gave_up" for event in result.ranks[0].events)
        if gave_up:
            words += ". Your code did not wait for a slow partition: call get() without a time-out"
        places = [event.data["place"] for event in result.ranks[0].events if event.name == "enter"]
        bound = late_binding(places, cycles[0]) if len(cycles) == 1 else ""
        grade.fail(f"{words}{'. ' if bound else ''}{bound}")
    gradient = value["gradients"][i]
    right = factor * (4 if reshaped else 1)
    if gradient is None or gradient.shape != batches[i].shape or not np.allclose(gradient, right):
        grade.fail(
            f"batches[{i}] has the right values, but backward() does not reach its micro-batch: store the "
            "result as it is, without detach, clone().data or no_grad"
        )


def _wrong_result(
    i: int, passed: list[int], value: dict, expected: np.ndarray, batches: np.ndarray, cycles: Any
) -> str:
    start = f"{'cycle' if len(cycles) == 1 else 'cycles'} {short([[tuple(p) for p in pairs] for pairs in cycles])}: "
    got = value["batches"][i]
    if got is None:
        kind = short(value["kinds"][i], 60)
        maker = f"partition {passed[-1]} made" if passed else "was given"
        return f"{start}batches[{i}] holds a {kind}, expected the tensor that {maker} for micro-batch {i}"
    if not passed:
        which = "this cycle" if len(cycles) == 1 else "these cycles"
        return f"{start}micro-batch {i} is not in {which}, but was changed"
    j = passed[-1]
    if got.shape == batches[i].shape and np.allclose(got, batches[i]):
        return f"{start}micro-batch {i} is unchanged: store the result of partition {j} in batches[{i}]"
    if got.shape != expected.shape:
        return f"{start}expected batches[{i}] of shape {expected.shape}, got {got.shape}: store the result as it is"
    for other_i, batch in enumerate(batches):
        for other_j in range(len(batches)):
            if len(cycles) == 1 and np.allclose(got, batch * (other_j + 2)):
                who = f"partition {other_j} made from micro-batch {other_i}"
                return f"{start}batches[{i}] holds what {who}, expected that of partition {j} from micro-batch {i}"
    return f"{start}batches[{i}] holds something other than what partition {j} made from micro-batch {i}"


def check_same_time(grade: Grade) -> None:
    """All partitions of a cycle work at the same time: each stays at work until it has met all the others.

    The other tests of p.4 ask for this as well, in the same run: results, devices and errors of partitions that are
    called one after the other are no evidence of a pipeline. There are two cycles, of other micro-batches each: who
    starts threads for one cycle has others in the next. CPU times that look wrong are measured once more.
    """
    draw = np.random.default_rng([grade.seed, WORKERS])
    cycles = [[[first + WORKERS - 1 - int(j), int(j)] for j in draw.permutation(WORKERS)] for first in (0, WORKERS)]
    pairs = [pair for cycle in cycles for pair in cycle]
    batches, permits = drawn_batches(draw, 2 * WORKERS), draw_permits(draw, (1, 2 * WORKERS, WORKERS))
    for attempt in range(2):
        referee = PermitReferee(permits, cycles, ThreadTimes())
        result = run_on(grade, [[*batches]], cycles, cpus(WORKERS), meet=True, referee=referee, attempt=attempt)
        if not result.referee.threads.problem:
            break
    must_meet(grade, result, lambda alone: _why_alone(alone, cycles[alone.micro_batch >= WORKERS]))
    must_end(grade, result, pairs)
    places = [enter["place"] for enter in _enters(result)]
    if idle := sorted({j for _, j in pairs} - {partition for _, partition in places}):
        grade.fail(
            late_binding(places[:WORKERS], cycles[0])
            or f"partition {idle[0]} has a task in the cycle {cycles[0]} but never ran: put the task into its in-queue"
        )
    given = {(0, i, j): batches[i] for i, j in pairs}
    must_have_permits(grade, result, given, {place: (place[2] + 2) * x for place, x in given.items()})
    for i, j in pairs:
        got, right = result.values[0]["batches"][i], (j + 2) * permits[0, i, j] * batches[i]
        if got is None or got.shape != right.shape or not np.allclose(got, right):
            grade.fail(
                f"all partitions of a cycle ran, but batches[{i}] does not hold what partition {j} made from "
                f"micro-batch {i}: get each result from its own queue and store it where its micro-batch was"
            )


def _why_alone(alone: Alone, pairs: Pairs) -> str:
    if bound := late_binding(alone.places, pairs):
        return bound
    if alone.puts_before_get < len(pairs):
        return (
            "put all tasks of a clock cycle before you get the first result; otherwise the partitions run one after "
            "another"
        )
    if len(set(alone.puts)) == 1:
        return f"all tasks went into in_queues[{alone.puts[0]}]"
    return "the partitions must run at the same time, and none may wait for another's result"


def check_workers(grade: Grade) -> None:
    """Each partition works in the thread of its worker, on its device, and each result comes from its own queue."""
    pairs = shuffled_cycle(grade, 3)
    result, _ = computed(grade, [pairs], cpus(3))
    enters = _enters(result)
    if any(enter["in_caller"] for enter in enters):
        grade.fail("a partition runs in the caller's thread: put a Task into its in-queue")
    threads = {tuple(enter["place"])[1]: enter["thread"] for enter in enters}
    if len(threads) < len(pairs):
        ran, bound = sorted(threads), late_binding([enter["place"] for enter in enters], pairs)
        grade.fail(f"partitions 0 to 2 have a task each, but only {ran} ran{'. ' if bound else ''}{bound}")
    if len(set(threads.values())) < len(threads):
        grade.fail("two partitions run in one thread: each needs its own worker, behind in_queues[partition]")
    # The last device, not the last, and one among several in one cycle.
    for devices, cycle in (
        (["cpu:0", "meta"], [[0, 1]]),
        (["meta", "cpu:0"], [[0, 0]]),
        (["cpu:0", "meta", "cpu:2"], [[0, 1], [1, 0], [2, 2]]),
        (["cpu:0", "meta", "cpu:2"], [[2, 2], [0, 0], [1, 1]]),
    ):
        _check_devices(grade, devices, cycle)
    check_same_time(grade)


def _enters(result: Result) -> list[Fields]:
    return [event.data for event in result.ranks[0].events if event.name == "enter"]


def _check_devices(grade: Grade, devices: list[str], pairs: list[list[int]]) -> None:
    """Every partition gets its micro-batch, which is on the CPU, on its own device, and its result stays there."""
    result, _ = computed(grade, [pairs], devices)
    for enter in _enters(result):
        j = tuple(enter["place"])[1]
        device = str(enter["device"])
        if device.split(":")[0] != devices[j].split(":")[0]:
            grade.fail(
                f"partition {j} is on device {devices[j]} but received a micro-batch on {short(device, 30)}: move the "
                "micro-batch first"
            )
    for i, j in pairs:
        value = result.values[0]
        device = str(value["devices"][i])
        if not device:
            kind = short(value["kinds"][i], 60)
            grade.fail(f"batches[{i}] holds a {kind}, expected the tensor that partition {j} made")
        if device.split(":")[0] != devices[j].split(":")[0]:
            grade.fail(
                f"the result of partition {j} was moved from its device, {devices[j]}, to {short(device, 30)}: "
                "leave it there; it moves when the next partition needs it"
            )


def check_errors(grade: Grade) -> None:
    """What a worker raises arrives as it was raised, and no thread is left."""
    for trouble, place in ((0, 1), (2, 2), (1, 0)):  # in the middle of the cycle, last, and first
        pairs, words = shuffled_cycle(grade, 3), f"drawn words {int(grade.draw.integers(10**6))}"
        now = [j for _, j in pairs].index(trouble)
        pairs[now], pairs[place] = pairs[place], pairs[now]
        result, _ = computed(grade, [pairs], cpus(3), trouble=trouble, words=words)
        _check_error(grade, result.values[0], trouble, words)
    check_same_time(grade)


def _check_error(grade: Grade, value: Fields, trouble: int, words: str) -> None:
    caught, start = value["caught"], f"partition {trouble} raised Trouble({words!r}), but "
    if caught is None and not value["entered"]:
        grade.fail(f"partition {trouble} is in the cycle, but never ran: does every task run its own partition?")
    if caught is None:
        grade.fail(f"{start}compute returned as if nothing had happened: look at the first half of each result")
    if not caught["same"] and caught["type"] == "SystemExit":
        grade.fail(f"{start}compute ended the program: raise the exception, the caller decides what to do")
    if not caught["same"]:
        kind = short(caught["type"], 60)
        kind = "a copy of it" if kind == "Trouble" else f"{kind}: {short(caught['words'], 100)}"
        grade.fail(f"{start}compute raised {kind}: re-raise the original exception object, exc_info[1]")
    if not caught["in_layer"]:
        grade.fail(f"{start}its traceback no longer shows the layer: raise it with its original traceback")
    if left := value["left"]:
        grade.fail(
            f"{left} threads are still running after the pipe was deleted: does your code keep a queue "
            "or start threads?"
        )
