"""The tables and figures of all runs in a folder: those of a sweep, or of single runs in folders of their own.

    python -m benchmark.tables runs/benchmark/sweep

latency.csv (ms per step, median), mem.csv (MB that a step needs at its peak, on the worker with the most) and, on GPUs,
power.csv (W) have a block of rows for each strategy, a row for each model and a column for each batch size of one
worker, as in the DeepSpeed profiling project. A cell is "OOM", "wrong" or "error" if the run failed, and empty if there
was none. With several numbers of workers, each has its own file (latency_2.csv, ...); latency.csv has the largest.

scaling.csv has a row for each run; row_of() says what its columns are. scaling.md begins with the speed-ups by workers
and strategy, as in the GPT-2 project. The figures are drawn from the same rows. What cannot be true, or was measured on
a busy machine, is flagged. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark.measure.machine import machine_words
from benchmark.measure.output import MB, cell, write_csv
from benchmark.measure.record import Cell, Failure, RunRecord, read_launch, read_outcome
from benchmark.names import command_parser
from benchmark.strategies import STRATEGIES, Label
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write

BUSY = 1.5  # load per core before a run, from which its times are flagged: the run before has a part in a minute's load
SAME = 1e-4  # training losses in fp32 that differ by more are not of the same training
ALIKE = (
    "model",
    "length",
    "precision",
    "seed",
    "learning_rate",
    "optimizer",
    "data_dir",
    "dropout",
)  # then losses agree
SINGLE = Label("single")
Row = dict[str, Any]
Line = list[Any]


@dataclass
class Runs:
    """All launches of a cell. gradient: by the proof."""

    cell: Cell
    gradient: str
    records: list[RunRecord] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def record(self) -> RunRecord | None:
        """That with the median throughput; None if all have failed."""
        ordered = sorted(self.records, key=lambda record: record.samples_per_second or 0.0)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


def read_runs(folder: Path) -> dict[Cell, Runs]:
    """All runs below a folder by their cell. Raises InputError if there is none."""
    found: dict[Cell, Runs] = {}
    files = [file for name in ("result.json", "failure.json") for file in folder.rglob(name)]
    for place in sorted({file.parent for file in files}):
        launch, outcome = read_launch(place), read_outcome(place)
        if launch:
            key, gradient = replace(launch.cell, repeat=0), launch.gradient
        elif isinstance(outcome, RunRecord):  # of a single benchmark.run
            key = Cell(Label(outcome.strategy), outcome.model, outcome.batch_size, outcome.world_size)
            gradient = "not proved"
        else:
            continue
        runs = found.setdefault(key, Runs(key, gradient))
        if isinstance(outcome, RunRecord):
            runs.records.append(outcome)
        else:
            runs.failure = outcome
    if not found:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return found


def timed(found: dict[Cell, Runs]) -> Iterator[tuple[Runs, RunRecord]]:
    yield from ((runs, runs.record) for runs in found.values() if runs.record and runs.record.steps_ms)


def mb(size: float | None) -> float | None:
    return None if size is None else size / MB


def row_of(runs: Runs, record: RunRecord, found: dict[Cell, Runs]) -> Row:
    """A run's figures by column; None for what was not measured. Times are those of all timed steps."""
    from benchmark.measure.intervals import mean_interval  # here: it loads scipy

    label, model, batch, workers = runs.cell.label, runs.cell.model, runs.cell.batch_size, runs.cell.workers
    speed, sent, memory, total = record.samples_per_second, record.communication, record.most_memory, record.steps.timed
    launches = [one.samples_per_second for one in runs.records if one.samples_per_second]
    mean, low, high = mean_interval(launches) if len(launches) > 1 else (None, None, None)
    validation = record.evaluations[-1] if record.evaluations else {}
    used = ("cpu_utilisation", "gpu_utilisation", "gpu_power", "gpu_temperature")

    def over(base: Label, batch_size: int) -> float | None:
        """This throughput over that of another run on one worker."""
        other = found.get(Cell(base, model, batch_size, 1))
        base_speed = other.record.samples_per_second if other and other.record else None
        return speed / base_speed if speed and base_speed else None

    return {
        "model": Path(model).name,
        "strategy": str(label),
        "workers": workers,
        "batch_size": batch,  # of one worker
        "speedup": over(label, batch * workers),  # over the same strategy on one worker, equal examples in a step
        "over_single": over(SINGLE, batch * workers),  # over one worker without any framework, equal examples
        "weak_speedup": over(label, batch),  # over the same strategy on one worker, equal examples on each worker
        "examples_per_second": speed,
        "launches_mean": mean,  # examples per second, with --repeats; and its 95 % interval
        "launches_low": low,
        "launches_high": high,
        "step_ms": record.step_ms,
        "step_ms_low": record.step_ms_95[0],  # 95 % interval of the median, within a launch
        "step_ms_high": record.step_ms_95[1],
        "total_s": record.wall_s,
        "communication_s": sent.total_ms and sent.total_ms * total / 1e3,  # under way, by the traced steps
        "exposed_s": sent.exposed_ms and sent.exposed_ms * total / 1e3,  # the part in which nothing was computed
        "sent_mb": mb(sent.sent_bytes),  # by a worker in a step
        "ideal_mb": mb(memory.persistent_ideal),  # parameters, gradients, optimizer of a worker, by the papers
        "kept_mb": mb(memory.persistent_counted),  # the same, counted
        "peak_mb": mb(memory.peak),  # on the worker with the most
        "train_loss": record.losses[-1],
        "validation_loss": validation.get("loss"),
        **{
            name: validation.get(name) for name in ("perplexity", "accuracy", "metric")
        },  # metric: of a user's own model
        "bleu": record.bleu,
        **{name: getattr(record.utilisation, name, None) for name in used},
        "load": record.environment["load"],  # of the machine, in the minute before
        "gradient": "ok" if label.strategy == "single" else runs.gradient,
    }


