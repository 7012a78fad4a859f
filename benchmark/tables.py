"""The tables and figures of a sweep, from the folders that it left.

    python -m benchmark.tables runs/benchmark/sweep
    python -m benchmark.tables runs/benchmark/sweep --predict --models t5-tiny,t5-3b,t5-11b --batch_sizes 1,32,64,128

latency.csv (ms per step, median) and mem.csv (MB that a step needs at its peak, on the worker with the most) have a
block of rows for each optimization level, a row for each model and a column for each batch size of one worker, as in
the DeepSpeed profiling project. A cell is "OOM" or "error" if the run failed, and empty if there was no run. If several
worker counts were run, each has its own file (latency_2.csv, ...); latency.csv has the largest count. scaling.csv has
the throughput divided by one worker's, for each framework. load.csv says how busy the machine was before each run.
Impossible values and busy machines are flagged.

--predict writes latency_filled.csv and mem_filled.csv instead: cells that were not run say "123.45 predicted", or "does
not fit". Predictions are made from benchmark.calibrate's file, by arithmetic where the model is not in it: they say
what order of magnitude to expect, not which of two frameworks is a little faster.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.names import models_of, names_of, numbers_of
from benchmark.strategies import STRATEGIES
from common.errors import InputError, exit_on_input_error
from common.flags import Parser
from common.paths import atomic_write

LEVELS = "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload"
BUSY = 0.5  # other programs' load per core before a run, from which its times are flagged
Figure = Callable[[dict], float | None]
Rows = list[list[str]]


@dataclass(frozen=True)
class SweepRun:
    """One combination; batch_size is that of one worker."""

    strategy: str
    model: str
    batch_size: int
    workers: int
    repeat: int = 0  # of several launches

    @property
    def name(self) -> str:
        again = f"-r{self.repeat}" if self.repeat else ""
        return f"{Path(self.model).name}-{self.strategy}-b{self.batch_size}-w{self.workers}{again}"


def kept(run: SweepRun, folder: Path) -> dict:
    """What a run has left: its result, its failure, or nothing."""
    for name in ("result.json", "failure.json"):
        if (folder / run.name / name).exists():
            found: dict = json.loads((folder / run.name / name).read_text())
            return found
    return {}


def read_runs(folder: Path) -> dict[SweepRun, dict]:
    """Results and failures by what was run; raises InputError if there is nothing."""
    found: dict[SweepRun, dict] = {}
    for place in sorted(folder.glob("*-b*-w*")):
        match = re.fullmatch(r"(.+)-(\w+)-b(\d+)-w(\d+)", place.name)
        run = match and SweepRun(match[2], match[1], int(match[3]), int(match[4]))
        if run and (result := kept(run, folder)):
            found[run] = result
    if not found:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return found


def level(strategy: str) -> str:
    """A strategy as the DeepSpeed profiling project names its blocks."""
    return f"optimization_level{strategy.removeprefix('zero')}" if STRATEGIES[strategy].zero else strategy


def block_rows(runs: dict[SweepRun, dict], workers: int, figure: Figure) -> Rows:
    """The rows of latency.csv or mem.csv."""
    here = [run for run in runs if run.workers == workers]
    batches = sorted({run.batch_size for run in here})
    rows = []
    for strategy in dict.fromkeys(sorted(run.strategy for run in here)):
        rows.append([level(strategy), *map(str, batches)])
        for model in dict.fromkeys(run.model for run in here if run.strategy == strategy):
            cells = [runs.get(SweepRun(strategy, model, batch, workers), {}) for batch in batches]
            rows.append([model, *(run.get("outcome") or as_text(figure(run)) for run in cells)])
    return rows


def as_text(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def latency(run: dict) -> float | None:
    return run.get("step_ms")


def peak_mb(run: dict) -> float | None:
    return most_mb(run, lambda memory: memory["peak"])


def most_mb(run: dict, figure: Figure) -> float | None:
    """A figure of a result's memory, in MB, of the worker with the most."""
    found = [figure(worker["memory"]) for worker in run.get("workers", [run]) if "memory" in worker]
    return max((size / 1e6 for size in found if size is not None), default=None)


