"""What the benchmark, task 4 and the timeline do with GPUs, where torch.cuda only pretends to have some."""

import json
import os
import re
import shlex
import sys
import threading
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark import workers
from benchmark.engines.deepspeed_config import deepspeed_config
from benchmark.engines.engine import Engine
from benchmark.engines.operators import compile_operators
from benchmark.engines.own_grid import OwnGrid
from benchmark.engines.pipeline import Pipeline
from benchmark.engines.single import DP
from benchmark.engines.tensor import TensorParallel
from benchmark.measure.meter import Meter, gpu_figures
from benchmark.measure.payload import Payload
from benchmark.measure.profile import read_trace
from benchmark.measure.result import phases
from benchmark.training import loop
from benchmark.training.workload import to_device
from cluster import emulate, gpu_check
from common.paths import ROOT
from common.record import Record
from common.timeline import capture, parts, run_timeline, trace
from common.timeline.boxes import Box, Step
from common.timeline.clocks import Clock
from common.timeline.profile_events import Profile
from common.timeline.waiting import Message
from common.workers.process_group import Worker
from course.table import load_course
from task4_traffic.traffic import COUNTABLE, TrafficRecord
from tests.own.made_timelines import during_backward

GPU = torch.device("cuda", 0)
ELSEWHERE = Worker(device=torch.device("meta"))  # a device that a CPU build of torch can move tensors to
SETTINGS = SimpleNamespace(
    strategy="dp", precision="bf16", learning_rate=1e-4, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    deepspeed_config=None, accumulation=1, batch_size=1, examples_per_step=1, world_size=1, backend="nccl",
    max_steps=12, dropped=2, eval_every=0, checkpoint_every=0, warmup_steps=0, cosine=False, keep_trace=False,
    resume=False, output_dir=ROOT, optimizer="adamw",
)  # fmt: skip


class StopHereError(Exception):
    """Raised in place of what a test does not need."""


@pytest.fixture
def gpus(monkeypatch):
    """Let torch say that it has so many GPUs; return the list in which waiting and memory are noted."""
    events = []

    def pretend(count):
        answers = {"is_available": count > 0, "device_count": count, "current_device": 0, "is_initialized": True}
        for name, answer in (answers | {"get_device_name": "a GPU", "memory_allocated": 0}).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: events.append(name) or len(events))
        sizes = lambda i: SimpleNamespace(total_memory=(1 + i) * 10**9)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", sizes)
        return events

    return pretend


@pytest.fixture
def called(monkeypatch):
    """Replace a function by one that ends the test's action; return the mock, which knows how it was called."""

    def replaced(owner, name):
        mock = MagicMock(side_effect=StopHereError)
        monkeypatch.setattr(owner, name, mock)
        return mock

    return replaced


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))


# ------------------------------------------------------------------------------------------- what runs


def test_deepspeed_gets_the_gpu_that_was_chosen_and_not_the_rank(monkeypatch, gpus):
    gpus(1)
    monkeypatch.setattr(dist, "init_process_group", MagicMock())
    monkeypatch.setenv("LOCAL_RANK", "7")

    workers.join(MagicMock(rank_on_node=3))

    assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "strategy, count, no_cuda, operators, accelerator",
    [
        ("zero2", 1, False, [], None),
        ("zero2_offload", 1, False, ["adam"], None),
        ("zero2", 1, True, ["adam", "shm"], "cpu"),
        ("zero2", 0, False, ["adam", "shm"], "cpu"),
        ("ddp", 0, False, [], None),
    ],
)
def test_with_cuda_deepspeeds_optimizer_for_cpus_is_built_only_to_offload(
    strategy, count, no_cuda, operators, accelerator, monkeypatch, gpus, tmp_path
):
    gpus(count)
    modules = {name: MagicMock() for name in ("deepspeed.ops.op_builder", "deepspeed.comm.torch")}
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.comm", *modules):
        monkeypatch.setitem(sys.modules, name, modules.get(name, MagicMock()))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "restored after the test")
    monkeypatch.delenv("DS_ACCELERATOR")

    compile_operators([strategy], no_cuda)

    adam, shm = modules["deepspeed.ops.op_builder"].CPUAdamBuilder, modules["deepspeed.comm.torch"].build_shm_op
    assert [name for name, mock in (("adam", adam), ("shm", shm)) if mock.called] == operators
    assert os.environ.get("DS_ACCELERATOR") == accelerator


def test_deepspeed_overlaps_and_pins_on_a_gpu_alone():
    for on_gpu in (True, False):
        zero = deepspeed_config(SETTINGS, "zero3_offload", on_gpu)["zero_optimization"]
        pinned = {zero[name]["pin_memory"] for name in ("offload_optimizer", "offload_param")}
        assert {zero["overlap_comm"], *pinned} == {on_gpu}


