"""How wrong are predictions? Real steps beside predicted ones, for cells that were drawn after the model was frozen.

    python -m benchmark.checks.prediction [--cells 60] [--seconds 2] [--quick]

A cell is a strategy, a model, a batch size, a number of workers and a link. Computing, links and engines are calibrated
first; nothing of the launches that are predicted goes into a prediction. One model, one number of workers, one link and
six strategies are never calibrated. The cells are drawn from a hash of benchmark/cost: a change of the cost model
draws others, so it cannot be fitted to them. The calibration is kept in runs/benchmark/checked_calibration.json.

For each link and number of workers, all cells of a model sit in the same workers and take turns, each of them twice:
the difference between the two is the cell's own error (A/A), and no prediction can be better. `naive` is what a table
of calibrated steps would say: the nearest one times batch and parameters, and messages times latency plus bytes over
the rate. Prints every cell, then the errors over all cells and over those with each thing that was not calibrated.

Exit code 0 only if the mean error is at most 8 %, the largest 20 %, and the mean at most half of the naive one. --quick
runs three cells on loopback and judges nothing. The last line is one JSON object; errors are in percent.
"""

import argparse
import hashlib
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmark.calibrate import calibrated, execute, together
from benchmark.calibrate import parse as parse_calibration
from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.cost import calibration as stored
from benchmark.cost.architecture import describe
from benchmark.cost.calibration import LOOPBACK, Calibration, EngineTimes
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import Links, moved
from benchmark.cost.measuring.plan import CalibrationPlan, Turn
from benchmark.cost.predict_step import Prediction, predict
from benchmark.engines.operators import compile_operators
from benchmark.strategies import STRATEGIES
from cluster.emulate import bits_per_second
from common.errors import exit_on_input_error
from common.flags import positive

# What is calibrated, and what never is.
KNOWN: dict[str, tuple] = {
    "strategy": (
        "ddp", "fsdp", "zero2", "zero3", "pipeline", "tensor", "own_overlap", "own_zero3", "own_tensor",
    ),
    "model": ("gpt2-tiny", "t5-tiny"),
    "workers": (2, 4),
    "link": (LOOPBACK, "1gbit", "100mbit"),
}  # fmt: skip
NEW: dict[str, tuple] = {
    "strategy": ("zero0", "zero1", "own_ring", "own_zero1", "own_zero2", "own_1f1b"),
    "model": ("gpt2-6x256",),
    "workers": (3,),
    "link": ("300mbit",),
}  # fmt: skip
BATCHES, CALIBRATED, LENGTH = (2, 3, 6), (1, 2, 4, 8), 64
KEPT = stored.DEFAULT.with_name("checked_calibration.json")
COMPUTE, ENGINES, LINK = 18, 6, 4  # times --seconds: computing and each number's engines; a launch's cells; a link
QUICK = ("ddp", "own_overlap", "own_zero2")
MEAN, LARGEST, OF_NAIVE = 8, 20, 0.5  # percent; of the naive error


def link_of(cell: Cell) -> str:
    return cell.rate or LOOPBACK


def never_calibrated(cell: Cell) -> list[str]:
    """What of this cell is never calibrated."""
    values = {**asdict(cell), "link": link_of(cell)}
    return [name for name, never in NEW.items() if values[name] in never]


def all_cells() -> list[Cell]:
    """Every cell that can run."""
    cells = []
    strategies, models, workers, links = (KNOWN[name] + NEW[name] for name in KNOWN)
    for link, count, model, batch, strategy in product(links, workers, models, BATCHES, strategies):
        cuts = STRATEGIES[strategy].cuts
        if cuts and (model.startswith("t5") or (cuts == "tensor" and describe(model, LENGTH).n_heads % count)):
            continue  # only GPT-2 is cut, and each worker needs as many of its heads
        cells.append(Cell(strategy, model, count, batch, LENGTH, rate=None if link == LOOPBACK else link))
    return cells


def draw(count: int, seed: object) -> list[Cell]:
    """Draw so many cells, as many of each link and number of workers as can be."""
    cells, turns, drawn = all_cells(), list[int](), Counter[tuple]()
    random.Random(str(seed)).shuffle(cells)
    for cell in cells:
        drawn[cell.rate, cell.workers] += 1
        turns.append(drawn[cell.rate, cell.workers])
    in_turn = sorted(zip(turns, cells, strict=True), key=lambda pair: pair[0])
    return [cell for _, cell in in_turn[:count]]


