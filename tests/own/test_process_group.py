"""Around the lesson's own join: the network interface, the share of the cores, and joins that went wrong."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from common.arguments import parse_glue_arguments
from common.errors import InputError
from common.workers.process_group import choose_interface, process_group, share_cores

LOOPBACK = next(name for name, at in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in at))


@pytest.fixture
def config(tmp_path):
    """A worker on its own, on the CPU, at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    flags = ["--world_size", "1", "--local_rank", "0", "--master_ip", "127.0.0.1", "--master_port", port, "--no_cuda"]
    return parse_glue_arguments("task2b_allreduce", [*flags, "--output_dir", str(tmp_path / "run")])


@pytest.fixture
def interfaces(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "")  # so that it is put back after the test
        monkeypatch.delenv(variable)
    return monkeypatch


def test_gloo_and_nccl_are_told_the_interface_unless_the_user_named_one(interfaces):
    choose_interface("no such host")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == LOOPBACK

    interfaces.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_number_of_threads_that_the_user_chose_is_kept(config, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))

    share_cores(config)

    assert torch.get_num_threads() == before


def test_a_script_of_one_worker_refuses_a_larger_world(tmp_path):
    config = parse_glue_arguments("task1_single", ["--no_cuda", "--output_dir", str(tmp_path / "run")])
    object.__setattr__(config, "world_size", 2)

    with pytest.raises(InputError, match="runs on one worker, got 2"), process_group(config):
        pass


def test_a_join_through_the_environment_meets_where_the_flags_say(config, interfaces):
    with process_group(config, lambda config: dist.init_process_group("gloo", rank=0, world_size=1)):
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(config.master_port))
    interfaces.setenv("MASTER_PORT", "12345")  # what is set already is kept
    with pytest.raises(InputError), process_group(config, lambda config: None):
        pass
    assert os.environ["MASTER_PORT"] == "12345"


def not_written(config):
    raise NotImplementedError("TODO 2a.1: join")


@pytest.mark.parametrize(
    "join, error, message",
    [
        (lambda config: None, InputError, r"init_process_group was not called \(region 2a.1\)"),
        (
            lambda config: dist.init_process_group("gloo", init_method="tcp://127.0.0.1", rank=0, world_size=1),
            InputError,
            "rank 0 could not join the process group: ",  # an address without a port
        ),
        (not_written, NotImplementedError, r"TODO 2a\.1"),
    ],
)
def test_a_join_that_does_not_join_says_why_in_one_line(config, interfaces, join, error, message):
    with pytest.raises(error, match=message) as caught, process_group(config, join):
        pass
    assert "\n" not in str(caught.value)
