"""The scripts as a student runs them: real processes, real gloo, and records that agree with one another."""

import json
import math
import signal
import subprocess
import sys

import pytest
import torch

from cluster.launch import free_port
from common.gradient_check import RIGHT
from common.paths import ROOT
from tests.own import workers
from tests.own.started_processes import wait_for
from tests.own.warm import Script
from tests.own.workers import mean_losses

pytestmark = pytest.mark.medium

STEPS = 4
TASKS = {  # workers, and flags; one worker: see test_real_steps.py
    "task2a_gather_scatter": (2, "--do_train"),
    "task2b_allreduce": (3, "--do_train", "--check_gradients"),
    "task3_ddp": (2,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """Every task's records, with the same total batch of 12, the same seed and no dropout."""
    flags = ("--dropout", 0, "--max_steps", STEPS, "--per_gpu_train_batch_size")
    return {
        task: workers.run(ROOT / task / "run_glue.py", count, folder / task, *flags, 12 // count, *more)
        for task, (count, *more) in TASKS.items()
    }


def test_losses_agree_on_any_number_of_workers_and_gradients_are_found_right(runs, folder):
    losses = [mean_losses(records) for records in runs.values()]

    assert f"gradient: {RIGHT}" in (folder / "task2b_allreduce/log0.txt").read_text()
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] == pytest.approx(losses[2], abs=1e-5)


def test_the_record_has_what_its_readers_rely_on(runs):
    for rank, record in enumerate(runs["task2b_allreduce"]):
        assert (record["task"], record["rank"], record["world_size"]) == ("task2b_allreduce", rank, 3)
        assert record["steps_per_epoch"] == math.ceil(record["examples"]["train"] / 12)
        assert len(record["iterations"]) == STEPS
        assert set(record["iterations"][0]["phases"]) == {"data", "forward", "backward", "communication", "optimizer"}
        seconds = [step["seconds"] for step in record["iterations"]]
        assert record["seconds_per_iteration"] == pytest.approx(sum(seconds[1:]) / (STEPS - 1))
        assert all(sum(step["phases"].values()) <= step["seconds"] for step in record["iterations"])
        assert record["config"]["seed"] == 42
        assert set(record["versions"]) == {"python", "torch", "transformers"}
    for rank, record in enumerate(runs["task3_ddp"]):
        assert len(record["evaluations"]) == (1 if rank == 0 else 0)  # only the first worker keeps the metrics
        assert record["iterations"][0]["phases"]["communication"] is None  # it cannot be separated from backward


def test_losses_are_in_a_file_one_a_line_and_the_first_worker_prints_them_with_metric_and_mean_time(runs, folder):
    log = (folder / "task3_ddp/log0.txt").read_text()

    for rank, record in enumerate(runs["task3_ddp"]):
        lines = (folder / f"task3_ddp/run/loss_{rank}.txt").read_text().splitlines()
        assert [float(line) for line in lines] == [step["loss"] for step in record["iterations"]]
    for words in ("iteration 1: loss", f"iteration {STEPS}: loss", "first losses:", "epoch 1: acc", "mean time per it"):
        assert words in log


def test_collectives_are_those_of_the_task(runs):
    size = runs["task2b_allreduce"][0]["parameters"] * 4

    collectives = {
        task: {entry["name"]: entry["bytes"] for entry in records[0]["collectives"]} for task, records in runs.items()
    }

    assert collectives["task2a_gather_scatter"] == {"gather": STEPS * size, "scatter": STEPS * size * 2}
    assert collectives["task2b_allreduce"]["all_reduce"] == STEPS * size  # and one all_gather of --check_gradients
    assert collectives["task3_ddp"]["all_reduce"] == STEPS * size


@pytest.mark.parametrize(("number", "hang_seconds", "words"), [
    (signal.SIGKILL, 120, ["rank 1 died (process ", "all_reduce #", "run_glue.py:"]),
    (signal.SIGSTOP, 8, ["no progress for 8 s (--hang_seconds): rank 0 waits in all_reduce", "rank 1 does not answer"]),
], ids=["killed", "stopped"])  # fmt: skip
def test_a_worker_that_is_killed_or_stopped_ends_the_other_with_a_reason(tmp_path, number, hang_seconds, words):
    flags = ("--per_gpu_train_batch_size", 2, "--hang_seconds", hang_seconds)
    ranks = workers.start(ROOT / "task2b_allreduce/run_glue.py", 2, tmp_path, *flags)
    try:
        log = tmp_path / "log0.txt"
        wait_for(lambda: log.exists() and "iteration 3:" in log.read_text(), "iteration 3")
        ranks[1].send_signal(number)
        code = ranks[0].wait(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()

    assert code == 3
    assert [missing for missing in words if missing not in log.read_text()] == [], log.read_text()


@pytest.mark.proof
def test_gpt2_starts_its_own_workers_and_agrees_with_ddp(tmp_path):
    flags = ("--dropout", "0", "--max_steps", "3", "--batch_size", "8")
    command = [sys.executable, "task2b_allreduce/run_gpt2.py", "--world_size", "2", "--master_port", str(free_port())]
    command += ["--output_dir", str(tmp_path), "--overwrite_output_dir", *flags]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    by_hand = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    with_ddp = workers.run(ROOT / "task3_ddp/run_gpt2.py", 2, tmp_path / "ddp", *flags)
    assert mean_losses(by_hand) == pytest.approx(mean_losses(with_ddp), abs=1e-5)
    assert "submit_figures/ is not changed" in done.stdout  # the figures are those of runs without --output_dir


ONE_WORKER = """
import sys
from common.arguments import parse_gpt2_arguments
from common.paths import import_file
script, rank = import_file(sys.argv.pop(1), "run_gpt2"), int(sys.argv.pop(1))
script.run_worker(rank, parse_gpt2_arguments("task2b_allreduce", world_size=2))
"""


def test_gpt2_keeps_every_workers_gradients_for_the_course_to_compare(tmp_path):
    kept = [ROOT / "tests" / f"model{rank}_gradients.pth" for rank in range(2)]
    (tmp_path / "one.py").write_text(ONE_WORKER)
    words = ["--pytest", "True", "--n_epochs", 1, "--world_size", 2, "--batch_size", 8]
    words += ["--master_port", free_port(), "--output_dir", tmp_path / "run"]
    script = ROOT / "task2b_allreduce/run_gpt2.py"
    try:
        ranks = [Script(tmp_path / "one.py", (script, rank, *words), tmp_path / f"log{rank}") for rank in (0, 1)]
        assert workers.wait(ranks) == [0, 0], (tmp_path / "log0").read_text()
        first, second = (torch.load(path) for path in kept)
    finally:
        for path in kept:
            path.unlink(missing_ok=True)

    assert any(gradient.abs().sum() > 0 for gradient in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_profile_is_one_trace_however_long_the_run(tmp_path):
    workers.run(ROOT / "task1_single/run_glue.py", 1, tmp_path, "--max_steps", 12, "--profile")

    log = (tmp_path / "log0.txt").read_text()
    assert log.count("trace of 3 iterations") == 1
    assert log.count("Self CPU time total") == 1
    assert json.loads((tmp_path / "run/trace_0.json").read_text())["traceEvents"]
    assert "bert.embeddings.word_embeddings.weight" in log
