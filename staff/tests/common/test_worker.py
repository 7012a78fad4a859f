"""Our own tests of pipeline/worker.py: what goes in, what comes out, and that threads and memory end."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from common.paths import ROOT
from pipeline.pipe import Pipe
from pipeline.worker import Task, create_workers
from staff.tests.pipeline.pipeline_stages import DEADLINE, labelled, mlp, no_worker_is_left, worker_threads

pytestmark = pytest.mark.medium
CPU = torch.device("cpu")

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def computed(task, out_queue, in_queue):
    in_queue.put(task)
    return out_queue.get(timeout=DEADLINE)


def test_a_task_is_computed_in_the_worker_of_its_partition_with_the_modes_of_its_creator():
    in_queues, out_queues = create_workers([torch.device("cpu:0"), torch.device("cpu:1")])
    before = torch.get_num_threads()

    def compute():
        dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled(), dtype

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        task = Task(compute)
    success, (done, result) = computed(task, out_queues[1], in_queues[1])

    assert success and done is task
    assert result == ("partition 1 (cpu:1)", max(1, before // 2), False, torch.bfloat16)
    assert torch.get_num_threads() == before


def test_an_exception_comes_back_as_it_was_raised_and_the_worker_goes_on():
    (in_queue,), (out_queue,) = create_workers([CPU])
    error = KeyError("mine")

    def compute():
        raise error

    success, exc_info = computed(Task(compute), out_queue, in_queue)

    assert not success
    assert exc_info[:2] == (KeyError, error) and exc_info[2].tb_next is not None
    assert computed(Task(lambda: 7), out_queue, in_queue)[1][1] == 7


@pytest.mark.parametrize("held", ["nothing", "a result", "an exception"])
def test_workers_end_with_their_pipe_even_if_a_result_was_not_collected(held):
    piped = Pipe(labelled(*mlp()), 2)
    threads = worker_threads()
    if held != "nothing":
        x = torch.randn(4, 7 if held == "an exception" else 6)  # 7 features fit no first layer
        piped.in_queues[0].put(Task(lambda pipe=piped: pipe.partitions[0](x)))  # type: ignore[misc]
        while piped.out_queues[0].empty():
            pass

    del piped
    gc.collect()

    for thread in threads:
        thread.join(DEADLINE)
    assert len(threads) == 3 and not any(thread.is_alive() for thread in threads)


def test_the_interpreter_waits_for_a_worker_that_computes_and_ends_those_that_wait():
    program = (
        "import torch; from pipeline.worker import Task, create_workers\n"
        "queues = create_workers([torch.device('cpu:0'), torch.device('cpu:1')])\n"
        "def work():\n"
        "    for _ in range(30): torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "    print('finished')\n"
        "queues[0][0].put(Task(work))"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
