"""cluster.launch, the beginning: its command line, and the output of several ranks on one screen."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from cluster.guard import threads_per_command
from cluster.launch import commands, parse
from cluster.screen import Lines, Screen
from common.errors import InputError
from tests.own import rank_stubs
from tests.own.rank_stubs import launch, lines_of
from tests.own.started_processes import run, started

stub = rank_stubs.stub  # a fixture
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"), pytest.mark.medium]


# -------------------------------------------------------------------------------------------- flags


def test_every_worker_gets_the_same_flags_and_its_own_rank(stub):
    result = launch(stub("flags"), "--seed", "7")

    flags = [json.loads(lines_of(rank, result.stdout)[0].removeprefix("flags ")) for rank in range(3)]
    port = flags[0][5]
    assert 1023 < int(port) < 65536
    same = ["--seed", "7", "--master_ip", "127.0.0.1", "--master_port", port, "--world_size", "3", "--local_rank"]
    assert flags == [[*same, str(rank)] for rank in range(3)]
    assert result.returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "2", "--master_port", "7001", "--master_ip", "10.0.0.9", "cluster/hello.py", "--step", "join"],
        ["--world_size=2", "--", "cluster/hello.py", "--master_port=7001", "--master_ip", "10.0.0.9"],
        [
            "--workers",
            "2",
            "--master_port",
            "7002",
            "--master_ip",
            "10.0.0.9",
            "cluster/hello.py",
            "--master_port=7001",
        ],
    ],
)
def test_flags_that_the_user_gave_are_kept(words):
    planned, _ = parse(words)

    assert planned.workers == 2
    assert planned.script[-6:] == ["--master_ip", "10.0.0.9", "--master_port", "7001", "--world_size", "2"]
    assert sum(word.startswith("--master") for word in planned.script) == 2


@pytest.mark.parametrize("words", [["--timeline", "cluster/hello.py"], ["cluster/hello.py", "--timeline", "5"]])
def test_the_timeline_is_the_scripts_own_flag(words):
    planned, _ = parse(words)

    assert planned.script.count("--timeline") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "python", "cluster/hello.py"], "leave out 'python'"),
        (["--", "no/such/script.py"], "there is no script no/such/script.py"),
        (["--", "cluster/hello.py", "--local_rank", "0"], "leave out --local_rank"),
        (["--workers", "2", "--", "cluster/hello.py", "--world_size", "4"], "--workers 2 and --world_size 4 differ"),
        (["--workers", "1", "--hosts", "127.0.0.1,127.0.0.2", "--", "cluster/hello.py"], "expected at least 2"),
        (["--hosts", "no-such-host.invalid", "--", "cluster/hello.py"], "add --master_ip"),
        (["--hosts", "localhost,node1", "--", "cluster/hello.py"], "only that node can reach"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(words, message):
    with pytest.raises(InputError, match=message):
        parse(words)


def test_workers_are_spread_evenly_over_hosts_with_one_command_line():
    planned, _ = parse(
        ["--workers", "4", "--hosts", "a,b", "--master_ip", "10.10.1.1", "--ssh", "ssh -p 22", "--folder", "my work"]
        + ["--", "cluster/hello.py", "--step", "a b"]
    )

    planned_commands = commands(planned)

    assert [command.node for command in planned_commands] == ["a", "a", "b", "b"]
    assert {tuple(command.words[:3]) for command in planned_commands} == {("ssh", "-p", "22")}
    remote = [command.words[-1] for command in planned_commands]
    assert len({re.sub(r"\d$", "R", line) for line in remote}) == 1, "only the last word, the rank, may differ"
    assert "cd 'my work' && exec" in remote[0]
    assert "--share 2" in remote[0]
    assert "'a b'" in remote[0]


def test_plan_prints_the_commands_and_starts_nothing(stub):
    result = run("-m", "cluster.launch", "--workers", "2", "--plan", "--", stub("flags"))

    assert [line[-14:] for line in result.stdout.splitlines()] == ["--local_rank 0", "--local_rank 1"]


def test_workers_share_the_cores(stub):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    many = launch(stub("threads"), workers=1 + len(os.sched_getaffinity(0)), env=environment).stdout
    set_by_user = launch(stub("threads"), workers=2, env=environment | {"OMP_NUM_THREADS": "13"}).stdout

    assert threads_per_command(1) == len(os.sched_getaffinity(0))
    assert lines_of(0, many) == ["threads 1"]
    assert lines_of(1, set_by_user) == ["threads 13"]


# ------------------------------------------------------------------------------------------- output


def test_in_a_pipe_no_bar_is_shown(capsys):
    screen = Screen(sys.stdout, sys.stderr)

    screen.show_bar("steps: 100%|")
    screen.show("[0] a loss")
    screen.close()

    assert capsys.readouterr() == ("[0] a loss\n", "")


def test_on_a_terminal_there_is_one_bar_and_it_never_splits_a_line(stub):
    main_end, terminal = pty.openpty()
    command = ["-m", "cluster.launch", "--workers", "2", "--", stub("bars")]
    with started(*command, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL) as process:
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(main_end, 65536):
                output += chunk
        except OSError:
            pass  # a terminal's way to say that the other end is closed
        assert process.wait() == 0
    os.close(main_end)
    after_erasing = re.sub(r"[^\n]*\r\x1b\[K", "", output.decode())
    assert after_erasing.count("a loss\r\n") == 20
    assert {line[3:] for line in after_erasing.split("\r\n") if "a loss" in line} == {" a loss"}
    assert "steps of rank 0" in output.decode()
    assert "rank 1" not in output.decode()


def test_lines_are_cut_alike_however_the_bytes_arrive():
    text = (
        "a\nEpoch:  50%|█  | 1/2 [00:01<00:01, 1.0s/it]\rEpoch: 100%|██ | 2/2 [00:02<00:00, 1.0s/it]oh é\nend".encode()
    )

    def cut(size: int) -> list[str]:
        lines = Lines()
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        return [line.text for chunk in [*chunks, b""] for line in lines.feed(chunk) if not line.is_bar]

    assert all(cut(size) == ["a", "oh é", "end"] for size in range(1, len(text) + 1))


def test_a_reader_that_leaves_ends_the_launch_without_a_traceback(stub):
    command = ["-m", "cluster.launch", "--workers", "2", "--", stub("endless")]
    with started(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 128 + signal.SIGPIPE
