"""What the benchmark, task 4's traffic and the timeline do on a GPU, as far as a machine without one can tell."""

import json
import os
import sys
import threading
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark import accounting, calibrate, sweep, workers
from benchmark.cost.measuring.plan import CalibrationPlan
from benchmark.engines.deepspeed_config import deepspeed_config
from benchmark.engines.engine import Engine
from benchmark.engines.operators import compile_operators
from benchmark.engines.own_grid import OwnGrid
from benchmark.engines.pipeline import Pipeline
from benchmark.engines.single import DP, Single
from benchmark.engines.tensor import TensorParallel
from benchmark.measure.meter import Meter, gpu_figures
from benchmark.measure.profile import read_trace
from benchmark.measure.result import phases
from benchmark.training import loop
from benchmark.training.workload import to_device
from cluster import emulate, gpu_check, ladder
from common.paths import ROOT
from common.record import Record
from common.timeline import capture, collect, parts, trace
from common.timeline.clocks import Clock, Reading
from common.timeline.profile_events import Profile
from common.timeline.waiting import Message
from common.workers.process_group import Worker
from task4_traffic.traffic import TrafficRecord
from tests.own.made_timelines import during_backward

GPU = torch.device("cuda", 0)
ON_GPU = Worker(device=GPU)


SETTINGS = SimpleNamespace(
    strategy="dp", precision="bf16", learning_rate=1e-4, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    deepspeed_config=None, accumulation=1, batch_size=1, examples_per_step=1,
)  # fmt: skip


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))


class StopHereError(Exception):
    """Raised in place of what a test does not need."""


def stop_here(*_, **__):
    raise StopHereError


@pytest.fixture
def gpus(monkeypatch):
    """Let torch say that there are so many GPUs; memory and waiting are noted in `events`."""
    events = []

    def pretend(count):
        fakes = {"is_available": lambda: count > 0, "device_count": lambda: count, "current_device": lambda: 0}
        fakes |= {"is_initialized": lambda: True, "get_device_name": lambda *_: "a GPU"}
        fakes |= {"get_device_properties": lambda i: SimpleNamespace(total_memory=(1 + i) * 10**9)}
        for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
            fakes[name] = lambda *_, name=name: events.append(name) or len(events)
        for name, function in (fakes | {"memory_allocated": lambda *_: 0}).items():
            monkeypatch.setattr(torch.cuda, name, function)
        return events

    return pretend


# ------------------------------------------------------------------------------------------- what runs


def test_calibration_measures_cpus_on_every_machine(monkeypatch):
    words = []
    monkeypatch.setattr(calibrate, "start_workers", lambda module, count, argv: words.extend(argv) or stop_here())

    with pytest.raises(StopHereError):
        calibrate.execute(CalibrationPlan(), 2, [])

    assert "--no_cuda" in words


def test_deepspeed_gets_the_gpu_that_was_chosen_and_not_the_rank(monkeypatch, gpus):
    gpus(1)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_RANK", "7")

    workers.join(SimpleNamespace(rank_on_node=3, master_ip="", master_port=0, backend="nccl", rank=3, world_size=4))

    assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "strategy, count, no_cuda, built, accelerator",
    [
        ("zero2", 1, False, [], None),
        ("zero2_offload", 1, False, ["adam"], None),
        ("zero2", 1, True, ["adam", "shm"], "cpu"),
        ("zero2", 0, False, ["adam", "shm"], "cpu"),
        ("ddp", 0, False, [], None),
    ],
)
def test_cuda_builds_deepspeeds_optimizer_for_cpus_only_to_offload(
    strategy, count, no_cuda, built, accelerator, monkeypatch, gpus, tmp_path
):
    gpus(count)
    operators = []
    builder = SimpleNamespace(load=lambda verbose: operators.append("adam"))
    modules = {
        "deepspeed.ops.op_builder": SimpleNamespace(CPUAdamBuilder=lambda: builder),
        "deepspeed.comm.torch": SimpleNamespace(build_shm_op=lambda: operators.append("shm")),
    }
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.comm", *modules):
        monkeypatch.setitem(sys.modules, name, modules.get(name, SimpleNamespace()))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")

    compile_operators([strategy], no_cuda)

    assert (operators, os.environ.get("DS_ACCELERATOR")) == (built, accelerator)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_deepspeed_overlaps_and_pins_on_a_gpu_alone(on_gpu):
    zero = deepspeed_config(SETTINGS, "zero3_offload", on_gpu)["zero_optimization"]

    pinned = {zero[name]["pin_memory"] for name in ("offload_optimizer", "offload_param")}
    assert {zero["overlap_comm"], *pinned} == {on_gpu}


