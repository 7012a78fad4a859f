"""cluster.emulate: the plan and its commands without any rights, then real nodes where this machine allows them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.emulate import Plan, commands, parse, why_not
from common.errors import InputError
from common.paths import ROOT
from staff.tests.cluster.started_processes import DEADLINE_SECONDS, processes_with, run, started, wait_for
from staff.tests.common.stopping_ranks import write_program

pytestmark = pytest.mark.medium

REASON = why_not() if sys.platform == "linux" else "network namespaces are Linux's"
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


def emulate(*words, **options) -> subprocess.CompletedProcess:
    return run("-m", "cluster.emulate", *words, **options)


# ---------------------------------------------------------------------------------- data and commands


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


@pytest.mark.parametrize(("words", "message"), [
    (["--nodes", "65", "--", "true"], "--nodes: expected 1 to 64, got 65"),
    (["--rate", "fast", "--", "true"], "--rate: expected a rate such as 1gbit"),
    (["--delay", "5", "--", "true"], "--delay: expected a number with us, ms or s"),
    (["--nodes", "2", "--shell", "node2"], "--shell: expected one of node0, node1; got 'node2'"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_clear_error(words, message):
    with pytest.raises(InputError, match=re.escape(message)):
        parse(words)


# ------------------------------------------------------------------------------------------ real nodes

HELLO = "python cluster/hello.py --master_ip 10.10.1.1 --master_port 6585 --world_size 2 --local_rank {rank}"
CONNECT = "import socket; s = socket.socket(); s.setblocking(False); s.connect_ex(('10.10.1.1', 6585)); print("
CONNECT += "s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b'\\0').decode())"


@needs_namespaces
def test_a_node_has_its_address_and_nothing_but_the_experiment_network_and_a_failure_names_it():
    show = "hostname; ip -o -4 address show | awk '{print $2, $4}'; getent hosts node0 | awk '{print $1}'"
    fail = "test {rank} != 1 && exec sleep 1000; echo a reason >&2; exit 7"

    result = emulate("--nodes", "2", "--", "sh", "-c", f'{show}; python -c "{CONNECT}"; {fail}')

    on_node_1 = [line[4:] for line in result.stdout.splitlines() if line.startswith("[1] ")]
    assert on_node_1 == ["node1", "lo 127.0.0.1/8", "eth0 10.10.1.2/24", "10.10.1.1", "reno"]  # whatever is used here
    reason = ["rank 1 (node1) failed first: exit code 7. Its last lines:", "[1] a reason"]
    assert (result.stderr.splitlines()[:2], result.returncode) == (reason, 7)


@needs_namespaces
def test_the_control_network_has_the_default_route_and_stays_quiet_while_workers_talk():
    show = f"ip route show default; {HELLO} >&2 && grep -E 'eth0:|control:' /proc/net/dev"

    result = emulate("--nodes", "2", "--control", "--", "sh", "-c", show)

    route, *counters = [line[4:].split() for line in result.stdout.splitlines() if line.startswith("[1] ")]
    assert route[:3] == ["default", "dev", "control"], result.stderr
    moved = {name.rstrip(":"): set(numbers) for name, *numbers in counters}
    assert moved["control"] == {"0"}  # bytes and packets, in and out
    assert moved["eth0"] != {"0"}


@needs_namespaces
@pytest.mark.parametrize(("what", "code", "words"), [
    ("computes", 0, []),  # at 1 Mbit/s each of six all_reduces takes two seconds, in which nobody computes
    *(pytest.param(*case, marks=pytest.mark.proof) for case in (
        ("is killed", 128 + signal.SIGKILL, ["rank 1 (node1) failed first: killed by SIGKILL", "rank 1 died (process"]),
        ("gathers", 3, ["--hang_seconds): collective #6 in iteration 3: ", "rank 1 called gather (60000)"]),
    )),
])  # fmt: skip
def test_on_nodes_a_hanging_run_is_explained_and_a_slow_link_is_no_hang(tmp_path, what, code, words):
    place = "--master_ip 10.10.1.1 --master_port 6585 --world_size 2 --local_rank {rank} --hang_seconds 1.5".split()
    script = ["python", write_program(tmp_path), what, "1", "(1, 60_000)" if code else "(60_000,)"]

    result = emulate(
        "--nodes", "2", "--rate", "1mbit", "--", *script, *place, "--output_dir", tmp_path / "run", timeout=200
    )

    assert result.returncode == code, result.stderr
    assert [word for word in words if word not in result.stderr] == []


@needs_namespaces
def test_a_delay_is_there_or_said_to_be_impossible():
    result = emulate("--nodes", "2", "--delay", "1ms", "--", "tc", "qdisc", "show", "dev", "eth0")

    if result.returncode == 0:
        assert result.stdout.count("delay 1ms") == 2
    else:
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
        assert result.stderr.startswith("error: --delay: this kernel has no netem")


@needs_namespaces
@pytest.mark.skipif(os.name == "posix" and os.getuid() != 0, reason="not root: every test above ran as a normal user")
def test_a_normal_user_gets_the_same_nodes():
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    probe = [*as_nobody, "unshare", "--user", "--map-root-user", "--net", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("normal users may not make namespaces here")
    new_enough = ["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*as_nobody, "env", python, *new_enough], capture_output=True, cwd=ROOT).returncode == 0:
            break
    else:
        pytest.skip("no Python here that a normal user may run")

    command = [*as_nobody, python, "-B", "-m", "cluster.emulate", "--nodes", "2", "--", "cat", "/proc/self/uid_map"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    mapped = sorted(line.split() for line in result.stdout.splitlines())
    assert mapped == [[f"[{rank}]", "0", "65534", "1"] for rank in range(2)], result.stderr


# ---------------------------------------------------------------------------------- nothing is left behind


def leftovers(mark: Path) -> list[str]:
    """Processes, interfaces and named namespaces of ours that outlive the tool."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    remaining = [f"process {pid}" for pid in processes_with(mark)]
    remaining += re.findall(r"\b(?:lan|port\d+)\b[:@]", links)
    remaining += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " nsfs " in line]
    return remaining + [str(path) for path in Path("/run/netns").glob("node*")]


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
    command = ["-m", "cluster.emulate", "--nodes", "3", "--", "sleep", "1000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for moment in moments:
        with started(*command, env=os.environ | {"MARK": str(tmp_path)}, start_new_session=True, **quiet) as process:
            time.sleep(moment)  # any moment will do: while it starts, builds, runs
            os.killpg(process.pid, number)
            process.wait(timeout=DEADLINE_SECONDS)
        wait_for(lambda: not leftovers(tmp_path), f"the end of {leftovers(tmp_path)}")


@needs_namespaces
def test_a_shell_opens_on_the_node_that_was_named_and_ends_with_the_tool_that_was_killed(tmp_path):
    environment = os.environ | {"MARK": str(tmp_path), "SHELL": "sh"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started("-m", "cluster.emulate", "--nodes", "2", "--shell", "node1", env=environment, **pipes) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"hostname\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"node1\n"
        assert len(processes_with(tmp_path)) >= 2  # what is left would be found

        process.kill()

        wait_for(lambda: not leftovers(tmp_path), "the end of the shell, whose input is still open")
