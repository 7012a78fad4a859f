"""The tables and figures of all runs in a folder: those of a sweep, or of single runs in folders of their own.

    python -m benchmark.tables runs/benchmark/sweep [--latex]

latency.csv (ms per step, median), mem.csv (MB that a step needs at its peak, on the worker with the most) and, on GPUs,
power.csv (W) have a block of rows for each strategy, a row for each model and a column for each batch size of one
worker, as in the DeepSpeed profiling project; behind them, the ends of 95 % intervals (1_low, 1_high, ...). A cell is
"OOM", "wrong" or "error" if the run failed, and empty if there was none. With several numbers of workers, each has its
own file (latency_2.csv, ...); latency.csv has the largest.

scaling.csv has a row for each run; row_of() says what its columns are. scaling.md begins with the speed-ups by workers
and strategy, as in the GPT-2 project; --latex writes them to scaling.tex, too. The figures (PNG and PDF) are drawn from
the same rows. What cannot be true, or was measured on a busy machine, is flagged. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmark.measure.machine import machine_words
from benchmark.measure.output import MB, Json, Lines, latex, markdown, write_csv
from benchmark.measure.record import FailedRun, RunRecord, SweepCell, read_launch, read_outcome
from benchmark.names import command_parser
from benchmark.strategies import STRATEGIES, Label
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write

BUSY = 1.5  # load per core before a run, from which its times are flagged: the run before has a part in a minute's load
SAME = 1e-4  # training losses in fp32 that differ by more are not of the same training
# Settings of equal trainings, whose losses agree.
ALIKE = ("model", "length", "precision", "seed", "learning_rate", "optimizer", "data_dir", "dropout")
SINGLE = Label("single")
PROFILED = {"latency": "step_ms", "mem": "peak_mb", "power": "gpu_power"}  # file -> column
USED = ("cpu_utilisation", "gpu_utilisation", "gpu_temperature")


@dataclass
class CellRuns:
    """All launches of a cell. gradient: by the proof."""

    cell: SweepCell
    gradient: str
    records: list[RunRecord] = field(default_factory=list)
    failure: FailedRun | None = None

    @property
    def record(self) -> RunRecord | None:
        """That with the median throughput; None if all have failed."""
        ordered = sorted(self.records, key=lambda record: record.samples_per_second or 0.0)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


def read_runs(folder: Path) -> dict[SweepCell, CellRuns]:
    """All runs below a folder by their cell. Raises InputError if there is none."""
    found: dict[SweepCell, CellRuns] = {}
    files = [file for name in ("result.json", "failure.json") for file in folder.rglob(name)]
    for place in sorted({file.parent for file in files}):
        launch, outcome = read_launch(place), read_outcome(place)
        if launch:
            key, gradient = replace(launch.cell, repeat=0), launch.gradient
        elif isinstance(outcome, RunRecord):  # of a single benchmark.run
            key = SweepCell(Label(outcome.strategy), outcome.model, outcome.batch_size, outcome.world_size)
            gradient = "not proved"
        else:
            continue
        runs = found.setdefault(key, CellRuns(key, gradient))
        if isinstance(outcome, RunRecord):
            runs.records.append(outcome)
        else:
            runs.failure = outcome
    if not found:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return found


def timed(found: dict[SweepCell, CellRuns]) -> Iterator[tuple[CellRuns, RunRecord]]:
    yield from ((runs, runs.record) for runs in found.values() if runs.record and runs.record.steps_ms)


def mb(size: float | None) -> float | None:
    return None if size is None else size / MB


def in_timed_steps(record: RunRecord, ms: float | None) -> float | None:
    """Seconds of what was measured in the traced steps."""
    return None if ms is None else ms * record.steps.timed / 1e3


# Figures with an interval, whose ends have columns of their own: _low and _high.
SPREAD: dict[str, Callable[[RunRecord], float | None]] = {
    "examples_per_second": lambda record: record.samples_per_second,
    "step_ms": lambda record: record.step_ms,
    "communication_s": lambda record: in_timed_steps(record, record.communication.total_ms),  # under way
    "exposed_s": lambda record: in_timed_steps(record, record.communication.exposed_ms),  # and nothing was computed
    "peak_mb": lambda record: mb(record.most_memory.peak),  # on the worker with the most
    "gpu_power": lambda record: getattr(record.utilisation, "gpu_power", None),
}


def spread(runs: CellRuns, record: RunRecord) -> dict[str, float | None]:
    """Each figure of a record with its 95 % interval: of the mean over launches, from three of them on.

    With fewer, only the time of a step has one: of its median, within the launch.
    """
    from benchmark.measure.intervals import mean_interval  # here: it loads scipy

    figures: dict[str, float | None] = {}
    for name, figure in SPREAD.items():
        launches = [value for one in runs.records if (value := figure(one)) is not None]
        low, high = mean_interval(launches)[1:] if launches else (None, None)
        if name == "step_ms" and low is None:
            low, high = record.step_ms_95
        figures |= {name: figure(record), f"{name}_low": low, f"{name}_high": high}
    return figures


def row_of(runs: CellRuns, record: RunRecord, found: dict[SweepCell, CellRuns]) -> Json:
    """A run's figures by column; None for what was not measured. Times are those of all timed steps."""
    label, model, batch, workers = runs.cell.label, runs.cell.model, runs.cell.batch_size, runs.cell.workers
    speed, memory = record.samples_per_second, record.most_memory
    validation = record.evaluations[-1] if record.evaluations else {}

    def over(base: Label, batch_size: int) -> float | None:
        """This throughput over that of another run on one worker."""
        other = found.get(SweepCell(base, model, batch_size, 1))
        base_speed = other.record.samples_per_second if other and other.record else None
        return speed / base_speed if speed and base_speed else None

    return {
        "model": Path(model).name,
        "strategy": str(label),
        "workers": workers,
        "batch_size": batch,  # of one worker
        "length": record.length,
        "precision": record.precision,
        "launches": len(runs.records),
        "speedup": over(label, batch * workers),  # over the same strategy on one worker, equal examples in a step
        "over_single": over(SINGLE, batch * workers),  # over one worker without any framework, equal examples
        "weak_speedup": over(label, batch),  # over the same strategy on one worker, equal examples on each worker
        **spread(runs, record),
        "total_s": record.wall_s,
        "sent_mb": mb(record.communication.sent_bytes),  # by a worker in a step
        "ideal_mb": mb(memory.persistent_ideal),  # parameters, gradients, optimizer of a worker, by the papers
        "kept_mb": mb(memory.persistent_counted),  # the same, counted
        "train_loss": record.losses[-1],
        "validation_loss": validation.get("loss"),
        # metric: of a user's own model
        **{name: validation.get(name) for name in ("perplexity", "accuracy", "metric")},
        "bleu": record.bleu,
        **{name: getattr(record.utilisation, name, None) for name in USED},
        "load": record.environment["load"],  # of the machine, in the minute before
        "gradient": "ok" if label.strategy == "single" else runs.gradient,
        "flagged": None,  # see doubts()
    }


