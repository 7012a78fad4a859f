"""What is decided and said about GPUs, with torch's answers in place of a GPU: devices, backends, errors, recorders."""

import pickle
import resource
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from beyond.sharded_model import ShardedBlock, ShardedModel
from cluster import doctor
from common import peak_memory
from common.arguments import parse_glue_arguments, parse_gpt2_arguments
from common.errors import InputError
from common.record import Record
from common.timeline import clocks
from common.workers import machine as own_machine
from common.workers import process_group
from common.workers.collectives import CollectiveLog, recorded
from common.workers.machine import device_and_backend, workers_on_machine
from common.workers.process_group import Worker
from pipeline.run_gpt2 import use_cpu_with_one_gpu
from staff.tests.gpu.fake_group import joined

GPU = torch.device("cuda", 0)
DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""
REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a \
network error, NCCL version 2.27.5
Last error:
socketProgress: Connection closed by remote peer node1<40112>"""


@pytest.fixture
def machine(monkeypatch):
    """machine(number of GPUs), of which torch sees all."""

    def has(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return has


# --- one GPU and many workers ---


@pytest.mark.parametrize(
    ("workers", "count", "choice"),
    [(4, 1, (True, "gloo")), (4, 2, (True, "gloo")), (2, 2, (False, "nccl")), (1, 1, (False, "nccl"))],
)
def test_workers_use_gpus_only_if_each_has_one(machine, workers, count, choice):
    machine(count)
    assert device_and_backend(workers, no_cuda=False, backend=None, speaks=False) == choice


def test_one_line_says_that_the_cpu_is_used(machine, capsys):
    machine(1)
    flags = ["--world_size", "4", "--local_rank", "0", "--output_dir", "/tmp/none"]

    config = parse_glue_arguments("task2b_allreduce", flags)

    assert capsys.readouterr().out == "4 workers and 1 GPU on this machine: using the CPU and gloo\n"
    assert (config.backend, process_group.choose_device(config).type) == ("gloo", "cpu")


def test_the_other_workers_say_nothing_and_a_script_that_starts_its_workers_decides_for_all(machine, capsys):
    machine(1)
    parse_glue_arguments("task2b_allreduce", ["--world_size", "4", "--local_rank", "1"])
    assert capsys.readouterr().out == ""
    config = parse_gpt2_arguments("task2b_allreduce", [], world_size=2)
    assert (config.backend, config.no_cuda) == ("gloo", True)


def test_nccl_on_request_needs_a_gpu_for_each_worker(machine):
    machine(1)
    with pytest.raises(InputError, match="a GPU for each of the 4 workers on this machine, got 1"):
        device_and_backend(4, no_cuda=False, backend="nccl", speaks=False)


def test_workers_on_four_nodes_with_a_gpu_each_use_nccl(machine):
    machine(1)
    assert workers_on_machine(4, "10.10.1.1", {"LOCAL_WORLD_SIZE": "1"}) == workers_on_machine(4, "10.10.1.1", {}) == 1
    assert workers_on_machine(4, "10.10.1.1", {"LOCAL_WORLD_SIZE": "2"}) == 2
    assert workers_on_machine(4, "127.0.0.1", {}) == 4


@pytest.mark.parametrize(
    ("message", "is_lost", "reason"),
    [
        (DUPLICATE, False, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"),
        (REMOTE, True, "socketProgress: Connection closed by remote peer node1<40112>"),
    ],
)
def test_the_last_error_of_nccl_is_shown_and_only_a_peer_that_is_gone_is_lost_contact(message, is_lost, reason):
    error = dist.DistBackendError(message)
    assert process_group._is_lost_contact(error) == is_lost
    assert process_group._reason(error) == reason


def test_a_torch_without_cuda_beside_a_driver_is_said_at_the_start(machine, monkeypatch, capsys, tmp_path):
    machine(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(own_machine, "DRIVER", tmp_path / "version")
    own_machine.DRIVER.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.05  Release Build\n")

    choice = device_and_backend(1, no_cuda=False, backend=None, speaks=True)

    assert choice == (False, "gloo")
    assert "was built without CUDA, so the CPU is used" in capsys.readouterr().out
    assert own_machine.nvidia_driver() == "560.35.05"
    device_and_backend(1, no_cuda=True, backend=None, speaks=True)
    assert capsys.readouterr().out == ""


def test_runs_that_are_compared_use_the_cpu_if_one_of_them_must(machine, monkeypatch):
    machine(1)
    monkeypatch.setattr(own_machine, "nvidia_driver", lambda: "550.54")
    assert (own_machine.no_cuda_for(4), own_machine.no_cuda_for(1)) == (["--no_cuda"], [])


@pytest.mark.parametrize(
    ("arguments", "level", "words"),
    [
        (("", "", 0), "ok", "no NVIDIA driver; every script uses the CPU and gloo"),
        (("550.54", "torch 2.13.0 without CUDA", 0), "note", "make setup"),
        (("550.54", "torch 2.13.0 for CUDA 12.8", 1), "ok", "one worker with NCCL, more with the CPU"),
        (("550.54", "torch 2.13.0 for CUDA 12.8", 4), "ok", "driver 550.54, torch 2.13.0 for CUDA 12.8, 4 for torch"),
    ],
)
def test_the_doctor_names_driver_build_gpus_and_what_scripts_use(arguments, level, words):
    finding = doctor.check_gpu(*arguments)
    assert finding.level == level
    assert words in str(finding)


def test_the_doctor_asks_torch():
    build, count = doctor.torch_on_gpus()
    assert build.startswith(f"torch {torch.__version__}")
    assert count == 0  # the tests hide GPUs from the programs that they start


def test_a_pipeline_on_one_gpu_uses_the_cpu_for_partitions_and_data(machine, capsys):
    machine(1)
    for mode, uses_cpu in (("pipeline_parallel", True), ("model_parallel", True), ("none", False)):
        config = use_cpu_with_one_gpu(parse_gpt2_arguments("pipeline", ["--model_parallel_mode", mode]))
        assert config.no_cuda == uses_cpu
        assert ("using the CPU" in capsys.readouterr().out) == uses_cpu


# --- the recorder of the backend in use ---


def nccl(number: int, name: str, state: str = "completed", is_p2p: bool = False) -> dict:
    """An entry of NCCL's recorder, as torch's FlightRecorder writes it."""
    shapes = {"input_sizes": ((4,),), "input_dtypes": ["Float"], "output_sizes": ((4,),), "output_dtypes": ["Float"]}
    return shapes | {
        "record_id": number, "profiling_name": f"nccl:{name}", "state": state, "retired": state == "completed",
        "is_p2p": is_p2p, "time_created_ns": number, "process_group": ("0", "default_pg"), "collective_seq_id": number,
    }  # fmt: skip


@pytest.fixture
def on_nccl(monkeypatch):
    """on_nccl(entries): this rank is in a group of NCCL, whose recorder has these entries; gloo's is empty."""

    def play(entries: list[dict]) -> None:
        def dump(entries: list[dict]):
            return lambda **_: pickle.dumps({"entries": entries})

        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", dump(entries), raising=False)
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", dump([]))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")

    return play