def scaling_rows(runs: dict[SweepRun, dict]) -> Rows:
    """framework, model, batch size; then the speed-up with each number of workers against one."""
    counts = sorted({run.workers for run in runs})
    rows = [["framework", "model", "batch_size", *map(str, counts)]]
    for place in dict.fromkeys((run.strategy, run.model, run.batch_size) for run in runs):
        one, *many = (runs.get(SweepRun(*place, count), {}).get("samples_per_second") for count in [1, *counts])
        if one:
            speedups = [as_text(value and value / one, 3) for value in many]
            rows.append([*map(str, place), *speedups])
    return rows


def load_rows(runs: dict[SweepRun, dict]) -> Rows:
    """The load before each run, and the cores that it had."""
    rows = [["run", "load", "cores"]]
    for run, result in runs.items():
        if "environment" in result:
            rows.append([run.name, *(str(result["environment"][name]) for name in ("load", "cores"))])
    return rows


def flags(runs: dict[SweepRun, dict]) -> list[str]:
    """What cannot be true, and what should not be believed."""
    found = []
    for run, result in runs.items():
        name = f"{run.model}, {run.strategy}, batch {run.batch_size}, {run.workers} workers"
        speed = result.get("samples_per_second")
        one = runs.get(SweepRun(run.strategy, run.model, run.batch_size, 1), {}).get("samples_per_second")
        if speed and one and speed / one > run.workers:
            found.append(f"{name}: speed-up {speed / one:.2f} exceeds the number of workers")
        if speed and result.get("wall_s"):
            examples = result["steps"]["timed"] * result["batch_size"] * result["accumulation"] * result["world_size"]
            if abs(speed * result["wall_s"] / examples - 1) > 0.05:
                found.append(
                    f"{name}: {speed:.1f} examples/s contradict {examples} examples in {result['wall_s']:.2f} s"
                )
        losses = result.get("losses", [])
        if len(losses) > 1 and len(set(losses)) == 1:
            found.append(f"{name}: the loss never changes ({losses[0]})")
        found += busy(result, name)
    return found


def busy(result: dict, name: str) -> list[str]:
    """A line if other programs ran before this one: the load of a minute, which the run before has a part in, too."""
    machine = result.get("environment", {})
    if machine.get("load", 0.0) <= machine.get("cores", 1) * (1 + BUSY):
        return []
    return [
        f"{name}: the machine was busy (load {machine['load']} on {machine['cores']} cores); do not compare its times"
    ]


def write_tables(folder: Path) -> dict[str, Any]:
    """All files, and what stands in the last line of a sweep."""
    runs = read_runs(folder)
    counts = sorted({run.workers for run in runs})
    for name, figure in (("latency", latency), ("mem", peak_mb)):
        for count in counts:
            write_csv(folder / f"{name}_{count}.csv", block_rows(runs, count, figure))
        write_csv(folder / f"{name}.csv", block_rows(runs, counts[-1], figure))
    write_csv(folder / "scaling.csv", scaling_rows(runs))
    write_csv(folder / "load.csv", load_rows(runs))
    draw(folder, runs, counts[-1])
    found = flags(runs)
    for line in found:
        print(f"flagged: {line}", file=sys.stderr)
    for name in ("latency", "mem", "scaling"):
        print(f"\n{name}.csv\n{(folder / f'{name}.csv').read_text()}", end="")
    return {"folder": folder.name, "flagged": found, "latency": block_rows(runs, counts[-1], latency)}


