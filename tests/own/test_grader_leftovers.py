"""Ranks: nothing of them is left, however they and those who started them end."""

import fcntl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from common.paths import ROOT
from grader import ranks
from tests.own.inline_student import HEAD
from tests.own.started_processes import wait_for

pytestmark = pytest.mark.medium

RANKS = 2


# Whoever still lives of a rank's processes holds its lock, since all of them have inherited the open file.
LEFTOVERS = """
    import fcntl

    def leave(write):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, b".")
                while True:
                    time.sleep(10)
            os._exit(0)

    def hop():
        if os.fork() == 0:
            while True:                     # always another process: each lives for one fork
                if os.fork():
                    os._exit(0)

    def go(context):
        name = context.arguments["folder"] + f"/{context.rank}"
        lock = open(name + ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        read, write = os.pipe()
        leave(write)
        hop()
        subprocess.Popen(["sleep", "1000"], start_new_session=True, pass_fds=[lock.fileno()])
        os.read(read, 1)
        with open(name + ".ready", "w") as file:
            file.write(os.getcwd())
        while context.arguments.get("stay"):
            time.sleep(10)
"""


def ready(folder):
    return len(list(folder.glob("*.ready"))) == 2


def alive(folder):
    """The ranks of which a process is left."""
    ranks = []
    for path in folder.glob("*.lock"):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                ranks.append(path.stem)
    return ranks


def test_double_forks_new_sessions_and_hopping_processes_are_gone_afterwards(play, tmp_path):
    result = play(LEFTOVERS, folder=str(tmp_path))

    assert result.outcome == "returned"
    assert ready(tmp_path)
    assert alive(tmp_path) == []


def test_an_interrupt_ends_all_ranks(play, tmp_path, monkeypatch):
    def interrupt(run):
        wait_for(lambda: ready(tmp_path), "processes of both ranks")
        raise KeyboardInterrupt

    monkeypatch.setattr("grader.ranks.one_run.RankRun.result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        play(LEFTOVERS, folder=str(tmp_path), stay=True)

    assert alive(tmp_path) == []


def test_ranks_are_gone_when_their_grader_is_killed(tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.own.inline_student import run_entry
        run_entry({str(tmp_path)!r}, "run.py", 2, folder={str(tmp_path)!r}, stay=True, deadline=1000)
    """
    (tmp_path / "run.py").write_text(HEAD + textwrap.dedent(LEFTOVERS))
    grader = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    wait_for(lambda: ready(tmp_path), "processes of both ranks")

    assert alive(tmp_path) != []
    grader.kill()
    grader.wait()

    wait_for(lambda: alive(tmp_path) == [], "the end of all processes")


KILLS_ITS_PARENT = """
    def go(context):
        with open(context.arguments["folder"] + f"/{context.rank}", "w") as file:
            file.write(os.getcwd())
        if context.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
"""


def test_a_rank_that_kills_its_parent_ends_this_run_only_and_the_next_has_its_walls(play, tmp_path, monkeypatch):
    result = play(KILLS_ITS_PARENT, folder=str(tmp_path))

    assert [rank.outcome for rank in result.ranks] == ["killed", "killed"]
    assert not Path((tmp_path / "1").read_text()).exists()

    # Walls are built before any student code, also by a new parent; this one does no more than say its arguments.
    monkeypatch.setenv("COS598D_CONFINE", "builtins:print policy")
    result = play("print('loaded')\ndef go(context):\n    return os.getcwd(), 'COS598D_CONFINE' in os.environ\n")
    ranks.stop()
    for rank in result.ranks:
        folder, hook_is_known = rank.value
        assert rank.stdout == f"{rank.rank} {folder} [] policy\nloaded\n"
        assert not hook_is_known
