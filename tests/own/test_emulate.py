"""cluster.emulate: the plan and its commands without any rights, then real nodes where this machine allows them."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.emulate import Plan, commands, parse, rank_command, why_not
from common.errors import InputError
from common.paths import ROOT
from tests.own.started_processes import DEADLINE_SECONDS, processes_with, run, started, wait_for

pytestmark = pytest.mark.medium

REASON = why_not() if sys.platform == "linux" else "network namespaces are Linux's"
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


def emulate(*words, **options) -> subprocess.CompletedProcess:
    return run("-m", "cluster.emulate", *words, **options)


# ---------------------------------------------------------------------------------- data and commands


def test_two_nodes_become_these_commands():
    made = lines(Plan(nodes=2, rate="1gbit"))

    node_1 = """
        ip netns add node1
        ip link add port1 type veth peer name eth0 netns node1
        ip link set port1 master lan up
        ip -netns node1 address add 10.10.1.2/24 dev eth0
        ip -netns node1 link set lo up
        ip -netns node1 link set eth0 up
        tc -netns node1 qdisc add dev eth0 root handle 1: tbf rate 1gbit burst 250000 latency 50ms
        tc qdisc add dev port1 root handle 1: tbf rate 1gbit burst 250000 latency 50ms
        """.strip().split("\n")
    assert made[:2] == ["ip link add lan type bridge", "ip link set lan up"]
    assert made[-8:] == [line.strip() for line in node_1]
    assert len(made) == 2 + 2 * 8


def lines(plan: Plan) -> list[str]:
    return [" ".join(command) for command in commands(plan)]


def test_each_link_is_shaped_in_both_directions_and_delayed_once():
    shaped = [line for line in lines(Plan(nodes=4, rate="100mbit")) if "tbf" in line]

    ends = [re.sub(r" qdisc add (dev \w+).*", r" \1", line) for line in shaped]
    assert ends == [end for n in range(4) for end in (f"tc -netns node{n} dev eth0", f"tc dev port{n}")]
    assert all("rate 100mbit" in line for line in shaped)
    assert [line for line in lines(Plan(nodes=2, delay="5ms")) if "netem" in line] == [
        f"tc -netns node{n} qdisc add dev eth0 parent 1: netem delay 5ms limit 100000" for n in range(2)
    ]
    assert not any("tbf" in line for line in lines(Plan(rate="none")))
    slow = next(line for line in lines(Plan(rate="1mbit")) if "tbf" in line)
    assert int(re.findall(r"burst (\d+)", slow)[0]) >= 65536  # one whole segment


def test_the_command_is_unchanged_but_for_the_rank():
    command = ["python", "run_glue.py", "--local_rank", "{rank}", "--output_dir", "out put/{rank}"]

    planned = rank_command(Plan(), 2, command)

    assert planned.words[-6:] == ["python", "run_glue.py", "--local_rank", "2", "--output_dir", "out put/2"]
    assert planned.words[:4] == ["ip", "netns", "exec", "node2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "65", "--", "true"], "--nodes: expected 1 to 64, got 65"),
        (["--rate", "fast", "--", "true"], "--rate: expected a rate such as 1gbit"),
        (["--delay", "5", "--", "true"], "--delay: expected a number with us, ms or s"),
        (["--nodes", "2", "--shell", "node2"], "--shell: expected one of node0, node1; got 'node2'"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(words, message):
    with pytest.raises(InputError, match=re.escape(message)):
        parse(words)


def test_plan_prints_all_commands_and_runs_none():
    result = emulate("--nodes", "2", "--plan", "--", "python", "x.py", "--local_rank", "{rank}")

    shown = result.stdout.splitlines()
    assert shown[0].startswith("unshare ")
    assert shown[0].endswith("--net --mount --pid --fork --kill-child --mount-proc")
    assert len(shown) == 1 + (2 + 2 * 8) + 2
    assert shown[-1].endswith("python x.py --local_rank 1")


# ------------------------------------------------------------------------------------------ real nodes


@needs_namespaces
@pytest.mark.proof
def test_workers_on_four_nodes_join_send_and_all_reduce():
    address = ["--master_ip", "10.10.1.1", "--master_port", "6585", "--world_size", "4", "--local_rank", "{rank}"]

    result = emulate("--", "python", "cluster/hello.py", *address)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("got the sum [10.0, 100.0]") == 4
    assert [f"rank {r} of 4 has joined, on node{r}" in result.stdout for r in range(4)] == [True] * 4


@needs_namespaces
def test_a_node_has_its_address_and_nothing_but_the_experiment_network_and_a_failure_names_it():
    show = "hostname; ip -o -4 address show | awk '{print $2, $4}'; getent hosts node0 | awk '{print $1}'"
    fail = "test {rank} != 1 && exec sleep 1000; echo a reason >&2; exit 7"

    result = emulate("--nodes", "2", "--", "sh", "-c", f"{show}; {fail}")

    on_node_1 = [line[4:] for line in result.stdout.splitlines() if line.startswith("[1] ")]
    assert on_node_1 == ["node1", "lo 127.0.0.1/8", "eth0 10.10.1.2/24", "10.10.1.1"]
    reason = ["rank 1 (node1) failed first: exit code 7. Its last lines:", "[1] a reason"]
    assert (result.stderr.splitlines()[:2], result.returncode) == (reason, 7)


@needs_namespaces
def test_the_control_network_has_the_default_route_and_stays_quiet_while_workers_talk():
    hello = "python cluster/hello.py --master_ip 10.10.1.1 --master_port 6585 --world_size 2 --local_rank {rank}"
    show = f"ip route show default; {hello} >&2 && grep -E 'eth0:|control:' /proc/net/dev"

    result = emulate("--nodes", "2", "--control", "--", "sh", "-c", show)

    route, *counters = [line[4:].split() for line in result.stdout.splitlines() if line.startswith("[1] ")]
    assert route[:3] == ["default", "dev", "control"], result.stderr
    moved = {name.rstrip(":"): set(numbers) for name, *numbers in counters}
    assert moved["control"] == {"0"}  # bytes and packets, in and out
    assert moved["eth0"] != {"0"}


@needs_namespaces
def test_a_delay_is_there_or_said_to_be_impossible():
    result = emulate("--nodes", "2", "--delay", "1ms", "--", "tc", "qdisc", "show", "dev", "eth0")

    if result.returncode == 0:
        assert result.stdout.count("delay 1ms") == 2
    else:
        assert result.returncode == 2
        assert result.stderr.startswith("error: --delay: this kernel has no netem")
        assert len(result.stderr.splitlines()) == 1


@needs_namespaces
def test_shell_opens_on_the_node_that_was_named():
    result = emulate("--nodes", "2", "--shell", "node1", input="hostname; exit 4\n", env=os.environ | {"SHELL": "sh"})

    assert result.stdout == "node1\n"
    assert result.returncode == 4


@needs_namespaces
@pytest.mark.skipif(os.name == "posix" and os.getuid() != 0, reason="not root: every test above ran as a normal user")
def test_a_normal_user_gets_the_same_nodes():
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _can(as_nobody, p)), None)
    if python is None:
        pytest.skip("no Python here that a normal user may run")
    probe = [*as_nobody, "unshare", "--user", "--map-root-user", "--net", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("normal users may not make namespaces here")

    command = [*as_nobody, python, "-B", "-m", "cluster.emulate", "--nodes", "2", "--", "cat", "/proc/self/uid_map"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    mapped = sorted(line.split() for line in result.stdout.splitlines())
    assert mapped == [[f"[{rank}]", "0", "65534", "1"] for rank in range(2)], result.stderr


def _can(user: list[str], python: str) -> bool:
    check = [*user, "env", python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(check, capture_output=True, cwd=ROOT).returncode == 0


# ---------------------------------------------------------------------------------- nothing is left behind


def leftovers(mark: Path) -> list[str]:
    """Processes, interfaces and named namespaces of ours that outlive the tool."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    remaining = [f"process {pid}" for pid in processes_with(mark)]
    remaining += re.findall(r"\b(?:lan|port\d+)\b[:@]", links)
    remaining += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " nsfs " in line]
    return remaining + [str(path) for path in Path("/run/netns").glob("node*")]


