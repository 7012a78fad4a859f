"""The GPT-2 parts of a report: metrics and figures that task 2b and the pipeline leave in submit_figures/."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.workers.processor import disturbance
from handin.runs import Run
from handin.schema import is_number, is_time, is_whole

FIGURES = {
    "data_parallel_training_time.png": "Data parallel: training time of an epoch",
    "data_parallel_tokens_per_second.png": "Data parallel: tokens per second, all workers",
    "pipeline_training_time.png": "Pipeline: training time of an epoch",
    "pipeline_tokens_per_second.png": "Pipeline: tokens per second",
}
_PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
_METRICS = ("training_time", "training_time_std", "tokens_per_second", "tokens_per_second_std")


@dataclass
class Gpt2:
    """Rows as they are kept, and doubts about them. Times in s per epoch, speeds in tokens per s of all workers."""

    scaling: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # workers, threads of each -> row
    modes: dict[str, dict[str, Any]] = field(default_factory=dict)  # mode of the pipeline -> row
    doubts: list[str] = field(default_factory=list)
    on_cpu: bool = True

    def speedup(self, workers: int, threads: int) -> float | None:
        """Tokens per second over one worker with one thread; None without such a run of the same batch per worker."""
        one, many = self.scaling.get((1, 1)), self.scaling[workers, threads]
        if one is None or one["batch_size"] * workers != many["batch_size"] or _settings_differ(one, many):
            return None
        return many["tokens_per_second"] / one["tokens_per_second"]

    def pipeline_speedup(self, mode: str) -> float | None:
        """Training time against model_parallel, where both were run alike."""
        base, row = self.modes.get("model_parallel"), self.modes[mode]
        if base is None or base["setting"] != row["setting"] or not _as_long(base, row):
            return None
        return base["training_time"] / row["training_time"]


def read_gpt2(folder: Path, on_cpu: bool = True) -> Gpt2:
    """Everything in submit_figures/ that can be read; what cannot is named in the doubts."""
    found = Gpt2(on_cpu=on_cpu)
    for path in sorted(folder.glob("data_parallel_*.json")):
        row = _read(path, found)
        if row and _is_row(row) and all(is_whole(row.get(key)) and row[key] for key in ("workers", "batch_size")):
            found.scaling[row["workers"], row.get("threads", 1)] = row
        elif row is not None:
            found.doubts.append(f"{_name(path)} was written by another version of the scripts; run it again")
    found.scaling = dict(sorted(found.scaling.items()))
    path = folder / "pipeline_metrics.json"
    for mode, row in (_read(path, found) or {}).items() if path.exists() else ():
        flat = _flatten(row)
        if flat is None:
            found.doubts.append(f"{_name(path)}: {mode} was written by another version; run that mode again")
        else:
            found.modes[mode] = flat
    found.doubts += [*_busy_machine(found), *_doubts_about_scaling(found), *_doubts_about_modes(found, on_cpu)]
    return found


def made_figures(run: Run, gpt2: Gpt2) -> bool:
    """Return whether a row of submit_figures/ was computed from this run: the row keeps the seconds of each epoch."""
    steps = max(1, run.first["steps_per_epoch"])
    seconds = [[step["seconds"] for step in record["iterations"]] for record in run.records]
    epochs = [
        sum(sum(times[i : i + steps]) for times in seconds) / len(seconds) for i in range(0, len(seconds[0]), steps)
    ]
    kept = [row["epochs"][-1][0] for row in (*gpt2.scaling.values(), *gpt2.modes.values()) if row.get("epochs")]
    return any(math.isclose(mine, theirs) for mine in epochs for theirs in kept)


def _read(path: Path, found: Gpt2) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(row, dict):
            return row
    except (OSError, ValueError, RecursionError):
        pass  # said below, like everything that is no table
    found.doubts.append(f"{_name(path)} is incomplete or damaged; run it again")
    return None


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _is_row(row: dict[str, Any]) -> bool:
    values: list[Any] = [row.get(key) for key in _METRICS]
    positive = is_time(row.get("training_time")) and is_time(row.get("tokens_per_second"))
    return positive and all(is_number(value) and math.isfinite(value) and value >= 0 for value in values)


def _flatten(row: Any) -> dict[str, Any] | None:
    """A mode's {"metric": {"mean", "std"}} in the shape of a scaling row."""
    try:
        flat = {key: row.get(key) for key in ("epochs", "other_programs")} | {"setting": row["setting"]}
        for metric in ("training_time", "tokens_per_second"):
            flat |= {"n_chunk": row["n_chunk"]} if "n_chunk" in row else {}
            flat |= {metric: row[metric]["mean"], f"{metric}_std": row[metric]["std"]}
        return flat if _is_row(flat) else None
    except (KeyError, TypeError):
        return None


