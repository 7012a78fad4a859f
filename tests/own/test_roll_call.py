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
from common.workers.roll_call import call_the_roll

pytestmark = pytest.mark.medium


@pytest.fixture
def config():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--world_size", "3", "--local_rank", "0", "--master_port", str(port), "--join_seconds", "20"]
    return parse_glue_arguments("task2a_gather_scatter", flags)


def start(*configs):
    """Call the roll once per configuration, in threads; what each was told, in the order given ("" is all well)."""
    told = [""] * len(configs)

    def work(number, config):
        try:
            call_the_roll(config)
        except InputError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(configs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return told


def test_all_workers_go_on_when_all_are_there(config):
    assert start(*(replace(config, rank=rank) for rank in (2, 0, 1))) == ["", "", ""]


def test_the_port_is_free_afterwards(config):
    start(*(replace(config, rank=rank) for rank in range(3)))

    socket.create_server(("127.0.0.1", config.master_port)).close()


def test_a_missing_rank_is_named_on_every_worker(config):
    config = replace(config, join_seconds=1.0)

    told = start(replace(config, rank=0), replace(config, rank=2, join_seconds=20.0))

    assert all("rank 1 of 3 did not connect within 1 s" in message for message in told)


def test_the_second_worker_of_a_rank_is_refused_and_the_others_go_on(config):
    refused = threading.Event()
    first, third = (replace(config, rank=rank) for rank in (1, 2))
    told = {}

    def join(name, config):
        told[name] = start(config)[0]

    def join_last():
        refused.wait(60)
        join("rank 2", third)

    def join_twice():
        start_together = [threading.Thread(target=join, args=(name, first)) for name in ("one", "other")]
        for thread in start_together:
            thread.start()
        while len(told) < 1:  # one of the two is answered at once, the other waits for rank 2
            start_together[0].join(0.05)
        refused.set()
        for thread in start_together:
            thread.join()

    threads = [threading.Thread(target=work) for work in (join_twice, join_last, lambda: join("rank 0", config))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert sorted([told["one"], told["other"]])[0] == ""
    message = max(told["one"], told["other"])
    assert f"rank 1 has already joined (process {os.getpid()} on {socket.gethostname()})" in message
    assert "start this worker with another --local_rank" in message
    assert told["rank 0"] == told["rank 2"] == ""


def test_a_rank_that_was_stopped_while_it_waited_may_come_again(config):
    def announce_and_leave():
        for _ in range(600):
            try:
                with socket.create_connection(("127.0.0.1", config.master_port), timeout=5) as connection:
                    who = {"rank": 1, "world_size": 3, "task": config.task}
                    who["process"] = {"host": "here", "process": 1, "space": 0}
                    connection.sendall(json.dumps(who).encode() + b"\n")
                    return
            except ConnectionRefusedError:
                threading.Event().wait(0.05)

    gone = threading.Thread(target=announce_and_leave)
    gone.start()
    told = []
    first = threading.Thread(target=lambda: told.extend(start(config)))
    first.start()
    gone.join()

    assert start(replace(config, rank=1), replace(config, rank=2)) == ["", ""]
    first.join(timeout=60)
    assert told == [""]


def test_a_rank_that_was_stopped_does_not_count_when_the_last_one_comes(config):
    """Rank 1 leaves, and then rank 2 comes: rank 0 must not go on without rank 1."""
    config = replace(config, join_seconds=3.0)
    told = []
    first = threading.Thread(target=lambda: told.extend(start(config)))
    announcement = {"rank": 1, "world_size": 3, "task": config.task, "process": {"host": "", "process": 1, "space": 0}}
    first.start()
    while True:  # until rank 0 listens
        try:
            connection = socket.create_connection(("127.0.0.1", config.master_port), timeout=5)
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    with connection, connection.makefile("rw") as line:
        line.write(json.dumps(announcement) + "\n")
        line.flush()
        assert json.loads(line.readline()) == {"greeting": "wait for the others"}

    (message,) = start(replace(config, rank=2))

    first.join(timeout=60)
    assert all("rank 1 of 3 did not connect within 3 s" in words for words in (*told, message))


def test_a_second_rank_0_is_told_who_the_first_is(config):
    told = []
    first = threading.Thread(target=lambda: told.extend(start(config, replace(config, rank=1))))
    first.start()
    while True:  # until the first listens
        try:
            socket.create_connection(("127.0.0.1", config.master_port), timeout=5).close()
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.05)

    (message,) = start(config)
    start(replace(config, rank=2))
    first.join(timeout=60)

    assert f"rank 0 has already joined (process {os.getpid()} on {socket.gethostname()})" in message
    assert "in use" not in message
    assert told == ["", ""]


def test_a_rank_of_a_run_that_has_begun_is_told_who_has_its_number(config):
    address = ("127.0.0.1", config.master_port)
    store = dist.TCPStore(*address, world_size=1, is_master=True, wait_for_workers=False)
    for rank in range(3):
        store.set(f"cos598d/process/{rank}", json.dumps({"host": "node7", "process": 4711 + rank}))

    messages = start(config, replace(config, rank=2))

    assert "rank 0 has already joined (process 4711 on node7)" in messages[0]
    assert "rank 2 has already joined (process 4713 on node7)" in messages[1]
    assert all("another --master_port" in message for message in messages)


def test_different_world_sizes_are_both_named(config):
    told = start(replace(config, rank=0), replace(config, rank=1, world_size=4))

    assert all("rank 1 at 127.0.0.1 has --world_size 4, rank 0 has 3" in message for message in told)


def test_different_scripts_are_named(config):
    told = start(replace(config, rank=0), replace(config, rank=1, task="task3_ddp"))

    assert all("runs task3_ddp, rank 0 runs task2a_gather_scatter" in message for message in told)


def test_a_rank_without_the_timeline_of_the_others_is_named(config):
    told = start(replace(config, rank=0, timeline=3), replace(config, rank=1))

    assert all("has --timeline 0, rank 0 has 3" in message for message in told)


def test_a_port_that_is_taken_says_so(config):
    with socket.create_server(("127.0.0.1", config.master_port)):
        (message,) = start(config)

    assert str(config.master_port) in message
    assert "another --master_port" in message


def test_a_master_that_cannot_be_reached_is_named_with_its_address(config):
    (message,) = start(replace(config, rank=1, join_seconds=0.5))

    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{config.master_port} within 0.5 s" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_said_to_be_that(config, rank):
    (message,) = start(replace(config, rank=rank, master_ip="no-such-host.invalid"))

    assert "no-such-host.invalid does not resolve on this machine" in message


def test_an_address_of_another_machine_is_refused_on_rank_0(config):
    (message,) = start(replace(config, master_ip="192.0.2.1"))

    assert "--master_ip must be an address of the machine on which rank 0 runs" in message


def test_a_rank_whose_rank_0_has_left_says_so_and_the_launcher_looks_for_the_cause_elsewhere(config):
    with socket.create_server(("127.0.0.1", config.master_port)) as rank_0:
        threading.Thread(target=lambda: rank_0.accept()[0].close()).start()
        (told,) = start(replace(config, rank=1, join_seconds=2.0))

    assert "rank 0 exited before all workers had connected" in told
    assert CONSEQUENCE.search(told)


def test_what_is_not_a_worker_is_ignored(config):
    def knock():
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", config.master_port), timeout=5) as stranger:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    return
            except ConnectionRefusedError:
                threading.Event().wait(0.05)

    stranger = threading.Thread(target=knock)
    stranger.start()
    first = threading.Thread(target=call_the_roll, args=(config,))
    first.start()
    stranger.join()

    assert start(replace(config, rank=1), replace(config, rank=2)) == ["", ""]
    first.join(timeout=30)
    assert not first.is_alive()
