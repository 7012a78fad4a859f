"""The tables and figures of a sweep, from the folders that it left.

    python -m benchmark.tables runs/benchmark/sweep

latency.csv (ms per step, median) and mem.csv (MB that a step needs at its peak, on the worker with the most) have a
block of rows for each optimization level, a row for each model and a column for each batch size of one worker, as in
the DeepSpeed profiling project. A cell is "OOM" or "error" if the run failed, and empty if there was no run. If several
worker counts were run, each has its own file (latency_2.csv, ...); latency.csv has the largest count. scaling.csv has
the throughput divided by one worker's, for each framework, if there are runs on one worker. load.csv says how busy the
machine was before each run. Impossible values and busy machines are flagged.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.measure.machine import machine_line
from benchmark.measure.output import MB, cell, write_csv
from benchmark.names import command_parser
from benchmark.strategies import STRATEGIES
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write

LEVELS = "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload"
BUSY = 0.5  # other programs' load per core before a run, from which its times are flagged
SAME = 1e-4  # validation losses in fp32 that differ by more are not of the same training
Figure = Callable[[dict], float | None]
Row = dict[str, Any]
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

    @property
    def name_of_strategy(self) -> str:
        """Without what a row says more than that, such as `again`."""
        return self.strategy.split()[0]

    @property
    def proof(self) -> tuple[str, int, str]:
        """The key of its proof in Proofs."""
        return self.model, self.workers, self.name_of_strategy

    def gradient(self, proofs: "Proofs") -> str:
        """What the column `gradient` says: ok, a fault, or not proved."""
        default = "ok" if self.name_of_strategy == "single" else "not proved"
        return str(proofs.get(self.proof, {}).get("gradient", default))


Runs = dict[SweepRun, dict]
Proofs = dict[tuple[str, int, str], dict]  # rows of benchmark.prove by SweepRun.proof


def left_in(place: Path) -> dict:
    """What a run has left in its folder: its result, its failure, or nothing."""
    files = (place / name for name in ("result.json", "failure.json"))
    return next((json.loads(file.read_text()) for file in files if file.exists()), {})


def read_runs(folder: Path) -> Runs:
    """Results and failures by what was run; raises InputError if there is nothing."""
    launches: dict[SweepRun, list[dict]] = {}
    for place in sorted(folder.glob("*-b*-w*")):
        match = re.fullmatch(r"(.+)-([\w ]+)-b(\d+)-w(\d+)(-r\d+)?", place.name)
        if match and (result := left_in(place)):
            run = SweepRun(match[2], match[1], int(match[3]), int(match[4]))
            launches.setdefault(run, []).append(result)
    if not launches:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return {run: combined(several) for run, several in launches.items()}


def most_mb(run: dict, figure: Figure) -> float | None:
    """A figure of a result's memory, in MB, of the worker with the most."""
    sizes = [figure(worker["memory"]) for worker in run.get("workers", [run]) if "memory" in worker]
    return max((size / MB for size in sizes if size is not None), default=None)


FIGURES: dict[str, Figure] = {
    "latency": lambda run: run.get("step_ms"),
    "mem": lambda run: most_mb(run, lambda memory: memory["peak"]),
}


def block_rows(cells: list[SweepRun], text: Callable[[SweepRun], str]) -> Rows:
    """The rows of latency.csv or mem.csv, with the text of each cell; strategies and models in the order of `cells`."""
    batches, rows = sorted({run.batch_size for run in cells}), []
    for strategy in dict.fromkeys(run.strategy for run in cells):
        # The DeepSpeed profiling project calls its strategies so.
        level = (
            f"optimization_level{strategy.removeprefix('zero')}" if STRATEGIES[strategy.split()[0]].zero else strategy
        )
        rows.append([level, *map(str, batches)])
        for model in dict.fromkeys(run.model for run in cells if run.strategy == strategy):
            rows.append([model, *(text(SweepRun(strategy, model, batch, cells[0].workers)) for batch in batches)])
    return rows


def measured_rows(runs: Runs, workers: int, figure: Figure) -> Rows:
    cells = sorted((run for run in runs if run.workers == workers), key=lambda run: run.strategy)
    texts = {run: runs[run].get("outcome") or cell(figure(runs[run]), missing="") for run in cells}
    return block_rows(cells, lambda run: texts.get(run, ""))


def scaling_rows(runs: Runs) -> Rows:
    """framework, model, batch size; then the speed-up with each number of workers against one."""
    counts = sorted({run.workers for run in runs})
    rows = [["framework", "model", "batch_size", *map(str, counts)]]
    for place in dict.fromkeys((run.strategy, run.model, run.batch_size) for run in runs):
        one, *many = (runs.get(SweepRun(*place, count), {}).get("samples_per_second") for count in [1, *counts])
        if one:
            rows.append([*map(str, place), *(cell(value and value / one, 3, missing="") for value in many)])
    return rows


