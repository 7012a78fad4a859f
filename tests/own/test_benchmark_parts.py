"""The benchmark without workers: arguments, configurations, phases, traces, byte formulas, data, tables."""

import importlib
import itertools
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.file_baton import FileBaton

from benchmark.arguments import parse
from benchmark.engines.deepspeed_config import deepspeed_config
from benchmark.engines.operators import remove_left_locks
from benchmark.measure.architecture import describe
from benchmark.measure.compared import ComparedStrategy
from benchmark.measure.intervals import interval, interval_text, ratio
from benchmark.measure.memory import counted
from benchmark.measure.meter import Meter
from benchmark.measure.mfu import utilisation
from benchmark.measure.output import text_table, write_csv
from benchmark.measure.payload import Payload, sent
from benchmark.measure.profile import read_trace, waiting_ms
from benchmark.measure.ranking import Bar, draw_ranking
from benchmark.measure.turns import nothing, take_round, take_rounds_alone
from benchmark.strategies import STRATEGIES
from benchmark.training.log import Log
from benchmark.training.loop import Plan, rate_at
from benchmark.training.translation import load_pairs, read_pairs, sample_pairs
from benchmark.training.workload import load_workload
from benchmark.workers import without
from common.errors import InputError
from common.models.load import load_tokenizer
from common.workers.process_group import Worker

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size", "0"], "--batch_size: expected 1 or more, got 0"),
        (["--strategy", "zero7"], "--strategy: expected one of single, dp, ddp"),
        (["--model", "bert"], "--model: expected gpt2"),
        (["--strategy", "single", "--workers", "2"], "--strategy single runs on one worker, got 2"),
        (["--workers", "2", "--world_size", "4"], "--workers 2 contradicts a world size of 4"),
        (["--precision", "fp16", "--no_cuda"], "--precision fp16 needs a GPU"),
        (["--strategy", "dp", "--no_cuda"], "--strategy dp .* use ddp"),
        (["--strategy", "pipeline", "--model", "t5-tiny"], "--strategy pipeline cuts GPT-2"),
        (
            ["--strategy", "tensor", "--precision", "bf16"],
            "--strategy tensor supports only fp32, got bf16; use --precision fp32",
        ),
        (["--strategy", "tensor", "--workers", "3"], "--strategy tensor: expected workers .* 4 attention heads, got 3"),
        (["--strategy", "own_grid", "--workers", "3"], "--grid: expected a grid for 3 workers"),
        (["--strategy", "own_grid", "--workers", "4", "--grid", "data=3"], "--grid: data=3 needs 3 workers, got 4"),
        (["--framework", "ddp", "--zero_stage", "2"], "go with --framework deepspeed"),
        (["--framework", "deepspeed", "--offload"], "--offload needs --zero_stage 1, 2 or 3"),
        (["--framework", "ddp", "--strategy", "fsdp"], "expected --strategy or --framework, got both"),
        (["--data_dir", "nowhere"], "--data_dir: there is no folder nowhere"),
        (["--strategy", "own_overlap", "--bucket_mb", "0"], "--bucket_mb: expected a size in MiB .* auto; got '0'"),
        (["--strategy", "own_overlap", "--bucket_mb", "large"], "--bucket_mb: expected a size .* auto; got 'large'"),
        (["--strategy", "ddp", "--bucket_mb", "4"], "--bucket_mb: works with --strategy own_overlap, got ddp"),
        (["--strategy", "fsdp", "--grid", "data=2"], "--grid: works with --strategy own_grid, got fsdp"),
        (["--model_name_or_path", "nowhere"], "--model: expected gpt2, .*; got 'nowhere'"),
        (["--model", "gpt2-2x100"], "--model: expected .* a width divisible by 64"),
        (["--warmup_steps", "20", "--max_steps", "20"], "--warmup_steps: expected fewer than 20 steps"),
    ],
)
def test_what_cannot_be_run_is_one_clear_line(words, message):
    with pytest.raises(InputError, match=message):
        parse(words)


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ([], "ddp"),
        (["--framework", "none"], "single"),
        (["--framework", "fsdp"], "fsdp"),
        (["--framework", "deepspeed", "--zero_stage", "2", "--offload"], "zero2_offload"),
    ],
)
def test_the_course_names_of_frameworks_lead_to_strategies(words, strategy):
    if "deepspeed" in words:
        pytest.importorskip("deepspeed")
    assert parse(words)[0].strategy == strategy


def test_a_deepspeed_file_for_another_world_size_is_refused(tmp_path):
    pytest.importorskip("deepspeed")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 2}}))

    with pytest.raises(InputError, match=r"train_batch_size is 64 in the file, but 8 by the command line \(4 x 1 x 2 "):
        parse(["--strategy", "zero2", "--workers", "2", "--deepspeed_config", str(file)])


