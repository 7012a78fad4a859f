"""Pipe.compute, p.4: called alone, for one clock cycle and for several in turn.

Partition j turns a micro-batch x into (j + 2) x. Partitions that are called one after the other may have the right
results, devices and errors, too. So every test also checks that partitions work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire.values import Fields
from tests.pipeline import pipe_shared as shared
from tests.pipeline.pipe_shared import IN_RANK, Watched

if TYPE_CHECKING:  # what a function finds in a rank
    import threading

    from grader.inside.tools import Context, copy_of, nn, torch
    from tests.pipeline.pipe_in_rank import NeverArrives, PipeWatch, WatchedStage, watch_queues

graded = pytest.mark.graded
CRASHES = shared.CRASHES
EXAMPLES, FEATURES = 2, 3  # of a micro-batch
WORKERS = 3  # partitions that work at the same time
Cycle = list[list[int]]  # (micro-batch, partition) pairs
CPUS = {count: [f"cpu:{j}" for j in range(count)] for count in (1, 2, 3, 4)}


# --- what a rank does ---


class Trouble(Exception):  # noqa: N818 (a name that no student raises by chance)
    """The error that a partition raises on purpose."""


def watched_pipe(context: Context, lesson: Any) -> tuple[Any, list[WatchedStage]]:
    """Return a student's Pipe with watched queues, and its stages, on the argument `devices`.

    With `reshape`, a stage returns its result, and three times its result beside it: (B, ...) -> (B, ..., 2).
    """
    arguments = context.arguments
    meet, slow, reshape = (arguments.get(name, False) for name in ("meet", "slow", "reshape"))
    watch = PipeWatch(context, arguments["cycles"] if meet else (), slow)

    def computation(j: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def compute(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x * (j + 2), x * 3 * (j + 2)], dim=-1) if reshape else x * (j + 2)

        return compute

    devices = [torch.device(name) for name in arguments["devices"]]
    stages = [WatchedStage(watch, j, computation(j)) for j in range(len(devices))]
    lesson._split_module = lambda modules: ([nn.Sequential(stage) for stage in stages], devices)
    pipe = lesson.Pipe(nn.Sequential(*stages), 1)
    watch_queues(pipe, watch)
    return pipe, stages


@in_rank(uses=[IN_RANK, watched_pipe], preload=["steps"], join=False)
def compute(context: Context, lesson: ModuleType, inputs: list[torch.Tensor]) -> object:
    """Call compute for each of `cycles`; return what the micro-batches hold then, and the gradients of their inputs."""
    pipe, _ = watched_pipe(context, lesson)
    given = [batch.clone().requires_grad_() for batch in inputs]
    batches, changed = list(given), False
    try:
        for pairs in context.arguments["cycles"]:
            context.event("cycle")
            schedule = [(i, j) for i, j in pairs]
            pipe.compute(batches, schedule)
            changed |= schedule != [(i, j) for i, j in pairs] or len(batches) != len(given)
    except NeverArrives:
        return {"waits_forever": True}
    tensors = [batch if isinstance(batch, torch.Tensor) else None for batch in batches]
    on_cpu = [None if tensor is None or tensor.is_meta else tensor for tensor in tensors]
    for last in on_cpu[: len(given)]:
        if last is not None and last.requires_grad:
            last.sum().backward()
    return {
        "changed": changed,
        "batches": [copy_of(last) for last in on_cpu],
        "kinds": ["Tensor" if isinstance(batch, torch.Tensor) else type(batch).__name__[:60] for batch in batches],
        "devices": ["" if tensor is None else str(tensor.device) for tensor in tensors],
        "gradients": [batch.grad for batch in given],
    }


@in_rank(uses=[IN_RANK, Trouble, watched_pipe], preload=["steps"], join=False)
def compute_with_trouble(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return what compute raises when the partition `trouble` raises, and how many threads outlive the pipe."""
    import gc
    import time
    import traceback

    arguments, before = context.arguments, set(threading.enumerate())
    pipe, stages = watched_pipe(context, lesson)
    stage = stages[arguments["trouble"]]
    error = stage.error = Trouble(arguments["words"])
    report = {"type": "nothing", "words": "", "same": False, "in_layer": False}
    try:
        pipe.compute(list(inputs), [(i, j) for i, j in arguments["cycles"][0]])
    except NeverArrives:
        return {"waits_forever": True}
    except BaseException as raised:  # what the student lets out is what is looked at
        if not stage.calls:
            raise  # a crash before the partition runs
        frames = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
        report = {"type": type(raised).__name__[:60], "words": str(raised)[:200], "same": raised is error}
        report["in_layer"] = "forward" in frames
    report["entered"] = stage.calls > 0
    error.__traceback__ = None  # it holds all frames, and they hold the pipe
    del pipe, stages, stage
    limit, left = time.monotonic() + arguments["patience"], {threading.current_thread()}
    while left and time.monotonic() < limit:
        gc.collect()
        left = set(threading.enumerate()) - before
        for thread in [*left][:1]:
            thread.join(0.05)
    return report | {"left": len(left)}


