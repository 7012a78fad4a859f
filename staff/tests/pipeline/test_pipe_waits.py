"""A pipeline that hangs: what is said about the main thread and about each worker, and that the run ends."""

import re
import sys

import pytest

from staff.tests.common.stopping_ranks import hang
from staff.tests.pipeline.pipeline_stages import no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time of threads")


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