@pytest.mark.parametrize("strategy", [name for name, row in STRATEGIES.items() if row.zero])
def test_what_must_be_equal_is_equal_in_every_deepspeed_configuration(strategy):
    pytest.importorskip("deepspeed")
    settings, _ = parse(["--strategy", strategy, "--max_grad_norm", "0", "--learning_rate", "3e-4"])

    config = deepspeed_config(settings, strategy, on_gpu=False)

    assert config["gradient_clipping"] == 0  # DeepSpeed would clip at 1.0 by itself
    assert config["optimizer"]["params"]["lr"] == 3e-4
    assert config["zero_optimization"]["stage"] == int(strategy[4])


def test_the_launcher_gets_the_command_line_without_the_number_of_workers():
    assert without(["--workers", "2", "--model", "gpt2", "--workers=3"], "--workers") == ["--model", "gpt2"]


# ------------------------------------------------------------------------------------- time


def test_phases_add_up_to_the_steps_wall_time():
    meter = Meter(Worker())
    meter.begin()
    for name in ("data", "forward", "backward", "backward", "optimizer"):
        with meter.phase(name):
            sum(range(1000))
    meter.end()

    step = meter.steps[0]

    assert sum(value for name, value in step.items() if name != "wall") == pytest.approx(step["wall"])
    assert all(value > 0 for value in step.values())


def event(name, begin, duration, category="cpu_op"):
    """An event of torch.profiler."""
    return {"ph": "X", "name": name, "ts": begin, "dur": duration, "cat": category, "tid": 1}


def test_communication_behind_arithmetic_is_not_exposed():
    events = [
        event("phase:backward", 0, 100, "user_annotation"),
        event("aten::mm", 0, 60),
        event("gloo:all_reduce", 40, 50),  # 20 of it behind the product
    ]

    times = read_trace(events, steps=1)

    assert times["communication_ms"] == pytest.approx(0.05)
    assert times["exposed_ms"] == pytest.approx(0.03)
    assert times["exposed_shares"] == {"backward": pytest.approx(0.3)}


def test_who_comes_first_waits_for_the_last_and_then_communicates():
    early = read_trace([event("gloo:all_reduce", 0, 90), event("aten::mm", 0, 20)], steps=1)
    late = read_trace([event("gloo:all_reduce", 5060, 30)], steps=1)  # another machine's clock
    everyone = [early["calls"], late["calls"]]

    assert early["exposed_ms"] == pytest.approx(0.07)
    assert waiting_ms(early, everyone, steps=1) == pytest.approx(0.04)  # from 20, where the product ends, to 60
    assert waiting_ms(late, everyone, steps=1) == 0


@pytest.mark.parametrize("names", [("all_reduce", "all_gather"), ("send", "send")])
def test_where_workers_make_different_calls_or_send_in_a_ring_waiting_is_not_known(names):
    own, other = (read_trace([event(f"gloo:{name}", 0, 10)], steps=1) for name in names)

    assert waiting_ms(own, [own["calls"], other["calls"]], steps=1) is None