# --- what is judged ---


def drawn_batches(draw: np.random.Generator, count: int) -> np.ndarray:
    """Return micro-batches (count, B, D). The first number of each tells which one it is."""
    batches = draw.normal(size=(count, EXAMPLES, FEATURES))
    batches[:, :, 0] = np.arange(EXAMPLES)
    batches[:, 0, 0] = np.arange(count)
    return batches


def shuffled_cycle(draw: np.random.Generator, partitions: int = WORKERS) -> Cycle:
    """Return a cycle in which all partitions work, in any order: micro-batch n-1-j is in partition j."""
    return [[partitions - 1 - int(j), int(j)] for j in draw.permutation(partitions)]


def computed(grade: Grade, cycles: list[Cycle], devices: list[str], batches: np.ndarray, **options: Any) -> Result:
    """Run compute; raise the verdict if a call did not return."""
    result = shared.run_pipe(grade, compute, [[*batches]], cycles=cycles, devices=devices, **options)
    shared.must_end(grade, result, [pair for cycle in cycles for pair in cycle])
    return result


def check_results(grade: Grade, partitions: int, cycles: list[Cycle], **options: Any) -> None:
    """Check that each result replaces its micro-batch, all others are unchanged, and backward() reaches the inputs."""
    batches = drawn_batches(grade.draw, partitions)
    result = computed(grade, cycles, CPUS[partitions], batches, **options)
    value, watched = result.values[0], Watched(result.ranks[0].events)
    owned = "compute changed the list `schedule` or the length of `batches`: they belong to the caller"
    check(grade, "", value, {"changed": Expected(False, owned)})
    hints = [watched.late_binding(cycles[0])] if len(cycles) == 1 else []
    if watched.named("gave_up"):
        hints.append("Your code did not wait for a slow partition: call get() without a time-out")
    hint = "".join(f"{hint}. " for hint in hints if hint)
    where = f"{'cycle' if len(cycles) == 1 else 'cycles'} {[[(i, j) for i, j in cycle] for cycle in cycles]}: "
    for i in range(partitions):
        got = {"kind": value["kinds"][i], "value": value["batches"][i], "gradient": value["gradients"][i]}
        check(grade, where, got, expected_batch(i, batches, cycles, bool(options.get("reshape")), hint))


def expected_batch(i: int, batches: np.ndarray, cycles: list[Cycle], reshape: bool, hint: str) -> dict[str, Expected]:
    """Return what `batches[i]` must hold after all cycles, and the gradient that its sum leaves in micro-batch i.

    reshape: the partitions also change the shape; for one cycle only. hint: what else was noticed, before a message.
    """
    passed, x = [j for cycle in cycles for m, j in cycle if m == i], batches[i]
    factor = np.prod([float(j + 2) for j in passed])
    value, gradient = x * factor, np.full(x.shape, factor)
    not_reached = "backward() does not reach its micro-batch: store the result itself, without detach, .data or no_grad"
    name, called = f"batches[{i}]", f"the gradient of micro-batch {i}"
    if not passed:
        unchanged = Expected(x, f"micro-batch {i} is in no cycle, but was changed", name)
        return {"value": unchanged, "gradient": Expected(gradient, not_reached, called)}
    if reshape:
        value, gradient = np.stack([value, 3 * value], axis=-1), 4 * gradient
    j = passed[-1]
    mistakes = {f"micro-batch {i} is unchanged: store the result of partition {j} in batches[{i}]": x}
    if len(cycles) == 1:
        at_position = [tuple(pair) for pair in cycles[0]][i : i + 1]  # the pair whose place in the cycle is i
        right = f"expected that of partition {j} from micro-batch {i}"
        mistakes |= {
            f"batches[{i}] holds what partition {n} made from micro-batch {m}, {right}"
            + (", or is that its place in the cycle?" if (m, n) in at_position else ""): other * (n + 2)
            for m, other in enumerate(batches)
            for n in range(len(batches))  # as many partitions as micro-batches
            if (m, n) != (i, j)
        }
    mistakes = {f"{hint}{sentence}": left for sentence, left in mistakes.items()}
    message = (
        f"{name} holds something other than what partition {j} made from micro-batch {i}: store the result as it is"
    )
    kind = f"{name} holds a {{got}}, expected the tensor that partition {j} made from micro-batch {i}"
    return {
        "kind": Expected("Tensor", kind),
        "value": Expected(value, f"{hint}{message}", name, mistakes),
        "gradient": Expected(gradient, f"{name} has the right values, but {not_reached}", called),
    }


