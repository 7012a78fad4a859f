"""Before the group is joined: every mistake in starting the workers is a sentence, on every worker."""

import json
import os
import socket
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from cluster.supervise import CONSEQUENCE
from common.arguments import parse_glue_arguments
from common.errors import InputError
from common.workers import roll_call
from common.workers.roll_call import call_the_roll

pytestmark = pytest.mark.medium


@pytest.fixture
def config():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--world_size", "3", "--local_rank", "0", "--master_port", str(port), "--join_seconds", "20"]
    return parse_glue_arguments("task2a_gather_scatter", flags)


def start(*configs):
    """Call the roll once per configuration, in threads; return each one's message, in order ("": all is well)."""
    messages = [""] * len(configs)

    def work(number, config):
        try:
            call_the_roll(config)
        except InputError as error:
            messages[number] = str(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(configs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return messages


class Started:
    """A call of the roll in a thread; `message` waits for its end and is the message that it got."""

    def __init__(self, config):
        self.answer = []
        self.thread = threading.Thread(target=lambda: self.answer.extend(start(config)))
        self.thread.start()

    @property
    def message(self):
        self.thread.join(timeout=60)
        (answer,) = self.answer
        return answer


def connected(config):
    """A connection to rank 0, as soon as it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", config.master_port), timeout=5)
        except ConnectionRefusedError:
            threading.Event().wait(0.02)


def announce(connection, config, rank=1):
    who = {"rank": rank, "world_size": 3, "task": config.task, "process": {"host": "", "process": 1, "space": 0}}
    connection.sendall(json.dumps(who).encode() + b"\n")


def test_all_workers_go_on_when_all_are_there_and_the_port_is_free_afterwards(config):
    assert start(*(replace(config, rank=rank) for rank in (2, 0, 1))) == ["", "", ""]

    socket.create_server(("127.0.0.1", config.master_port)).close()


def test_a_missing_rank_is_named_on_every_worker(config):
    config = replace(config, join_seconds=1.0)

    messages = start(replace(config, rank=0), replace(config, rank=2, join_seconds=20.0))

    assert all("rank 1 of 3 did not connect within 1 s" in message for message in messages)


def test_the_second_process_of_a_rank_is_refused_and_the_others_go_on(config):
    first = Started(config)
    connected(config).close()  # rank 0 listens
    others = [Started(replace(config, rank=1)) for _ in range(2)]
    while all(other.thread.is_alive() for other in others):  # one of the two is answered at once, the other waits
        threading.Event().wait(0.02)
    (again,) = start(config)
    last = Started(replace(config, rank=2))

    refused, accepted = sorted((other.message for other in others), reverse=True)
    here = f"(process {os.getpid()} on {socket.gethostname()})"
    assert f"rank 1 has already joined {here}: start this worker with another --local_rank" in refused
    assert f"rank 0 has already joined {here}" in again and "in use" not in again
    assert first.message == accepted == last.message == ""


def test_what_is_no_worker_and_a_rank_that_was_stopped_while_it_waited_are_ignored(config):
    first = Started(config)
    with connected(config) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with connected(config) as stopped:
        announce(stopped, config)

    assert start(replace(config, rank=1), replace(config, rank=2)) == ["", ""]
    assert first.message == ""


def test_a_rank_that_was_stopped_does_not_count_when_the_last_one_comes(config):
    """Rank 1 leaves, and then rank 2 comes: rank 0 must not go on without rank 1."""
    config = replace(config, join_seconds=3.0)
    first = Started(config)
    with connected(config) as stopped, stopped.makefile("r") as line:
        announce(stopped, config)
        assert json.loads(line.readline()) == {"greeting": "wait for the others"}

    (message,) = start(replace(config, rank=2))

    assert all("rank 1 of 3 did not connect within 3 s" in words for words in (first.message, message))


def test_at_the_port_of_a_run_that_has_begun_a_rank_says_so_at_once_and_does_not_wait_for_ever(
    config, monkeypatch, capsys
):
    monkeypatch.setattr(roll_call, "GREETING_SECONDS", 0.1)  # a store never greets
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 0.5)
    config = replace(config, join_seconds=1.0)
    store = dist.TCPStore("127.0.0.1", config.master_port, world_size=1, is_master=True, wait_for_workers=False)

    messages = start(config, replace(config, rank=2))

    assert store.port == config.master_port
    assert all("a run that has begun" in message and "another --master_port" in message for message in messages)
    assert f"rank 2: no answer from 127.0.0.1:{config.master_port} yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes_of_0, changes_of_1, expected",
    [
        ({}, {"world_size": 4}, "rank 1 at 127.0.0.1 has --world_size 4, rank 0 has 3"),
        ({}, {"task": "task3_ddp"}, "runs task3_ddp, rank 0 runs task2a_gather_scatter"),
        ({"timeline": 3}, {}, "has --timeline 0, rank 0 has 3"),
        ({}, {"backend": "nccl"}, "uses nccl, rank 0 uses gloo"),
    ],
)
def test_what_differs_between_two_workers_is_named_on_both(config, changes_of_0, changes_of_1, expected):
    messages = start(replace(config, rank=0, **changes_of_0), replace(config, rank=1, **changes_of_1))

    assert all(expected in message for message in messages)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"rank": 1, "join_seconds": 0.5}, "rank 1 could not reach rank 0 at 127.0.0.1:"),
        ({"master_ip": "no-such-host.invalid"}, "no-such-host.invalid does not resolve on this machine"),
        ({"master_ip": "192.0.2.1"}, "--master_ip must be an address of the machine on which rank 0 runs"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(config, changes, expected):
    (message,) = start(replace(config, **changes))

    assert expected in message


def test_a_port_that_is_taken_says_so(config, monkeypatch):
    monkeypatch.setattr(roll_call, "GREETING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", config.master_port)):
        (message,) = start(config)

    assert str(config.master_port) in message and "another --master_port" in message


def test_a_rank_whose_rank_0_has_left_says_so_and_the_launcher_looks_for_the_cause_elsewhere(config):
    with socket.create_server(("127.0.0.1", config.master_port)) as rank_0:
        threading.Thread(target=lambda: rank_0.accept()[0].close()).start()
        (message,) = start(replace(config, rank=1, join_seconds=2.0))

    assert "rank 0 exited before all workers had connected" in message
    assert CONSEQUENCE.search(message)