def test_data_parallel_computes_in_the_dtype_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = DP(SETTINGS, Worker(), tiny_gpt2())  # without GPUs, DataParallel has its module and no copies
    dtypes = []

    def thread_of_a_copy():
        torch.set_autocast_dtype("cpu", torch.float16)  # the default on a GPU
        with torch.autocast("cpu"):
            dtypes.append(engine.model.module(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.dtype)

    thread = threading.Thread(target=thread_of_a_copy)
    thread.start()
    thread.join()

    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("engine", [Pipeline, OwnGrid, TensorParallel])
def test_a_model_that_is_cut_is_not_whole_on_the_gpu_first(engine, called):
    wrap = called(engine, "wrap")

    with pytest.raises(StopHereError):
        Engine.__init__(object.__new__(engine), SETTINGS, ELSEWHERE, tiny_gpt2())

    assert {parameter.device.type for parameter in wrap.call_args.args[-1].parameters()} == {"cpu"}


def test_adamw_resumes_with_its_number_of_steps_on_the_cpu(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"model": {}, "scaler": {}, "optimizer": {"step": torch.ones(())}}, file)
    resumed = MagicMock(cuts_model=False, state_file=lambda folder: file)

    Engine.load(resumed, tmp_path)

    assert resumed.optimizer.load_state_dict.call_args.args[0]["step"].device.type == "cpu"


def test_batches_are_copied_from_pinned_memory():
    tensor = MagicMock()

    list(to_device([{"input_ids": tensor}], GPU))

    tensor.pin_memory().to.assert_called_once_with(GPU, non_blocking=True)


def test_emulated_nodes_have_no_gpu(called, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    start = called(emulate.subprocess, "Popen")

    with pytest.raises(StopHereError):
        emulate.run_inside([], interactive=False)

    assert start.call_args.kwargs["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_in_task_4_nccl_sends_along_a_ring_over_the_interface_that_is_counted(called, monkeypatch):
    called(Record, "__init__")
    for name in COUNTABLE:
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)

    with pytest.raises(StopHereError):
        TrafficRecord(SETTINGS, Worker(device=GPU))

    assert {name: os.environ[name] for name in COUNTABLE} == COUNTABLE
    assert (COUNTABLE["NCCL_ALGO"], COUNTABLE["NCCL_PROTO"], COUNTABLE["NCCL_NET"]) == ("Ring", "Simple", "Socket")


# ------------------------------------------------------------------------------------------- what is measured


def test_the_mark_of_a_phase_ends_after_the_wait_for_the_gpu(gpus, monkeypatch):
    events = gpus(1)

    @contextmanager
    def mark(name):
        yield
        events.append("mark ends")

    monkeypatch.setattr(loop, "mark", mark)
    meter = Meter(Worker(device=GPU))
    meter.begin()
    with loop.phase(meter, "backward", traced=True):
        pass

    assert events[-2:] == ["synchronize", "mark ends"]


def event(name, category, begin, duration):
    return {"ph": "X", "tid": 1, "name": name, "cat": category, "ts": begin, "dur": duration}


LAUNCHES = [
    event("phase:backward", "user_annotation", 0, 100),
    event("aten::mm", "cpu_op", 0, 100),
    event("nccl:all_reduce", "cpu_op", 0, 5),
]
KERNELS = [
    event("phase:backward", "gpu_user_annotation", 0, 100),
    event("nccl:all_reduce", "gpu_user_annotation", 40, 50),
    event("ampere_sgemm", "kernel", 0, 60),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 40, 50),
]


def test_only_kernels_are_communication_on_the_gpu_and_without_them_nothing_is_measured():
    figures, unknown = (read_trace(events, steps=1, on_gpu=True) for events in ([*LAUNCHES, *KERNELS], LAUNCHES))

    assert [figures[f"{name}_ms"] for name in ("communication", "exposed")] == pytest.approx([0.05, 0.03])
    assert unknown.pop("calls") == [] and set(unknown.values()) == {None}
    assert phases([{"wall": 1.0, "backward": 1.0}], unknown["exposed_shares"])["communication"] is None


def test_the_peak_of_memory_on_a_gpu_is_that_of_the_timed_steps(gpus, monkeypatch):
    events = gpus(1)
    for name in ("dist", "Tracer", "counted"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "to_device", lambda batches, _: batches)
    monkeypatch.setattr(Worker, "batches", lambda _, batches: batches)
    engine = MagicMock()
    engine.backward.return_value = torch.zeros(())
    engine.step.side_effect = lambda _: events.append("step")
    engine.validate.side_effect = lambda *_: events.append("validation")
    workload = MagicMock()
    workload.batches.return_value = iter(range(99))

    measured = loop.train(SETTINGS, Worker(device=GPU), workload, engine, MagicMock(), loop.PeakMemory(GPU))

    order = [name for name in events if name != "synchronize"]
    start, end = "reset_peak_memory_stats", ["max_memory_allocated", "max_memory_reserved"]
    assert order == [start, *["step"] * 2, start, *["step"] * 8, *end, *["step"] * 2, "validation"]
    assert measured.reserved is not None


