"""cluster.launch, the end: failures, real workers, other hosts, and that nothing stays behind however it ends."""

import os
import signal
import sys

import pytest

from cluster.launch import free_port
from tests.own import rank_stubs, ssh_server
from tests.own.rank_stubs import launch, lines_of
from tests.own.started_processes import processes_with, run, started, wait_for

stub, ssh = rank_stubs.stub, ssh_server.ssh  # fixtures
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"), pytest.mark.medium]


# ----------------------------------------------------------------------------------------- failures


def test_the_first_failure_is_shown_first_and_once_and_the_others_are_stopped(stub):
    script = stub("rank_2_fails")

    result = launch(script, workers=4)

    shown = result.stderr.splitlines()
    assert shown[0] == "rank 2 failed first: exit code 1. Its last lines:"
    assert shown[1] == "[2] Traceback (most recent call last):"
    assert shown[-2:] == ["[2] RuntimeError: the reason", "stopping: rank 0, rank 1, rank 3"]
    assert result.stderr.count("RuntimeError: the reason") == 1
    assert result.returncode == 1
    assert processes_with(script.parent) == []


def test_an_error_that_all_ranks_make_is_shown_once(stub):
    result = launch(stub("all_fail_alike"), workers=4)

    assert result.stderr.count("error: the same everywhere") == 1
    assert "failed first: exit code 1" in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "name, code, shown",
    [
        (  # the cause is named, even if a rank that lost it ended sooner
            "rank_0_loses_rank_2",
            7,
            ["rank 2 failed first: exit code 7"]
            + ["afterwards rank 0 failed: exit code 1: RuntimeError: Connection closed by peer"],
        ),
        ("rank_1_fails_before_rank_2", 11, ["rank 1 failed first: exit code 11"]),
        (  # and the table of another rank below it
            "rank_2_is_killed",
            128 + signal.SIGKILL,
            ["rank 2 failed first: killed by SIGKILL (exit code 137)", "[0] where each rank was:"]
            + ["[0]   rank 2  died", "[0] rank 2 died (process 7 on here)"],
        ),
    ],
)
def test_of_several_failures_the_cause_is_named(stub, name, code, shown):
    result = launch(stub(name))

    assert result.stderr.splitlines()[: len(shown)] == shown
    assert result.returncode == code


def test_a_rank_that_ends_well_leaves_the_others_at_work(stub):
    result = launch(stub("rank_0_ends_first"))

    assert result.stdout.count("still working") == 2
    assert result.returncode == 0


# -------------------------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGKILL, os.kill),
        (signal.SIGINT, os.killpg),  # Ctrl-C goes to the whole group
        *(pytest.param(number, os.kill, marks=pytest.mark.proof) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_however_the_launcher_is_stopped_no_rank_that_ignores_sigterm_is_left(stub, tmp_path, number, send):
    script = stub("stubborn_family")
    with started("-m", "cluster.launch", "--workers", "2", "--", script, start_new_session=True) as process:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "both ranks")

        send(process.pid, number)

        expected = -number if number == signal.SIGKILL else 128 + number
        assert process.wait() == expected
    wait_for(lambda: not processes_with(tmp_path), "the end of all processes")


# --------------------------------------------------------------------------------------- the real thing


def test_hello_joins_sends_and_all_reduces_on_real_workers():
    result = launch("cluster/hello.py", workers=2)

    assert result.returncode == 0, result.stderr
    assert lines_of(1, result.stdout)[1] == "rank 1 received [1.0, 2.0, 3.0]"
    assert [lines_of(rank, result.stdout)[-1].partition("sum ")[2] for rank in range(2)] == ["[3.0, 30.0]"] * 2


@pytest.mark.proof
def test_hello_is_joined_by_torchrun_too():
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]

    result = run(*torchrun, "cluster/hello.py")

    assert result.stdout.count("got the sum [3.0, 30.0]") == 2, result.stderr


# ------------------------------------------------------------------------------------------------ ssh


def over_ssh(reach: str, *words, hosts: int = 3) -> list:
    where = ["--hosts", ",".join(["127.0.0.1"] * hosts), "--python", sys.executable]
    return ["-m", "cluster.launch", *where, "--ssh", reach, "--", *words]


@pytest.mark.proof
def test_hosts_are_reached_by_ssh_and_work_together(ssh):
    result = run(*over_ssh(ssh, "cluster/hello.py", hosts=2))

    assert result.returncode == 0, result.stderr
    assert [lines_of(rank, result.stdout)[-1].partition("sum ")[2] for rank in range(2)] == ["[3.0, 30.0]"] * 2


def test_a_failure_on_a_host_is_named_and_ends_the_remote_processes(ssh, stub):
    script = stub("stubborn_family")

    result = run(*over_ssh(ssh, script, "fail"))

    assert result.stderr.splitlines()[0] == "rank 1 (127.0.0.1) failed first: exit code 5"
    assert result.returncode == 5
    assert processes_with(script.parent) == []


@pytest.mark.proof
def test_kill_9_of_the_launcher_ends_the_remote_processes(ssh, stub, tmp_path):
    script = stub("stubborn_family")
    with started(*over_ssh(ssh, script)) as process:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)), "all ranks")

        process.kill()

    wait_for(lambda: not processes_with(tmp_path), "the end of all remote processes")


def test_a_host_that_refuses_is_one_failure_with_ssh_s_own_words(ssh, stub):
    nobody = ssh.replace("-l ", "-l no-such-user-")

    result = run(*over_ssh(nobody, "cluster/hello.py"))

    assert result.returncode == 255
    assert "Permission denied" in result.stderr
    assert "exit code 255 comes from ssh itself; test the connection with: ssh -p" in result.stderr
