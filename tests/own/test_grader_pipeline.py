"""The pipeline's graders themselves: what stands for a student's code, and that no verdict depends on timing."""

import inspect
import itertools
from queue import SimpleQueue

import pytest
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from common.schedule import _clock_cycles
from grader.verdicts import Deadlocked, TimedOut, Wrong
from pipeline.pipe import Pipe
from pipeline.worker import InQueue, Task
from tests.own.inline_student import view_with
from tests.pipeline import pipe_in_rank as watched
from tests.pipeline import pipe_shared, test_compute, test_pipe, test_schedule
from tests.pipeline.test_forward import StandIns
from tests.task2b.partitions_in_rank import Data
from tests.training.loop_in_rank import Classifier, LanguageModel

STAND_INS = {
    "_clock_cycles": (StandIns.clock_cycles, _clock_cycles),
    "Pipe.compute": (StandIns.compute, Pipe.compute),
    "Task.compute": (watched.WatchedTask.compute, Task.compute),
    "InQueue.put": (watched.WatchedInQueue.put, InQueue.put),
    "SimpleQueue.get": (watched.WatchedOutQueue.get, SimpleQueue.get),
    "SimpleQueue.get_nowait": (watched.WatchedOutQueue.get_nowait, SimpleQueue.get_nowait),
    "SimpleQueue.empty": (watched.WatchedOutQueue.empty, SimpleQueue.empty),
}
TESTS_OF_COMPUTE = (
    test_compute.test_compute_puts_each_result_where_its_micro_batch_was,
    test_compute.test_all_partitions_of_a_clock_cycle_work_at_the_same_time,
    test_compute.test_each_partition_works_in_its_own_worker_and_on_its_device,
    test_compute.test_what_a_worker_raises_arrives_as_it_was_raised_and_all_threads_end,
)
# Queues the tasks of partition 0 ahead of time, and hands on whatever is ready: no clock cycle waits for another.
AHEAD = """
batches = list(x.split(self.split_size))
for batch in batches:
    self.in_queues[0].put(Task(partial(self.partitions[0], batch)))
for i in range(len(batches)):
    for j in range(len(self.partitions)):
        success, result = self.out_queues[j].get()
        if not success:
            raise result[1]
        batches[i] = result[1]
        if j + 1 < len(self.partitions):
            self.in_queues[j + 1].put(Task(partial(self.partitions[j + 1], batches[i])))
return torch.cat(batches)
"""


def parameters(function):
    """Name and default of each, without self."""
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_can_be_called_as_what_it_replaces(name):
    stand_in, original = STAND_INS[name]

    assert [*parameters(stand_in).items()] == [*parameters(original).items()]


@pytest.mark.parametrize(("stand_in", "original"), [
    (Classifier.forward, BertForSequenceClassification.forward), (LanguageModel.forward, GPT2LMHeadModel.forward),
    (Data.__getitem__, TensorDataset.__getitem__), (Data.__len__, TensorDataset.__len__),
])  # fmt: skip
def test_a_small_model_or_dataset_takes_nothing_that_the_real_one_does_not(stand_in, original):
    assert parameters(stand_in).items() <= parameters(original).items()


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_pipe_that_queues_tasks_ahead_of_time_works_at_the_same_time_in_every_run(tmp_path):
    view = view_with(tmp_path, "pipeline/pipe.py", "p.3", AHEAD)

    for _ in range(4):
        test_pipe.check_same_time(view)
        view.session.runs.clear()


@pytest.mark.medium
def test_a_call_that_can_never_return_is_a_deadlock_long_before_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(pipe_shared, "DEADLINE", 3600.0)
    view = view_with(tmp_path, "pipeline/pipe.py", "p.4", "for i, j in schedule:\n    self.out_queues[j].get()")

    for check in TESTS_OF_COMPUTE:
        with pytest.raises(Deadlocked, match="before it has put any task"):
            check(view)


@pytest.mark.medium
def test_only_one_run_waits_for_its_deadline_when_compute_never_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(pipe_shared, "DEADLINE", 1.0)
    view = view_with(tmp_path, "pipeline/pipe.py", "p.4", "while True:\n    pass")

    for check in (*TESTS_OF_COMPUTE, test_pipe.check_same_time, test_pipe.check_again):
        with pytest.raises(TimedOut, match="still running"):
            check(view)

    assert [result.outcome for result in view.session.runs.values()].count("deadline") == 1


POLLS = """
import queue
for micro_batch, j in schedule:
    self.in_queues[j].put(Task(partial(self.partitions[j], batches[micro_batch])))
    while True:
        try:
            success, result = self.out_queues[j].get_nowait()
            break
        except queue.Empty:
            pass
    batches[micro_batch] = result[1]
"""


@pytest.mark.medium
def test_partitions_that_work_in_turn_are_found_though_the_caller_polls(tmp_path):
    with pytest.raises(Wrong, match="put all tasks of a clock cycle before you get the first result"):
        test_compute.check_same_time(view_with(tmp_path, "pipeline/pipe.py", "p.4", POLLS))


# --- what a rank sends is small ---------------------------------------------------------------------------------------


class Endless:
    """A clock cycle that says it has one pair, and never ends."""

    def __len__(self):
        return 1

    def __iter__(self):
        return itertools.repeat((0, 0))


@pytest.mark.parametrize("schedule", [
    itertools.repeat(Endless()), [[(0, 0)] * 50] * 1000, type("Long" * 225_000, (nn.Module,), {})(),
], ids=["endless", "many pairs", "a long class name"])  # fmt: skip
def test_of_any_schedule_little_is_kept(schedule):
    assert len(str(test_schedule.cycles_of(schedule, 35, 106))) < 2000
