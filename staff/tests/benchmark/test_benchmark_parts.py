"""The benchmark without workers: arguments, configurations, the instruments, data."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from benchmark.arguments import parse
from benchmark.engines.deepspeed_config import deepspeed_config
from benchmark.measure.architecture import describe
from benchmark.measure.intervals import interval, mean_interval, ratio
from benchmark.measure.meter import GpuSampler
from benchmark.measure.mfu import utilisation
from benchmark.measure.payload import sent
from benchmark.measure.profile import communication, communication_of
from benchmark.measure.turns import take_rounds_alone
from benchmark.strategies import STRATEGIES
from benchmark.training.loop import StepPlan, rate_at
from benchmark.training.translation import load_pairs, read_pairs, sample_pairs
from benchmark.training.workload import load_workload
from common.errors import InputError
from common.models.load import load_tokenizer
from common.paths import ROOT

pytest.importorskip("tensorboard")
SINGLE = ["--strategies", "single", "--no_cuda"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# --- arguments ---


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--batch_size 0", ["--batch_size", "0"]),
        ("--strategies zero7", ["--strategies", "single, dp, ddp", "zero7"]),
        ("--model bert", ["--model", "gpt2", "bert"]),
        ("--model gpt2-2x100", ["--model", "divisible by 64"]),
        ("--strategies single --workers 2", ["single", "one worker", "2"]),
        ("--workers 2 --world_size 4", ["--workers 2", "4"]),
        ("--precision fp16 --no_cuda", ["fp16", "GPU"]),
        ("--strategies dp --no_cuda", ["dp", "GPU"]),
        ("--strategies pipeline --model t5-tiny", ["pipeline", "GPT-2", "t5-tiny"]),
        ("--strategies tensor --precision bf16", ["tensor", "fp32", "bf16"]),
        ("--strategies tensor --workers 3", ["tensor", "4 attention heads", "3"]),
        ("--strategies own_grid --workers 4 --grid data=3", ["--grid", "3 workers", "4"]),
        ("--framework ddp --zero_stage 2", ["--zero_stage", "deepspeed"]),
        ("--framework deepspeed --offload", ["--offload", "--zero_stage"]),
        ("--framework ddp --strategies fsdp", ["--strategies", "--framework"]),
        ("--data_dir nowhere", ["--data_dir", "nowhere"]),
        ("--strategies own_overlap --bucket_mb 0", ["--bucket_mb", "0"]),
        ("--strategies ddp --bucket_mb 4", ["--bucket_mb", "own_overlap", "ddp"]),
        ("--warmup_steps 20 --max_steps 20", ["--warmup_steps", "20"]),
        ("--bleu", ["--bleu", "T5", "gpt2-tiny"]),
        ("--recompute --strategies tensor", ["tensor", "--recompute"]),
        ("--compile --strategies own_1f1b", ["own_1f1b", "--compile"]),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_flag_and_its_value(words, named):
    with pytest.raises(InputError) as refused:
        parse(words.split())

    assert all(word in str(refused.value) for word in named), refused.value


def test_the_course_names_of_frameworks_lead_to_strategies():
    pytest.importorskip("deepspeed")
    names = ("", "--framework none", "--framework fsdp", "--framework deepspeed --zero_stage 2 --offload")

    strategies = [parse(words.split())[0].strategy for words in names]

    assert strategies == ["ddp", "single", "fsdp", "zero2_offload"]


def test_a_deepspeed_file_that_contradicts_the_command_line_is_refused(tmp_path):
    pytest.importorskip("deepspeed")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 2}}))

    with pytest.raises(InputError, match=r"train_batch_size is 64 .* 8 "):
        parse(["--strategies", "zero2", "--workers", "2", "--deepspeed_config", str(file)])


@pytest.mark.parametrize("strategy", [name for name, row in STRATEGIES.items() if row.zero])
def test_what_must_be_equal_is_equal_in_every_deepspeed_configuration(strategy):
    pytest.importorskip("deepspeed")
    settings, _ = parse(["--strategies", strategy, "--max_grad_norm", "0", "--learning_rate", "3e-4"])

    config = deepspeed_config(settings, strategy, on_gpu=False)

    assert config["gradient_clipping"] == 0  # DeepSpeed would clip at 1.0 by itself
    assert config["optimizer"]["params"]["lr"] == 3e-4
    assert config["zero_optimization"]["stage"] == int(strategy[4])


# --- time ---


def test_a_step_is_timed_from_when_all_workers_are_ready_until_the_slowest_has_ended():
    """Two workers, of whom the second is late: in getting ready for one step, and in taking the other."""
    barrier, events, timed = threading.Barrier(2), [], {}

    def late(rank):
        if rank:
            time.sleep(0.05)  # the first worker gets to its next line; if it does not, this test sees less
            events.append("late")

    def work(rank):
        def turn(of_step):
            def prepare(number):
                late(rank and not of_step)
                return lambda: late(rank and of_step)

            return prepare

        def clock():  # counts what has happened
            return len(events)

        turns = [turn(of_step=False), turn(of_step=True)]
        timed[rank] = take_rounds_alone(turns, 2, warm_up=1, seed=1, meet=barrier.wait, clock=clock).tolist()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert timed == {0: [[0, 1]] * 2, 1: [[0, 1]] * 2}


def test_every_strategy_takes_its_turn_in_each_round_in_an_order_that_is_drawn_and_the_same_on_all_workers():
    def orders():
        taken: list[str] = []
        turns = [lambda number, name=name: lambda: taken.append(name) for name in "ab"]
        take_rounds_alone(turns, 8, warm_up=1, seed=3, meet=lambda: None)
        return ["".join(taken[i : i + 2]) for i in range(0, 16, 2)]

    assert set(orders()) == {"ab", "ba"}
    assert orders() == orders()


def event(name, begin, duration, category="cpu_op"):
    """An event of torch.profiler."""
    return {"ph": "X", "name": name, "ts": begin, "dur": duration, "cat": category, "tid": 1}


@pytest.mark.parametrize(
    ("product", "message", "category"),
    [
        ("aten::mm", "gloo:all_reduce", "cpu_op"),
        ("sgemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel"),
        ("sgemm", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel"),
    ],
)
def test_communication_behind_arithmetic_is_not_exposed(product, message, category):
    events = [
        event("phase:backward", 0, 100, "user_annotation"),
        event(product, 0, 60, category),
        event(message, 40, 50, category),  # 20 of it behind the product
    ]
    on_gpu = category == "kernel"
    calls = [event("nccl:all_reduce", 0, 30), event("aten::mm", 0, 100)] if on_gpu else []

    assert communication([*events, *calls], steps=2, on_gpu=on_gpu) == pytest.approx((0.025, 0.015))  # ms of a step


def test_of_strategies_that_take_turns_each_has_the_communication_of_its_own_steps():
    events = [
        event("phase:ddp", 0, 100, "user_annotation"),
        event("gloo:all_reduce", 10, 50),
        event("aten::mm", 30, 10),
        event("phase:ddp", 100, 100, "user_annotation"),
        event("gloo:all_reduce", 110, 30),
        event("phase:fsdp", 200, 100, "user_annotation"),
        event("gloo:all_gather", 210, 90),
        event("phase:single", 300, 100, "user_annotation"),
        event("aten::mm", 310, 10),
    ]

    figures = {name: communication_of(events, name) for name in ("ddp", "fsdp", "single")}

    # In a step of two: (50 + 30) / 2 us, and 10 of them behind a product.
    assert figures == {"ddp": pytest.approx((0.04, 0.035)), "fsdp": pytest.approx((0.09, 0.09)), "single": (0, 0)}


FEW = """
import json, torch, torch.distributed as dist
from benchmark.measure.payload import Payload
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for calls in (3, 1, 4, 5):
    payload = Payload()
    for _ in range(calls):
        dist.all_reduce(torch.ones(3))
    seen = payload.collectives()
    print(json.dumps(seen and len(seen)))
