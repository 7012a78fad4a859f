"""Computes the two metrics of a run, and draws the two figures that compare the modes.

submit_figures/pipeline_metrics.json keeps the last run of each mode: training time of an epoch (s) and tokens per
second, each as mean and standard deviation over the epochs, without the first one, which is a warm-up. A run with its
own --output_dir, such as one of several numbers of micro-batches, leaves submit_figures/ as it is.
"""

import json
from pathlib import Path
from typing import Any

from common.config import Gpt2Config
from common.epochs import mean_and_deviation, measured_epochs
from common.figures import bars
from common.paths import ROOT, atomic_write, shown
from common.record import Record
from common.workers.processor import other_programs

MODES = {"model_parallel", "pipeline_parallel"}
FOLDER = ROOT / "submit_figures"
RUNS = ROOT / "runs"
FIGURES = {
    "training_time": ("training time of an epoch (s)", "pipeline_training_time.png"),
    "tokens_per_second": ("tokens per second", "pipeline_tokens_per_second.png"),
}


def epoch_metrics(config: Gpt2Config, record: Record) -> dict[str, Any]:
    """Return both metrics of every epoch, with mean and deviation; the first one counts only if it is the only one."""
    measured = record.as_dict()
    epochs = measured_epochs(measured, config.batch_size * config.model_max_length)
    times, speeds = zip(*epochs, strict=True)
    means = {
        name: dict(zip(("mean", "std"), mean_and_deviation(values), strict=True))
        for name, values in (("training_time", times), ("tokens_per_second", speeds))
    }
    alone = "processor" in measured and measured["world_size"] == 1  # one process of several sees only its own share
    busy = other_programs([measured["processor"]]) if alone else None
    return {**means, "epochs": epochs, "other_programs": busy}


def compare_modes(config: Gpt2Config, metrics: dict[str, Any]) -> None:
    """Print this run's metrics; keep them and draw both figures for all modes, unless it has its own --output_dir."""
    mode = config.model_parallel_mode if config.schedule == "threads" else config.schedule
    for name, (label, _) in FIGURES.items():
        deviation = f" +- {metrics[name]['std']:.2f}" if metrics[name]["std"] else ""  # one epoch has none
        print(f"{label}: {metrics[name]['mean']:.2f}{deviation}")
    if config.output_dir != RUNS / ("pipeline" if mode == "pipeline_parallel" else f"pipeline_{mode}"):
        print(f"{shown(FOLDER)}/ is not changed: it shows runs without --output_dir")
        return
    path = FOLDER / "pipeline_metrics.json"
    try:
        runs = json.loads(path.read_text())
        assert isinstance(runs, dict)
    except (OSError, ValueError, AssertionError):
        runs = {}
    setting = [Path(config.model_name_or_path).name, config.batch_size, config.model_max_length]
    chunks = {} if mode in ("none", "model_parallel") else {"n_chunk": config.n_chunk}
    runs[mode] = {"setting": setting, **chunks, **metrics}
    with atomic_write(path) as file:
        json.dump(runs, file, indent=1)
    comparable = {name: run for name, run in runs.items() if run["setting"] == setting}
    for name, (label, file_name) in FIGURES.items():
        means, deviations = ([run[name][key] for run in comparable.values()] for key in ("mean", "std"))
        title = f"{setting[0]}, batch {setting[1]}, {setting[2]} tokens"
        bars(FOLDER / file_name, list(comparable), means, label=label, title=title, errors=deviations)
    if mode in MODES <= comparable.keys():
        slow, fast = (comparable[name]["training_time"]["mean"] for name in ("model_parallel", "pipeline_parallel"))
        print(f"pipeline_parallel is {slow / fast:.2f} times as fast as model_parallel")
