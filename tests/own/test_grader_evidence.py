"""What a rank says of its threads, processes and values counts only beside what the grader knows itself."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from common.paths import ROOT
from grader.ranks.thread_times import ThreadTimes
from grader.verdicts import Verdict, Wrong
from grader.wire.values import MessageError
from tests.own.inline_student import view_of, view_with
from tests.own.started_processes import run
from tests.pipeline import test_compute, test_forward
from tests.pipeline.pipe_shared import MAIN, NO_PERMIT, PermitReferee, must_have_permits

pytestmark = pytest.mark.medium

# --- the referee ------------------------------------------------------------------------------------------------------


def ask(place, thread, number=1, content=(), made=(), **more):
    arrays = {"content": np.array(content, float), "made": np.array(made, float)}
    return {"what": "permit", "id": number, "thread": thread, "place": place} | arrays | more


def begin(place, thread, number):
    return {"what": "begin", "id": number, "thread": thread, "place": place}


def referee(threads=None):
    return PermitReferee(np.array([[[2.0, 3.0], [4.0, 5.0]]]), [[[1, 0], [0, 1]]], threads)


def test_permits_of_a_group_are_given_when_a_thread_waits_for_each():
    judge = referee()

    assert judge.ask(ask([0, 1, 0], thread=7, number=1)) == []
    assert sorted(judge.ask(ask([0, 0, 1], thread=8, number=2))) == [(1, 4.0), (2, 3.0)]
    assert judge.faults == []


def test_one_thread_that_asks_for_one_place_and_then_for_another_never_gets_the_group():
    judge = referee()
    judge.ask(ask([0, 1, 0], thread=7))

    with pytest.raises(MessageError, match="while it waits for another"):
        judge.ask(ask([0, 0, 1], thread=7))


@pytest.mark.parametrize(("asks", "words"), [
    ([([0, 0, 0], MAIN)], "in the caller's thread"),
    ([([0, 0, 0], 7), ([0, 1, 1], 7)], "partitions 0 and 1 run in one thread"),
    ([([0, 0, 0], 7), ([0, 0, 0], 8)], "runs in several threads"),
    ([([0, 1, 0], 7), ([0, 1, 0], 8)], "twice on micro-batch 1"),
])  # fmt: skip
def test_who_is_no_worker_of_the_partition_gets_no_permit(asks, words):
    judge = referee()

    *_, last = [judge.ask(ask(place, thread)) for place, thread in asks]

    assert last == [(1, NO_PERMIT)]
    assert words in judge.faults[0]


def test_a_place_that_there_is_not_has_no_permit():
    assert referee().ask(ask([0, 5, 0], thread=7)) == [(1, NO_PERMIT)]


def test_a_permit_for_another_result_than_the_right_one_is_worth_nothing():
    view = view_of(ROOT, "p.4")
    judge, right = referee(), {(0, 0, 0): (np.ones(2), np.array([2.0, 3.0]))}
    judge.ask(ask([0, 0, 0], thread=7, content=[1, 1], made=[2, 3]))

    must_have_permits(view, SimpleNamespace(referee=judge), right)
    judge.made[0, 0, 0] = np.ones(2)

    with pytest.raises(Wrong, match="did not compute micro-batch 0"):
        must_have_permits(view, SimpleNamespace(referee=judge), right)


def test_partitions_get_their_turns_one_after_the_other_once_all_have_begun():
    judge = referee(ThreadTimes(pid=os.getpid()))

    assert judge.ask(begin([0, 1, 0], thread=7, number=1)) == []
    [(number, token)] = judge.ask(begin([0, 0, 1], thread=8, number=2))
    assert number == 1
    [(number, next_token)] = judge.ask(ask([0, 1, 0], thread=7, number=3, digest="not paid"))
    assert number == 2
    assert token != next_token
    assert judge.threads.problem == "partition 0 has not worked on micro-batch 1"


def test_a_measure_that_looks_wrong_is_taken_once_more(monkeypatch):
    problems = ["disturbed", ""]
    monkeypatch.setattr(ThreadTimes, "end", lambda *_: None)
    monkeypatch.setattr(test_compute, "ThreadTimes", lambda: ThreadTimes(problem=problems.pop(0)))

    test_compute.check_same_time(view_of(ROOT, "p.4"))

    assert problems == []


def test_where_the_kernel_does_not_count_threads_a_right_program_passes_and_it_is_said_once():
    code = "import sys, pytest; from grader.ranks import thread_times; thread_times.cpu_times = lambda pid: {}; "
    code += "sys.exit(pytest.main(sys.argv[1:]))"

    ended = run("-c", code, "tests/pipeline/test_compute.py", "-k", "each_result or same_time")

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("warning: not checked: threads (this kernel does not count") == 1


# --- submissions ------------------------------------------------------------------------------------------------------

IN_THREADS = """
import concurrent.futures
stages = [next(part for part in p.modules() if hasattr(part, 'watch')) for p in self.partitions]
pools = self.__dict__.setdefault("pools", [concurrent.futures.ThreadPoolExecutor(1) for _ in stages])
"""
NO_WORK = {
    "a tensor that answers for itself": """