def test_collectives_of_nccl_are_counted_and_sends_left_out_since_they_are_counted_when_they_are_made(on_nccl):
    sends = [nccl(0, "send 0->1", is_p2p=True), nccl(1, "coalesced")]
    on_nccl([*sends, nccl(2, "all_reduce"), nccl(3, "all_reduce"), nccl(4, "broadcast")])
    log = CollectiveLog()

    assert [(entry.name, entry.number) for entry in recorded()] == [
        ("all_reduce", 0), ("all_reduce", 1), ("broadcast", 2),
    ]  # fmt: skip
    assert log.drain() == 5
    assert log.drain() == 0
    assert [(entry["name"], entry["count"], entry["bytes"]) for entry in log.summary()] == [
        ("all_reduce", 2, 32), ("broadcast", 1, 16),
    ]  # fmt: skip


def test_a_collective_of_nccl_is_pending_until_it_is_completed_also_if_it_is_not_yet_retired(on_nccl):
    entries = [nccl(0, "all_reduce"), nccl(1, "all_reduce", "started"), nccl(2, "all_reduce", "scheduled")]
    on_nccl([*entries, nccl(3, "all_reduce") | {"retired": False}])
    assert [entry.is_pending for entry in recorded()] == [False, True, True, False]


# --- clocks, devices, memory ---


def test_a_clock_is_read_when_the_question_has_arrived_on_the_gpu(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(dist, "recv", lambda tensor, rank: order.append("recv"))
    monkeypatch.setattr(dist, "send", lambda tensor, rank: None)
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: order.append("arrived") or item(tensor))

    clocks._answer(torch.device("cpu"), lambda: order.append("now") or 0.0)

    assert order == ["recv", "arrived", "now"] * clocks.EXCHANGES


def test_a_phase_waits_for_every_gpu_of_a_pipeline(monkeypatch, tmp_path):
    config = parse_glue_arguments("task1_single", ["--output_dir", str(tmp_path)])
    record = Record(config, Worker(device=GPU))
    record.devices = [GPU, torch.device("cuda", 1), torch.device("cpu")]
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    with record.phase("forward"):
        pass

    assert waited == record.devices[:2]


def test_a_memory_limit_on_a_gpu_leaves_the_limits_of_the_process_alone(monkeypatch):
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 4 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    before = resource.getrlimit(resource.RLIMIT_DATA)

    peak_memory._limit(1000, GPU)()

    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert shares == [0.5, 1.0]


def test_a_block_that_backward_gathered_in_vain_is_sent_after_its_gather():
    with joined(0, 2):
        block = ShardedBlock([nn.Parameter(torch.ones(3, 2))])
        block.start_gather()
        gather = block.gathering = mock.Mock()

        ShardedModel.send(SimpleNamespace(in_transit=deque()), block)

        gather.wait.assert_called_once_with()
        assert block.gathering is None
        block.wait()
        assert block.flat.values.untyped_storage().nbytes() == block.nbytes