def _settings_differ(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    mine, theirs = row.get("setting"), other.get("setting")
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return ["one of them was written by another version of the scripts"] if mine != theirs else []
    return [f"{key} {mine.get(key)} vs. {theirs.get(key)}" for key in mine if mine.get(key) != theirs.get(key)]


def _busy_machine(found: Gpt2) -> Iterator[str]:
    rows = {f"GPT-2, workers: {workers}, threads: {threads}": row for (workers, threads), row in found.scaling.items()}
    for what, row in (rows | found.modes).items():
        cores = row.get("other_programs")
        if is_number(cores) and (said := disturbance(cores)):
            yield f"{what}: {said}; run it again"


def _doubts_about_scaling(found: Gpt2) -> Iterator[str]:
    one = found.scaling.get((1, 1))
    for (workers, threads), row in found.scaling.items():
        if one is None or row is one:
            continue
        what = f"GPT-2 on {workers} workers vs. 1" if threads == 1 else f"GPT-2 on {workers} x {threads} threads vs. 1"
        if one["batch_size"] * workers != row["batch_size"]:
            yield (
                f"{what}: not comparable, the batch of one worker is {row['batch_size'] / workers:g} "
                f"vs. {one['batch_size']}"
            )
        elif other := _settings_differ(one, row):
            yield f"{what}: not comparable, {'; '.join(other)}"
        else:
            yield from _doubts_about_ratio(what, one, row, workers * threads, "workers" if threads == 1 else "threads")
            if not _as_long(one, row):
                yield _not_as_long(what, one, row)


def _tokens(row: dict[str, Any]) -> list[float]:
    """Of each epoch, by its throughput and its time; of the mean epoch where the file is of an earlier version.

    The mean throughput times the mean time is more: it grows with the differences between the epochs.
    """
    try:
        return [time * speed for time, speed in row["epochs"] if is_time(time) and is_time(speed)] or [_of_means(row)]
    except (KeyError, TypeError, ValueError):
        return [_of_means(row)]


def _of_means(row: dict[str, Any]) -> float:
    return row["tokens_per_second"] * row["training_time"]


def _as_long(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the epochs of two runs were equally long, each against the other's of the same number."""
    return all(0.9 < mine / theirs < 1.1 for mine, theirs in zip(_tokens(row), _tokens(other), strict=False))


def _not_as_long(what: str, base: dict[str, Any], row: dict[str, Any]) -> str:
    mine, theirs = max(
        zip(_tokens(row), _tokens(base), strict=False), key=lambda pair: abs(math.log(pair[0] / pair[1]))
    )
    return (
        f"{what}: tokens per second x seconds gives {mine:.0f} tokens per epoch in one run, {theirs:.0f} in the other: "
        "the epochs have different lengths (--max_steps?), or a file is inconsistent"
    )


def _doubts_about_modes(found: Gpt2, on_cpu: bool) -> Iterator[str]:
    base = found.modes.get("model_parallel")
    for mode, row in found.modes.items():
        if base is None or row is base:
            continue
        what = f"{mode} vs. model_parallel"
        limit = _PARTITIONS if on_cpu and mode != "none" else math.inf  # the uncut model may use every core
        if base["setting"] != row["setting"]:
            yield f"{what}: not comparable, (model, batch, tokens) {base['setting']} vs. {row['setting']}"
        elif not _as_long(base, row):
            yield _not_as_long(what, base, row)
        else:
            yield from _doubts_about_ratio(what, base, row, limit, "partitions")


def _doubts_about_ratio(what: str, slow: dict[str, Any], fast: dict[str, Any], limit: float, of: str) -> Iterator[str]:
    speeds, errors = ([r[key] for r in (slow, fast)] for key in ("tokens_per_second", "tokens_per_second_std"))
    ratio = speeds[1] / speeds[0]
    if ratio > limit:
        yield f"{what}: a speed-up of {ratio:.2f} exceeds the number of {of}, {limit}: measure again"
    if not any(errors):
        yield f"{what}: only one epoch was measured, so {ratio:.2f} may be noise: run with --n_epochs 4"
    elif abs(speeds[1] - speeds[0]) <= 2 * math.hypot(*errors):
        yield f"{what}: {ratio:.2f} is within the noise (two standard deviations over the epochs)"
