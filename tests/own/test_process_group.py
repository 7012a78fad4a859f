"""Around the lesson's own join: the network interface, the share of the cores, and joins that went wrong."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from common.arguments import parse_glue_arguments
from common.errors import InputError
from common.workers.process_group import choose_interface, interface_towards, process_group, share_cores

LOOPBACK = next(name for name, at in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in at))


@pytest.fixture
def config(tmp_path):
    """A worker on its own, on the CPU, at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    flags = ["--world_size", "1", "--local_rank", "0", "--master_ip", "127.0.0.1", "--master_port", port, "--no_cuda"]
    return parse_glue_arguments("task2b_allreduce", [*flags, "--output_dir", str(tmp_path / "run")])


def join_alone(config):
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)


@pytest.fixture
def interfaces(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "")  # so that it is put back after the test
        monkeypatch.delenv(variable)
    return monkeypatch


def test_the_interface_is_the_one_that_leads_to_the_master():
    assert interface_towards("127.0.0.1") == LOOPBACK


def test_an_address_that_no_name_server_knows_has_no_interface():
    assert interface_towards("no such host") is None


def test_gloo_and_nccl_are_told_the_interface(interfaces):
    choose_interface("127.0.0.1")

    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == LOOPBACK


def test_an_interface_that_the_user_named_is_kept(interfaces):
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


def test_an_address_that_is_set_in_the_environment_is_kept(config, interfaces):
    interfaces.setenv("MASTER_PORT", "12345")
    kept = []

    with process_group(config, lambda config: kept.append(os.environ["MASTER_PORT"]) or join_alone(config)):
        assert kept == ["12345"]


def test_a_join_that_does_not_join_names_its_region(config, interfaces):
    with pytest.raises(InputError, match=r"init_process_group was not called \(region 2a.1\)"):
        with process_group(config, lambda config: None):
            pass


def test_a_join_that_fails_says_why_in_one_line(config, interfaces):
    def join(config):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1", rank=0, world_size=1)  # no port

    with pytest.raises(InputError, match="rank 0 could not join the process group: ") as error:
        with process_group(config, join):
            pass
    assert "\n" not in str(error.value)


def test_an_open_todo_speaks_for_itself(config, interfaces):
    def join(config):
        raise NotImplementedError("TODO 2a.1: join")

    with pytest.raises(NotImplementedError, match=r"TODO 2a\.1"), process_group(config, join):
        pass
