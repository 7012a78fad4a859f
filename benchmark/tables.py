"""The tables and figures of a sweep, from the folders that it left.

    python -m benchmark.tables runs/benchmark/sweep

latency.csv (ms per step, median) and mem.csv (MB that a step needs at its peak, on the worker with the most) have a
block of rows for each optimization level, a row for each model and a column for each batch size of one worker, as in
the DeepSpeed profiling project. A cell is "OOM" or "error" if the run failed, and empty if there was no run. If several
worker counts were run, each has its own file (latency_2.csv, ...); latency.csv has the largest count. scaling.csv has
the throughput divided by one worker's, for each framework. Impossible values are flagged.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import InputError, exit_on_input_error
from common.figures import bars
from common.flags import Parser
from common.paths import atomic_write

Cell = tuple[str, str, int, int]  # strategy, model, batch size of one worker, workers


def read_runs(folder: Path) -> dict[Cell, dict]:
    """Results and failures by what was run; raises InputError if there is nothing."""
    found: dict[Cell, dict] = {}
    for place in sorted(folder.glob("*-b*-w*")):
        head, _, workers = place.name.rpartition("-w")
        head, _, batch = head.rpartition("-b")
        model, _, strategy = head.rpartition("-")
        for name in ("result.json", "failure.json"):
            if (place / name).exists():
                found[strategy, model, int(batch), int(workers)] = json.loads((place / name).read_text())
                break
    if not found:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return found


def level(strategy: str) -> str:
    """A strategy as the DeepSpeed profiling project names its blocks."""
    return f"optimization_level{strategy.removeprefix('zero')}" if strategy.startswith("zero") else strategy


def block_rows(runs: dict[Cell, dict], workers: int, figure: Callable[[dict], float | None]) -> list[list[str]]:
    """The rows of latency.csv or mem.csv."""
    here = [cell for cell in runs if cell[3] == workers]
    batches = sorted({cell[2] for cell in here})
    rows = []
    for strategy in dict.fromkeys(sorted(cell[0] for cell in here)):
        rows.append([level(strategy), *map(str, batches)])
        for model in dict.fromkeys(cell[1] for cell in here if cell[0] == strategy):
            cells = [runs.get((strategy, model, batch, workers)) for batch in batches]
            rows.append([model, *("" if run is None else _cell(run, figure) for run in cells)])
    return rows


def _cell(run: dict, figure: Callable[[dict], float | None]) -> str:
    if "outcome" in run:
        return str(run["outcome"])
    value = figure(run)
    return "" if value is None else f"{value:.2f}"


def latency(run: dict) -> float | None:
    return run.get("step_ms")


def peak_mb(run: dict) -> float | None:
    return most_mb(run, lambda memory: memory["peak"])


def most_mb(run: dict, figure: Callable[[dict], float | None]) -> float | None:
    """A figure of a result's memory, in MB, of the worker with the most."""
    found = [figure(worker["memory"]) for worker in run.get("workers", [run]) if "memory" in worker]
    return max((size / 1e6 for size in found if size is not None), default=None)


def scaling_rows(runs: dict[Cell, dict]) -> list[list[str]]:
    """framework, model, batch size; then the speed-up with each number of workers against one."""
    counts = sorted({cell[3] for cell in runs})
    rows = [["framework", "model", "batch_size", *map(str, counts)]]
    for strategy, model, batch in dict.fromkeys(cell[:3] for cell in runs):
        one = _throughput(runs.get((strategy, model, batch, 1)))
        many = [_throughput(runs.get((strategy, model, batch, count))) for count in counts]
        if one:
            speedups = ["" if value is None else f"{value / one:.3f}" for value in many]
            rows.append([strategy, model, str(batch), *speedups])
    return rows


def _throughput(run: dict | None) -> float | None:
    return None if run is None else run.get("samples_per_second")


def flags(runs: dict[Cell, dict]) -> list[str]:
    """What cannot be true."""
    found = []
    for (strategy, model, batch, workers), run in runs.items():
        name = f"{model}, {strategy}, batch {batch}, {workers} workers"
        speed, one = _throughput(run), _throughput(runs.get((strategy, model, batch, 1)))
        if speed and one and speed / one > workers:
            found.append(f"{name}: speed-up {speed / one:.2f} exceeds the number of workers")
        if speed and run.get("wall_s"):
            examples = run["steps"]["timed"] * run["batch_size"] * run["accumulation"] * run["world_size"]
            if abs(speed * run["wall_s"] / examples - 1) > 0.05:
                found.append(f"{name}: {speed:.1f} examples/s contradict {examples} examples in {run['wall_s']:.2f} s")
        losses = run.get("losses", [])
        if len(losses) > 1 and len(set(losses)) == 1:
            found.append(f"{name}: the loss never changes ({losses[0]})")
    return found


def write_tables(folder: Path) -> dict[str, Any]:
    """All files, and what stands in the last line of a sweep."""
    runs = read_runs(folder)
    counts = sorted({cell[3] for cell in runs})
    for name, figure in (("latency", latency), ("mem", peak_mb)):
        for count in counts:
            _write_csv(folder / f"{name}_{count}.csv", block_rows(runs, count, figure))
        _write_csv(folder / f"{name}.csv", block_rows(runs, counts[-1], figure))
    _write_csv(folder / "scaling.csv", scaling_rows(runs))
    draw(folder, runs, counts[-1])
    found = flags(runs)
    for line in found:
        print(f"flagged: {line}", file=sys.stderr)
    for name in ("latency", "mem", "scaling"):
        print(f"\n{name}.csv\n{(folder / f'{name}.csv').read_text()}", end="")
    return {"folder": folder.name, "flagged": found, "latency": block_rows(runs, counts[-1], latency)}


def draw(folder: Path, runs: dict[Cell, dict], workers: int) -> None:
    """Throughput, total time and communication time of each strategy, one figure per model at its largest batch."""
    for model in dict.fromkeys(cell[1] for cell in runs):
        done = {c: run for c, run in runs.items() if c[1] == model and c[3] == workers and "step_ms" in run}
        if not done:
            continue
        batch = max(cell[2] for cell in done)
        shown = {cell[0]: run for cell, run in done.items() if cell[2] == batch}
        figures = {
            "throughput": ("examples per second", [run["samples_per_second"] for run in shown.values()]),
            "total_time": ("timed steps, ms per step", [run["step_ms"] for run in shown.values()]),
            "communication_time": (
                "communication, ms per step",
                [run["communication"]["total_ms"] or 0.0 for run in shown.values()],
            ),
        }
        for name, (label, values) in figures.items():
            title = f"{model}, batch {batch} x {workers} workers"
            names = [strategy.replace("_", "\n") for strategy in shown]
            bars(folder / f"{name}_{model}.png", names, values, label=label, title=title)


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    with atomic_write(path) as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def main() -> None:
    parser = Parser(
        prog="python -m benchmark.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output folder of a sweep, for example runs/benchmark/sweep")
    print(json.dumps(write_tables(parser.parse_args().folder)))


if __name__ == "__main__":
    exit_on_input_error(main)
