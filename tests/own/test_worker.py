"""Our own tests of pipeline/worker.py: what goes in, what comes out, and that threads and memory end."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from common.paths import ROOT
from pipeline.pipe import Pipe
from pipeline.worker import Task, create_workers
from tests.own.pipeline_stages import DEADLINE, labelled, mlp, no_worker_is_left, worker_threads

pytestmark = pytest.mark.medium

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def test_a_task_is_computed_in_the_worker_of_its_partition_and_comes_back_with_its_result():
    in_queues, out_queues = create_workers([torch.device("cpu:0"), torch.device("cpu:1")])
    task = Task(lambda: threading.current_thread().name)

    in_queues[1].put(task)

    success, (done, name) = out_queues[1].get(timeout=DEADLINE)
    assert success
    assert done is task
    assert name == "partition 1 (cpu:1)"


def test_an_exception_comes_back_as_it_was_raised_and_the_worker_goes_on():
    in_queues, out_queues = create_workers([torch.device("cpu")])
    error = KeyError("mine")

    def compute():
        raise error

    in_queues[0].put(Task(compute))
    in_queues[0].put(Task(lambda: 7))

    success, exc_info = out_queues[0].get(timeout=DEADLINE)
    assert not success
    assert exc_info[:2] == (KeyError, error)
    assert exc_info[2].tb_next is not None
    assert out_queues[0].get(timeout=DEADLINE)[1][1] == 7


def test_a_task_takes_grad_mode_and_autocast_along_to_the_worker():
    in_queues, out_queues = create_workers([torch.device("cpu")])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        task = Task(lambda: (torch.is_grad_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))

    in_queues[0].put(task)

    assert out_queues[0].get(timeout=DEADLINE)[1][1] == (False, torch.bfloat16)


def test_a_worker_ends_when_nobody_can_give_it_a_task_any_more():
    in_queues, _ = create_workers([torch.device("cpu")] * 3)
    threads = worker_threads()

    del in_queues
    gc.collect()

    for thread in threads:
        thread.join(DEADLINE)
    assert len(threads) == 3
    assert not any(thread.is_alive() for thread in threads)


def test_an_idle_worker_keeps_no_task_alive():
    in_queues, out_queues = create_workers([torch.device("cpu")])
    task = Task(lambda: None)
    gone = weakref.ref(task)

    in_queues[0].put(task)
    out_queues[0].get(timeout=DEADLINE)
    in_queues[0].put(Task(lambda: None))  # when this one is done, the worker has let go of the first
    out_queues[0].get(timeout=DEADLINE)
    del task

    assert gone() is None


def test_creating_workers_leaves_the_callers_number_of_threads():
    before = torch.get_num_threads()

    in_queues, out_queues = create_workers([torch.device("cpu")] * 2)
    in_queues[0].put(Task(torch.get_num_threads))

    assert out_queues[0].get(timeout=DEADLINE)[1][1] == max(1, before // 2)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("fails", [False, True])
def test_the_workers_end_with_the_pipe_though_results_were_not_collected(fails):
    piped = Pipe(labelled(*mlp()), 2)
    x = torch.randn(4, 7 if fails else 6)  # 7 features fit no first layer: the result is an exception
    threads = worker_threads()
    piped.in_queues[0].put(Task(lambda pipe=piped: pipe.partitions[0](x)))

    while piped.out_queues[0].empty():
        pass
    del piped
    gc.collect()

    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)


def test_a_task_lets_go_of_its_function_once_it_is_computed():
    def compute():
        return 7

    task, gone = Task(compute), weakref.ref(compute)
    del compute

    assert task.compute() == 7
    assert gone() is None


def test_an_output_that_is_dropped_takes_its_graph_along():
    piped = Pipe(labelled(*mlp()), 2)
    y = piped(torch.randn(4, 6))
    run = weakref.ref(y.grad_fn.run)

    gc.disable()
    del y
    gone = run() is None
    gc.enable()

    assert gone


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
