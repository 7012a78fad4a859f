"""The benchmark with real workers and engines: agreement, resuming, what is written, what goes wrong."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest

from common.paths import ROOT
from tests.own.started_processes import processes_with, run, started, wait_for

pytest.importorskip("tensorboard")
pytestmark = [pytest.mark.proof, pytest.mark.skipif(sys.platform != "linux", reason="emulates limits of Linux")]

TOO_LONG = 900  # seconds; a busy machine, and DeepSpeed's first compilation


def slow(strategy):
    """A strategy of which another one, engine and all, stands for it in make test."""
    return pytest.param(strategy, marks=pytest.mark.slow)


def benchmark(*words, **options):
    return run("-m", "benchmark.run", *words, **{"timeout": TOO_LONG} | options)


def result_of(done) -> dict:
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_strategies_are_timed_beside_each_other_and_train_as_one_worker_does(tmp_path):
    """20 steps in fp32: losses to 5e-6; that the gradients are right is test_prove.py's business."""
    pytest.importorskip("deepspeed")
    done = run("-m", "benchmark.compare", "--workers", "2", "--output_dir", tmp_path / "c", timeout=TOO_LONG)

    rows = {row["strategy"]: row for row in result_of(done)["rows"]}

    built = sum(importlib.util.find_spec(name) is not None for name in ("megatron", "horovod"))
    assert len(rows) == 21 + built  # 18 strategies, single, ddp again and ddp metered
    assert all(row["gradient"] == "ok" and row["loss_difference"] <= 5e-6 for row in rows.values()), rows
    assert rows["single"]["last_loss"] < 7.0


def test_buckets_of_a_chosen_size_are_right(tmp_path):
    """The backward passes that are timed leave nothing behind, and all ranks choose the same."""
    flags = ["--strategy", "own_overlap", "--bucket_mb", "auto", "--workers", "2"]
    done = run("-m", "benchmark.prove", *flags, "--output_dir", tmp_path / "c", timeout=TOO_LONG)

    assert "own_overlap: buckets of " in done.stderr
    assert done.returncode == 0, done.stdout


def test_a_run_writes_its_table_its_files_and_one_json_line(tmp_path):
    folder = tmp_path / "run"
    flags = ["--eval_every", "4", "--save", "--keep_trace", "--cosine", "--warmup_steps", "2"]
    done = benchmark("--workers", "2", "--max_steps", "10", *flags, "--output_dir", folder)

    result = result_of(done)

    assert "ddp" in done.stdout
    assert "communication" in done.stdout
    assert result["wall_s"] == pytest.approx(result["steps"]["timed"] * result["phases_ms"]["wall"] / 1e3)
    assert [evaluation["step"] for evaluation in result["evaluations"]] == [4, 8, 10]
    assert result["evaluations"][0]["perplexity"] == pytest.approx(math.exp(result["evaluations"][0]["loss"]))
    assert result["communication"]["sent_bytes"] == 4 * result["parameters"]  # a ring of two sends all gradients once
    assert len((folder / "losses.txt").read_text().splitlines()) == 10
    assert json.loads((folder / "trace_0.json").read_text())["traceEvents"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() == result["parameters"]
    assert AutoTokenizer.from_pretrained(folder / "model")("a")["input_ids"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    losses = list(map(float, (folder / "losses.txt").read_text().split()))
    assert [scalar.value for scalar in board.Scalars("train/loss")] == pytest.approx(losses)
    assert result["last_norm"] > 0
    assert len(board.Scalars("validation/perplexity")) == 3


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "pipeline", slow("ddp"), slow("zero2")])
def test_a_killed_run_goes_on_with_the_same_losses(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.own.started_processes.DEADLINE_SECONDS", TOO_LONG)
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    flags = ["--strategy", strategy, "--workers", "2", "--max_steps", "9", "--checkpoint_every", "3"]
    flags += ["--dropout", "0.1"]  # the random numbers go on, too
    result_of(benchmark(*flags, "--output_dir", tmp_path / "whole"))
    environment = os.environ | {"COS598D_MARK": str(tmp_path)}
    broken = tmp_path / "broken"
    endless = [*flags, "--max_steps", "100000"]
    with started("-m", "benchmark.run", *endless, "--output_dir", broken, env=environment, stderr=-3) as process:
        wait_for(lambda: list(broken.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not processes_with(tmp_path), "the end of all workers")
    kept = sorted(broken.glob("checkpoints/step-*"))[-1]
    step = json.loads((kept / "manifest.json").read_text())["step"]
    total = str(max(9, step))
    if step > 9:
        pytest.skip(f"the run was faster than the kill: {step} steps")

    result_of(benchmark(*flags[:4], "--max_steps", total, *flags[6:], "--resume", "--output_dir", broken))

    assert (broken / "losses.txt").read_text() == (tmp_path / "whole" / "losses.txt").read_text()


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path):
    flags = ["--max_steps", "2", "--checkpoint_every", "2", "--output_dir", tmp_path / "run"]
    result_of(benchmark(*flags))
    file = next((tmp_path / "run" / "checkpoints").glob("step-*/state.pt"))
    file.write_bytes(file.read_bytes()[:-1000])

    done = benchmark(*flags, "--max_steps", "4", "--resume")

    assert done.returncode != 0
    assert "state.pt is corrupt or missing; delete this folder" in done.stderr
    assert "Traceback" not in done.stderr


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

    assert done.returncode != 0
    assert "cannot write checkpoint" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_records_what_fails_and_goes_on(tmp_path):
    flags = "--models t5-tiny --strategies single --batch_sizes 1,900 --workers 1 --steps 3".split()
    done = run("-m", "benchmark.sweep", *flags, "--output_dir", tmp_path / "s", timeout=TOO_LONG)
    again = run("-m", "benchmark.sweep", *flags, "--output_dir", tmp_path / "s", timeout=TOO_LONG)

    failures = result_of(done)["failures"]

    assert len(failures) == 1
    assert "expected at least 900 training examples" in failures[0]
    table = (tmp_path / "s" / "latency.csv").read_text().splitlines()
    assert table[0] == "single,1,900"
    assert table[1].endswith(",error")
    assert result_of(again) == result_of(done)
    assert "t5-tiny-single-b1-w1" in str(sorted((tmp_path / "s").iterdir()))


def test_out_of_memory_is_recorded_as_such(tmp_path):
    flags = ["--models", "gpt2-tiny", "--strategies", "single", "--batch_sizes", "4", "--workers", "1", "--steps", "3"]
    limited = ["--memory_limit_mb", "1", "--skip_predicted_oom", "--output_dir", tmp_path / "s"]

    done = run("-m", "benchmark.sweep", *flags, *limited, timeout=TOO_LONG)

    assert ": OOM: predicted" in result_of(done)["failures"][0]
    assert (tmp_path / "s" / "latency.csv").read_text() == "single,4\ngpt2-tiny,OOM\n"


@pytest.mark.parametrize("strategy", ["single", "fsdp", slow("ddp"), slow("zero2")])
def test_bf16_comes_near_the_losses_of_fp32(strategy, tmp_path):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    workers = "1" if strategy == "single" else "2"
    losses = {}
    for precision in ("fp32", "bf16"):
        flags = ["--strategy", strategy, "--workers", workers, "--max_steps", "5", "--precision", precision]
        result_of(benchmark(*flags, "--output_dir", tmp_path / precision))
        losses[precision] = [float(line) for line in (tmp_path / precision / "losses.txt").read_text().split()]

    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