def test_tensorboard_shows_the_mean_of_all_workers_losses(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda losses: losses.mul_(4))  # three times as large elsewhere
    log, written = Log(SimpleNamespace(output_dir=tmp_path), Worker(0, 2, torch.device("cpu"))), []
    monkeypatch.setattr(log, "_write", lambda step, values: written.append((step, values)))

    for step in range(2):
        log.loss(step, 1.0 + step, 0.1, [])
        log.agree()

    losses = [(step, values["train/loss"]) for step, values in written if "train/loss" in values]
    assert losses == [(1, 2.0), (2, 4.0)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_every_step_is_dropped_or_timed_or_traced(count):
    steps = Plan(0, count, dropped=2)

    assert steps.dropped + steps.timed + steps.traced == count
    assert steps.timed >= 1


def test_the_rate_rises_and_falls_as_a_cosine():
    settings = SimpleNamespace(warmup_steps=2, max_steps=10, learning_rate=1.0, cosine=True)

    rates = [rate_at(settings, step) for step in range(10)]

    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_each_step_is_taken_once_in_a_round_in_a_drawn_order_that_is_the_same_on_all_workers():
    def orders() -> list[list[str]]:
        rounds = []
        for number in range(8):
            taken: list[str] = []
            turns = [lambda number, name=name, taken=taken: lambda: taken.append(name) for name in "ab"]
            take_round(turns, number, meet=lambda: None)
            rounds.append(taken)
        return rounds

    assert {"".join(taken) for taken in orders()} == {"ab", "ba"}
    assert orders() == orders()


def test_what_meeting_takes_is_no_part_of_a_step():
    now = [0.0]

    def passes(seconds):
        now[0] += seconds

    turns = [lambda number, seconds=seconds: lambda: passes(seconds) for seconds in (2.0, 3.0)]

    seconds = take_rounds_alone(turns, 4, warm_up=1, seed=1, meet=lambda: passes(0.5), clock=lambda: now[0])

    assert seconds.tolist() == [[2.0, 3.0]] * 4


def test_alone_only_the_first_worker_takes_steps(monkeypatch):
    monkeypatch.setattr("benchmark.measure.compared.STRATEGIES", {"single": SimpleNamespace(make=lambda *_: None)})
    settings, _ = parse(["--world_size", "2", "--no_cuda"], "compare", add_flags=lambda parser: None)
    workload = SimpleNamespace(
        kind="gpt2", build=lambda *_: nn.Linear(1, 1), batches=lambda settings: itertools.repeat({})
    )

    first, second = (ComparedStrategy("single", settings, Worker(rank, 2), workload, alone=True) for rank in (0, 1))

    assert second.turn(0) is nothing
    assert first.turn(0) is not nothing


def test_a_ratio_is_that_of_pairs_and_too_few_rounds_have_no_interval():
    drawn = random.Random(0)
    seconds = [drawn.uniform(1, 2) for _ in range(40)]

    assert ratio([2 * value for value in seconds], seconds) == pytest.approx((2, 2, 2))
    assert interval([1.0, 2.0, 9.0]) == (2.0, None, None)
    assert ratio([2.0], [1.0]) == (2.0, None, None)
    assert interval_text(interval([1.0])) == "1.000 [-]"
    assert None not in interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


# ------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("name", "bytes_out"),
    [("all_reduce", 150), ("_reduce_scatter_base", 150), ("all_gather", 300), ("broadcast", 75), ("barrier", 0)],
)
def test_bytes_of_a_collective_of_100_bytes_on_4_workers(name, bytes_out):
    assert sent(name, 100, workers=4) == bytes_out
    assert sent("reduce_scatter", 100, workers=4, backend="nccl") == 75  # half of gloo's


@pytest.mark.parametrize(("first", "expected"), [(3, {"bytes": 200, "calls": 2}), (4, {"bytes": None, "calls": None})])
def test_a_step_whose_first_calls_the_recorder_has_overwritten_has_no_bytes(monkeypatch, first, expected):
    numbers = iter([range(3), range(first, 5)])  # before the step, after it: 3 and 4 are the step's
    monkeypatch.setattr(
        "benchmark.measure.payload.recorded",
        lambda: [SimpleNamespace(number=number, name="all_reduce", bytes=100, group="") for number in next(numbers)],
    )
    engine = SimpleNamespace(group_sizes=dict, unrecorded_bytes=lambda: 0)

    assert Payload().of_engine(engine, SimpleNamespace(world_size=2, backend="gloo")) == expected


@pytest.mark.parametrize(
    ("strategy", "per_parameter"), [("ddp", 16), ("zero1", 10), ("zero2", 7), ("zero3", 4), ("fsdp", 4)]
)
def test_the_bytes_of_the_papers_on_four_workers(strategy, per_parameter):
    assert STRATEGIES[strategy].ideal_bytes(1000, workers=4) == per_parameter * 1000


def test_deepspeed_keeps_a_master_copy():
    shapes = [torch.Size([1000, 200])]

    assert STRATEGIES["zero1"].documented_bytes(shapes * 4, workers=4) == (4 + 16 / 4) * 800_000
    assert (
        STRATEGIES["zero1"].documented_bytes(shapes, workers=4) == (4 + 16 / 4) * 200_000 + 4 * 150_000
    )  # one gradient, whole
    assert STRATEGIES["zero1_offload"].documented_bytes(shapes, workers=4) == (4 + 20 / 4 + 8) * 200_000


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=lambda row: row.name)
def test_a_row_names_an_engine_that_exists(row):
    if row.zero:
        pytest.importorskip("deepspeed")
    file, name = row.engine.split(":")
    assert callable(getattr(importlib.import_module(f"benchmark.engines.{file}"), name))


def test_shared_storages_are_counted_once():
    shared = nn.Linear(10, 10, bias=False)
    model = nn.Sequential(shared, nn.Linear(10, 10, bias=False))
    model[1].weight = shared.weight
    model(torch.ones(1, 10)).sum().backward()
    engine = SimpleNamespace(bare=model, state=[torch.zeros(50), shared.weight.detach()[:5]])

    assert counted(engine) == 400 + 400 + 200  # the parameters, their gradients, the rest


