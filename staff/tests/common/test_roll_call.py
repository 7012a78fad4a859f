"""Before the group is joined: every mistake in starting the workers is a sentence, on every worker."""

import os
import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch.distributed as dist

from common.arguments import parse_glue_arguments
from common.errors import STOPPED_BY_ANOTHER, InputError
from common.workers import roll_call
from common.workers.roll_call import call_the_roll

pytestmark = pytest.mark.medium
HERE = f"(process {os.getpid()} on {socket.gethostname()})"


@pytest.fixture
def config():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--world_size", "3", "--local_rank", "0", "--master_port", str(port), "--join_seconds", "20"]
    return parse_glue_arguments("task2a_gather_scatter", flags)


@pytest.fixture
def begin():
    """begin(config) calls the roll in a thread; the result of what it returns is the message, "" if all is well."""
    rolls = []

    def message(config):
        try:
            rolls.append(call_the_roll(config))
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        yield lambda config: pool.submit(message, config)
    for channel in (channel for roll in rolls for channel in roll.channels.values()):
        channel.close()


@pytest.fixture
def start(begin):
    """start(*configs) calls the roll for all of them, and returns each one's message."""
    return lambda *configs: [call.result(timeout=60) for call in [begin(config) for config in configs]]


def connected(config):
    """A connection to rank 0, as soon as it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", config.master_port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.02)


def test_all_workers_go_on_when_all_are_there_and_the_port_is_free_for_the_lesson(config, start):
    assert start(*(replace(config, rank=rank) for rank in (2, 0, 1))) == ["", "", ""]

    socket.create_server(("127.0.0.1", config.master_port)).close()  # though their connections to rank 0 stay


def test_a_missing_rank_is_named_on_every_worker(config, start):
    config = replace(config, join_seconds=1.0)

    messages = start(replace(config, rank=0), replace(config, rank=2, join_seconds=20.0))

    assert all("rank 1 of 3 did not connect within 1 s" in message for message in messages)


def test_the_second_process_of_a_rank_is_refused_and_the_others_go_on(config, begin):
    first = begin(config)
    connected(config).close()  # rank 0 listens
    (refused,), (accepted,) = wait([begin(replace(config, rank=1)) for _ in range(2)], return_when=FIRST_COMPLETED)
    again = begin(config).result()
    last = begin(replace(config, rank=2))

    assert f"rank 1 has already joined {HERE}: start this worker with another --local_rank" in refused.result()
    assert f"rank 0 has already joined {HERE}" in again and "in use" not in again
    assert first.result() == accepted.result() == last.result() == ""


def test_at_the_port_of_a_run_that_has_begun_a_rank_says_so_at_once_and_does_not_wait_for_ever(
    config, start, monkeypatch, capsys
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
        ({}, {"world_size": 4}, " has --world_size 4, rank 0 has --world_size 3"),
        ({}, {"task": "task3_ddp"}, " runs task3_ddp, rank 0 runs task2a_gather_scatter"),
        ({"timeline": 3}, {}, " has --timeline 0, rank 0 has --timeline 3"),
        ({}, {"backend": "nccl"}, " uses nccl, rank 0 uses gloo; use --no_cuda everywhere"),
    ],
)
def test_what_differs_between_two_workers_is_named_on_both(config, start, changes_of_0, changes_of_1, expected):
    messages = start(replace(config, rank=0, **changes_of_0), replace(config, rank=1, **changes_of_1))

    assert all(f"rank 1 {HERE}{expected}" in message for message in messages)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"rank": 1, "join_seconds": 0.5}, "rank 1 could not reach rank 0 at 127.0.0.1:"),
        ({"master_ip": "no-such-host.invalid"}, "no-such-host.invalid does not resolve on this machine"),
        ({"master_ip": "192.0.2.1"}, "--master_ip must be an address of the machine on which rank 0 runs"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(config, start, changes, expected):
    (message,) = start(replace(config, **changes))

    assert expected in message


def test_a_rank_whose_rank_0_has_left_says_so_and_that_it_is_not_the_cause(config):
    with socket.create_server(("127.0.0.1", config.master_port)) as rank_0:
        threading.Thread(target=lambda: rank_0.accept()[0].close()).start()
        try:
            call_the_roll(replace(config, rank=1, join_seconds=2.0))
        except InputError as error:
            message, code = str(error), error.exit_code

    assert "rank 0 exited before all workers had connected" in message
    assert code == STOPPED_BY_ANOTHER  # by which the launcher tells a consequence from its cause