def state_of_the_model() -> str:
    """The hash of all files that predictions are made by."""
    texts = (file.read_bytes() for file in sorted(Path(stored.__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def measure(cells: Sequence[Cell], link: str, workers: int, seconds: float) -> list[EngineTimes]:
    """Run the cells, for so many seconds in all; return the times of all engines."""
    times = []
    for labels in (groups := together(list(dict.fromkeys(cell.strategy for cell in cells)), workers)):
        turns = turns_of(cells, labels)
        plan = CalibrationPlan(link=link, turns=turns, seconds=seconds / len(groups) / len(turns))
        times += execute(plan, workers, ["--length", str(LENGTH)]).engines
    return times


def turns_of(cells: Sequence[Cell], labels: Sequence[str]) -> list[Turn]:
    """What is resident together: of one model, all cells with one of these strategies, each twice."""
    again: dict[str, list[tuple[str, int]]] = {}
    for cell in cells:
        if cell.strategy in labels:
            twice = [(cell.strategy, cell.batch), (f"{cell.strategy} again", cell.batch)]
            again.setdefault(cell.model, []).extend(twice)
    return list(again.items())


def compared(calibration: Calibration, cell: Cell, measured: Sequence[EngineTimes]) -> Row | None:
    """Return the row of a cell, which is predicted from the calibration alone; None if it cannot run here."""
    took = {(entry.strategy, entry.batch): entry.seconds for entry in measured if entry.model == cell.model}
    first, again = (took.get((name, cell.batch)) for name in (cell.strategy, f"{cell.strategy} again"))
    if first is None or again is None:
        return None
    prediction = predict(calibration, cell)
    part, part_seconds = max(prediction.parts.items(), key=lambda item: item[1])
    seconds = (first + again) / 2
    return {
        "strategy": cell.strategy,
        "model": cell.model,
        "workers": cell.workers,
        "batch": cell.batch,
        "link": link_of(cell),
        "measured ms": 1e3 * seconds,
        "predicted ms": 1e3 * prediction.seconds,
        "error": 100 * (prediction.seconds / seconds - 1),
        "naive": 100 * (naive(calibration, prediction) / seconds - 1),
        "A/A": 100 * abs(again / first - 1),
        "largest part": f"{part} {part_seconds / prediction.seconds:.0%}",
        "never calibrated": ", ".join(never_calibrated(cell)),
    }


def naive(calibration: Calibration, prediction: Prediction) -> float:
    """The nearest calibrated step, times examples and parameters, and every message one after the other."""
    cell = prediction.cell
    near = min(
        calibration.profiles,
        key=lambda p: (p.model != cell.model, abs(p.workers - cell.workers), abs(p.batch - cell.batch)),
    )
    size = describe(cell.model, LENGTH).elements / describe(near.model, near.length).elements
    links = Links(calibration)
    latency, large = links.transfer("hop", 4, 2).latency, 2**24
    rate = moved("all_reduce", large, 2) / links.transfer("all_reduce", large, 2).flow
    if cell.rate is not None:
        rate = bits_per_second(cell.rate) / 8
    messages = sum(calls for calls, _ in prediction.sent.values())
    return near.seconds * cell.batch / near.batch * size + messages * latency + prediction.sent_bytes / rate


def calibrate(cells: Sequence[Cell], seconds: float) -> Calibration:
    """Calibrate what these cells are predicted from, afresh."""
    figures = [{**asdict(cell), "link": link_of(cell)} for cell in cells]
    needed = {
        name: [value for value in values if any(figure[name] in (value, *NEW[name]) for figure in figures)]
        for name, values in KNOWN.items()
    }
    compute = {
        "models": needed["model"], "workers": [1, *needed["workers"]], "strategies": needed["strategy"],
        "batches": CALIBRATED, "engine_batch": [4], "length": [LENGTH], "seconds": [COMPUTE * seconds],
    }  # fmt: skip
    compile_operators([*needed["strategy"], *(cell.strategy for cell in cells)], no_cuda=True)
    calibration = extended(stored.empty(), compute)
    for link in needed["link"]:
        if link != LOOPBACK:
            flags = {"links": [link], "workers": needed["workers"], "seconds": [LINK * seconds]}
            calibration = extended(calibration, flags)
    return calibration


def extended(calibration: Calibration, flags: Mapping[str, Iterable[object]]) -> Calibration:
    """Return the calibration with what benchmark.calibrate measures with these flags."""
    words = [word for name, values in flags.items() for word in (f"--{name}", ",".join(map(str, values)))]
    return list(calibrated(calibration, parse_calibration(words)))[-1]


def errors(what: str, rows: Sequence[Row]) -> Row:
    """Return the errors of these cells, and the naive ones."""
    sizes = [abs(row["error"]) for row in rows]
    return {
        "of": what,
        "cells": len(rows),
        "mean": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "largest": max(sizes),
        "naive": statistics.fmean(abs(row["naive"]) for row in rows),
        "A/A": statistics.fmean(row["A/A"] for row in rows),
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the errors of all cells, which are judged, and of those with something that was never calibrated."""
    parts = {f"another {name}": [row for row in rows if name in row["never calibrated"]] for name in NEW}
    parts["all of it calibrated"] = [row for row in rows if not row["never calibrated"]]
    judged = errors("all", rows)
    good = judged["mean"] <= min(MEAN, OF_NAIVE * judged["naive"]) and judged["largest"] <= LARGEST
    return [judged | {"holds": good}, *(errors(what, part) for what, part in parts.items() if part)]


def cells(flags: argparse.Namespace) -> list[Row]:
    """Calibrate, then measure, link by link."""
    state = state_of_the_model()
    drawn = draw(flags.cells, state)
    if flags.quick:
        drawn = [Cell(name, "gpt2-tiny", 2, 2, LENGTH) for name in QUICK]
    calibration = calibrate(drawn, flags.seconds)
    stored.save(calibration, KEPT)
    rows: list[Row] = []
    for link, count in dict.fromkeys((link_of(cell), cell.workers) for cell in drawn):
        here = [cell for cell in drawn if (link_of(cell), cell.workers) == (link, count)]
        measured = measure(here, link, count, ENGINES * flags.seconds)
        rows += [row for cell in here if (row := compared(calibration, cell, measured))]
    figures = summary(rows)
    figures[0]["holds"] |= flags.quick
    return [*rows, *figures, {"state of the model": state}]


def main() -> None:
    parser = check_parser("checks.prediction", __doc__)
    parser.add_argument("--cells", type=positive, default=60, help="so many are drawn (60)")
    parser.add_argument("--seconds", type=float, default=2.0, help="unit: 18 for computing, 6 for a launch (2)")
    run_parts(parser, {"cells": cells}, seconds=0.5)


if __name__ == "__main__":
    exit_on_input_error(main)