def load_rows(runs: Runs) -> Rows:
    """The load before each run, and the cores that it had."""
    machines = [(run.name, result["environment"]) for run, result in runs.items() if "environment" in result]
    return [["run", "load", "cores"], *([name, str(host["load"]), str(host["cores"])] for name, host in machines)]


def flags(runs: Runs) -> list[str]:
    """What cannot be true, and what should not be believed."""
    flagged = []
    for run, result in runs.items():
        name = f"{run.model}, {run.strategy}, batch {run.batch_size}, {run.workers} workers"
        speed = result.get("samples_per_second")
        one = runs.get(SweepRun(run.strategy, run.model, run.batch_size, 1), {}).get("samples_per_second")
        if speed and one and speed / one > run.workers:
            flagged.append(f"{name}: speed-up {speed / one:.2f} exceeds the number of workers")
        losses = result.get("losses", [])
        if len(losses) > 1 and len(set(losses)) == 1:
            flagged.append(f"{name}: the loss never changes ({losses[0]})")
        flagged += busy(result, name)
    return flagged


def busy(result: dict, name: str) -> list[str]:
    """A line if other programs ran before this one: the load of a minute, which the run before has a part in, too."""
    machine = result.get("environment", {})
    if machine.get("load", 0.0) <= machine.get("cores", 1) * (1 + BUSY):
        return []
    return [
        f"{name}: the machine was busy (load {machine['load']} on {machine['cores']} cores); do not compare its times"
    ]


def row_of(run: SweepRun, results: Runs) -> Row:
    """A run's figures, and its throughput over that of one worker; None for what was not measured.

    Times are those of all timed steps, sizes those of the worker with the most.
    """
    result, examples = results[run], run.batch_size * run.workers
    speed, steps = result.get("samples_per_second"), result.get("steps", {}).get("timed", 0)
    one, single = (
        results.get(SweepRun(name, run.model, examples, 1), {}).get("samples_per_second")
        for name in (run.strategy, "single")
    )
    communication, exposed = (result.get("communication", {}).get(name) for name in ("total_ms", "exposed_ms"))
    validation = (result.get("evaluations") or [{}])[-1]
    launches_mean, launches_low, launches_high = result.get("launches_95", (None, None, None))
    return {
        "model": Path(run.model).name,
        "framework": run.strategy,
        "workers": run.workers,
        "batch_size": run.batch_size,  # of one worker
        "speedup": speed and one and speed / one,  # over the same framework on one worker
        "over_single": speed and single and speed / single,  # over one worker without any framework
        "examples_per_second": speed,
        "launches_mean": launches_mean,  # examples per second, with --repeats; and the mean's 95 % interval
        "launches_low": launches_low,
        "launches_high": launches_high,
        "total_s": result.get("wall_s"),
        "communication_s": communication and communication * steps / 1e3,  # under way, by the traced steps
        "exposed_s": exposed and exposed * steps / 1e3,  # the part of it in which nothing was computed
        "kept_mb": most_mb(result, lambda memory: memory["persistent_counted"]),
        "peak_mb": FIGURES["mem"](result),
        "validation_loss": validation.get("loss"),
        "perplexity": validation.get("perplexity"),
        "bleu": result.get("bleu"),  # with -- --bleu
        "metric": validation.get("metric"),  # of a user's own model
        **{
            name: result.get("utilisation", {}).get(name)
            for name in ("gpu_utilisation", "gpu_power", "gpu_temperature")
        },
    }