# ------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("world_size", [2, 4])
def test_workers_share_the_examples_that_one_worker_would_take(world_size):
    settings = SimpleNamespace(
        model="gpt2-tiny", tokenizer_name="", data_dir=None, length=32, seed=1, accumulation=2, rank=0
    )
    workload = load_workload(settings)

    def step(rank, size, world):
        chosen = SimpleNamespace(**vars(settings) | {"rank": rank, "batch_size": size, "world_size": world})
        chosen.examples_per_step = size * world * 2
        batches = workload.batches(chosen, first_step=3)
        return [next(batches)["input_ids"] for _ in range(2)]

    alone = step(0, 4, 1)
    shared = [step(rank, 4 // world_size, world_size) for rank in range(world_size)]

    for micro in range(2):
        assert torch.equal(torch.cat([share[micro] for share in shared]), alone[micro])


def test_pairs_are_read_from_tsv_and_json_lines(tmp_path):
    (tmp_path / "a.tsv").write_text("one\u2028two\teins\u2028zwei\r\nthree\tdrei\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"translation": {"en": "two", "de": "zwei"}}\n{"source": "x", "target": "y"}\n')

    assert read_pairs(tmp_path / "a.tsv") == [("one\u2028two", "eins\u2028zwei"), ("three", "drei")]
    assert read_pairs(tmp_path / "b.jsonl") == [("two", "zwei"), ("x", "y")]


def test_what_is_no_pair_and_no_data_are_named(tmp_path):
    with pytest.raises(InputError, match="holds no translation pairs"):
        load_pairs(tmp_path, None, 8)
    (tmp_path / "a.tsv").write_text("one\teins\nonly one\n")
    with pytest.raises(InputError, match=re.escape("a.tsv:2: expected a text, a tab and its translation")):
        read_pairs(tmp_path / "a.tsv")


def test_a_lock_of_a_killed_build_is_removed_at_the_second_look_and_that_of_a_running_one_stays(tmp_path):
    names = ("left", "open", "built")
    left, opened, built = locks = [tmp_path / name / "lock" for name in names]
    for lock in locks:
        lock.parent.mkdir()
    for lock in (left, built):
        lock.touch()
    baton = FileBaton(str(opened))  # torch's own lock
    assert baton.try_acquire()

    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=built.parent, stdin=subprocess.PIPE) as builder:
        unowned = remove_left_locks(tmp_path, set())
        assert unowned == {left} and left.exists()
        remove_left_locks(tmp_path, unowned)
        assert [lock.exists() for lock in locks] == [False, True, True]
        builder.communicate(b"\n")
    baton.release()


def test_padding_carries_no_loss():
    train, validation = load_pairs(None, load_tokenizer("tiny", "t5"), 48)

    item = train[0]

    assert len(train) + len(validation) == len(sample_pairs()) == 900
    assert item["input_ids"].shape == item["labels"].shape == (48,)
    assert (item["labels"] == -100).any()


# ------------------------------------------------------------------------------------- output


def test_what_was_not_measured_is_said_in_a_figure_and_not_drawn_as_0(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    texts, lengths = [], []
    monkeypatch.setattr(Axes, "text", lambda self, x, y, text, **options: texts.append(text))
    barh = Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda self, y, width, **o: lengths.append(width) or barh(self, y, width, **o))

    draw_ranking(tmp_path / "f.png", [Bar("pipeline", None), Bar("ddp", 2.0, 1.5, 2.5)], "ms", "gpt2")

    assert texts == [" not measured"]
    assert lengths == [2.0]


def test_a_table_has_names_to_the_left_and_figures_to_the_right(tmp_path):
    assert text_table([["name", "ms", "calls"], ["ddp", 10.0, 3], ["own_zero3", 7.5, None]], 1) == (
        "name         ms  calls\nddp        10.0      3\nown_zero3   7.5      -"
    )
    write_csv(tmp_path / "a.csv", [["name", "ms"], ["ddp", None]], "2 cores")
    assert (tmp_path / "a.csv").read_text() == "# 2 cores\nname,ms\nddp,\n"


def test_the_model_s_arithmetic_is_compared_with_the_peak_of_all_gpus(monkeypatch):
    parsed, _ = parse(["--world_size", "2", "--precision", "bf16"])
    settings = replace(parsed, no_cuda=False)  # with fewer GPUs than workers, it is set
    flops = 3 * describe("gpt2-tiny", settings.length).flops

    assert utilisation(settings, 989e12 / flops, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert utilisation(settings, 756e12 / flops, "NVIDIA H100 PCIe") == pytest.approx(0.5)
    assert utilisation(settings, 1e6, "a GPU of tomorrow") is None
    assert utilisation(settings, 1e6, None) is None
