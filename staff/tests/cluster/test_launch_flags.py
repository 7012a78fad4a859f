"""The command line of cluster.launch, and the commands that follow from it; nothing is started."""

import re
import sys

import pytest

from cluster.launch import commands, parse
from common.errors import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux machines")

HELLO = ["cluster/hello.py", "--step", "join"]
FLAGS = ["--master_ip", "10.0.0.9", "--master_port", "7001", "--world_size", "2"]


@pytest.mark.parametrize(("words", "script"), [
    (["--workers", "2", "--master_port", "7001", "--master_ip", "10.0.0.9", *HELLO], HELLO),
    (["--world_size=2", "--", *HELLO, "--master_port=7001", "--master_ip", "10.0.0.9"], HELLO),
    (["--workers", "2", "--master_port", "7002", *FLAGS[:2], *HELLO, "--master_port=7001"], HELLO),  # the last
    (["--timeline", *FLAGS, *HELLO], [*HELLO, "--timeline"]),
    (["--timeline", *FLAGS, *HELLO, "--timeline", "5"], [*HELLO, "--timeline", "5"]),
])  # fmt: skip
def test_flags_that_the_user_gave_are_kept(words, script):
    planned, _ = parse(words)

    assert planned.workers == 2
    assert planned.script == [*script, *FLAGS]


@pytest.mark.parametrize(("words", "message"), [
    (["--", "python", "cluster/hello.py"], "leave out 'python'"),
    (["--", "no/such/script.py"], "there is no script no/such/script.py"),
    (["--", "cluster/hello.py", "--local_rank", "0"], "leave out --local_rank"),
    (["--workers", "2", "--", "cluster/hello.py", "--world_size", "4"], "--workers 2 and --world_size 4 differ"),
    (["--workers", "1", "--hosts", "127.0.0.1,127.0.0.2", "--", "cluster/hello.py"], "expected at least 2"),
    (["--hosts", "no-such-host.invalid", "--", "cluster/hello.py"], "add --master_ip"),
    (["--hosts", "localhost,node1", "--", "cluster/hello.py"], "only that node can reach"),
])  # fmt: skip
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
    assert all(words in remote[0] for words in ("cd 'my work' && exec", "--share 2", "'a b'"))