def check_same_time(grade: Grade) -> None:
    """Check that all partitions of a cycle work at the same time: each waits until all others are at work, too."""
    draw = np.random.default_rng([grade.seed, WORKERS])
    cycles = [[[first + i, j] for i, j in shuffled_cycle(draw)] for first in (0, WORKERS)]
    pairs = [(i, j) for cycle in cycles for i, j in cycle]
    batches = drawn_batches(draw, 2 * WORKERS)
    arguments: Fields = {"cycles": cycles, "devices": CPUS[WORKERS], "meet": True}
    result = shared.run_pipe(grade, compute, [[*batches]], **arguments)

    def why_alone(watched: Watched, micro_batch: int) -> str:
        """Say why the other partitions did not run while this one waited for them."""
        cycle = cycles[1] if micro_batch >= WORKERS else cycles[0]
        puts = [put["partition"] for put in watched.named("put")]
        names = [event.name for event in watched.events if event.name in ("put", "get")]
        puts_before_get = names.index("get") if "get" in names else len(names)
        if late_binding := watched.late_binding(cycle):
            return late_binding
        if puts_before_get < len(cycle):
            advice = "otherwise the partitions run one after another"
            return f"put all tasks of a clock cycle before you get the first result; {advice}"
        if len(set(puts)) == 1:
            return f"all tasks went into in_queues[{puts[0]}]"
        return "the partitions must run at the same time, and none may wait for another's result"

    shared.must_meet(grade, result, why_alone)
    shared.must_end(grade, result, pairs)
    watched = Watched(result.ranks[0].events)
    if idle := sorted({j for _, j in pairs} - {j for _, j in watched.places}):
        advice = "put the task into its in-queue"
        grade.fail(f"partition {idle[0]} has a task in the cycle {cycles[0]} but never ran: {advice}")
    message = "get each result from its own queue and store it where its micro-batch was"
    expected = {i: Expected((j + 2) * batches[i], message, f"batches[{i}]") for i, j in pairs}
    got = dict(enumerate(result.values[0]["batches"]))
    check(grade, "all partitions of a cycle ran, but it does not hold what its partition made: ", got, expected)
    shared.must_have_met(grade, result, cycles)


def check_devices(grade: Grade, devices: list[str], cycle: Cycle) -> None:
    """Check that every partition gets its micro-batch on its own device, and that its result stays there."""
    result = computed(grade, [cycle], devices, drawn_batches(grade.draw, len(devices)))
    value, got, expected = result.values[0], Fields(), dict[str, Expected]()
    types, watched = [device.split(":")[0] for device in devices], Watched(result.ranks[0].events)
    for enter in watched.enters:
        got[f"input {enter['place'][1]}"] = str(enter["device"]).split(":")[0]
    advice = "move it first, and pass on the tensor that .to() returns: the old one stays where it was"
    for _, j in cycle:
        never = f"partition {j} has a task in the cycle {cycle} but never ran: put the task into its in-queue"
        never = watched.late_binding(cycle) or never
        message = f"partition {j} is on device {devices[j]} but received a micro-batch on {{got}}"
        expected[f"input {j}"] = Expected(types[j], f"{message}: {advice}", mistakes={never: None})
    for i, j in cycle:
        got |= {f"kind {j}": value["kinds"][i], f"output {j}": value["devices"][i].split(":")[0]}
        kind = f"batches[{i}] holds a {{got}}, expected the tensor that partition {j} made"
        message = f"the result of partition {j} was moved from its device, {devices[j]}, to {{got}}"
        advice = "leave it there; it moves when the next partition needs it"
        expected |= {f"kind {j}": Expected("Tensor", kind), f"output {j}": Expected(types[j], f"{message}: {advice}")}
    check(grade, "", got, expected)