def columns(rows: list[Json]) -> Lines:
    """Headings, then figures; a column that nobody could measure is left out."""
    heads = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return [heads, *([row[name] for name in heads] for row in rows)]


def profile(found: dict[SweepCell, CellRuns], rows: dict[SweepCell, Json], workers: int, figure: str) -> Lines:
    """latency.csv, mem.csv or power.csv: a block for each strategy, by model and batch size; then the intervals."""
    cells, lines = [key for key in found if key.workers == workers], list[list[object]]()
    batches = sorted({key.batch_size for key in cells})
    has_ends = any(rows[key][f"{figure}_low"] is not None for key in cells if key in rows)
    ends = [(batch, end) for batch in batches for end in ("low", "high")] if has_ends else []

    def text(key: SweepCell, column: str) -> str:
        value = rows[key][column] if key in rows else None
        return "" if value is None else f"{value:.2f}"

    for label in sorted({key.label for key in cells}, key=str):
        level = str(label)
        if STRATEGIES[label.strategy].zero:  # the DeepSpeed profiling project calls its strategies so
            level = level.replace("zero", "optimization_level")
        lines.append([level, *batches, *(f"{batch}_{end}" for batch, end in ends)])
        for model in dict.fromkeys(key.model for key in cells if key.label == label):
            keys = {batch: SweepCell(label, model, batch, workers) for batch in batches}
            failed = {batch: found[key].failure for batch, key in keys.items() if key in found and key not in rows}
            values = [
                failure.outcome if (failure := failed.get(batch)) else text(key, figure) for batch, key in keys.items()
            ]
            lines.append([Path(model).name, *values, *(text(keys[batch], f"{figure}_{end}") for batch, end in ends)])
    return lines


