"""The watchdog of a worker on its own: when it is patient, and how it ends a run that hangs."""

import bdb
import re

import pytest
import torch

from common.workers.process_group import Worker
from common.workers.pulse import LONGEST_TICK, Pulse, Silence, Thread
from tests.own.hanging_runs import Hanging


def test_silence_is_counted_from_the_last_beat_and_not_while_the_process_was_stopped():
    pulse = Pulse()
    pulse.beat()
    silence = Silence(pulse, may_rest=True, now=0.0)

    assert [silence.look(1.0), silence.look(3.0)] == [1.0, 3.0]
    pulse.last += 1
    assert [silence.look(4.0), silence.look(5.0)] == [0.0, 1.0]
    assert silence.look(3600.0) == 1 + LONGEST_TICK


@pytest.mark.parametrize(("may_rest", "expected"), [(True, 0.0), (False, 2.0)])
def test_while_no_step_is_due_only_a_member_of_a_group_is_watched(may_rest, expected):
    silence = Silence(Pulse(), may_rest, now=0.0)

    assert silence.look(2.0) == expected


def test_a_worker_rests_before_and_after_its_batches_and_after_a_loop_that_was_left():
    worker = Worker()
    rests = [worker.pulse.rests]

    for _ in worker.batches([torch.ones(1)] * 2):
        rests.append(worker.pulse.rests)
    rests.append(worker.pulse.rests)
    batches = worker.batches([torch.ones(1)] * 2)
    next(batches)
    batches.close()

    assert [*rests, worker.pulse.rests] == [True, False, False, True, True]


def test_a_thread_at_a_breakpoint_is_in_the_debugger():
    in_debugger = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame):
            in_debugger.append(Thread().is_in_debugger())

    Debugger().runcall(lambda: None)

    assert in_debugger
    assert all(in_debugger)
    assert not Thread().is_in_debugger()


HANGS = """
from torch import nn

reached = threading.Event()


def hang(*_):
    reached.set()
    while True:
        pass


lose_patience_when(reached.is_set)
make = nn.Module.train
nn.Module.train = lambda self, mode=True: (self.register_forward_pre_hook(hang), make(self, mode))[1]
go_on_as({script!r})
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    "script",
    [
        "task1_single/run_glue.py",
        *(pytest.param(f"{name}/run_gpt2.py", marks=pytest.mark.proof) for name in ("beyond", "pipeline")),
    ],
)
def test_a_step_that_never_ends_ends_the_run_with_code_3_and_its_line(tmp_path, script):
    words = ["--do_train"] if "glue" in script else ["--model_max_length", 16, "--batch_size", 4]

    run = Hanging(tmp_path, HANGS.format(script=script), [*words, "--max_steps", 3])
    code = run.end()

    log = run.log.read_text()
    assert code == 3, log
    assert re.search(r"^rank 0: no progress for 0.1 s \(--hang_seconds\)$", log, re.M)
    assert re.search(r"^rank 0 (computes|is idle) at .*/hangs\.py:\d+$", log, re.M), log
    assert "comparing the ranks" not in log
