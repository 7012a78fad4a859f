"""The pipeline's graders themselves: no verdict depends on timing, and a call that never returns costs one deadline."""

import pytest

from grader.verdicts import Deadlocked, TimedOut, Wrong
from tests.own.inline_student import view_with
from tests.pipeline import test_compute, test_pipe

pytestmark = pytest.mark.medium

TESTS_OF_COMPUTE = [test for name, test in vars(test_compute).items() if name.startswith("test_")][:4]
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


def test_a_pipe_that_queues_tasks_ahead_of_time_works_at_the_same_time_in_every_run(tmp_path):
    view = view_with(tmp_path, "pipeline/pipe.py", "p.3", AHEAD)

    for _ in range(4):
        test_pipe.check_same_time(view)
        view.session.runs.clear()


def test_a_call_that_can_never_return_is_a_deadlock_long_before_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_SLOWNESS", "100")  # the deadline is half an hour
    view = view_with(tmp_path, "pipeline/pipe.py", "p.4", "for i, j in schedule:\n    self.out_queues[j].get()")

    for test in TESTS_OF_COMPUTE:
        with pytest.raises(Deadlocked, match="before it has put any task"):
            test(view)


def test_only_one_run_waits_for_its_deadline_when_compute_never_returns(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_SLOWNESS", "0.05")
    view = view_with(tmp_path, "pipeline/pipe.py", "p.4", "while True:\n    pass")

    for check in (*TESTS_OF_COMPUTE, test_pipe.check_same_time, test_pipe.check_again):
        with pytest.raises(TimedOut, match="still running"):
            check(view)

    assert [result.outcome for result in view.session.runs.values()].count("deadline") == 1


def test_partitions_that_work_in_turn_are_found_though_the_caller_polls(tmp_path):
    with pytest.raises(Wrong, match="put all tasks of a clock cycle before you get the first result"):
        test_compute.check_same_time(view_with(tmp_path, "pipeline/pipe.py", "p.4", POLLS))