def test_a_message_from_rank_to_rank_is_counted_once():
    engine = SimpleNamespace(unrecorded_bytes=lambda: 5.0, group_sizes=dict)

    def sent(backend):
        return Payload().of_engine(engine, SimpleNamespace(world_size=1, backend=backend))[0]

    assert [sent(backend) for backend in ("gloo", "nccl")] == [5.0, 5.0]  # no backend's are among the collectives


def test_the_figures_of_a_gpu_are_those_of_the_workers_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 10 + (device.index or 0))

    assert gpu_figures(torch.device("cuda", 1))["gpu_utilisation"] == 11
    assert gpu_figures(torch.device("cpu")) == {}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("nvidia-ml-py") for requirement in extras["benchmark"])


def test_the_end_of_a_launch_on_a_gpu_is_not_taken_for_that_of_a_message(monkeypatch):
    capturing = capture.Capture(0, 1, on_gpu=True)
    profile = Profile([], [Message("all_reduce", 0.2, 0.6, number=1)], [])
    monkeypatch.setattr(capture, "read_profile", lambda *_: profile)
    capturing._start()
    capturing.log.steps, capturing.log.phases = [Step(0, 0, 0.0, 1.0)], [Box(0, "process", "backward", 0.0, 0.9)]
    capturing.stop()

    timeline = run_timeline.assemble("t", "r", [capturing.log], [Clock()])

    (row,) = parts.parts(timeline)
    assert (row.exposed, row.waiting, row.hidden) == (None, None, None)
    assert row.computing == pytest.approx(0.9)
    assert timeline.notes == (run_timeline.ON_GPU,)


def test_what_a_gpu_does_not_tell_is_a_dash_in_the_table_also_from_a_file(tmp_path):
    trace.write_trace(replace(during_backward(), on_gpu=True), tmp_path / "t.json")

    line = parts.table(trace.read_trace(tmp_path / "t.json")).splitlines()[1]

    assert line.split()[-3:] == ["-", "0.00", "-"]  # waiting, other, hidden


EVERYTHING = '9 passed, CPU, all_reduce, first losses: 2.000000, 3 DDP, torch.bfloat16, rows, "strategy": "ddp"'


@pytest.fixture
def check(gpus, monkeypatch, tmp_path):
    """Run gpu_check with so many GPUs and these outputs of its commands; return its exit code and its file."""

    def run(count, with_gpus=EVERYTHING, without=EVERYTHING):
        def output_of(command, *_, **variables):
            if variables.get("CUDA_VISIBLE_DEVICES") != "":
                return with_gpus, 0
            return ("RuntimeError: no NVIDIA driver", 1) if "SANITIZER" in command else (without, 0)

        gpus(count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        file = tmp_path / "checks.json"
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(file)])
        monkeypatch.setattr(gpu_check, "output_of", output_of)
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
        return ended.value.code, json.loads(file.read_text())["checks"] if file.exists() else None

    return run


def test_without_a_gpu_the_check_says_so_in_one_line_and_exits_with_2(check, capsys):
    assert check(0) == (2, None)
    assert capsys.readouterr().out == gpu_check.NO_GPU + "\n"


@pytest.mark.parametrize("count, numbers", [(1, {1, 2, 8, 10}), (4, set(range(1, 11)))])
def test_checks_run_where_there_are_enough_gpus(count, numbers, check):
    code, rows = check(count)

    assert code == 0
    assert {row["number"] for row in rows if row["outcome"] == "passed"} == numbers
    for row, wanted in zip(rows, gpu_check.CHECKS, strict=True):
        assert row["outcome"] == ("passed" if wanted.gpus <= count else f"not run: needs {wanted.gpus} GPUs")


def test_the_first_check_runs_every_grader():
    words = shlex.split(gpu_check.CHECKS[0].command)
    folders = [word for word in words if (ROOT / word).is_dir()]
    left_out = [word.partition("=")[2] for word in words if word.startswith("--ignore")]
    files = {file for task in load_course().tasks.values() for file in (*task.tests, *task.whole)}

    assert files and all(any(file.startswith(f"{folder}/") for folder in folders) for file in files)
    assert not any(file.startswith(f"{folder}/") for folder in left_out for file in files)


def test_the_files_and_modules_of_the_checks_are_there():
    commands = " ".join(check.command for check in gpu_check.CHECKS)
    files = {word.replace(".", "/") + ".py" for word in re.findall(r"-m ((?:cluster|benchmark)[\w.]+)", commands)}
    files |= set(re.findall(r"[\w/]+\.py\b", commands))

    assert len(files) > 5
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("outputs", [(EVERYTHING, "losses: 2.000300"), ("Duplicate GPU", EVERYTHING), (EVERYTHING, "")])
def test_a_check_fails_without_its_output_or_with_other_losses(outputs, check):
    code, rows = check(2, *outputs)

    assert code == 1
    assert any(row["outcome"].startswith("failed") for row in rows)
