"""The tables and figures of all runs in a folder: those of a sweep, or of single runs in folders of their own.

    python -m benchmark.tables runs/benchmark/sweep [--latex]

latency.csv (ms per step, median), mem.csv (MB that a step needs at its peak, on the worker with the most) and, on GPUs,
power.csv (W) have a block of rows for each strategy, a row for each model and a column for each batch size of one
worker, as in the DeepSpeed profiling project; behind them, the ends of 95 % intervals (1_low, 1_high, ...). A cell is
"OOM", "wrong" or "error" if the run failed, and empty if there was none. With several numbers of workers, each has its
own file (latency_2.csv, ...); latency.csv has the largest.

scaling.csv has a row for each run; row_of() in measure/rows.py says what its columns are. scaling.md begins with the
speed-ups by workers and strategy, as in the GPT-2 project; --latex writes them to scaling.tex, too. The figures (PNG
and PDF) are drawn from the same rows. What cannot be true, or was measured on a busy machine, is flagged. The last line
is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmark.measure.machine import machine_words
from benchmark.measure.output import Json, Lines, latex, markdown, write_csv
from benchmark.measure.record import COUNTED, SweepCell
from benchmark.measure.rows import CellRuns, doubts, read_runs, row_of, timed
from benchmark.names import command_parser
from benchmark.strategies import STRATEGIES
from common.errors import exit_on_input_error
from common.paths import atomic_write

PROFILED = {"latency": "step_ms", "mem": "peak_mb", "power": "gpu_power"}  # file -> column


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
        notes += [COUNTED, *(f"flagged: {line}" for line in flagged)]
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
