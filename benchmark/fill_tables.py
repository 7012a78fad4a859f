"""The tables of a sweep with the cells that this machine cannot run: predicted, and marked as such.

    python -m benchmark.fill_tables runs/benchmark/sweep --models t5-tiny,t5-3b,t5-11b --batch_sizes 1,32,64,128

latency.csv and mem.csv have rows for optimization levels and models and columns for batch sizes (tables.py). Here every
cell that was run keeps its figure; the others say "123.45 predicted", or "does not fit". Written beside them as
latency_filled.csv and mem_filled.csv. The predictions come from benchmark.calibrate's file, by arithmetic where the
model is not in it: they say what order of magnitude to expect, not which of two frameworks is a little faster.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmark.cost import calibration as stored
from benchmark.cost.calibration import Calibration
from benchmark.cost.cell import Cell
from benchmark.cost.predict_step import Prediction, Surroundings, predict
from benchmark.names import MODELS, STRATEGIES
from benchmark.tables import latency, level, peak_mb, read_runs
from common.errors import InputError, exit_on_input_error
from common.flags import Parser
from common.paths import atomic_write

LEVELS = "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload"
FIGURES: dict[str, tuple[Callable[[dict], float | None], Callable[[Prediction], float]]] = {
    "latency": (latency, lambda found: found.seconds * 1e3),
    "mem": (peak_mb, lambda found: found.memory.peak / 1e6),
}


def filled(
    name: str, runs: dict[tuple[str, str, int, int], dict], arguments: argparse.Namespace, calibration: Calibration
) -> list[list[str]]:
    """Return the rows of one table."""
    measured, predicted = FIGURES[name]
    where = Surroundings(memory=None if arguments.memory_gb is None else arguments.memory_gb * 1e9)
    rows = []
    for strategy in arguments.strategies:
        rows.append([level(strategy), *map(str, arguments.batch_sizes)])
        for model in arguments.models:
            row = [model]
            for batch in arguments.batch_sizes:
                run = runs.get((strategy, model, batch, arguments.workers), {})
                figure = None if "outcome" in run or not run else measured(run)
                row.append(f"{figure:.2f}" if figure is not None else "")
                if figure is None:
                    cell = Cell(strategy, model, arguments.workers, batch, arguments.length)
                    row[-1] = attempt(calibration, cell, where, predicted)
            rows.append(row)
    return rows


def attempt(calibration: Calibration, cell: Cell, where: Surroundings, figure: Callable[[Prediction], float]) -> str:
    """Return a predicted figure, marked; or that the cell does not fit."""
    try:
        return f"{figure(predict(calibration, cell, where)):.2f} predicted"
    except InputError as error:
        if "does not fit" not in str(error):
            raise
        return "does not fit"


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags; raises InputError."""
    parser = Parser(prog="python -m benchmark.fill_tables", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folder", type=Path, help="what a sweep left, or a new folder: then all cells are predicted")
    add("--models", default="t5-tiny,t5-small,t5-large,t5-3b,t5-11b", help="%(default)s")
    add("--strategies", default=LEVELS, help="%(default)s")
    add("--batch_sizes", default="1,2,4,8,16,32,64,128", help="of one worker (%(default)s)")
    add("--workers", type=int, default=2, help="2")
    add("--length", type=int, default=64, help="tokens of an example (64)")
    add("--memory_gb", type=float, help="of the machine (default: of this one)")
    add("--calibration", type=Path, default=stored.DEFAULT, help="%(default)s")
    arguments = parser.parse_args(argv)
    arguments.models, arguments.strategies = arguments.models.split(","), arguments.strategies.split(",")
    for flag, known in (("models", MODELS), ("strategies", STRATEGIES)):
        if unknown := [name for name in getattr(arguments, flag) if name not in known]:
            raise InputError(f"--{flag}: expected names among {', '.join(known)}; got {', '.join(unknown)}")
    words = arguments.batch_sizes.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"--batch_sizes: expected numbers from 1 on, such as 1,2,4; got {arguments.batch_sizes!r}")
    arguments.batch_sizes = [int(word) for word in words]
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    calibration = stored.load(arguments.calibration)
    has_runs = arguments.folder.is_dir() and any(arguments.folder.glob("*-b*-w*"))
    runs = read_runs(arguments.folder) if has_runs else {}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tables = {name: filled(name, runs, arguments, calibration) for name in FIGURES}
    for name, rows in tables.items():
        path = arguments.folder / f"{name}_filled.csv"
        with atomic_write(path) as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(f"\n{path.name}\n{path.read_text()}", end="")
    print(json.dumps({"folder": arguments.folder.name, **tables}))


if __name__ == "__main__":
    exit_on_input_error(main)
