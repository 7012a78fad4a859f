"""The GPT-2 parts of a report: metrics and figures that task 2b and the pipeline leave in submit_figures/."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.workers.processor import disturbance
from handin.runs import Number, Run, Shape, is_time, misfit, read_json

FIGURES = {
    "data_parallel_training_time.png": "Data parallel: training time of an epoch",
    "data_parallel_tokens_per_second.png": "Data parallel: tokens per second, all workers",
    "pipeline_training_time.png": "Pipeline: training time of an epoch",
    "pipeline_tokens_per_second.png": "Pipeline: tokens per second",
}
_PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
Row = dict[str, Any]
_METRICS = ("training_time", "tokens_per_second")
# Of each epoch: seconds, and tokens per second.
_SCALING: dict[str, Shape] = {
    "workers": int,
    "threads": int,
    "batch_size": int,
    "setting": dict,
    "other_programs": Number | None,
    "epochs": [[is_time]],
    **dict.fromkeys(_METRICS, is_time),
    **{f"{name}_std": Number for name in _METRICS},
}
_MODE: dict[str, Shape] = {
    "setting": list,
    "other_programs": Number | None,
    "epochs": [[is_time]],
    **{name: {"mean": is_time, "std": Number} for name in _METRICS},
}


@dataclass
class Gpt2:
    """Rows as they are kept. Times in s per epoch, speeds in tokens per s of all workers.

    speedups: of a row over the one that it is compared with, by the key of the row; only where they can be compared.
    """

    scaling: dict[tuple[int, int], Row] = field(default_factory=dict)  # workers, threads of each -> row
    modes: dict[str, Row] = field(default_factory=dict)  # mode of the pipeline -> row
    speedups: dict[Hashable, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    on_cpu: bool = True


def read_gpt2(folder: Path, on_cpu: bool = True) -> Gpt2:
    """Everything in submit_figures/ that can be read; what cannot is named in the doubts."""
    gpt2 = Gpt2(on_cpu=on_cpu)
    for path in sorted(folder.glob("data_parallel_*.json")):
        row = _read(path, gpt2)
        if row and misfit(row, _SCALING):
            gpt2.doubts.append(f"{_name(path)} was written by another version of the scripts; run it again")
        elif row:
            gpt2.scaling[row["workers"], row["threads"]] = row
    gpt2.scaling = dict(sorted(gpt2.scaling.items()))
    path = folder / "pipeline_metrics.json"
    for mode, row in _read(path, gpt2).items() if path.exists() else ():
        if misfit(row, _MODE):
            gpt2.doubts.append(f"{_name(path)}: {mode} was written by another version; run that mode again")
        else:
            means = {name: row[name]["mean"] for name in _METRICS}
            gpt2.modes[mode] = {**row, **means, **{f"{name}_std": row[name]["std"] for name in _METRICS}}
    rows = {f"GPT-2, workers: {workers}, threads: {threads}": row for (workers, threads), row in gpt2.scaling.items()}
    for what, row in (rows | gpt2.modes).items():
        if warning := disturbance(row["other_programs"]):
            gpt2.doubts.append(f"{what}: {warning}; run it again")
    _compare_workers(gpt2)
    _compare_modes(gpt2)
    return gpt2


def made_figures(run: Run, gpt2: Gpt2) -> bool:
    """Return whether a row of submit_figures/ was computed from this run: the row keeps the seconds of each epoch."""
    steps = max(1, run.first["steps_per_epoch"])
    seconds = [[step["seconds"] for step in record["iterations"]] for record in run.records]
    epochs = [
        sum(sum(times[i : i + steps]) for times in seconds) / len(seconds) for i in range(0, len(seconds[0]), steps)
    ]
    row_epochs = [row["epochs"][-1][0] for row in (*gpt2.scaling.values(), *gpt2.modes.values())]
    return any(math.isclose(of_run, of_row) for of_run in epochs for of_row in row_epochs)


def _read(path: Path, gpt2: Gpt2) -> Row:
    row = read_json(path)
    if isinstance(row, dict):
        return row
    gpt2.doubts.append(f"{_name(path)} is incomplete or damaged; run it again")
    return {}


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _compare_workers(gpt2: Gpt2) -> None:
    one = gpt2.scaling.get((1, 1), {})
    for (workers, threads), row in gpt2.scaling.items() if one else ():
        what = f"GPT-2 on {workers} workers vs. 1" if threads == 1 else f"GPT-2 on {workers} x {threads} threads vs. 1"
        settings = {key: (value, row["setting"].get(key)) for key, value in one["setting"].items()}
        reason = "; ".join(f"{key} {value} vs. {other}" for key, (value, other) in settings.items() if value != other)
        if one["batch_size"] * workers != row["batch_size"]:
            reason = f"the batch of one worker is {row['batch_size'] / workers:g} vs. {one['batch_size']}"
        of = "workers" if threads == 1 else "threads"
        _compare(gpt2, (workers, threads), what, one, row, reason, workers * threads, of)


def _compare_modes(gpt2: Gpt2) -> None:
    base = gpt2.modes.get("model_parallel", {})
    for mode, row in gpt2.modes.items() if base else ():
        settings = f"(model, batch, tokens) {base['setting']} vs. {row['setting']}"
        reason = settings if base["setting"] != row["setting"] else ""
        limit = _PARTITIONS if gpt2.on_cpu and mode != "none" else math.inf  # the uncut model may use every core
        _compare(gpt2, mode, f"{mode} vs. model_parallel", base, row, reason, limit, "partitions")


def _compare(gpt2: Gpt2, key: Hashable, what: str, base: Row, row: Row, reason: str, limit: float, of: str) -> None:
    """Keep the speed-up of a row over `base`, and every doubt about it.

    reason: why they cannot be compared, "" if they can. limit: the largest possible speed-up, a number `of`.
    """
    if reason:
        gpt2.doubts.append(f"{what}: not comparable, {reason}")
        return
    # Each epoch against the other's of the same number. The product of the means is no length: it grows with the
    # differences between the epochs.
    lengths = zip(*([time * speed for time, speed in each["epochs"]] for each in (row, base)), strict=False)
    length, base_length = max(lengths, key=lambda pair: abs(math.log(pair[0] / pair[1])))
    if not 0.9 < length / base_length < 1.1:
        gpt2.doubts.append(
            f"{what}: tokens per second x seconds gives {length:.0f} tokens per epoch in one run, {base_length:.0f} "
            "in the other: the epochs have different lengths (--max_steps?), or a file is inconsistent"
        )
        return
    difference = row["tokens_per_second"] - base["tokens_per_second"]
    errors = [each["tokens_per_second_std"] for each in (base, row)]
    ratio = gpt2.speedups[key] = row["tokens_per_second"] / base["tokens_per_second"]
    if ratio > limit:
        gpt2.doubts.append(f"{what}: a speed-up of {ratio:.2f} exceeds the number of {of}, {limit}: measure again")
    if row is not base and not any(errors):
        gpt2.doubts.append(f"{what}: only one epoch was measured, so {ratio:.2f} may be noise: run with --n_epochs 4")
    elif row is not base and abs(difference) <= 2 * math.hypot(*errors):
        gpt2.doubts.append(f"{what}: {ratio:.2f} is within the noise (two standard deviations over the epochs)")
