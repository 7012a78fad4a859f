"""Runs that cannot continue, with real processes and gloo: which rank is named, and why."""

import re
import signal
import sys

import pytest

from cluster.launch import free_port
from tests.own.started_processes import run
from tests.own.stopping_ranks import run_ranks, write_program

pytestmark = [pytest.mark.medium, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]


# What one of three ranks does in iteration 3 -> its rank, the first sentence about the run, the exit codes. Others are
# in test_real_steps.py       a collective left out: rank 0 has made 17 all_reduces, rank 1 18: it left one out
#    test_task_scripts.py     a rank killed: rank 1 died; or stopped: rank 0 waits for rank 1: rank 1 is stopped
#    test_lone_worker.py      a worker on its own, a step that never ends: rank 0 computes at
#    test_pipe_waits.py       a pipeline: which partition waits for what, and where
#    test_roll_call.py        ranks that do not connect: rank 2 of 4 did not connect within 120 s
#    test_comparison.py       the sentences for what ranks have called
HUNG_RUNS = {
    "receives": (1, "every rank waits: .*rank 1 in recv at ", [3, 3, 3]),  # a message that nobody sends
    "fails": (0, "rank 0 failed in iteration 3: KeyError: 'the batch has no labels'", [1, 3, 3]),
    "calls_another": (
        1,
        r"rank 1 called broadcast \(5\) where the others called all_reduce \(5\) in iteration 3",
        [3, 3, 3],
    ),
    "dies": (0, r"rank 0 died \(process \d+ on .*; see its own output\)$", [-signal.SIGKILL, 3, 3]),
}


def end_of(what, folder):
    rank, sentence, codes = HUNG_RUNS[what]
    stopped = run_ranks(folder, what, rank)

    assert re.match(sentence, stopped.conclusion), stopped.conclusion
    assert stopped.codes == codes
    return stopped


@pytest.mark.parametrize("what", ["receives", "fails"])
def test_what_a_rank_did_is_named_with_its_iteration(tmp_path, what):
    end_of(what, tmp_path)


def test_different_collectives_are_named_while_all_ranks_wait(tmp_path):
    stopped = end_of("calls_another", tmp_path)

    assert "no rank can continue" in "".join(stopped.logs)
    assert [log.count("where each rank was:") for log in stopped.logs] == [1, 0, 0]
    assert [log.count(stopped.kept["conclusion"]) for log in stopped.logs] == [1, 1, 1]


def test_a_rank_that_was_killed_is_named_with_its_process(tmp_path):
    row = end_of("dies", tmp_path).kept["rows"][1]

    assert (row["rank"], row["state"], row["calls"]) == ("1", "waits", "8 all_reduce")
    assert re.match(r"all_reduce #8 \(5\), .*/ranks\.py:\d+, iteration 3", row["where"])


@pytest.mark.parametrize("what", [pytest.param("sleeps", marks=pytest.mark.proof), "computes"])
def test_a_slow_rank_raises_no_alarm(tmp_path, what):
    run = run_ranks(tmp_path, what, 1)

    assert run.codes == [0, 0, 0]
    assert run.kept is None
    assert all("comparing" not in log for log in run.logs)


@pytest.mark.proof
def test_the_launcher_shows_only_the_table_if_no_rank_died(tmp_path):
    words = ["calls_another", 1, "(3, 5, 7)", "--master_port", free_port(), "--output_dir", tmp_path / "run"]
    result = run("-m", "cluster.launch", "--workers", 3, "--", write_program(tmp_path), *words, timeout=240)

    assert result.stderr.count("where each rank was:") == 1
    assert result.stderr.count("rank 1 called broadcast") == 1
    assert "failed first" not in result.stderr
    assert result.returncode == 3