def test_data_parallel_computes_in_the_dtype_that_was_asked_for():
    engine = DP(SETTINGS, Worker(), tiny_gpt2())  # without GPUs, DataParallel calls its module in the same thread
    dtypes = []

    def thread_of_a_replica():
        torch.set_autocast_dtype("cpu", torch.float16)  # as on a GPU, where it is the default
        with torch.autocast("cpu"):
            dtypes.append(engine.model.module(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.dtype)

    thread = threading.Thread(target=thread_of_a_replica)
    thread.start()
    thread.join()

    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("engine", [Pipeline, OwnGrid, TensorParallel])
def test_a_model_that_is_cut_is_not_whole_on_the_gpu_first(engine, monkeypatch):
    devices = set()
    monkeypatch.setattr(
        engine, "wrap", lambda _, model: devices.update(p.device.type for p in model.parameters()) or stop_here()
    )

    with pytest.raises(StopHereError):
        Engine.__init__(object.__new__(engine), SETTINGS, Worker(device=torch.device("meta")), tiny_gpt2())

    assert devices == {"cpu"}


@pytest.mark.parametrize("engine, file", [(Single, "state"), (Pipeline, "stage0"), (OwnGrid, "cell0")])
def test_adamw_resumes_with_its_number_of_steps_on_the_cpu(engine, file, tmp_path):
    torch.save({"model": {}, "scaler": {}, "optimizer": {"step": torch.ones(())}}, tmp_path / f"{file}.pt")
    states = []
    part = SimpleNamespace(load_state_dict=states.append)
    there = Worker(device=torch.device("meta"))

    engine.load(SimpleNamespace(worker=there, bare=part, parts=part, optimizer=part, scaler=part), tmp_path)

    assert [state["step"].device.type for state in states if "step" in state] == ["cpu"]


def test_batches_are_copied_from_pinned_memory():
    calls = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: calls.append((device, non_blocking)))

    list(to_device([{"input_ids": SimpleNamespace(pin_memory=lambda: pinned)}], GPU))

    assert calls == [(GPU, True)]


def test_a_sweep_compares_with_the_memory_of_the_smallest_gpu(gpus):
    gpus(2)

    assert sweep.available_bytes(2, no_cuda=False) == 10**9
    assert sweep.available_bytes(4, no_cuda=False) != 10**9  # more workers than GPUs: they use the CPU
    assert sweep.available_bytes(2, no_cuda=True) != 10**9


