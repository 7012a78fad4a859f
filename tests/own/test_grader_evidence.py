"""Evidence: what a rank says of its threads, processes and values counts only beside what the grader knows itself."""

import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from common.paths import ROOT
from course.table import load_course
from grader.grading import Grade, Session
from grader.ranks.thread_times import ThreadTimes, cpu_times
from grader.verdicts import Verdict, Wrong
from grader.wire.values import MessageError
from tests.own.inline_student import player
from tests.pipeline import test_compute, test_forward, test_gpt2
from tests.pipeline.pipe_shared import MAIN, NO_PERMIT, PermitReferee, must_have_permits
from tests.start import test_start
from tests.task2b import test_loaders as loaders

pytestmark = pytest.mark.medium

COURSE = load_course()
STAGES = """
stages = [next(part for part in p.modules() if hasattr(part, 'watch')) for p in self.partitions]
def real(j, x):
    return x * (j + 2) if stages[j].layer is None else stages[j].layer.computes()(x)
"""


IN_WORKERS = """
for i, j in schedule:
    self.in_queues[j].put(Task(partial(self.partitions[j], batches[i].to(self.devices[j]))))
for i, j in schedule:
    success, result = self.out_queues[j].get()
    if not success:
        raise result[1].with_traceback(result[2])
    batches[i] = result[1]
"""


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 1)


def test_a_spied_function_and_a_probe_still_tell_events(play):
    source = """
        def go(context):
            context.spy(torch, "ones", "made")
            torch.ones(2)
    """

    result = play(source)

    assert [event.name for event in result.ranks[0].events] == ["made"]


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


def test_a_permit_for_another_result_than_the_right_one_is_worth_nothing(grade):
    view = grade("pipeline/pipe.py", "p.4", "pass")
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


def test_a_measure_that_looks_wrong_is_taken_once_more(grade, monkeypatch):
    view, problems = grade("pipeline/pipe.py", "p.4", IN_WORKERS), ["disturbed", ""]
    monkeypatch.setattr(ThreadTimes, "end", lambda *_: None)
    monkeypatch.setattr(test_compute, "ThreadTimes", lambda: ThreadTimes(problem=problems.pop(0)))

    test_compute.check_same_time(view)

    assert problems == []