def check_error(grade: Grade, trouble: int, place: int) -> None:
    """Check that compute raises the exception of partition `trouble` itself, and that no thread is left.

    `place`: the place of this partition in the cycle.
    """
    cycle, words = shuffled_cycle(grade.draw), f"drawn words {int(grade.draw.integers(10**6))}"
    current = [j for _, j in cycle].index(trouble)
    cycle[current], cycle[place] = cycle[place], cycle[current]
    inputs = [[*drawn_batches(grade.draw, WORKERS)]]
    arguments: Fields = {"cycles": [cycle], "devices": CPUS[WORKERS], "trouble": trouble, "words": words}
    result = shared.run_pipe(grade, compute_with_trouble, inputs, **arguments)
    shared.must_end(grade, result, cycle)
    got = result.values[0]
    never = f"partition {trouble} is in the cycle, but never ran: does every task run its own partition?"
    never = Watched(result.ranks[0].events).late_binding(cycle) or never
    caller = {
        "compute ended the program: raise the exception, the caller decides what to do": "SystemExit",
        "compute returned as if nothing had happened: look at the first half of each result": "nothing",
    }
    advice = "re-raise the original exception object, exc_info[1]"
    if "unpack" in str(got["words"]):
        advice = f"look at `success` before you unpack, since a failed task comes with exc_info; {advice}"
    left = "{got} threads are still running after the pipe was deleted: does your code keep a queue or start threads?"
    start = f"partition {trouble} raised Trouble({words!r}), but "
    check(grade, "", got, {"entered": Expected(True, never)})
    expected = {
        "type": Expected("Trouble", f"compute raised {{got}}: {short(got['words'], 100)}: {advice}", mistakes=caller),
        "same": Expected(True, f"compute raised a copy of it: {advice}"),
        "in_layer": Expected(True, "its traceback no longer shows the layer: raise it with its original traceback"),
        "left": Expected(0, left),
    }
    check(grade, start, got, expected)


# --- the graded tests ---


@graded("p.4")
def test_compute_puts_each_result_where_its_micro_batch_was(grade: Grade) -> None:
    check_results(grade, 4, [[[2, 3], [0, 1], [3, 0]]])
    for partitions in (3, 2, 4):
        check_results(grade, partitions, [shuffled_cycle(grade.draw, partitions)[:-1]])
    check_results(grade, 1, [[[0, 0]]])
    check_results(grade, 3, [[[0, 0]], [[0, 1], [1, 0]], [[0, 2], [1, 1], [2, 0]]])  # one pipe, several calls
    check_results(grade, 3, [shuffled_cycle(grade.draw)], reshape=True)
    check_results(grade, 3, [shuffled_cycle(grade.draw)], slow=True)
    check_same_time(grade)


@graded("p.4", weight=2)
def test_all_partitions_of_a_clock_cycle_work_at_the_same_time(grade: Grade) -> None:
    check_same_time(grade)


@graded("p.4")
def test_each_partition_works_in_its_own_worker_and_on_its_device(grade: Grade) -> None:
    check_devices(grade, ["cpu:0", "meta"], [[0, 1]])  # the last device
    check_devices(grade, ["meta", "cpu:0"], [[0, 0]])  # not the last
    for cycle in ([[0, 1], [1, 0], [2, 2]], [[2, 2], [0, 0], [1, 1]]):  # one among several
        check_devices(grade, ["cpu:0", "meta", "cpu:2"], cycle)
    check_same_time(grade)


@graded("p.4")
def test_what_a_worker_raises_arrives_as_it_was_raised_and_all_threads_end(grade: Grade) -> None:
    for trouble, place in ((0, 1), (2, 2), (1, 0)):  # in the middle of the cycle, last, and first
        check_error(grade, trouble, place)
    check_same_time(grade)


@graded("p.4", absence=True)
def test_the_pipe_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed("pipeline/pipe.py")
