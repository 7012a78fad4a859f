"""The watchdog of a worker on its own: when it is patient, and how it ends a run that hangs."""

import bdb
import re

import pytest
import torch

from common.workers.process_group import Worker
from common.workers.pulse import Pulse, Silence, Thread
from tests.own.stopping_ranks import hang


@pytest.mark.parametrize(("may_rest", "expected"), [(True, [0, 0, 1]), (False, [1, 2, 1])])
def test_ticks_without_a_beat_are_counted_and_only_in_a_group_also_while_no_step_is_due(may_rest, expected):
    pulse = Pulse()
    silence = Silence(pulse, may_rest)

    before_training = [silence.count(), silence.count()]
    pulse.beat()

    assert silence.count() == 0
    assert [*before_training, silence.count()] == expected


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

    stopped = hang(tmp_path, HANGS.format(script=script), *words, "--max_steps", 3)

    (log,) = stopped.logs
    assert stopped.codes == [3], log
    assert re.search(r"^rank 0: no progress for 0.1 s \(--hang_seconds\)$", log, re.M)
    assert re.search(r"^rank 0 (computes|is idle) at .*/hangs\.py:\d+$", log, re.M), log
    assert "comparing the ranks" not in log