# --- submissions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def grade(tmp_path):
    """A function: the graders' view of a file with another body for a region."""

    def make(file, region, body):
        for folder in ("common", "pipeline", "task2b_allreduce"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        path = tmp_path / file
        before, rest = path.read_text().split(f"# BEGIN SOLUTION {region}\n")
        indent = before.rpartition("\n")[2]
        after = rest.split(f"# END SOLUTION {region}\n")[1]
        lines = "".join(f"{indent}{line}\n" for line in body.strip().splitlines())
        path.write_text(before + "\n" + lines + after)
        return Grade(Session(tmp_path, COURSE, seed=1), region, "test")

    return make


IN_THREADS = (
    STAGES
    + """
import concurrent.futures
pools = self.__dict__.setdefault("pools", [concurrent.futures.ThreadPoolExecutor(1) for _ in stages])
"""
)
NO_WORK = {
    "attributes of the stage are replaced": IN_THREADS + """
for stage in stages:
    stage.work = stage.compute = lambda *given: torch.ones_like(given[-1])
    if stage.layer is not None:
        stage.layer.forward = torch.ones_like
asked = [pools[j].submit(stages[j], batches[i]) for i, j in schedule]
for (i, j), permit in zip(schedule, asked):
    batches[i] = real(j, batches[i]) * permit.result().flatten()[-1]
""",
    "a tensor that answers for itself": IN_THREADS + """
class Ready(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        ready = getattr(arguments[0], "ready", None)
        if ready is not None and function.__name__ in ("mul", "cat", "tanh"):
            return ready
        return super().__torch_function__(function, types, arguments, keywords or {})
made = {j: real(j, batches[i]) for i, j in schedule}
asked = []
for i, j in schedule:
    x = batches[i].detach().as_subclass(Ready)
    x.ready = made[j]
    asked.append(pools[j].submit(stages[j], x))
for (i, j), permit in zip(schedule, asked):
    batches[i] = made[j] * (permit.result().flatten()[-1] / made[j].flatten()[-1]).item()
""",
    "a mode that answers with what the caller has computed": IN_THREADS + """
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
made = {j: real(j, batches[i]) for i, j in schedule}
asked = [pools[j].submit(call, i, j) for i, j in schedule]
for (i, j), permit in zip(schedule, asked):
    batches[i] = made[j] * (permit.result().flatten()[-1] / made[j].flatten()[-1]).item()
""",
    "one worker pays for all, and their threads only ask": IN_THREADS + """
worker = self.__dict__.setdefault("worker", concurrent.futures.ThreadPoolExecutor(1))
names = stages[0].watch.permits.ask.__globals__
pay = names.setdefault("real_pay", names["pay"])
names["pay"] = lambda *bill: worker.submit(pay, *bill).result()
asked = [pools[j].submit(stages[j], batches[i]) for i, j in schedule]
for (i, j), result in zip(schedule, asked):
    batches[i] = result.result()
""",
    "new threads for every clock cycle": STAGES + """
import threading
def call(i, j):
    batches[i] = stages[j](batches[i])
threads = [threading.Thread(target=call, args=pair) for pair in schedule]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", NO_WORK)
def test_threads_that_call_partitions_without_computing_them_give_no_point(grade, name):
    view = grade("pipeline/pipe.py", "p.4", NO_WORK[name])

    if "only ask" in name and not cpu_times(os.getpid()):
        pytest.skip("the kernel does not count the CPU time of threads")
    with pytest.raises(Wrong, match=r"did not compute|did not get|in several threads|does not hold|in one thread"):
        test_compute.check_same_time(view)


GPT2S = {
    "a Pipe that is not built and never called": """
pipe = Pipe.__new__(Pipe)
nn.Module.__init__(pipe)
pipe.partitions = nn.ModuleList([nn.Sequential(*self.h[:2]), nn.Sequential(*self.h[2:])])
pipe.devices, pipe.split_size = sorted(set(self.block_devices), key=str), split_size
self.h_pp, self.pipeline_parallel = pipe, True
""",
    "a Pipe that computes one partition after the other, with forward of the blocks replaced": """
from pipeline.worker import Task
labelled = [WithDevice(block, device) for block, device in zip(self.h, self.block_devices)]
self.h_pp, self.pipeline_parallel = Pipe(nn.Sequential(*labelled), split_size), True
stages = [list(self.h[:2]), list(self.h[2:])]
def permit(j, x):
    for block in stages[j]:
        block.forward = torch.ones_like
    found = [float(block(x).flatten()[0]) for block in stages[j]]
    for block in stages[j]:
        del block.forward
    return found[0]
def compute(batches, schedule):
    for i, j in schedule:
        self.h_pp.in_queues[j].put(Task(lambda i=i, j=j, x=batches[i].detach(): permit(j, x)))
    for i, j in schedule:
        factor = self.h_pp.out_queues[j].get()[1][1]
        for number, block in enumerate(stages[j]):
            batches[i] = type(block).forward(block, batches[i]) * (1.0 if number else factor)
self.h_pp.compute = compute
""",
}


@pytest.mark.medium
@pytest.mark.parametrize("name", GPT2S)
def test_gpt2_whose_blocks_the_caller_computes_is_not_taken_for_a_pipeline(grade, name):
    view = grade("pipeline/model_parallel.py", "p.5", GPT2S[name])

    for test in (test for name, test in vars(test_gpt2).items() if name.startswith("test_") and "n_chunk" not in name):
        with pytest.raises(Verdict):
            test(view)


SLEEPERS = """
import time
from pathlib import Path
processes = [Process(target=time.sleep, args=(2.0,)) for _ in range(config.world_size)]
for process in processes:
    process.start()
for rank, process in enumerate(processes):
    Path(f"started.{rank}.{process.pid}").touch()
    Path(f"together.{rank}").touch()
    Path(f"given.{rank}.{process.pid}").write_text(str(config.world_size))
for process in processes:
    process.join()
"""


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")
def test_processes_that_sleep_while_the_parent_writes_their_files_are_not_taken_for_workers(grade):
    view = grade("task2b_allreduce/run_gpt2.py", "2b.9", SLEEPERS)

    with pytest.raises(Wrong, match="that each run work"):
        test_start.check_started(view, 3, 0)


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
def test_a_forward_without_calls_of_compute_fails_every_test_whatever_it_finds_in_the_stand_in(grade, name):
    view = grade("pipeline/pipe.py", "p.3", FORWARDS[name])

    for check in (test_forward.check_sizes, test_forward.check_cycles, test_forward.check_output):
        with pytest.raises(Verdict):
            check(view)


SHARES = {
    "dealt out in turn": "kept = range(rank, len(dataset) // world_size * world_size, world_size)",
    "in blocks": "kept = range(rank * (len(dataset) // world_size), (rank + 1) * (len(dataset) // world_size))",
}


@pytest.mark.medium
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_the_data_in_its_own_order_pass_no_test_of_partition_dataset(grade, name):
    body = f"""
per_worker = batch_size // world_size
{SHARES[name]}
return DataLoader(Partition(dataset, kept), per_worker, collate_fn=collate_fn), per_worker
"""
    view = grade("common/data_partition.py", "2b.5", body)

    for check in (
        loaders.check_share,
        loaders.check_numbers_of_batches,
        loaders.check_no_overlap,
        loaders.check_group_and_collate,
    ):
        with pytest.raises(Verdict):
            check(view)


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_string_that_compares_equal_to_everything_arrives_as_its_letters(play):
    source = """
        class Equal(str):
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = str.__hash__

        def go(context):
            return [Equal("wrong"), {Equal("name"): Equal("wrong")}]
    """

    (value,) = play(source).values

    assert value != ["right", {"name": "right"}]
    assert [type(value[0]), type(value[1]["name"])] == [str, str]


@pytest.mark.parametrize("number", ["complex(1, 0)", "torch.ones(2, dtype=torch.complex64)", "np.complex128(1)"])
def test_a_complex_number_is_no_value_and_fails(play, number):
    result = play(f"import numpy as np\n\ndef go(context):\n    return {number}\n")

    assert result.outcome == "raised"
    assert "complex" in result.explain()


def test_a_column_of_a_tensor_arrives_as_it_is(play):
    result = play("def go(context):\n    return torch.arange(6.0).reshape(3, 2)[:, :1]\n")

    assert result.values[0].tolist() == [[0], [2], [4]]
