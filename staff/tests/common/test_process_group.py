"""Around the lesson's own join: a worker's place, the network interface, the cores, and joins that went wrong."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from common.arguments import parse_glue_arguments
from common.errors import InputError
from common.workers.process_group import choose_interface, process_group

LOOPBACK = next(name for name, at in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in at))
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.10.1.1", "MASTER_PORT": "7000"}


@pytest.fixture
def config(tmp_path):
    """A worker on its own, on the CPU, at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    flags = ["--world_size", "1", "--local_rank", "0", "--master_ip", "127.0.0.1", "--master_port", port, "--no_cuda"]
    return parse_glue_arguments("task2b_allreduce", [*flags, "--output_dir", str(tmp_path / "run")])


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", *TORCHRUN):
        monkeypatch.setenv(variable, "")  # so that it is put back after the test
        monkeypatch.delenv(variable)
    return monkeypatch


@pytest.mark.parametrize("chosen", [None, max(psutil.net_if_addrs())])
def test_gloo_and_nccl_are_told_the_interface_unless_the_user_named_one(environment, chosen):
    if chosen:
        environment.setenv("GLOO_SOCKET_IFNAME", chosen)
    choose_interface("no such host")
    assert "NCCL_SOCKET_IFNAME" not in os.environ

    choose_interface("127.0.0.1")

    assert os.environ["NCCL_SOCKET_IFNAME"] == LOOPBACK
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or LOOPBACK)


def test_an_interface_that_this_machine_does_not_have_is_refused_with_those_that_it_has(environment):
    environment.setenv("GLOO_SOCKET_IFNAME", "eth77")

    with pytest.raises(InputError, match=rf"no interface eth77; it has .*{LOOPBACK}.*; unset the variable"):
        choose_interface("127.0.0.1")


def join(config):
    dist.init_process_group("gloo", rank=0, world_size=1)  # through the environment


@pytest.mark.parametrize("set_by_user", [False, True])
def test_a_join_meets_where_the_flags_say_and_cores_are_shared_unless_the_user_has_set_them(
    config, environment, set_by_user
):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    if set_by_user:
        environment.setenv("OMP_NUM_THREADS", "3")
    try:
        with process_group(config, join) as worker:
            assert (worker.rank, worker.world_size, worker.is_first) == (0, 1, True)
            assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(config.master_port))
            assert torch.get_num_threads() == (3 if set_by_user else len(os.sched_getaffinity(0)))
    finally:
        torch.set_num_threads(before)
    assert not dist.is_initialized()


def not_written(config):
    raise NotImplementedError("TODO 2a.1: join")


@pytest.mark.parametrize(("join", "error", "message"), [
    (lambda config: None, InputError, r"init_process_group was not called \(region 2a.1\)"),
    (
        lambda config: dist.init_process_group("gloo", init_method="tcp://127.0.0.1", rank=0, world_size=1),
        InputError, "rank 0 could not join the process group: ",  # an address without a port
    ),
    (not_written, NotImplementedError, r"TODO 2a\.1"),
])  # fmt: skip
def test_a_join_that_does_not_join_says_why_in_one_line(config, join, error, message):
    with pytest.raises(error, match=message) as caught, process_group(config, join):
        pass
    assert "\n" not in str(caught.value)


def test_a_script_of_one_worker_refuses_a_larger_world(tmp_path):
    flags = ["--no_cuda", "--output_dir", str(tmp_path / "run"), "--world_size", "2", "--local_rank", "0"]

    with (
        pytest.raises(InputError, match="runs on one worker, got 2"),
        process_group(parse_glue_arguments("task1_single", flags)),
    ):
        pass
