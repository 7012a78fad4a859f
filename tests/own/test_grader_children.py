"""How many processes a rank has at once, counted by the process that starts the ranks."""

import signal
import sys

import pytest

from grader import ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")

STARTS = """
import os, signal, time
def go(context):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    counted = []
    for together in context.arguments["groups"]:
        children = []
        for _ in range(together):
            pid = os.fork()
            if pid == 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # which ends it
                time.sleep(context.arguments["patience"])
                os._exit(1)
            children.append(pid)
        counted += [os.waitpid(pid, 0)[1] for pid in children]
    return counted
"""


def counted(tmp_path, groups, children, patience):
    (tmp_path / "run.py").write_text(STARTS)
    arguments = {"file": "run.py", "function": "go", "groups": groups, "patience": patience, "children": children}
    return ranks.run("grader.inside.context:call", 1, arguments, tree=tmp_path)


def test_processes_that_run_at_once_are_counted_and_told(tmp_path):
    result = counted(tmp_path, [3], 3, 60)

    assert result.children == 3
    assert result.values == [[signal.SIGUSR2] * 3]
    assert len(result.numbers) == 3


def test_processes_one_after_the_other_are_not_many(tmp_path):
    result = counted(tmp_path, [1, 1], 2, 0.2)

    assert result.children <= 1
    assert signal.SIGUSR2 not in result.values[0]
    assert not result.numbers


def test_a_rank_without_processes_has_none(tmp_path):
    assert counted(tmp_path, [], 2, 0).children == 0


def test_nobody_counts_unless_a_run_asks(tmp_path):
    assert counted(tmp_path, [], 0, 0).children == -1