def start_and_stop(mark: Path, number: int | None, moment: float) -> None:
    """One run of three nodes: to its end, or `number` sent to it after `moment` seconds."""
    command = ["-m", "cluster.emulate", "--nodes", "3", "--", "sleep", "0.1" if number is None else "1000"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(*command, env=os.environ | {"MARK": str(mark)}, start_new_session=True, **quiet) as process:
        if number is not None:
            time.sleep(moment)  # any moment will do: while it starts, builds, runs
            os.killpg(process.pid, number)
        code = process.wait(timeout=DEADLINE_SECONDS)
    assert number is not None or code == 0
    wait_for(lambda: not leftovers(mark), f"the end of {leftovers(mark)}")


@needs_namespaces
@pytest.mark.parametrize(
    "number, moments",
    [
        (signal.SIGINT, (0.3,)),
        (signal.SIGKILL, (0.15, 1.0)),
        pytest.param(signal.SIGTERM, (0.02, 0.15, 0.3, 1.0), marks=pytest.mark.proof),
    ],
)
def test_stopped_at_any_moment_it_leaves_nothing(tmp_path, number, moments):
    for moment in moments:
        start_and_stop(tmp_path, number, moment)


@needs_namespaces
def test_a_shell_ends_with_the_tool_that_was_killed(tmp_path):
    environment = os.environ | {"MARK": str(tmp_path), "SHELL": "sh"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started("-m", "cluster.emulate", "--nodes", "1", "--shell", "node0", env=environment, **pipes) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"echo up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        assert len(processes_with(tmp_path)) >= 2  # what is left would be found

        process.kill()

        wait_for(lambda: not leftovers(tmp_path), "the end of the shell, whose input is still open")


@needs_namespaces
@pytest.mark.slow
def test_200_starts_and_stops_a_third_of_them_killed_leave_nothing(tmp_path):
    moments = random.Random(5)

    for turn in range(200):
        start_and_stop(tmp_path, signal.SIGKILL if turn % 3 == 0 else None, moments.uniform(0, 1.2))  # checks itself