def test_emulated_nodes_have_no_gpu(monkeypatch):
    environments = []
    monkeypatch.setattr(emulate.subprocess, "Popen", lambda *_, env, **__: environments.append(env) or stop_here())

    with pytest.raises(StopHereError):
        emulate.run_inside([], interactive=False)

    assert environments[0]["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("nodes, count, hidden", [(None, 4, False), (None, 1, True), (4, 4, True)])
def test_all_tasks_of_the_ladder_use_gpus_or_none_does(nodes, count, hidden, gpus, monkeypatch):
    gpus(count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    environment = ladder.environment(SimpleNamespace(nodes=nodes, workers=4))

    assert (environment.get("CUDA_VISIBLE_DEVICES") == "") is hidden


def test_nccl_sends_along_a_ring_over_the_interface_that_is_counted(monkeypatch):
    monkeypatch.setattr(Record, "__init__", stop_here)
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    with pytest.raises(StopHereError):
        TrafficRecord(SimpleNamespace(backend="nccl"), ON_GPU)

    assert [os.environ[name] for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET")] == ["Ring", "Simple", "Socket"]
    assert os.environ["NCCL_P2P_DISABLE"] == os.environ["NCCL_SHM_DISABLE"] == "1"


# ------------------------------------------------------------------------------------------- what is measured


def test_the_mark_of_a_phase_ends_after_the_wait_for_the_gpu(gpus, monkeypatch):
    events = gpus(1)

    @contextmanager
    def mark(name):
        yield
        events.append("mark ends")

    monkeypatch.setattr(loop, "mark", mark)
    meter = Meter(ON_GPU)
    meter.begin()
    with loop.phase(meter, "backward", traced=True):
        pass

    assert events[-2:] == ["synchronize", "mark ends"]


def events_of(*rows):
    names = ("name", "cat", "ts", "dur")
    return [{"ph": "X", "tid": 1, **dict(zip(names, row, strict=True))} for row in rows]


def test_kernels_alone_are_time_on_the_gpu_and_communication_there():
    trace_events = events_of(
        ("phase:backward", "user_annotation", 0, 100),
        ("phase:backward", "gpu_user_annotation", 0, 100),
        ("aten::mm", "cpu_op", 0, 100),
        ("nccl:all_reduce", "cpu_op", 0, 5),
        ("nccl:all_reduce", "gpu_user_annotation", 40, 50),
        ("ampere_sgemm", "kernel", 0, 60),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 40, 50),
    )

    figures = read_trace(trace_events, steps=1, on_gpu=True)

    assert figures["device_ms"] == pytest.approx(0.11)
    assert (figures["communication_ms"], figures["exposed_ms"]) == (pytest.approx(0.05), pytest.approx(0.03))


def test_without_kernels_in_the_trace_communication_is_not_measured():
    trace_events = events_of(("phase:backward", "user_annotation", 0, 100), ("nccl:all_reduce", "cpu_op", 0, 5))

    figures = read_trace(trace_events, steps=1, on_gpu=True)

    assert set(figures.values()) == {None}
    assert phases([{"wall": 1.0, "backward": 1.0}], figures, "ddp")["communication"] is None


def test_a_worker_on_the_cpu_of_a_gpu_machine_is_traced_on_the_cpu(gpus):
    gpus(1)
    trace_events = events_of(("aten::mm", "cpu_op", 0, 60), ("gloo:all_reduce", "cpu_op", 40, 50))

    figures = read_trace(trace_events, steps=1)

    assert figures["exposed_ms"] == pytest.approx(0.03)
    assert figures["device_ms"] is None


def test_the_peak_of_memory_on_a_gpu_is_that_of_the_timed_steps(gpus, monkeypatch):
    events = gpus(1)
    monkeypatch.setattr(loop, "dist", SimpleNamespace(barrier=lambda: None))
    monkeypatch.setattr(loop, "to_device", lambda batches, _: batches)
    monkeypatch.setattr(loop, "Tracer", lambda _: SimpleNamespace(start=lambda: None, stop=lambda _: None, steps=0))
    engine = SimpleNamespace(
        forward=lambda _: 0, backward=lambda *_, **__: torch.zeros(()), step=lambda _: events.append("step"),
        group_sizes=dict, validate=lambda *_: events.append("validation"), bare=torch.nn.Linear(1, 1),
    )  # fmt: skip
    settings = SimpleNamespace(
        resume=False, max_steps=12, dropped=2, strategy="ddp", accumulation=1, eval_every=0, checkpoint_every=0,
        warmup_steps=0, learning_rate=0.1, cosine=False, keep_trace=False, world_size=1, backend="nccl",
        output_dir=ROOT,
    )  # fmt: skip
    log = SimpleNamespace(restart=list, loss=lambda *_: None, evaluation=lambda *_: None)
    workload = SimpleNamespace(batches=lambda *_: iter(range(99)), validation_batches=lambda _: [], kind="gpt2")
    memory = loop.PeakMemory(GPU)
    monkeypatch.setattr(Worker, "batches", lambda _, batches: batches)

    measured = loop.train(settings, ON_GPU, workload, engine, log, memory)

    order = [event for event in events if event != "synchronize"]
    start, end = "reset_peak_memory_stats", ["max_memory_allocated", "max_memory_reserved"]
    assert order == [start, *["step"] * 2, start, *["step"] * 8, *end, *["step"] * 2, "validation"]
    assert measured["reserved"] is not None


def test_a_message_from_rank_to_rank_is_counted_once():
    engine = SimpleNamespace(unrecorded_bytes=lambda: 5.0)

    assert [accounting.unrecorded_bytes(engine, backend) for backend in ("gloo", "nccl")] == [5.0, 0.0]


def test_figures_of_a_gpu_are_those_of_the_workers_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 10 + device.index)

    assert gpu_figures(torch.device("cuda", 1))["gpu_utilisation"] == 11
    assert set(gpu_figures(torch.device("cpu")).values()) == {None}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(word.startswith("nvidia-ml-py") for word in project["optional-dependencies"]["benchmark"])


def test_a_rank_on_a_gpu_does_not_take_the_end_of_a_launch_for_that_of_a_message(monkeypatch):
    capturing = capture.Capture(0, 1, on_gpu=True)
    launched = Profile([], [Message("all_reduce", 0.2, 0.6, number=1)], [], 0.0)
    monkeypatch.setattr(capture, "read_profile", lambda *_: launched)
    capturing._start()
    capturing.seen.steps, capturing.seen.phases = [(0, (0.0, 1.0))], [("backward", (0.0, 0.9))]
    capturing.stop()

    timeline = collect.assemble("t", "r", [capturing.seen], [Clock(Reading(0.0), Reading(0.0))])

    (row,) = parts.parts(timeline)
    assert (row.exposed, row.waiting, row.hidden) == (None, None, None)
    assert row.computing == pytest.approx(0.9)
    assert timeline.notes == (collect.ON_GPU,)


def test_what_a_gpu_does_not_tell_is_a_dash_in_the_table_and_stays_one_in_the_file(tmp_path):
    timeline = replace(during_backward(), on_gpu=True)
    trace.write_trace(timeline, tmp_path / "t.json")

    line = parts.table(trace.read_trace(tmp_path / "t.json")).splitlines()[1]

    assert line.split()[-3:] == ["-", "0.00", "-"]  # waiting, other, hidden


# ------------------------------------------------------------------------------------------- the ten checks


def check_gpus(monkeypatch, tmp_path, on_gpu, on_cpu):
    """Run gpu_check with these outputs for a command; return its exit code and its file."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path / "out" / "checks.json")])
    monkeypatch.setattr(
        gpu_check,
        "output_of",
        lambda *_, **variables: (on_cpu if variables.get("CUDA_VISIBLE_DEVICES") == "" else on_gpu, 0),
    )
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    file = tmp_path / "out" / "checks.json"
    return ended.value.code, json.loads(file.read_text()) if file.exists() else None


EVERYTHING = "9 passed, CPU, all_reduce, first losses: 2.000000, 3 DDP, torch.bfloat16, rows, " + '"outcome": "ok"'


def test_without_a_gpu_the_check_says_so_in_one_line_and_ends_with_2(gpus, monkeypatch, tmp_path, capsys):
    gpus(0)

    assert check_gpus(monkeypatch, tmp_path, "", "") == (2, None)
    assert capsys.readouterr().out == gpu_check.NO_GPU + "\n"


@pytest.mark.parametrize("count, run", [(1, {1, 2, 8, 10}), (2, set(range(1, 11))), (4, set(range(1, 11)))])
def test_a_check_runs_where_there_are_gpus_enough(count, run, gpus, monkeypatch, tmp_path):
    gpus(count)

    code, file = check_gpus(monkeypatch, tmp_path, EVERYTHING, EVERYTHING)

    outcomes = {
        (check["outcome"], row.gpus <= count) for check, row in zip(file["checks"], gpu_check.CHECKS, strict=True)
    }
    assert code == 0
    assert {check["number"] for check in file["checks"] if check["outcome"] == "passed"} == run
    assert outcomes <= {("passed", True), ("not run: needs 2 GPUs", False), ("not run: needs 4 GPUs", False)}
    assert len(file["gpus"]) == count


@pytest.mark.parametrize(
    "on_gpu, on_cpu", [(EVERYTHING, "losses: 2.000300"), ("Duplicate GPU detected", EVERYTHING), (EVERYTHING, "")]
)
def test_a_check_fails_without_its_output_or_with_other_losses(on_gpu, on_cpu, gpus, monkeypatch, tmp_path):
    gpus(2)

    code, file = check_gpus(monkeypatch, tmp_path, on_gpu, on_cpu)

    assert code == 1
    assert any(check["outcome"].startswith("failed") for check in file["checks"])
