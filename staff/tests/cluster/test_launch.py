"""cluster.launch: what each rank gets, the output of all ranks on one screen, failures, and that nothing is left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from cluster.launch import free_port
from cluster.supervise import Lines
from staff.tests.cluster.started_processes import processes_with, run, started, wait_for
from staff.tests.common import rank_stubs
from staff.tests.common.rank_stubs import launch, lines_of

stub, ssh = rank_stubs.stub, rank_stubs.ssh  # fixtures
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"), pytest.mark.medium]


# ------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize("threads", [None, "13"])
def test_every_worker_gets_the_same_flags_its_own_rank_and_its_share_of_the_cores(stub, threads):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if threads is None else {"OMP_NUM_THREADS": threads}

    result = launch(stub("shows"), "--seed", "7", env=environment)

    shown = [lines_of(rank, result.stdout) for rank in range(3)]
    same = json.loads(shown[0][0])[:-1]
    assert same[:5] == ["--seed", "7", "--master_ip", "127.0.0.1", "--master_port"] and 1023 < int(same[5]) < 65536
    assert same[6:] == ["--world_size", "3", "--local_rank"]
    assert [json.loads(lines[0]) for lines in shown] == [[*same, str(rank)] for rank in range(3)]
    assert {lines[1] for lines in shown} == {f"threads {threads or max(1, len(os.sched_getaffinity(0)) // 3)}"}
    assert result.returncode == 0


def test_plan_prints_the_commands_and_starts_nothing():
    result = run("-m", "cluster.launch", "--workers", "2", "--plan", "--", "cluster/hello.py")

    assert [line[-14:] for line in result.stdout.splitlines()] == ["--local_rank 0", "--local_rank 1"]


# ------------------------------------------------------------------------------------------- output


def test_lines_are_cut_alike_however_the_bytes_arrive_and_a_bar_is_its_last_state():
    text = "a\nEpoch:  50%|█  | 1/2\rEpoch: 100%|██ | 2/2\noh é\r\nend".encode()

    def cut(size: int) -> list[str]:
        lines = Lines()
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        return [line for chunk in [*chunks, b""] for line in lines.feed(chunk)]

    assert all(cut(size) == ["a", "Epoch: 100%|██ | 2/2", "oh é", "end"] for size in range(1, len(text) + 1))


def test_a_reader_that_leaves_ends_the_launch_without_a_traceback(stub):
    command = ["-m", "cluster.launch", "--workers", "2", "--", stub("endless")]
    with started(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 128 + signal.SIGPIPE


# ----------------------------------------------------------- failures; test_stopped_runs.py has those of real ranks


def test_the_first_failure_is_shown_first_and_once_and_the_others_are_stopped(stub):
    script = stub("rank_2_fails")

    result = launch(script, workers=4)

    shown = result.stderr.splitlines()
    assert shown[:2] == [
        "rank 2 failed first: exit code 1. Its last lines:",
        "[2] Traceback (most recent call last):",
    ]
    assert shown[-2:] == ["[2] RuntimeError: the reason", "stopping: rank 0, rank 1, rank 3"]
    assert result.stderr.count("RuntimeError: the reason") == 1
    assert result.returncode == 1
    assert processes_with(script.parent) == []


def test_of_many_lines_of_a_failed_rank_the_last_are_shown(stub):
    result = launch(stub("rank_0_fails_after_many_lines"))

    assert "[0] RuntimeError: the reason" in result.stderr.splitlines()


@pytest.mark.parametrize(("name", "first", "code"), [
    ("all_fail_alike", r"rank \d failed first: exit code 1\. Its last lines:\n\[\d\] error: the same everywhere\n", 1),
    ("rank_0_stops_because_of_rank_2", "rank 2 failed first: exit code 7\n", 7),  # though it ended later
])  # fmt: skip
def test_of_several_failures_the_cause_is_named_and_a_mistake_of_all_is_shown_once(stub, name, first, code):
    result = launch(stub(name))

    assert re.match(first, result.stderr), result.stderr
    assert result.stderr.count("error:") <= 1
    assert result.returncode == code


def test_a_rank_that_ends_well_leaves_the_others_at_work(stub):
    result = launch(stub("rank_0_ends_first"))

    assert (result.stdout.count("still working"), result.returncode) == (2, 0)


@pytest.mark.parametrize(("number", "send"), [
    (signal.SIGKILL, os.kill),
    (signal.SIGINT, os.killpg),  # Ctrl-C goes to the whole group
    *(pytest.param(number, os.kill, marks=pytest.mark.proof) for number in (signal.SIGTERM, signal.SIGHUP)),
])  # fmt: skip
def test_however_the_launcher_is_stopped_no_rank_that_ignores_sigterm_is_left(stub, tmp_path, number, send):
    script = stub("stubborn_family")
    with started("-m", "cluster.launch", "--workers", "2", "--", script, start_new_session=True) as process:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "both ranks")

        send(process.pid, number)

        assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not processes_with(tmp_path), "the end of all processes")


# --------------------------------------------------------------------------------- real workers, and ssh


@pytest.mark.parametrize("launcher", ["cluster.launch", pytest.param("torchrun", marks=pytest.mark.proof)])
def test_hello_joins_sends_and_all_reduces_on_real_workers(launcher):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]

    script = "cluster/hello.py"
    result = launch(script, workers=2) if launcher == "cluster.launch" else run(*torchrun, script)

    assert result.returncode == 0, result.stderr
    assert "rank 1 received [1.0, 2.0, 3.0]" in result.stdout
    assert result.stdout.count("got the sum [3.0, 30.0]") == 2


def over_ssh(ssh: str, *words, hosts: int = 3) -> list:
    where = ["--hosts", ",".join(["127.0.0.1"] * hosts), "--python", sys.executable]
    return ["-m", "cluster.launch", *where, "--ssh", ssh, "--", *words]


def test_hosts_are_reached_by_ssh_and_work_together(ssh):
    result = run(*over_ssh(ssh, "cluster/hello.py", "--step", "all_reduce", hosts=2))

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("got the sum [3.0, 30.0]") == 2


def test_a_failure_on_a_host_is_named_and_ends_the_remote_processes(ssh, stub):
    script = stub("stubborn_family")

    result = run(*over_ssh(ssh, script, "fail"))

    assert result.stderr.splitlines()[0] == "rank 1 (127.0.0.1) failed first: exit code 5"
    assert result.returncode == 5
    assert processes_with(script.parent) == []


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs an ssh")
def test_a_host_that_cannot_be_reached_is_one_failure_with_ssh_s_own_words():
    result = run(*over_ssh(f"ssh -o BatchMode=yes -p {free_port()}", "cluster/hello.py"))

    assert result.returncode == 255
    assert "Connection refused" in result.stderr
    assert "exit code 255 comes from ssh itself; test the connection with: ssh" in result.stderr