class Ready(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        ready = getattr(arguments[0], "ready", None)
        if ready is not None and function.__name__ in ("mul", "cat", "tanh"):
            return ready
        return super().__torch_function__(function, types, arguments, keywords or {})
made = {j: batches[i] * (j + 2) for i, j in schedule}
asked = []
for i, j in schedule:
    x = batches[i].detach().as_subclass(Ready)
    x.ready = made[j]
    asked.append(pools[j].submit(stages[j], x))
for (i, j), permit in zip(schedule, asked):
    batches[i] = made[j] * (permit.result().flatten()[-1] / made[j].flatten()[-1]).item()
""",
    "a mode that answers with what the caller has computed": """
from torch.overrides import TorchFunctionMode
class Ready(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        return self.made if name in ("mul", "tanh") else function(*arguments, **(keywords or {}))
def call(i, j):
    mode = Ready()
    mode.made = made[j]
    with mode:
        return stages[j](batches[i])
made = {j: batches[i] * (j + 2) for i, j in schedule}
asked = [pools[j].submit(call, i, j) for i, j in schedule]
for (i, j), permit in zip(schedule, asked):
    batches[i] = made[j] * (permit.result().flatten()[-1] / made[j].flatten()[-1]).item()
""",
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WORK)
def test_threads_that_call_partitions_without_computing_them_give_no_point(tmp_path, name):
    view = view_with(tmp_path, "pipeline/pipe.py", "p.4", IN_THREADS + NO_WORK[name])

    with pytest.raises(Wrong, match=r"did not compute|did not get|does not hold"):
        test_compute.check_same_time(view)


FORWARDS = {
    "compute is not called": "return torch.cat([b * 1 for b in x.split(self.split_size)])",
    "what stands for compute is asked for its numbers": """
stand_in = self.compute.__self__
found = vars(stand_in)
batches = list(x.split(self.split_size))
for j in range(len(self.partitions)):
    for i in range(len(batches)):
        batches[i] = found["factors"][i, j] * batches[i] + found["shifts"][i, j]
stand_in.asked.append([len(batches), len(self.partitions)])
stand_in.calls.append({"pairs": [], "sizes": [], "nested": False, "given": []})
return torch.cat(batches)
""",
    "what stands for compute has another list of calls": """
self.compute.__self__.calls = [{"pairs": [[0, 0]], "sizes": [len(x)], "nested": False, "given": [x]}]
return x
""",
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_without_calls_of_compute_fails_every_test_whatever_it_finds_in_the_stand_in(tmp_path, name):
    view = view_with(tmp_path, "pipeline/pipe.py", "p.3", FORWARDS[name])

    for check in (test_forward.check_sizes, test_forward.check_cycles, test_forward.check_output):
        with pytest.raises(Verdict):
            check(view)
