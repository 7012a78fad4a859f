"""The scripts as a student runs them: real processes, real gloo, and records that agree with one another."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from cluster.launch import free_port
from common.paths import ROOT
from tests.own.warm import Script

pytestmark = pytest.mark.medium

STEPS = 4
TASKS = {"task1_single": 1, "task2a_gather_scatter": 2, "task2b_allreduce": 3, "task3_ddp": 4}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(task, rank, world_size, port, folder, *flags, script="run_glue.py"):
    """One worker with the course's own command line, from inside the task's folder."""
    words = ["--master_ip", "127.0.0.1", "--master_port", port, "--world_size", world_size]
    words += ["--local_rank", rank, "--output_dir", folder, "--overwrite_output_dir", *flags]
    return Script(ROOT / task / script, words, folder / f"log{rank}.txt")


def run(task, world_size, folder, *flags, script="run_glue.py"):
    """All workers of a task to their end; the records of all ranks and what rank 0 printed."""
    folder.mkdir()
    port = free_port()
    workers = [start(task, rank, world_size, port, folder, *flags, script=script) for rank in range(world_size)]
    codes = [worker.wait(timeout=240) for worker in workers]
    log = (folder / "log0.txt").read_text()
    assert codes == [0] * world_size, log
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)], log


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every task once, on another number of workers each, with the same total batch of 12, seed and no dropout."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for task, workers in TASKS.items():
        flags = ("--dropout", 0, "--max_steps", STEPS, "--per_gpu_train_batch_size", 12 // workers)
        made[task] = run(task, workers, folder / task, *flags)
    return folder, made


def mean_losses(records):
    columns = zip(*([step["loss"] for step in record["iterations"]] for record in records), strict=True)
    return [sum(column) / len(records) for column in columns]


@pytest.mark.parametrize("task", list(TASKS)[1:])
def test_losses_agree_with_one_worker_on_any_number_of_workers(runs, task):
    _, made = runs

    assert mean_losses(made[task][0]) == pytest.approx(mean_losses(made["task1_single"][0]), abs=1e-5)


def test_the_record_has_what_its_readers_rely_on(runs):
    _, made = runs
    records, _ = made["task2b_allreduce"]

    for rank, record in enumerate(records):
        assert (record["task"], record["rank"], record["world_size"]) == ("task2b_allreduce", rank, 3)
        assert record["steps_per_epoch"] == math.ceil(record["examples"]["train"] / 12)
        assert len(record["iterations"]) == STEPS
        assert set(record["iterations"][0]["phases"]) == {"data", "forward", "backward", "communication", "optimizer"}
        seconds = [step["seconds"] for step in record["iterations"]]
        assert record["seconds_per_iteration"] == pytest.approx(sum(seconds[1:]) / (STEPS - 1))
        assert all(sum(step["phases"].values()) <= step["seconds"] for step in record["iterations"])
        assert record["config"]["seed"] == 42
        assert set(record["versions"]) == {"python", "torch", "transformers"}


def test_only_the_first_worker_keeps_the_metrics(runs):
    _, made = runs

    kept = [len(record["evaluations"]) for record in made["task2b_allreduce"][0]]

    assert kept == [1, 0, 0]


def test_a_phase_that_cannot_be_separated_is_null(runs):
    _, made = runs

    assert made["task3_ddp"][0][0]["iterations"][0]["phases"]["communication"] is None


def test_the_loss_file_has_one_loss_a_line(runs):
    folder, made = runs

    for rank, record in enumerate(made["task3_ddp"][0]):
        lines = (folder / "task3_ddp" / f"loss_{rank}.txt").read_text().splitlines()
        assert [float(line) for line in lines] == [step["loss"] for step in record["iterations"]]


def test_collectives_are_those_of_the_task(runs):
    _, made = runs
    size = made["task1_single"][0][0]["parameters"] * 4

    collectives = {
        task: {entry["name"]: entry["bytes"] for entry in records[0]["collectives"]}
        for task, (records, _) in made.items()
    }

    assert collectives["task1_single"] == {}
    assert collectives["task2a_gather_scatter"] == {"gather": STEPS * size, "scatter": STEPS * size * 2}
    assert collectives["task2b_allreduce"] == {"all_reduce": STEPS * size}
    assert collectives["task3_ddp"]["all_reduce"] == STEPS * size


def test_the_first_worker_prints_losses_metric_and_mean_time(runs):
    _, made = runs
    _, log = made["task2a_gather_scatter"]

    for words in ("iteration 1: loss", f"iteration {STEPS}: loss", "first losses:", "epoch 1: acc", "mean time per it"):
        assert words in log


def test_a_worker_that_is_killed_ends_the_others_with_a_clear_message(tmp_path):
    port = free_port()
    flags = ("--per_gpu_train_batch_size", 2)
    workers = [start("task2b_allreduce", rank, 3, port, tmp_path, *flags) for rank in range(3)]
    try:
        wait_for(tmp_path / "log0.txt", "iteration 3:", workers)
        workers[2].send_signal(signal.SIGKILL)
        codes = [worker.wait(timeout=20) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()

    assert codes == [3, 3, -9]
    logs = [(tmp_path / f"log{rank}.txt").read_text() for rank in (0, 1)]
    assert any(
        f"rank {rank}: lost contact" in log for rank, log in enumerate(logs)
    )  # the other one may hear of it first
    assert all("rank 2 died (process " in log for log in logs)
    waiting = next(line for line in (tmp_path / "log0.txt").read_text().splitlines() if line.startswith("  rank 1  "))
    assert "all_reduce #" in waiting
    assert "task2b_allreduce/run_glue.py:" in waiting


def test_a_worker_that_stands_still_ends_all_with_code_3(tmp_path):
    port = free_port()
    flags = ("--per_gpu_train_batch_size", 2, "--hang_seconds", 3)
    workers = [start("task2b_allreduce", rank, 2, port, tmp_path, *flags) for rank in range(2)]
    try:
        wait_for(tmp_path / "log0.txt", "iteration 3:", workers)
        workers[1].send_signal(signal.SIGSTOP)
        code = workers[0].wait(timeout=60)
        workers[1].send_signal(signal.SIGCONT)
        codes = [code, workers[1].wait(timeout=60)]
    finally:
        for worker in workers:
            worker.kill()

    assert codes == [3, 3]
    log = (tmp_path / "log0.txt").read_text()
    assert "rank 0: no progress for 3 s (--hang_seconds)" in log
    assert "rank 0 waits for rank 1: rank 1 is stopped" in log


def wait_for(path, words, workers, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists() or words not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        assert all(worker.poll() is None for worker in workers), path.read_text()
        time.sleep(0.1)


@pytest.mark.proof
def test_gpt2_starts_its_own_workers_and_agrees_with_ddp(tmp_path):
    flags = ("--dropout", "0", "--max_steps", "3", "--batch_size", "8")
    own = tmp_path / "own"
    own.mkdir()
    command = [sys.executable, "task2b_allreduce/run_gpt2.py", "--world_size", "2", "--master_port", str(free_port())]
    done = subprocess.run(
        [*command, "--output_dir", str(own), "--overwrite_output_dir", *flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    by_hand = [json.loads((own / f"rank{rank}.json").read_text()) for rank in range(2)]
    with_ddp, _ = run("task3_ddp", 2, tmp_path / "ddp", *flags, script="run_gpt2.py")

    assert mean_losses(by_hand) == pytest.approx(mean_losses(with_ddp), abs=1e-5)
    assert "submit_figures/ is not changed" in done.stdout  # the figures are those of runs without --output_dir


ONE_WORKER = """
import importlib.util, sys
from common.arguments import parse_gpt2_arguments
path, rank = sys.argv.pop(1), int(sys.argv.pop(1))
spec = importlib.util.spec_from_file_location("run_gpt2", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.run_worker(rank, parse_gpt2_arguments("task2b_allreduce", world_size=2))
"""


@pytest.mark.parametrize("started", ["one by one", pytest.param("by the script", marks=pytest.mark.proof)])
def test_gpt2_keeps_every_workers_gradients_for_the_course_to_compare(tmp_path, started):
    kept = [ROOT / "tests" / f"model{rank}_gradients.pth" for rank in range(2)]
    (tmp_path / "one.py").write_text(ONE_WORKER)
    script = ROOT / "task2b_allreduce/run_gpt2.py"
    words = ["--pytest", "True", "--n_epochs", "1", "--world_size", "2", "--batch_size", "8"]
    words += ["--master_port", str(free_port()), "--output_dir", str(tmp_path / "run")]
    try:
        if started == "one by one":
            workers = [Script(tmp_path / "one.py", (script, rank, *words), tmp_path / f"log{rank}") for rank in (0, 1)]
            codes = [worker.wait(timeout=240) for worker in workers]
            assert codes == [0, 0], (tmp_path / "log0").read_text()
        else:
            command = [sys.executable, script.name, *words]
            done = subprocess.run(command, cwd=script.parent, env=ENVIRONMENT, stderr=subprocess.PIPE, timeout=240)
            assert done.returncode == 0, done.stderr
        first, second = (torch.load(path) for path in kept)
    finally:
        for path in kept:
            path.unlink(missing_ok=True)

    assert any(gradient.abs().sum() > 0 for gradient in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_profile_is_one_trace_however_long_the_run(tmp_path):
    _, log = run("task1_single", 1, tmp_path / "profile", "--max_steps", "12", "--profile")

    assert log.count("trace of 3 iterations") == 1
    assert log.count("Self CPU time total") == 1
    assert json.loads((tmp_path / "profile/trace_0.json").read_text())["traceEvents"]
    assert "bert.embeddings.word_embeddings.weight" in log