def columns(rows: list[Row]) -> list[Line]:
    """Headings, then figures; a column that nobody could measure is left out."""
    heads = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    return [heads, *([row[name] for name in heads] for row in rows)]


def markdown(lines: list[Line]) -> str:
    texts = [[cell(v, 4) if v is None or isinstance(v, float) else str(v) for v in line] for line in lines]
    texts.insert(1, ["---"] * len(texts[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in texts)


PROFILED: dict[str, Callable[[RunRecord], float | None]] = {
    "latency": lambda record: record.step_ms,
    "mem": lambda record: mb(record.most_memory.peak),
    "power": lambda record: getattr(record.utilisation, "gpu_power", None),
}


def profile(found: dict[Cell, Runs], workers: int, name: str) -> list[Line]:
    """latency.csv, mem.csv or power.csv: a block for each strategy, by model and batch size."""
    cells, lines = [key for key in found if key.workers == workers], list[Line]()
    batches = sorted({key.batch_size for key in cells})

    def text(label: Label, model: str, batch: int) -> str:
        runs = found.get(Cell(label, model, batch, workers))
        if runs and runs.record:
            return cell(PROFILED[name](runs.record), missing="")
        return runs.failure.outcome if runs and runs.failure else ""

    for label in sorted({key.label for key in cells}, key=str):
        level = str(label)
        if STRATEGIES[label.strategy].zero:  # the DeepSpeed profiling project calls its strategies so
            level = level.replace("zero", "optimization_level")
        lines.append([level, *batches])
        for model in dict.fromkeys(key.model for key in cells if key.label == label):
            lines.append([Path(model).name, *(text(label, model, batch) for batch in batches)])
    return lines


def comparable(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Of each model a title and its rows: all if their steps have equally many examples, or its largest batch's."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        examples, batch = {row["batch_size"] * row["workers"] for row in own}, max(row["batch_size"] for row in own)
        if len(examples) == 1:
            yield f"{model}, {min(examples)} examples in a step", own
        else:
            yield f"{model}, batch {batch} on each worker", [row for row in own if row["batch_size"] == batch]


def speedups(title: str, rows: list[Row]) -> str:
    """The GPT-2 project's table: a line for each number of workers, a column for each strategy."""
    column = "over_single" if any(row["over_single"] for row in rows) else "weak_speedup"
    figures = {(row["workers"], row["strategy"]): row[column] for row in rows}
    counts, names = sorted({row["workers"] for row in rows}), sorted({row["strategy"] for row in rows})
    lines = [[count, *(figures.get((count, name)) for name in names)] for count in counts]
    return f"{title}: {column}\n\n{markdown([['workers', *names], *lines])}"


def doubts(found: dict[Cell, Runs], rows: list[Row]) -> list[str]:
    """What cannot be true, and what should not be believed."""
    lines, alike = [], dict[tuple, tuple[str, RunRecord]]()
    for row in rows:
        if (speedup := max(row["speedup"] or 0.0, row["weak_speedup"] or 0.0)) > row["workers"]:
            name = f"{row['model']}, {row['strategy']}, batch {row['batch_size']}"
            lines.append(f"{name}: speed-up {speedup:.2f} exceeds the number of workers, {row['workers']}")
    for runs, record in timed(found):
        name, machine = runs.cell.name, record.environment
        if len(record.losses) > 1 and len(set(record.losses)) == 1:
            lines.append(f"{name}: the loss never changes ({record.losses[0]})")
        if machine["load"] > BUSY * machine["cores"]:
            load = f"load {machine['load']} on {machine['cores']} cores"
            lines.append(f"{name}: the machine was busy ({load}); do not compare its times")
        settings = (record.examples_per_step, *(record.settings[setting] for setting in ALIKE))
        other, expected = alike.setdefault(settings, (name, record))
        for step, (loss, right) in enumerate(zip(record.losses, expected.losses, strict=False), 1):
            if record.precision == "fp32" and not abs(loss - right) <= SAME:  # a NaN is one, too
                lines.append(f"{name}: loss {loss:.6f} in step {step}, but {right:.6f} in {other}: another training")
                break
    return lines


def draw(folder: Path, title: str, rows: list[Row]) -> None:
    """Figures by strategy and number of workers."""
    from benchmark.measure.bars import Bar, draw_bars  # here: the tables are written without numpy

    figures: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "throughput": ("examples per second", "examples_per_second", ("launches_low", "launches_high")),
        "scaling": ("speed-up over single", "over_single", ()),
        "weak_scaling": ("speed-up over one worker with as many examples", "weak_speedup", ()),
        "total_time": ("timed steps, ms per step", "step_ms", ("step_ms_low", "step_ms_high")),
        "communication_time": ("communication in the timed steps, s", "communication_s", ()),
        "memory": ("peak of a step, MB", "peak_mb", ()),
    }
    order = list(dict.fromkeys(row["strategy"] for row in rows))
    rows = sorted(rows, key=lambda row: (order.index(row["strategy"]), row["workers"]))
    for name, (label, column, ends) in figures.items():
        if any(row[column] is not None for row in rows):
            bars = [
                Bar(
                    row["strategy"],
                    f"{row['workers']} worker{'s' * (row['workers'] > 1)}",
                    row[column],
                    *(row[end] for end in ends),
                )
                for row in rows
            ]
            draw_bars(folder / f"{name}_{rows[0]['model']}.png", bars, label, title)


def write_tables(folder: Path) -> dict[str, Any]:
    """Write and print all tables, draw the figures; return the figures for the last line."""
    found = read_runs(folder)
    rows = [row_of(runs, record, found) for runs, record in timed(found)]
    rows.sort(key=lambda row: (row["model"], row["workers"], -(row["examples_per_second"] or 0.0)))
    for name in ("speedup", "over_single", "weak_speedup"):
        if not any(row[name] for row in rows if row["workers"] > 1):  # over itself, one worker has 1
            rows = [row | {name: None} for row in rows]
    for name, figure in PROFILED.items():
        if name == "power" and not any(figure(record) for _, record in timed(found)):
            continue
        counts = sorted({key.workers for key in found})
        for workers in counts:
            suffixes = [f"_{workers}"] * (len(counts) > 1) + [""] * (workers == counts[-1])
            for suffix in suffixes:
                write_csv(folder / f"{name}{suffix}.csv", profile(found, workers, name))
        print(f"{name}.csv\n{(folder / f'{name}.csv').read_text()}")
    flagged = doubts(found, rows)
    failures = [{"run": runs.cell.name, **asdict(runs.failure)} for runs in found.values() if runs.failure]
    if rows:
        write_csv(folder / "scaling.csv", columns(rows))
        tables = [speedups(title, own) for title, own in comparable(rows)] + [markdown(columns(rows))]
        tables.append(machine_words(next(record.environment for _, record in timed(found))))
        not_proved = sorted({row["strategy"] for row in rows if row["gradient"] != "ok"})
        notes = [
            *([f"gradients not proved: {', '.join(not_proved)}; see benchmark.prove"] if not_proved else []),
            *(f"flagged: {line}" for line in flagged),
            *("{run}: {outcome}: {message}".format(**one) for one in failures),
        ]
        with atomic_write(folder / "scaling.md") as file:
            file.write("\n\n".join([*tables, *notes]) + "\n")
        print((folder / "scaling.md").read_text())
        for title, own in comparable(rows):
            draw(folder, title + (", on a busy machine" if any("busy" in line for line in flagged) else ""), own)
    return {"folder": folder.name, "rows": rows, "flagged": flagged, "failures": failures}


def main() -> None:
    parser = command_parser("tables", __doc__)
    parser.add_argument("folder", type=Path, help="output folder of a sweep, or one with folders of runs")
    print(json.dumps(write_tables(parser.parse_args().folder)))


if __name__ == "__main__":
    exit_on_input_error(main)