def comparable(rows: list[Json]) -> Iterator[tuple[str, list[Json]]]:
    """Of each model a caption and its rows: all if their steps have equally many examples, or its largest batch's."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        examples, batch = {row["batch_size"] * row["workers"] for row in own}, max(row["batch_size"] for row in own)
        about = ", ".join(
            f"{length} tokens, {kind}" for length, kind in {(row["length"], row["precision"]) for row in own}
        )
        if len(examples) == 1:
            yield f"{model}, {min(examples)} examples in a step, {about}", own
        else:
            largest = [row for row in own if row["batch_size"] == batch]
            yield f"{model}, {batch} examples on each worker, {about}", largest


def speedups(rows: list[Json]) -> tuple[str, Lines]:
    """The GPT-2 project's table: a line for each number of workers, a column for each strategy; and what it shows."""
    column = "over_single" if any(row["over_single"] for row in rows) else "weak_speedup"
    figures = {(row["workers"], row["strategy"]): row[column] for row in rows}
    counts, names = sorted({row["workers"] for row in rows}), sorted({row["strategy"] for row in rows})
    lines = [[count, *(figures.get((count, name)) for name in names)] for count in counts]
    return column, [["workers", *names], *lines]


def doubts(found: dict[SweepCell, CellRuns], rows: dict[SweepCell, Json]) -> Iterator[tuple[SweepCell, str]]:
    """What cannot be true, and what should not be believed, by cell."""
    alike: dict[tuple, tuple[str, RunRecord]] = {}
    for cell, row in rows.items():
        if (speedup := max(row["speedup"] or 0.0, row["weak_speedup"] or 0.0)) > cell.workers:
            yield cell, f"speed-up {speedup:.2f} exceeds the number of workers, {cell.workers}"
    for runs, record in timed(found):
        cell, machine = runs.cell, record.environment
        if len(record.losses) > 1 and len(set(record.losses)) == 1:
            yield cell, f"the loss never changes ({record.losses[0]})"
        if machine["load"] > BUSY * machine["cores"]:
            load = f"load {machine['load']} on {machine['cores']} cores"
            yield cell, f"the machine was busy ({load}); do not compare its times"
        settings = (record.examples_per_step, *(record.settings[setting] for setting in ALIKE))
        other, expected = alike.setdefault(settings, (cell.name, record))
        for step, (loss, right) in enumerate(zip(record.losses, expected.losses, strict=False), 1):
            if record.precision == "fp32" and not abs(loss - right) <= SAME:  # a NaN is one, too
                yield cell, f"loss {loss:.6f} in step {step}, but {right:.6f} in {other}: another training"
                break


FIGURES = {  # file -> label, column, whether it has an interval
    "throughput": ("examples per second", "examples_per_second", True),
    "scaling": ("speed-up over single", "over_single", False),
    "weak_scaling": ("speed-up over one worker with as many examples", "weak_speedup", False),
    "total_time": ("timed steps, ms per step", "step_ms", True),
    "communication_time": ("communication in the timed steps, s", "communication_s", True),
    "memory": ("peak of a step, MB", "peak_mb", True),
}


def draw(folder: Path, caption: str, rows: list[Json]) -> None:
    """Figures by strategy and number of workers."""
    from benchmark.measure.bars import Bar, draw_bars  # here: the tables are written without numpy

    order = list(dict.fromkeys(row["strategy"] for row in rows))
    rows = sorted(rows, key=lambda row: (order.index(row["strategy"]), row["workers"]))
    for name, (label, column, has_ends) in FIGURES.items():
        if any(row[column] is not None for row in rows):
            bars = []
            for row in rows:
                workers = f"{row['workers']} worker{'s' * (row['workers'] > 1)}"
                ends = [row[f"{column}_{end}"] for end in ("low", "high")] if has_ends else []
                bars.append(Bar(row["strategy"], workers, row[column], *ends))
            draw_bars(folder / f"{name}_{rows[0]['model']}.png", bars, label, caption, also=".pdf")


