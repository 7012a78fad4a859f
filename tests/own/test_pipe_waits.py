"""A pipeline that hangs: what is said about the main thread and about each worker, and that the run ends."""

import contextlib
import re
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.workers.frames import frame_of, frames_of
from common.workers.rows import Row, State
from pipeline.pipe import Pipe
from pipeline.who_waits import explain
from pipeline.worker import Task, awaited_queue, running_workers, waits_for_task
from tests.own.pipeline_stages import DEADLINE, labelled, mlp, no_worker_is_left
from tests.own.stopping_ranks import hang

__all__ = ["no_worker_is_left"]  # a fixture for every test here
ROW = Row(0, State.IDLE, place="elsewhere.py:1", call="all_reduce #1 (3)")
HERE = r"own/test_pipe_waits\.py:\d+"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time of threads")


def until(is_so):
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def number_of_waiting_workers():
    return sum(waits_for_task(frame_of(thread)) for thread in running_workers())


@contextlib.contextmanager
def caller(work):
    """A thread that calls the pipe, as the main thread of a run does; the block ends when it does."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(DEADLINE)
    assert not thread.is_alive()


class Wait(nn.Module):
    """A layer whose forward or backward waits until a test lets it go on."""

    def __init__(self, phase):
        super().__init__()
        self.phase, self.reached, self.may_go_on = phase, threading.Event(), threading.Event()

    def forward(self, x):
        y = x * 1
        if self.phase == "forward":
            self.stay()
        else:
            y.register_hook(lambda _: self.stay())
        return y

    def stay(self):
        self.reached.set()
        self.may_go_on.wait(DEADLINE)


@pytest.mark.parametrize(("put", "line", "reason"), [
    (0, "partition 0 (cpu:0)  waits for a task", ": a result is taken before its task was put, or twice"),
    (
        1, "partition 0 (cpu:0)  waits for a task; 1 result in its out-queue",
        ", but there is 1 result in the out-queue of partition 0: take each result from the out-queue of its partition",
    ),
], ids=["nothing was put", "one lies in another queue"])  # fmt: skip
def test_a_result_that_is_awaited_in_vain_is_named(put, line, reason):
    piped = Pipe(labelled(*mlp()), 2)
    for _ in range(put):
        piped.in_queues[0].put(Task(lambda: torch.ones(1)))

    with caller(lambda: piped.out_queues[1].get()) as main:
        until(lambda: piped.out_queues[0].qsize() == put and number_of_waiting_workers() == 3)
        until(lambda: awaited_queue(frame_of(main)) is piped.out_queues[1])
        explained = explain(ROW, main)
        piped.out_queues[1].put(None)

    assert explained.threads == [line, *(f"partition {j} (cpu:{j})  waits for a task" for j in (1, 2))]
    assert explained.call == "for a result of partition 1"
    assert re.fullmatch(HERE, explained.place)
    main_waits = f"the main thread waits for a result of partition 1 at {explained.place}"
    assert explained.conclusion == f"every worker waits for a task, and {main_waits}{reason}"


@linux
def test_a_layer_that_does_not_return_is_named_with_its_line():
    layer = Wait("forward")
    piped = Pipe(labelled(nn.Identity(), layer), 2)

    with caller(lambda: piped(torch.ones(2, 3))) as main:
        until(lambda: layer.reached.is_set() and awaited_queue(frame_of(main)) is piped.out_queues[1])
        explained = explain(ROW, main)
        layer.may_go_on.set()

    assert explained.threads[0] == "partition 0 (cpu:0)  waits for a task"
    assert re.fullmatch(rf"partition 1 \(cpu:1\)  is at {HERE}", explained.threads[1])
    assert re.fullmatch(
        rf"the main thread waits for a result of partition 1 at pipeline/pipe\.py:\d+; partition 1 is at {HERE}",
        explained.conclusion,
    )


@linux
def test_in_the_backward_pass_the_worker_for_whose_gradient_another_one_waits_is_named():
    layer = Wait("backward")
    piped = Pipe(labelled(nn.Linear(3, 3), layer), 2)

    with caller(lambda: piped(torch.ones(2, 3)).sum().backward()) as main:
        until(lambda: layer.reached.is_set() and awaited_queue(frame_of(main)) is not None)
        until(lambda: number_of_waiting_workers() == 0)  # partition 0 has its task
        first = next(iter(running_workers()))
        until(lambda: any(function == "acquire" for _, _, function in frames_of(frame_of(first))))
        explained = explain(ROW, main)
        layer.may_go_on.set()

    assert explained.threads[0] == "partition 0 (cpu:0)  waits for the gradient of a later partition"
    assert re.search(rf"; partition 1 is at {HERE}$", explained.conclusion)


def test_nothing_is_concluded_while_the_main_thread_is_elsewhere():
    piped, end = Pipe(labelled(*mlp()), 2), threading.Event()

    with caller(lambda: end.wait(DEADLINE)) as main:
        until(lambda: number_of_waiting_workers() == len(piped.partitions))
        explained = explain(ROW, main)
        end.set()

    assert replace(explained, threads=()) == ROW


TAKES_FIRST = """
from pipeline.pipe import Pipe


def compute(self, batches, schedule):
    for micro_batch, j in schedule:
        success, result = self.out_queues[j].get()


Pipe.compute = compute
"""
SMALL = ("--max_steps", 3, "--batch_size", 8, "--model_max_length", 16)


@pytest.mark.medium
def test_a_run_whose_pipe_hangs_ends_with_code_3_and_a_line_per_partition(tmp_path):
    flags = ("--model_parallel_mode", "pipeline_parallel", *SMALL)

    stopped = hang(tmp_path, "pipeline/run_gpt2.py", TAKES_FIRST, *flags)

    (log,) = stopped.logs
    assert stopped.codes == [3], log
    assert re.search(
        r"^  rank 0  waits  for a result of partition 0, .*/hangs\.py:\d+, iteration 1, forward$", log, re.M
    )
    for j in range(2):
        assert f"\n     partition {j} (cpu:{j})  waits for a task\n" in log
    assert stopped.conclusion.endswith(": a result is taken before its task was put, or twice")
    assert log.rstrip().endswith(stopped.conclusion)


LAST_STAGE_HANGS = """
import threading
from pipeline.distributed import PipelinedProcesses

step, steps = PipelinedProcesses.forward_backward, []


def forward_backward(self, tokens):
    steps.append(1)
    if self.rank == 1 and len(steps) == 2:
        threading.Event().wait()
    return step(self, tokens)


PipelinedProcesses.forward_backward = forward_backward
"""


@linux
@pytest.mark.medium
def test_over_processes_the_stage_that_waits_in_the_schedule_is_named_and_the_one_that_hangs(tmp_path):
    stopped = hang(tmp_path, "pipeline/run_gpt2.py", LAST_STAGE_HANGS, "--schedule", "gpipe", *SMALL, workers=2)

    assert stopped.codes == [3, 3], stopped.logs[0]
    assert re.search(r": rank 0 waits in \w+ at .*; rank 1 is idle at .*hangs\.py:\d+$", stopped.conclusion)