def draw(folder: Path, runs: dict[SweepRun, dict], workers: int) -> None:
    """Throughput, total time and communication time of each strategy, one figure per model at its largest batch."""
    from benchmark.measure.ranking import Bar, draw_ranking

    for model in dict.fromkeys(run.model for run in runs):
        done = {r: result for r, result in runs.items() if (r.model, r.workers) == (model, workers) and latency(result)}
        if not done:
            continue
        batch = max(run.batch_size for run in done)
        shown = {run.strategy: result for run, result in done.items() if run.batch_size == batch}
        figures: dict[str, tuple[str, list[Bar]]] = {
            "throughput": ("examples per second", [Bar(s, r["samples_per_second"]) for s, r in shown.items()]),
            "total_time": (
                "timed steps, ms per step",
                [Bar(s, r["step_ms"], *r.get("step_ms_95", ())) for s, r in shown.items()],
            ),
            "communication_time": (
                "communication, ms per step",
                [Bar(s, r["communication"]["total_ms"]) for s, r in shown.items()],
            ),
        }
        for name, (label, bars) in figures.items():
            title = f"{model}, batch {batch} x {workers} workers"
            draw_ranking(folder / f"{name}_{model}.png", bars, label, title)


def write_csv(path: Path, rows: Rows) -> None:
    with atomic_write(path) as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def filled(figure: str, runs: dict[SweepRun, dict], arguments: argparse.Namespace) -> Rows:
    """The rows of one table, latency or mem, with predictions where nothing was run."""
    from benchmark.cost import calibration as stored  # here: they load numpy
    from benchmark.cost.cell import Cell
    from benchmark.cost.predict_step import Surroundings, predict

    calibration = stored.load(arguments.calibration)
    where = Surroundings(memory=None if arguments.memory_gb is None else arguments.memory_gb * 1e9)

    def predicted(run: SweepRun) -> str:
        try:
            found = predict(
                calibration, Cell(run.strategy, run.model, run.workers, run.batch_size, arguments.length), where
            )
        except InputError as error:
            reason = next((words for words in ("does not fit", "not predicted") if words in str(error)), "")
            if not reason:
                raise
            return reason
        if figure == "latency" and found.is_range:
            return f"{found.least * 1e3:.0f} to {found.seconds * 1e3:.0f} predicted"
        value = found.seconds * 1e3 if figure == "latency" else found.memory.peak / 1e6
        return f"{value:.2f} predicted"

    measured, rows = latency if figure == "latency" else peak_mb, []
    for strategy in arguments.strategies:
        rows.append([level(strategy), *map(str, arguments.batch_sizes)])
        for model in arguments.models:
            cells = [SweepRun(strategy, model, batch, arguments.workers) for batch in arguments.batch_sizes]
            rows.append([model, *(as_text(measured(runs.get(cell, {}))) or predicted(cell) for cell in cells)])
    return rows


def fill(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Write the completed tables."""
    folder = arguments.folder
    runs = read_runs(folder) if folder.is_dir() and any(folder.glob("*-b*-w*")) else {}
    tables = {name: filled(name, runs, arguments) for name in ("latency", "mem")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        path = folder / f"{name}_filled.csv"
        write_csv(path, rows)
        print(f"\n{path.name}\n{path.read_text()}", end="")
    return tables


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags; raises InputError."""
    parser = Parser(prog="python -m benchmark.tables", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folder", type=Path, help="output folder of a sweep; with --predict a new one, too: then all is predicted")
    add("--predict", action="store_true", help="complete the tables by predictions; the other flags belong to this")
    add("--models", default="t5-tiny,t5-small,t5-large,t5-3b,t5-11b", help="%(default)s")
    add("--strategies", default=LEVELS, help="%(default)s")
    add("--batch_sizes", default="1,2,4,8,16,32,64,128", help="of one worker (%(default)s)")
    add("--workers", type=int, default=2, help="2")
    add("--length", type=int, default=64, help="tokens of an example (64)")
    add("--memory_gb", type=float, help="of the machine (default: of this one)")
    add("--calibration", type=Path, default=Path("runs/benchmark/calibration.json"), help="%(default)s")
    arguments = parser.parse_args(argv)
    arguments.models = models_of(arguments.models)
    arguments.strategies = names_of("--strategies", arguments.strategies, STRATEGIES)
    arguments.batch_sizes = numbers_of("--batch_sizes", arguments.batch_sizes)
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.predict:
        print(json.dumps({"folder": arguments.folder.name, **fill(arguments)}))
    else:
        print(json.dumps(write_tables(arguments.folder)))


if __name__ == "__main__":
    exit_on_input_error(main)
