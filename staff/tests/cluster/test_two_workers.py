"""GPT-2 on one and on two workers, the end of `make demo`; and what is said when other programs are busy."""

import os
from dataclasses import replace

import pytest

from cluster.demo.two_workers import Speed, table
from common.workers.processor import disturbance, other_programs


def ranks(*own, seconds=10.0, machine=12.0):
    return [{"seconds": seconds, "own": value, "machine": machine} for value in own]


def test_a_run_beside_a_busy_program_is_called_disturbed():
    assert other_programs(ranks(5.0, 5.0)) == pytest.approx(0.2)  # what no rank used
    assert other_programs(ranks(12.5)) == 0.0
    assert other_programs(ranks(1.0, machine=None)) is None and other_programs(ranks(1.0, seconds=0.5)) is None
    cores = len(os.sched_getaffinity(0))
    assert disturbance(0.7) == f"disturbed: other programs used 0.7 of {cores} cores during this run"
    assert disturbance(0.1) == disturbance(None) == ""


def test_the_baseline_is_one_worker_with_one_thread_and_a_disturbed_run_does_not_count():
    one, two = Speed("1 worker, 1 thread", 7000, ""), Speed("2 workers, 1 thread each", 13300, "")
    lines = table([one, two]).split("\n")

    assert lines[2].split() == ["1", "worker,", "1", "thread", "7000", "1.00"]
    assert lines[3].split()[-2:] == ["13300", "1.90"]
    assert "repeat" not in "".join(lines)
    assert (
        table([one, replace(two, warning="disturbed")]).rstrip().endswith("repeat: python -m cluster.demo.two_workers")
    )
