"""Ranks: how each can end, what is captured of it, what a rank is and may, and that nothing of it is left."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from common.paths import ROOT
from grader.ranks.rank_process import MAX_OUTPUT
from staff.tests.cluster.started_processes import wait_for
from staff.tests.grader.inline_student import HEAD

pytestmark = pytest.mark.medium

RANKS = 2


# --- how a rank ends --------------------------------------------------------------------------------------------------

TODO = "def go(context):\n    raise NotImplementedError('TODO 1.2: do it')"
SEGFAULT = "import faulthandler\ndef go(context):\n    faulthandler._sigsegv()"
LYING = "class E(Exception):\n    __str__ = None\ndef go(context):\n    raise E"


@pytest.mark.parametrize(("source", "outcome", "words"), [
    (TODO, "raised", "NotImplementedError: TODO"),
    ("import no_such_module", "raised", "ModuleNotFoundError"),
    ("def go(context:\n", "raised", "SyntaxError"),
    ("sys.exit('bye')", "exited", "exited with code 1 by SystemExit: bye while loading task/run.py"),
    ("def go(context):\n    sys.exit(4)", "exited", "exited with code 4"),
    ("def go(context):\n    os._exit(0)", "exited", "exited with code 0"),
    ("def go(context):\n    os.kill(os.getpid(), 9)", "killed", "killed by SIGKILL"),
    ("def go(context):\n    os.kill(os.getpid(), 40)", "killed", "killed by signal 40"),
    (SEGFAULT, "killed", "SIGSEGV (task/run.py:6)"),
    (LYING, "raised", "E: (its message"),
    ("", "raised", "has no attribute 'go'"),
])  # fmt: skip
def test_every_ending_of_a_rank_is_told_apart(play, source, outcome, words):
    result = play(source)

    assert [rank.outcome for rank in result.ranks] == [outcome, outcome]
    assert result.outcome == outcome
    assert words in result.explain()
    with pytest.raises(RuntimeError):
        _ = result.values


ENDLESS = {
    "loop": "def go(context):\n    while True:\n        pass\n",
    "sleep": "def go(context):\n    try:\n        time.sleep(1000)\n    finally:\n        os.kill(0, 0)\n",
    "loop at import": "x = 0\nwhile True:\n    x += 1\n",
    "swallows everything": "def go(context):\n    while True:\n        signal.pthread_sigmask(0, range(1, 9))\n",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended_at_the_deadline_and_says_where_it_was(play, name):
    result = play(ENDLESS[name], 1, deadline=0.5)

    assert result.outcome == "deadline"
    assert result.explain().startswith("the deadline of 0.5 s has passed: rank 0 was still running (task/run.py:")


def test_a_spied_function_does_what_it_did_and_leaves_an_event_of_the_name_that_was_asked_for(play):
    source = """
        import math

        def go(context):
            context.spy(math, "sqrt", "root", lambda x: {"of": x})
            context.spy(math, "floor")
            return [math.sqrt(4.0), math.floor(2.5)]
        """

    result = play(source, 1)

    assert result.values == [[2.0, 2]]
    assert [(event.name, event.data) for event in result.ranks[0].events] == [("root", {"of": 4.0}), ("floor", {})]


def test_a_failure_carries_the_students_lines_only(play):
    source = """
        def inner(x):
            return torch.ones(2) @ torch.ones(3)

        def go(context):
            return inner(1)
    """

    error = play(source).ranks[1].error

    lines = [(frame.file, frame.line, frame.function, frame.text) for frame in error.trace]
    assert lines == [
        ("task/run.py", 8, "go", "return inner(1)"),
        ("task/run.py", 5, "inner", "return torch.ones(2) @ torch.ones(3)"),
    ]
    assert error.where == "task/run.py:5"


def test_output_before_a_crash_is_kept_up_to_a_limit_and_never_blocks_a_rank(play):
    source = """
        def go(context):
            print("first", flush=True)
            os.write(2, b"error\\xff")
            for _ in range(300):
                os.write(1, b"x" * 10_000)
            os.kill(os.getpid(), 9)
    """

    result = play(source)

    assert result.outcome == "killed"
    for rank in result.ranks:
        assert rank.stdout.startswith("first\nxxx")
        assert rank.stderr == "error\ufffd"
        assert len(rank.stdout) == MAX_OUTPUT


# --- what a rank is ---------------------------------------------------------------------------------------------------


def test_each_rank_is_a_process_with_one_thread_and_a_folder_of_its_own(play):
    source = """
        def go(context):
            open("made", "w").close()
            return [os.getpid(), os.getsid(0), os.getcwd(), os.listdir(), torch.get_num_threads(),
                    len(os.listdir("/proc/self/task")), os.getcwd() == os.environ["TMPDIR"], sys.stdin.read()]
    """

    first, second = play(source).values

    assert first[0] == first[1] != second[0]
    assert first[2] != second[2]
    assert first[3:] == [["made"], 1, 1, True, ""]
    assert not Path(first[2]).exists()
    assert first[0] != os.getpid()


def test_the_tree_comes_first_and_stays_as_it_was(play, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/schedule.py").write_text("mine = 7")
    (tmp_path / "task").mkdir()
    (tmp_path / "task/beside.py").write_text("beside = 8")

    (tmp_path / "wave.py").write_text("mine = 9")  # the name of a module of Python's own

    source = """
        import beside, wave
        from common.schedule import mine

        def go(context):
            return mine, beside.beside, wave.mine
    """

    assert play(source, 1).values == [[7, 8, 9]]
    assert not list(tmp_path.rglob("__pycache__"))


def test_ranks_differ_where_separate_processes_differ(play):
    source = """
        import random
        import numpy

        filled = [torch.nn.Parameter(torch.ones(1)) for _ in range(3000)]  # all free the same memory after loading

        def go(context):
            filled.clear()
            context.shuffle_addresses()
            parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(16)]
            order = [next(i for i, p in enumerate(parameters) if p is q) for q in set(parameters)]
            return [random.random(), numpy.random.rand(), order], torch.rand(1).item()
    """

    got = play(source, 4).values

    for draws in zip(*(value[0] for value in got), strict=True):
        assert len({str(draw) for draw in draws}) == 4
    assert len({value[1] for value in got}) == 1  # torch starts from the same seed in every process


def test_a_rank_gets_its_own_inputs_and_no_others(play):
    got = play("def go(context):\n    return context.inputs", inputs=[[1], [2, 3]]).values

    assert got == [[1], [2, 3]]


# --- what a rank leaves -----------------------------------------------------------------------------------------------

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
    living = []
    for path in folder.glob("*.lock"):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                living.append(path.stem)
    return living


def test_double_forks_new_sessions_and_hopping_processes_are_gone_afterwards(play, tmp_path):
    result = play(LEFTOVERS, folder=str(tmp_path))

    assert result.outcome == "returned"
    assert ready(tmp_path)
    assert alive(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_are_gone_when_their_grader_is_killed_and_when_an_interrupted_one_goes_on(tmp_path, number):
    program = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
        sys.path.insert(0, {str(ROOT)!r})
        from staff.tests.grader.inline_student import run_entry
        try:
            run_entry({str(tmp_path)!r}, "run.py", 2, folder={str(tmp_path)!r}, stay=True, deadline=1000)
        except KeyboardInterrupt:  # grader.watch goes on, too
            print(sys.stdin.readline())
            print(run_entry({str(tmp_path)!r}, "run.py", 2, "leave_nothing").values)
    """
    (tmp_path / "run.py").write_text(HEAD + textwrap.dedent(LEFTOVERS) + "def leave_nothing(context): return 1\n")
    words = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as grader:
        wait_for(lambda: ready(tmp_path), "processes of both ranks")

        assert alive(tmp_path) != []
        grader.send_signal(number)

        wait_for(lambda: alive(tmp_path) == [], "the end of all processes")
        output, _ = grader.communicate(b"go on\n" if number == signal.SIGINT else None)
    assert output.decode().endswith("[1, 1]\n") == (number == signal.SIGINT)
