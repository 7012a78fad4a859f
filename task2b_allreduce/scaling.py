"""Training time and tokens per second of a GPT-2 run, saved and drawn together with those of earlier runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.config import Gpt2Config
from common.epochs import mean_and_deviation, measured_epochs
from common.errors import STOPPED_BY_ANOTHER, InputError
from common.figures import bars
from common.paths import ROOT, atomic_write, shown
from common.workers.processor import other_programs

FIGURES = ROOT / "submit_figures"
DEFAULT_FOLDER = ROOT / "runs" / "task2b_allreduce_gpt2"


def check_workers(processes: Sequence) -> None:
    """Raise InputError unless all processes were started, joined and ended without an error."""
    if not processes:
        raise InputError("no worker was started (region 2b.9)")
    if any(process.is_alive() for process in processes):
        for worker in processes:
            worker.terminate()
        raise InputError("the script did not wait for its workers: join every process (region 2b.9)")
    failed = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
    # A worker that only lost contact is not the one that failed first.
    failed.sort(key=lambda failure: failure[1] == STOPPED_BY_ANOTHER)
    if failed:
        raise InputError("rank {} exited with code {}; see its message above".format(*failed[0]))


def own_epochs(record: dict) -> list[tuple[float, float]]:
    """Return one worker's training time (s) and tokens per second of the epochs."""
    config = record["config"]
    return measured_epochs(record, config["batch_size"] // record["world_size"] * config["model_max_length"])


def epoch_metrics(record: dict) -> dict[str, float]:
    """Return one worker's mean and standard deviation over epochs of training time (s) and tokens per second."""
    times, speeds = zip(*own_epochs(record), strict=True)
    time, time_std = mean_and_deviation(times)
    speed, speed_std = mean_and_deviation(speeds)
    return {
        "training_time": time,
        "training_time_std": time_std,
        "tokens_per_second": speed,
        "tokens_per_second_std": speed_std,
    }


def combine(workers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average the workers' times and their deviations, and add up their tokens per second.

    The deviations of the tokens per second are combined as if they were independent.
    """
    column = {name: np.array([worker[name] for worker in workers]) for name in workers[0]}
    return {
        "training_time": float(column["training_time"].mean()),
        "training_time_std": float(column["training_time_std"].mean()),
        "tokens_per_second": float(column["tokens_per_second"].sum()),
        "tokens_per_second_std": float(np.sqrt((column["tokens_per_second_std"] ** 2).sum())),
    }


def report_scaling(config: Gpt2Config, figures: Path = FIGURES) -> None:
    """Read the records of a run, save its metrics in submit_figures/ and draw both figures from all metrics there.

    A run with its own --output_dir, such as one of `make demo`, only prints its metrics.
    """
    records = [json.loads((config.output_dir / f"rank{r}.json").read_text()) for r in range(config.world_size)]
    workers = [epoch_metrics(record) for record in records]
    for rank, worker in enumerate(workers):
        print(f"rank {rank}: {_words(worker)}")
    threads = records[0]["host"]["threads"] if records[0]["host"]["device"] == "cpu" else 1
    together = {
        "workers": config.world_size,
        "threads": threads,  # of each worker
        "batch_size": config.batch_size,
        "setting": _setting(config, records[0]),
        "other_programs": other_programs([record["processor"] for record in records]),  # cores that they used
        **combine(workers),
        "epochs": [
            [sum(time for time, _ in epoch) / len(epoch), sum(speed for _, speed in epoch)]
            for epoch in zip(*map(own_epochs, records), strict=True)
        ],
    }
    print(f"{config.world_size} workers: {_words(together)}")
    if config.n_epochs < 3:
        print(
            "only one epoch was measured; use --n_epochs 4 for a mean and standard deviation over three epochs, "
            "because the first epoch is a warm-up"
        )
    if config.output_dir != DEFAULT_FOLDER:
        print(f"{shown(figures)}/ is not changed: it shows runs without --output_dir")
        return
    name = f"data_parallel_{config.world_size}" + (f"_threads_{threads}" if threads > 1 else "")
    with atomic_write(figures / f"{name}.json") as file:
        json.dump({**together, "per_worker": workers}, file, indent=1)
    draw_scaling(figures)


def _setting(config: Gpt2Config, record: dict) -> dict:
    """Return what two runs must have in common if their metrics are to be compared."""
    return {
        "model": Path(config.model_name_or_path).name,
        "tokens per example": config.model_max_length,
        "training examples": record["examples"]["train"],
        "seed": config.seed,
        "dropout": config.dropout,
        "device": record["host"]["device"].split(":")[0],
        "torch": record["versions"]["torch"],
    }


def draw_scaling(figures: Path) -> None:
    """Draw the two figures, with one bar for each number of workers whose run is in `figures`."""
    runs = [json.loads(file.read_text()) for file in figures.glob("data_parallel_*.json")]
    runs.sort(key=lambda run: (run.get("threads", 1), run["workers"]))
    names = [_bar_name(run) for run in runs]
    for metric, label in (
        ("training_time", "training time per epoch (s)"),
        ("tokens_per_second", "tokens per second, all workers"),
    ):
        values, errors = [run[metric] for run in runs], [run[f"{metric}_std"] for run in runs]
        path = figures / f"data_parallel_{metric}.png"
        bars(path, names, values, errors=errors, label=label, title="GPT-2, data parallel")
        print(f"figure: {shown(path)}")


def _bar_name(run: dict) -> str:
    workers = f"{run['workers']} worker{'s' if run['workers'] > 1 else ''}"
    threads = f" x {run['threads']} threads" if run.get("threads", 1) > 1 else ""
    return f"{workers}{threads}\nbatch {run['batch_size']}"


def _words(metrics: dict) -> str:
    """Return mean and deviation as text; one epoch alone has no deviation."""
    time, speed = f"{metrics['training_time']:.3f}", f"{metrics['tokens_per_second']:.0f}"
    if metrics["training_time_std"]:
        time += f" +- {metrics['training_time_std']:.3f}"
        speed += f" +- {metrics['tokens_per_second_std']:.0f}"
    return f"training time {time} s per epoch, {speed} tokens per second"
