"""benchmark.run with real workers: what is timed, what is written, resuming, and what goes wrong."""

import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.tests.cluster.started_processes import processes_with, run, started, wait_for
from staff.tests.workers import group

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")

TOO_LONG = 900  # seconds; a busy machine, and DeepSpeed's first compilation
SLOW = 1.5  # seconds; much longer than any step here
WARMING_UP = f"""
import time, torch, torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch import nn
calls = {{"loss": 0, "step": 0}}
def once_more(name):
    calls[name] += 1
    return calls[name]
def loss(model, batch):
    if once_more("loss") <= 2:  # the first step: two micro-batches
        time.sleep({SLOW})
    return model(batch["x"]).square().mean()
def after_step(*_):
    if once_more("step") == 2 and dist.get_rank() == 1:  # the last step of the warm-up, on one worker
        time.sleep({SLOW})
register_optimizer_step_post_hook(after_step)
def build():
    return nn.Linear(4, 4), {{"x": torch.randn(64, 4)}}, loss
"""


def slow(strategy):
    """A strategy of which another one, engine and all, stands for it in make bank."""
    return pytest.param(strategy, marks=pytest.mark.slow)


def in_group(workers: int, folder: Path, *words: object) -> dict:
    """The record of benchmark.run on so many workers, which write into folder/run."""
    codes = group(ROOT / "benchmark" / "run.py", workers, folder, *words)
    assert codes == [0] * workers, (folder / "log0.txt").read_text()[-2000:]
    return json.loads((folder / "run" / "result.json").read_text())


def benchmark(*words: object):
    return run("-m", "benchmark.run", *map(str, words), timeout=TOO_LONG)


def result_of(done) -> dict:
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def losses_in(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "losses.txt").read_text().split()]


@pytest.mark.medium
def test_warm_up_is_not_timed_and_all_workers_begin_the_timed_steps_together(tmp_path):
    file = tmp_path / "warming_up.py"
    file.write_text(WARMING_UP)

    words = ["--model", f"{file}:build", "--strategy", "own_ring", "--batch_size", 3, "--accumulation", 2]
    record = in_group(2, tmp_path / "r", *words, "--max_steps", 9)

    assert record["steps"] == {"dropped": 2, "timed": 5, "traced": 2}
    assert len(record["losses"]) == 9 and len(record["steps_ms"]) == 5
    assert max(record["steps_ms"]) < 1e3 * SLOW * 0.9
    seconds = sum(record["steps_ms"]) / 1e3
    assert record["samples_per_second"] == pytest.approx(2 * 3 * 2 * 5 / seconds)
    assert record["tokens_per_second"] is None  # they are numbers
    assert record["communication"]["sent_bytes"] == 4 * 20  # a ring of two sends each gradient once in a step
    assert record["wall_s"] == pytest.approx(seconds)
    assert record["step_ms"] == pytest.approx(statistics.median(record["steps_ms"]))
    wall = record["phases_ms"].pop("wall")
    assert wall == pytest.approx(1e3 * seconds / 5) == pytest.approx(sum(record["phases_ms"].values()))


@pytest.mark.medium
def test_a_run_goes_on_from_its_checkpoint_with_the_same_losses_and_refuses_a_damaged_one(tmp_path):
    flags = ["--strategy", "single", "--length", 16, "--dropout", 0.1, "--checkpoint_every", 3]
    in_group(1, tmp_path / "whole", *flags, "--max_steps", 6)
    in_group(1, tmp_path / "parts", *flags, "--max_steps", 3)
    in_group(1, tmp_path / "parts", *flags, "--max_steps", 6, "--resume")

    assert losses_in(tmp_path / "parts" / "run") == losses_in(tmp_path / "whole" / "run")
    file = next((tmp_path / "parts" / "run" / "checkpoints").glob("step-*/state.pt"))
    file.write_bytes(file.read_bytes()[:-1000])
    again = [*flags, "--max_steps", 9, "--resume"]
    assert group(ROOT / "benchmark" / "run.py", 1, tmp_path / "parts", *again) != [0]
    said = (tmp_path / "parts" / "log0.txt").read_text()
    assert "checkpoint" in said and "delete this folder" in said and "Traceback" not in said


