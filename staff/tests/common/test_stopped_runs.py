"""Runs that cannot continue, with real processes and gloo: which rank is named, its call, its line, and how it ends.

Others are in test_task_scripts.py (a worker is killed, or stopped by Ctrl-Z), test_real_steps.py (a rank leaves a call
out, and all look alike), test_pipe_waits.py (a pipeline) and test_roll_call.py (ranks that do not connect).
"""

import re
import signal
import sys

import pytest

from cluster.launch import free_port
from staff.tests.cluster.started_processes import run
from staff.tests.common.stopping_ranks import hang, run_ranks, write_program

pytestmark = [pytest.mark.medium, pytest.mark.skipif(sys.platform != "linux", reason="ranks of one machine")]

HUNG = "no progress for 3 s (--hang_seconds): "
MISMATCH = "collective #8 in iteration 3: rank 1 called {} at LINE, ranks 0 and 2 called all_reduce (5) at LINE; "
# What one of three ranks does in iteration 3, that rank, the conclusion, and the exit codes.
STOPPED = [
    ("gathers", 1, HUNG + MISMATCH.format("gather (5)"), [3, 3, 3]),
    ("receives", 2, f"{HUNG}ranks 0 and 1 wait in all_reduce #8 (5) at LINE; rank 2 waits in recv at LINE", [3, 3, 3]),
    ("fails", 0, "rank 0 failed in iteration 3: KeyError: 'labels'", [1, 3, 3]),
    ("is killed", 0, "rank 0 died (PROCESS, see its own output)", [-signal.SIGKILL, 3, 3]),
    ("is killed while others sleep", 1, "rank 1 died (PROCESS, see its own output)", [3, -signal.SIGKILL, 3]),
    *[pytest.param(*row, marks=pytest.mark.proof) for row in (
        ("fails", 2, "rank 2 failed in iteration 3: KeyError: 'labels'", [3, 3, 1]),
        ("is killed", 1, "rank 1 died (PROCESS, see its own output)", [3, -signal.SIGKILL, 3]),
        ("is killed while others sleep", 0, "rank 0 died (PROCESS, see its own output)", [-signal.SIGKILL, 3, 3]),
    )],
]  # fmt: skip


def without_numbers(text: str) -> str:
    return re.sub(r"process \d+ on [^\s,]+", "PROCESS", re.sub(r"\S+/(ranks|hangs)\.py:\d+", "LINE", text))


@pytest.mark.parametrize(("what", "rank", "conclusion", "codes"), STOPPED)
def test_a_run_ends_with_the_rank_its_call_and_its_line(tmp_path, what, rank, conclusion, codes):
    stopped = run_ranks(tmp_path, what, rank)

    assert without_numbers(stopped.conclusion).startswith(conclusion)
    assert stopped.codes == codes
    assert all(stopped.conclusion in log for log, code in zip(stopped.logs, codes, strict=True) if code == 3)
    assert stopped.report
    waiting = stopped.report["rows"][(rank + 1) % 3]
    if what.endswith("others sleep"):
        assert "all_reduce #7 (3), LINE, iteration 3" in without_numbers(waiting["where"])
        return
    if waiting["state"] != "unknown":  # rank 0 was killed: one of the others wrote the file
        assert waiting["state"] == "waits" and waiting["calls"] == "8 all_reduce"
    assert without_numbers(waiting["where"]).endswith("all_reduce #8 (5), LINE, iteration 3")


@pytest.mark.parametrize("what", ["computes", pytest.param("never ends", marks=pytest.mark.proof)])
def test_a_rank_that_computes_is_waited_for_ten_times_as_long(tmp_path, what):
    run = run_ranks(tmp_path, what, 1, hang_seconds=1)

    assert run.codes == ([0, 0, 0] if what == "computes" else [3, 3, 3]), run.logs
    assert what == "computes" or "rank 1 computes at" in run.conclusion


def test_the_launcher_shows_the_report_of_a_run_that_gloo_has_aborted_since_a_rank_left_a_call_out(tmp_path):
    words = ["skips", "1", "(3, 5, 7)", "--output_dir", tmp_path / "run"]
    result = run("-m", "cluster.launch", "--workers", "3", "--", write_program(tmp_path), *words)

    first, *_, last = result.stderr.splitlines()
    assert re.match(r"rank \d failed first: killed by SIGABRT", first)
    assert without_numbers(last).startswith(MISMATCH.format("all_reduce (7)"))
    assert result.stderr.count("where each rank was:") == 1 and "\x1e" not in result.stderr
    assert result.returncode == 128 + signal.SIGABRT


@pytest.mark.proof
def test_under_torchrun_too_the_ranks_say_where_they_wait(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    words = ["gathers", "1", "(3, 5, 7)", "--output_dir", tmp_path / "run", "--hang_seconds", "3"]

    result = run(*torchrun, write_program(tmp_path), *words)

    assert "rank 0 called all_reduce (5)" in result.stderr and "rank 1 called gather (5)" in result.stderr


LAYER_WAITS = """
import threading
from torch import nn

make = nn.Module.train
nn.Module.train = lambda self, mode=True: (self.register_forward_pre_hook(wait), make(self, mode))[1]


def wait(*_):
    threading.Event().wait()
"""


def test_a_step_of_a_worker_on_its_own_that_never_ends_is_named_with_its_line(tmp_path):
    stopped = hang(tmp_path, "task1_single/run_glue.py", LAYER_WAITS, "--do_train", "--max_steps", 3)

    assert stopped.codes == [3], stopped.logs
    assert without_numbers(stopped.conclusion) == f"{HUNG}rank 0 is idle at LINE"