def write_profiles(folder: Path, found: dict[SweepCell, CellRuns], rows: dict[SweepCell, Json]) -> None:
    """Write and print latency.csv, mem.csv and, if there is something to say, power.csv."""
    counts = sorted({key.workers for key in found})
    for name, figure in PROFILED.items():
        if name == "power" and not any(row[figure] for row in rows.values()):
            continue
        for workers in counts:
            suffixes = [f"_{workers}"] * (len(counts) > 1) + [""] * (workers == counts[-1])
            for suffix in suffixes:
                write_csv(folder / f"{name}{suffix}.csv", profile(found, rows, workers, figure))
        print(f"{name}.csv\n{(folder / f'{name}.csv').read_text()}")


def write_scaling(folder: Path, rows: list[Json], notes: list[str], machine: str, with_latex: bool) -> None:
    """Write scaling.csv and scaling.md, which is printed, too; draw the figures."""
    tables = [(caption, *speedups(own)) for caption, own in comparable(rows)]
    texts = [f"{caption}: {column}\n\n{markdown(lines)}" for caption, column, lines in tables]
    text = "\n\n".join([*texts, markdown(columns(rows)), machine, *notes]) + "\n"
    write_csv(folder / "scaling.csv", columns(rows))
    with atomic_write(folder / "scaling.md") as file:
        file.write(text)
    print(text)
    warning = "do not compare: the machine was busy" if any("busy" in (row["flagged"] or "") for row in rows) else ""
    about = "\n".join(filter(None, [machine, warning]))
    if with_latex:
        with atomic_write(folder / "scaling.tex") as file:
            file.writelines(latex(lines, f"{caption}: {column}; {about}") for caption, column, lines in tables)
    for caption, own in comparable(rows):
        draw(folder, f"{caption}\n{about}", own)


def write_tables(folder: Path, with_latex: bool = False) -> Json:
    """Write and print all tables, draw the figures; return the figures for the last line."""
    found = read_runs(folder)
    rows = {runs.cell: row_of(runs, record, found) for runs, record in timed(found)}
    rows = dict(sorted(rows.items(), key=lambda one: (one[1]["model"], one[0].workers, -one[1]["examples_per_second"])))
    for name in ("speedup", "over_single", "weak_speedup"):
        if not any(row[name] for cell, row in rows.items() if cell.workers > 1):  # over itself, one worker has 1
            rows = {cell: row | {name: None} for cell, row in rows.items()}
    write_profiles(folder, found, rows)
    flagged = []
    for cell, doubt in doubts(found, rows):
        flagged.append(f"{cell.name}: {doubt}")
        rows[cell]["flagged"] = "; ".join(filter(None, [rows[cell]["flagged"], doubt]))
    failures = [{"run": runs.cell.name, **asdict(runs.failure)} for runs in found.values() if runs.failure]
    if rows:
        not_proved = sorted({row["strategy"] for row in rows.values() if row["gradient"] != "ok"})
        notes = [f"gradients not proved: {', '.join(not_proved)}; see benchmark.prove"] if not_proved else []
        notes += [f"flagged: {line}" for line in flagged]
        notes += ["{run}: {outcome}: {message}".format(**one) for one in failures]
        machine = machine_words(next(record.environment for _, record in timed(found)))
        write_scaling(folder, list(rows.values()), notes, machine, with_latex)
    return {"folder": folder.name, "rows": list(rows.values()), "flagged": flagged, "failures": failures}


def main() -> None:
    parser = command_parser("tables", __doc__)
    parser.add_argument("folder", type=Path, help="output folder of a sweep, or one with folders of runs")
    parser.add_argument("--latex", action="store_true", help="write the speed-ups to scaling.tex, too")
    flags = parser.parse_args()
    print(json.dumps(write_tables(flags.folder, flags.latex)))


if __name__ == "__main__":
    exit_on_input_error(main)