@pytest.mark.medium
def test_weights_and_biases_gets_what_tensorboard_gets(tmp_path, monkeypatch):
    """A module that writes down its calls stands for wandb, which is not among our packages."""
    (tmp_path / "wandb.py").write_text(
        "import json, os, pathlib\n"
        "class Run:\n"
        "    def __init__(self, dir, **about):\n        self.file = open(pathlib.Path(dir, 'wandb.jsonl'), 'w')\n"
        "    def define_metric(self, *_, **__): pass\n"
        "    def log(self, values): self.file.write(json.dumps({**values, 'mode': os.environ['WANDB_MODE']}) + '\\n')\n"
        "    def finish(self): self.file.close()\n"
        "init = lambda project, dir, name, config: Run(dir)\n"
    )
    words = ["-m", "benchmark.run", "--strategy", "single", "--max_steps", "3", "--length", "16", "--wandb"]
    words += ["--model", "t5-tiny", "--bleu"]
    place = ["--local_rank", "0", "--world_size", "1", "--output_dir", tmp_path / "run"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    result = result_of(run(*words, *place, timeout=TOO_LONG))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    logged = [json.loads(line) for line in (tmp_path / "run" / "wandb.jsonl").read_text().splitlines()]
    losses = losses_in(tmp_path / "run")
    assert {line["mode"] for line in logged} == {"offline"} and 0 <= result["bleu"] < 100
    assert [line["train/loss"] for line in logged if "train/loss" in line] == losses
    assert [scalar.value for scalar in board.Scalars("train/loss")] == pytest.approx(losses)
    assert [scalar.value for scalar in board.Scalars("train/loss_of_first_worker")] == pytest.approx(losses)
    assert result["last_loss"] == losses[-1]


@pytest.mark.proof
def test_all_strategies_are_timed_beside_each_other_and_train_as_one_worker_does(tmp_path):
    """20 steps in fp32: losses to 5e-6; that the gradients are right is test_prove.py's business."""
    pytest.importorskip("deepspeed")
    done = run("-m", "benchmark.compare", "--workers", "2", "--output_dir", tmp_path / "c", timeout=TOO_LONG)

    rows = {row["strategy"]: row for row in result_of(done)["rows"]}

    built = sum(importlib.util.find_spec(name) is not None for name in ("megatron", "horovod"))
    assert len(rows) == 20 + built  # 18 strategies, single and ddp again
    assert all(row["gradient"] == "ok" and row["loss_difference"] <= 5e-6 for row in rows.values()), rows
    assert rows["single"]["last_loss"] < 7.0


@pytest.mark.proof
def test_a_run_writes_its_table_its_files_and_one_json_line(tmp_path):
    folder = tmp_path / "run"
    flags = ["--eval_every", 4, "--save", "--keep_trace", "--cosine", "--warmup_steps", 2]

    result = result_of(benchmark("--workers", 2, "--max_steps", 10, *flags, "--output_dir", folder))

    assert [evaluation["step"] for evaluation in result["evaluations"]] == [4, 8, 10]
    assert result["evaluations"][0]["perplexity"] == pytest.approx(math.exp(result["evaluations"][0]["loss"]))
    assert result["communication"]["sent_bytes"] == 4 * result["parameters"]  # a ring of two sends all gradients once
    assert len(losses_in(folder)) == 10 and result["last_norm"] > 0
    assert json.loads((folder / "trace_0.json").read_text())["traceEvents"]
    assert "aten::addmm" in (folder / "operators_1.txt").read_text()
    assert (folder / "memory_1.png").stat().st_size > 5000
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() == result["parameters"]
    assert AutoTokenizer.from_pretrained(folder / "model")("a")["input_ids"]


@pytest.mark.proof
@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "pipeline", slow("ddp"), slow("zero2")])
def test_a_killed_run_goes_on_with_the_same_losses(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr("staff.tests.cluster.started_processes.DEADLINE_SECONDS", TOO_LONG)
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    flags = ["--strategy", strategy, "--workers", 2, "--checkpoint_every", 3, "--dropout", 0.1]
    result_of(benchmark(*flags, "--max_steps", 9, "--output_dir", tmp_path / "whole"))
    environment, broken = os.environ | {"COS598D_MARK": str(tmp_path)}, tmp_path / "broken"
    endless = ["-m", "benchmark.run", *map(str, flags), "--max_steps", "100000", "--output_dir", broken]
    with started(*endless, env=environment, stderr=-3) as process:
        wait_for(lambda: list(broken.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not processes_with(tmp_path), "the end of all workers")
    kept = sorted(broken.glob("checkpoints/step-*"))[-1]
    step = json.loads((kept / "manifest.json").read_text())["step"]
    if step > 9:
        pytest.skip(f"the run was faster than the kill: {step} steps")

    result_of(benchmark(*flags, "--max_steps", 9, "--resume", "--output_dir", broken))

    assert losses_in(broken) == losses_in(tmp_path / "whole")


@pytest.mark.proof
def test_a_full_disk_is_one_clear_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = f'mount -t tmpfs -o size=6m tmpfs {disk} && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run(["unshare", *user, "--mount", "true"]).returncode:
        pytest.skip("this user may not mount")
    words = [sys.executable, "-m", "benchmark.run", "--max_steps", "2", "--checkpoint_every", "1"]
    command = ["unshare", *user, "--mount", "sh", "-c", inside, "sh", *words, "--output_dir", str(disk / "run")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TOO_LONG)

    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "cannot write checkpoint" in done.stderr and "MB free); make room" in done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("strategy", ["single", "fsdp", slow("ddp"), slow("zero2")])
def test_bf16_comes_near_the_losses_of_fp32(strategy, tmp_path):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    losses = {}
    for precision in ("fp32", "bf16"):
        workers = 1 if strategy == "single" else 2
        flags = ["--strategy", strategy, "--workers", workers, "--max_steps", 5, "--precision", precision]
        result_of(benchmark(*flags, "--output_dir", tmp_path / precision))
        losses[precision] = losses_in(tmp_path / precision)

    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
