"""Runs that cannot continue, with real processes and gloo: which rank is named, and why."""

import re
import signal
import sys

import pytest

from cluster.launch import free_port
from tests.own.started_processes import run
from tests.own.stopping_ranks import run_ranks, write_program

pytestmark = [pytest.mark.medium, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

DIFFERENT, EQUAL = "(3, 5, 7)", "(3, 3, 3)"  # sizes of the calls of an iteration
LEFT_OUT = "rank 1 has made 17 all_reduces, the others 18: it left one out in iteration 3"


@pytest.mark.parametrize(
    "what, rank, sizes, conclusion, codes",
    [
        ("receives", 1, DIFFERENT, "rank 1 in recv at ", {0: 3, 1: 3, 2: 3}),  # a message that nobody sends
        ("fails", 0, DIFFERENT, "rank 0 failed in iteration 3: KeyError: 'the batch has no labels'", {0: 1}),
        # In make test, test_real_steps.py has this one with two workers.
        pytest.param("leaves_out", 1, EQUAL, LEFT_OUT, {0: 3, 1: 0, 2: 3}, marks=pytest.mark.proof),
        pytest.param("fails", 1, DIFFERENT, "rank 1 failed in iteration 3: KeyError", {1: 1}, marks=pytest.mark.proof),
        pytest.param(
            "leaves_out", 1, DIFFERENT, "rank 1 left out all_reduce (5) in iteration 3", {}, marks=pytest.mark.proof
        ),
    ],
)
def test_what_a_rank_did_is_named_with_its_iteration(tmp_path, what, rank, sizes, conclusion, codes):
    stopped = run_ranks(tmp_path, what, rank, 3, sizes)

    assert conclusion in stopped.conclusion
    assert {rank: stopped.codes[rank] for rank in codes} == codes


def test_different_collectives_are_named_while_all_ranks_wait(tmp_path):
    stopped = run_ranks(tmp_path, "calls_another", 1)

    assert stopped.conclusion.startswith(
        "rank 1 called broadcast (5) where the others called all_reduce (5) in iteration 3"
    )
    assert stopped.codes == [3, 3, 3]
    assert "no rank can continue" in "".join(stopped.logs)
    assert [log.count("where each rank was:") for log in stopped.logs] == [1, 0, 0]
    assert [log.count(stopped.kept["conclusion"]) for log in stopped.logs] == [1, 1, 1]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.proof)])
def test_a_rank_that_was_killed_is_named_with_its_process(tmp_path, rank):
    stopped = run_ranks(tmp_path, "dies", rank)

    assert re.fullmatch(
        rf"rank {rank} died \(process \d+ on .*; (killed by SIGKILL|see its own output)\)", stopped.kept["conclusion"]
    )
    assert stopped.codes[rank] == -signal.SIGKILL
    assert sorted(stopped.codes)[1:] == [3, 3]
    row = stopped.kept["rows"][1]
    assert (row["rank"], row["state"], row["calls"]) == ("1", "waits", "8 all_reduce")
    assert re.match(r"all_reduce #8 \(5\), .*/ranks\.py:\d+, iteration 3", row["where"])


@pytest.mark.parametrize("what", [pytest.param("sleeps", marks=pytest.mark.proof), "computes"])
def test_a_slow_rank_raises_no_alarm(tmp_path, what):
    run = run_ranks(tmp_path, what, 1)

    assert run.codes == [0, 0, 0]
    assert run.kept is None
    assert all("comparing" not in log for log in run.logs)


def launch(folder, *what):
    words = [*what, "(3, 5, 7)", "--master_port", free_port(), "--output_dir", folder / "run"]
    return run("-m", "cluster.launch", "--workers", "3", "--", write_program(folder), *words, timeout=240)


@pytest.mark.proof
def test_the_launcher_shows_the_table_below_the_rank_that_died(tmp_path):
    result = launch(tmp_path, "dies", "2")

    shown = result.stderr.splitlines()
    first = shown.index("rank 2 failed first: killed by SIGKILL (exit code 137)")
    assert shown[first + 1] == "[0] where each rank was:"
    assert shown[first + 4].startswith("[0]   rank 2  died ")
    assert shown[first + 5].startswith("[0] rank 2 died (process ")
    assert result.returncode == 137


@pytest.mark.proof
def test_the_launcher_shows_only_the_table_if_no_rank_died(tmp_path):
    result = launch(tmp_path, "calls_another", "1")

    assert result.stderr.count("where each rank was:") == 1
    assert result.stderr.count("rank 1 called broadcast") == 1
    assert "failed first" not in result.stderr
    assert result.returncode == 3