def combined(launches: list[dict]) -> dict:
    """The launch with the median throughput, and the mean of all with its interval; a failure where all failed."""
    from benchmark.measure.intervals import mean_interval  # here: it loads scipy

    timed = [launch for launch in launches if "outcome" not in launch]
    if len(launches) == 1 or not timed:
        return launches[0]
    timed.sort(key=lambda launch: launch["samples_per_second"])
    middle = timed[(len(timed) - 1) // 2]
    return middle | {"launches_95": mean_interval([launch["samples_per_second"] for launch in timed])}


def disagreements(rows: list[Row]) -> list[str]:
    """Frameworks whose validation loss is not that of the first row of the same model."""
    flagged = []
    for row in rows:
        first = next(other for other in rows if other["model"] == row["model"])
        loss, expected = row["validation_loss"], first["validation_loss"]
        if loss is not None and expected is not None and not abs(loss - expected) <= SAME:  # a NaN is one, too
            flagged.append(
                f"{row['model']}, {row['framework']}, {row['workers']} workers: validation loss {loss:.6f}, "
                f"but {expected:.6f} with {first['framework']} on {first['workers']}"
            )
    return flagged


def csv_rows(rows: list[Row], missing: str = "") -> list[list[str]]:
    """The headings and the cells; columns that nobody could measure are left out."""
    heads = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []

    def text(value: object) -> str:
        return cell(value, 4, missing=missing) if value is None or isinstance(value, float) else str(value)

    return [heads, *([text(row[name]) for name in heads] for row in rows)]


def markdown(rows: list[Row]) -> str:
    """The same as a table; a dash stands for what was not measured."""
    head, *body = csv_rows(rows, "-")
    lines = [[name.replace("_", " ") for name in head], ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_tables(folder: Path) -> dict[str, Any]:
    """Write all files of a sweep; return the figures for its last line."""
    runs = read_runs(folder)
    counts = sorted({run.workers for run in runs})
    tables = {f"{name}_{n}": measured_rows(runs, n, figure) for name, figure in FIGURES.items() for n in counts}
    tables |= {name: tables[f"{name}_{counts[-1]}"] for name in FIGURES}
    tables |= {"scaling": scaling_rows(runs)} if counts[0] == 1 else {}
    busy_runs = [run.name for run, result in runs.items() if busy(result, run.name)]
    comment = f"the machine was busy: do not compare the times of {', '.join(busy_runs)}" if busy_runs else ""
    for name, rows in (tables | {"load": load_rows(runs)}).items():
        write_csv(folder / f"{name}.csv", rows, comment if name.startswith(("latency", "scaling")) else "")
        if name in (*FIGURES, "scaling"):
            show(folder / f"{name}.csv")
    draw(folder, runs, counts[-1])
    flagged = flags(runs)
    for line in flagged:
        print(f"flagged: {line}", file=sys.stderr)
    return {"folder": folder.name, "flagged": flagged, "latency": tables["latency"]}


def write_frameworks(
    folder: Path, wanted: list[SweepRun], failures: list[str], begin: dict, proofs: Proofs
) -> dict[str, Any]:
    """Write frameworks.csv, frameworks.md and figures of runs; return the last line's figures."""
    in_folder = read_runs(folder)
    results = {run: in_folder[replace(run, model=Path(run.model).name)] for run in wanted}
    timed = [run for run in results if "outcome" not in results[run]]
    rows = [row_of(run, results) | {"gradient": run.gradient(proofs)} for run in timed]
    machine, flagged = machine_line(begin), disagreements(rows)
    rows.sort(key=lambda row: (row["model"], row["workers"], -(row["examples_per_second"] or 0.0)))
    write_csv(folder / "frameworks.csv", csv_rows(rows), machine)
    with atomic_write(folder / "frameworks.md") as file:
        file.write(f"{markdown(rows)}\n\n{machine}\n")
    draw(folder, results, max(run.workers for run in results))
    busy_runs = [line for run, result in results.items() for line in busy(result, run.name)]
    notes = [*(f"left out: {line}" for line in failures), *(f"flagged: {line}" for line in [*flagged, *busy_runs])]
    print("\n".join([markdown(rows), "", machine, *notes]))
    return {"rows": rows, "flagged": flagged, "busy": busy_runs, "environment": begin}


def show(path: Path) -> None:
    print(f"\n{path.name}\n{path.read_text()}", end="")


def draw(folder: Path, runs: Runs, workers: int) -> None:
    """Throughput, total time and communication time of each strategy, one figure per model at its largest batch."""
    from benchmark.measure.ranking import Bar, draw_ranking

    figures: dict[str, tuple[str, Callable[[dict], tuple]]] = {
        "throughput": (
            "examples per second", lambda result: result.get("launches_95") or (result["samples_per_second"],)
        ),
        "total_time": (
            "timed steps, ms per step", lambda result: (result["step_ms"], *result.get("step_ms_95", ()))
        ),
        "communication_time": ("communication, ms per step", lambda result: (result["communication"]["total_ms"],)),
    }  # fmt: skip
    timed = {run: result for run, result in runs.items() if run.workers == workers and "step_ms" in result}
    for model in dict.fromkeys(run.model for run in timed):
        batch = max(run.batch_size for run in timed if run.model == model)
        results = {
            run.strategy: result for run, result in timed.items() if (run.model, run.batch_size) == (model, batch)
        }
        title = f"{model}, batch {batch} x {workers} workers"
        title += ", on a busy machine" if any(busy(result, "") for result in results.values()) else ""
        for name, (label, values) in figures.items():
            bars = [Bar(strategy, *values(result)) for strategy, result in results.items()]
            draw_ranking(folder / f"{name}_{Path(model).name}.png", bars, label, title)


def main() -> None:
    parser = command_parser("tables", __doc__)
    parser.add_argument("folder", type=Path, help="output folder of a sweep")
    print(json.dumps(write_tables(parser.parse_args().folder)))


if __name__ == "__main__":
    exit_on_input_error(main)