"""


@pytest.mark.medium
def test_a_step_of_which_the_recorder_has_forgotten_a_collective_is_not_counted():
    """It keeps four: a step of four is counted, of a step of five the first is gone."""
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "4", "PYTHONPATH": str(ROOT)}

    done = subprocess.run([sys.executable, "-c", FEW], env=environment, capture_output=True, text=True, timeout=300)

    assert done.stdout.split() == ["3", "1", "4", "null"], done.stderr[-2000:]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_every_step_is_dropped_or_timed_or_traced(count):
    steps = StepPlan(0, count, dropped=2)

    assert steps.dropped + steps.timed + steps.traced == count
    assert steps.timed >= 1


def test_the_rate_rises_and_falls_as_a_cosine():
    settings, _ = parse([*SINGLE, "--cosine", "--warmup_steps", "2", "--max_steps", "10", "--learning_rate", "1"])

    rates = [rate_at(settings, step) for step in range(10)]

    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_an_interval_needs_enough_samples_and_a_ratio_is_that_of_pairs():
    seconds = [1.0 + 0.7 * (i * 7 % 13) / 13 for i in range(40)]

    assert ratio([2 * value for value in seconds], seconds) == pytest.approx((2, 2, 2))
    assert interval([1.0, 2.0, 9.0]) == (2.0, None, None)
    middle, low, high = interval(seconds)
    assert low is not None and high is not None
    assert low < middle < high
    # Student's t of 2 degrees of freedom is 4.303, and the mean's error 20 / sqrt(3).
    assert mean_interval([100.0, 140.0, 120.0]) == pytest.approx((120.0, 70.32, 169.68), abs=0.01)


def test_a_gpu_is_read_while_steps_run():
    """It cannot be a last look only: the reader hands out three values, and waits for nobody after them."""
    values, read_three = iter([100.0, 200.0, 600.0]), threading.Event()

    def read(_):
        value = next(values, None)
        if value is None:
            read_three.set()
            return {}
        return {"gpu_power": value}

    gpu = GpuSampler(torch.device("cuda"), read)
    gpu.start()
    assert read_three.wait(60)

    assert gpu.means() == {"gpu_power": 300.0}
    assert GpuSampler(torch.device("cpu"), read).means() == {}


# --- bytes ---


@pytest.mark.parametrize(
    ("name", "bytes_out"),
    [("all_reduce", 150), ("_reduce_scatter_base", 150), ("all_gather", 300), ("broadcast", 75), ("barrier", 0)],
)
def test_bytes_of_a_collective_of_100_bytes_on_4_workers(name, bytes_out):
    assert sent(name, 100, workers=4) == bytes_out
    assert sent("reduce_scatter", 100, workers=4, backend="nccl") == 75  # half of gloo's


@pytest.mark.parametrize(
    ("strategy", "ideal"), [("ddp", 16), ("zero1", 10), ("zero2_offload", 7), ("own_zero3", 4), ("fsdp", 4)]
)
def test_bytes_per_parameter_on_four_workers(strategy, ideal):
    assert STRATEGIES[strategy].ideal_bytes(800_000, workers=4) == ideal * 800_000


# --- data ---


@pytest.mark.parametrize(("workers", "accumulation"), [(2, 1), (4, 1), (2, 2)])
def test_workers_take_the_examples_of_one_worker_and_each_example_once_in_an_epoch(workers, accumulation):
    alone, _ = parse([*SINGLE, "--batch_size", "8", "--length", "32"])
    workload = load_workload(alone)
    steps = len(workload.train) // 8
    shared = replace(alone, world_size=workers, accumulation=accumulation, batch_size=8 // workers // accumulation)
    ranks = [workload.batches(replace(shared, rank=rank)) for rank in range(workers)]
    one, epochs = workload.batches(alone), []

    for step in range(2 * steps):
        expected = next(one)["input_ids"]
        got = torch.cat([next(rank)["input_ids"] for _ in range(accumulation) for rank in ranks])
        assert torch.equal(got, expected)
        epochs += [[]] if step % steps == 0 else []
        epochs[-1] += [tuple(example) for example in expected.tolist()]

    numbers = {tuple(example["input_ids"].tolist()) for example in workload.train}  # type: ignore[attr-defined]
    assert all(len(set(epoch)) == min(len(numbers), 8 * steps) for epoch in epochs)
    assert epochs[0] != epochs[1]  # another order


def test_pairs_are_read_from_tsv_and_json_lines_and_what_is_none_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("one\u2028two\teins\u2028zwei\r\nthree\tdrei\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"translation": {"en": "two", "de": "zwei"}}\n{"source": "x", "target": "y"}\n')
    (tmp_path / "c.tsv").write_text("one\teins\nonly one\n")

    assert read_pairs(tmp_path / "a.tsv") == [("one\u2028two", "eins\u2028zwei"), ("three", "drei")]
    assert read_pairs(tmp_path / "b.jsonl") == [("two", "zwei"), ("x", "y")]
    with pytest.raises(InputError, match=re.escape("c.tsv:2")):
        read_pairs(tmp_path / "c.tsv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="--data_dir"):
        load_pairs(tmp_path / "empty", None, 8)


def test_padding_carries_no_loss():
    train, validation = load_pairs(None, load_tokenizer("tiny", "t5"), 48)

    item = train[0]

    assert len(train) + len(validation) == len(sample_pairs())
    assert item["input_ids"].shape == item["labels"].shape == (48,)
    assert (item["labels"] == -100).any()


# --- strategies ---


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=lambda row: row.name)
def test_a_row_names_an_engine_that_exists(row):
    if row.zero:
        pytest.importorskip("deepspeed")
    file, name = row.engine.split(":")
    assert callable(getattr(importlib.import_module(f"benchmark.engines.{file}"), name))


def test_the_model_s_arithmetic_is_compared_with_the_peak_of_all_gpus():
    settings = replace(parse(["--world_size", "2", "--precision", "bf16"])[0], no_cuda=False)
    flops = 3 * describe("gpt2-tiny", settings.length).flops

    assert utilisation(settings, 989e12 / flops, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert utilisation(settings, 756e12 / flops, "NVIDIA H100 PCIe") == pytest.approx(0.5)
    assert utilisation(settings, 1e6, "a GPU of tomorrow") is None
