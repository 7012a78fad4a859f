"""How wrong are predictions? Real steps beside predicted ones, for cells that are drawn at random.

    python -m benchmark.checks.prediction [--cells 60] [--seed 1] [--full] [--quick]

A cell is a strategy, a model, a batch size, a number of workers and a link. For each link and number of workers, all
drawn cells of a model sit in the same workers and take turns, each of them twice: the difference between the two is the
cell's own error (A/A), and no prediction can be better. The machine is not the same from one launch to the next. So
computing is calibrated again in each: steps without communication take turns with the cells and say how fast this
launch computes (its pace; 1 is that of the first calibration). Engines are calibrated on loopback, with a batch that is
in no cell. The calibration is kept in runs/benchmark/checked_calibration.json.

Prints every cell, then mean, median and largest error, the worst cell with its reason, and how often the order of two
strategies is right. It takes half an hour; --full runs all cells, which takes hours. --quick runs three on loopback
and judges nothing. Exit code 0 only if the mean error is at most 5 %, the largest 12 % (or twice the cell's A/A), and
95 % of the pairs that differ by more than 5 % are in the right order. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from benchmark.calibrate import calibrated, execute, together
from benchmark.calibrate import parse as parse_calibration
from benchmark.cost import calibration as stored
from benchmark.cost.calibration import LOOPBACK, Calibration, EngineTimes
from benchmark.cost.cell import Cell
from benchmark.cost.measuring.plan import CalibrationPlan, Turn
from benchmark.cost.predict_step import Prediction, Surroundings, pace_of, predict
from benchmark.measure.machine import environment
from common.errors import InputError, exit_on_input_error

STRATEGIES = ("ddp", "fsdp", "zero0", "zero2", "pipeline", "own_overlap", "own_zero2", "own_zero3")
LINKS = (LOOPBACK, "100mbit", "300mbit", "1gbit")
WORKERS = (1, 2, 4)
SMALL, LARGE = ("gpt2-tiny", "t5-tiny"), "gpt2-24m"  # MB of parameters: 4.5, 3.4, 93
BATCHES = (2, 3, 6)
LARGE_BATCH = 1
LENGTH = 64
KEPT = stored.DEFAULT.with_name("checked_calibration.json")
CALIBRATED, KNOWN_BATCH = (1, 2, 4, 8), 4  # computing; the engines
LARGE_CALIBRATED, LARGE_KNOWN_BATCH = (1, 2), 2
COMPUTE, ENGINES, LINK = 6, 6, 3  # times --seconds: computing and each number's engines; a launch's cells; a link
MEAN, LARGEST, ORDER, DIFFERENT = 0.05, 0.12, 0.95, 0.05


@dataclass(frozen=True)
class Place:
    """A cell and its link."""

    cell: Cell
    link: str

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{cell.strategy}, {cell.model}, {cell.workers} x {cell.batch}, {self.link}"


@dataclass(frozen=True)
class ComparedCell:
    """A place, in seconds: measured (both times together), predicted; `twice`: the difference of the two, relative.

    pace: of computing in its launch, see cost.prediction.pace_of.
    """

    place: Place
    measured: float
    twice: float
    predicted: Prediction
    pace: float = 1.0

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured - 1

    @property
    def allowed(self) -> float:
        return max(LARGEST, 2 * self.twice)


def all_places() -> list[Place]:
    """Every cell that is sensible: one worker has no link, and a large model would take minutes on a slow one."""
    found = []
    for link in LINKS:
        for workers in WORKERS:
            if workers == 1 and link != LOOPBACK:
                continue
            models = [(model, batch) for model in SMALL for batch in BATCHES]
            models += [(LARGE, LARGE_BATCH)] if link == "1gbit" else []
            for (model, batch), strategy in ((m, s) for m in models for s in STRATEGIES):
                if strategy == "pipeline" and (model.startswith("t5") or workers == 1):
                    continue
                found.append(Place(Cell(strategy, model, workers, batch, LENGTH), link))
    return found


def draw(count: int, seed: int) -> list[Place]:
    """Draw so many places, as many of each link and number of workers as can be."""
    drawn = random.Random(seed)
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in all_places():
        groups.setdefault((place.link, place.cell.workers), []).append(place)
    for group in groups.values():
        drawn.shuffle(group)
    found: list[Place] = []
    while len(found) < count and any(groups.values()):
        for group in groups.values():
            found += [group.pop()] if group and len(found) < count else []
    return found


def turns_of(places: Sequence[Place], labels: Sequence[str]) -> list[Turn]:
    """What is resident together: of one model, all places with one of these strategies, each twice."""
    cells = [place.cell for place in places if place.cell.strategy in labels]
    turns = []
    for model in dict.fromkeys(cell.model for cell in cells):
        here = [cell for cell in cells if cell.model == model]
        engines = [(label, cell.batch) for cell in here for label in (cell.strategy, f"{cell.strategy} again")]
        turns.append(Turn(model, engines, list(LARGE_CALIBRATED if model == LARGE else CALIBRATED)))
    return turns


def measure(places: Sequence[Place], link: str, workers: int, seconds: float) -> list[EngineTimes]:
    """Run the places, for so many seconds in all; return the times of all engines."""
    strategies = list(dict.fromkeys(place.cell.strategy for place in places))
    found = []
    for labels in (groups := together(strategies, workers)):
        turns = turns_of(places, labels)
        plan = CalibrationPlan(link=link, turns=turns, seconds=seconds / len(groups) / len(turns))
        entries = execute(plan, workers, ["--length", str(LENGTH)])["engines"]
        found += [stored.READ["engines"](entry) for entry in entries]
    return found


def compared(calibration: Calibration, place: Place, measured: Sequence[EngineTimes]) -> ComparedCell | None:
    """Predict a place at the pace of its launch; None if it cannot run here."""
    cell = place.cell
    of_model = {(entry.strategy, entry.batch): entry for entry in measured if entry.model == cell.model}
    first, again = (of_model.get((name, cell.batch)) for name in (cell.strategy, f"{cell.strategy} again"))
    if first is None or again is None:
        return None
    pace = pace_of(calibration, first, cell.batch)
    found = predict(calibration, cell, Surroundings(None if place.link == LOOPBACK else place.link), first)
    return ComparedCell(place, (first.seconds + again.seconds) / 2, abs(again.seconds / first.seconds - 1), found, pace)


def calibrate(places: Sequence[Place], seconds: float) -> Calibration:
    """Calibrate computing, loopback, and the engines of these places, afresh."""
    found = stored.empty()
    for models, batches, known in ((SMALL, CALIBRATED, KNOWN_BATCH), ((LARGE,), LARGE_CALIBRATED, LARGE_KNOWN_BATCH)):
        cells = [place.cell for place in places if place.cell.model in models]
        if not cells:
            continue
        flags = {
            "models": dict.fromkeys(cell.model for cell in cells),
            "workers": sorted({cell.workers for cell in cells}),
            "strategies": dict.fromkeys(cell.strategy for cell in cells),
            "batches": batches,
            "engine_batch": [known],
            "length": [LENGTH],
            "seconds": [seconds],
        }
        found = extended(found, flags)
    return found


def extended(calibration: Calibration, flags: Mapping[str, Iterable[object]]) -> Calibration:
    """Return the calibration with what benchmark.calibrate measures with these flags."""
    words = [word for name, values in flags.items() for word in (f"--{name}", ",".join(map(str, values)))]
    return list(calibrated(calibration, parse_calibration(words)))[-1]


def compare(places: Sequence[Place], seconds: float) -> list[ComparedCell]:
    """Calibrate and measure, link by link; prints each row as soon as it is there."""
    heads = f"{'measured':>10}{'predicted':>11}{'error':>8}{'A/A':>8}{'pace':>7}"
    print(f"{'strategy, model, workers x batch, link':<44}{heads}")
    rows = []
    calibration = calibrate(places, COMPUTE * seconds)
    for link in dict.fromkeys(place.link for place in places):
        here = [place for place in places if place.link == link]
        counts = sorted({place.cell.workers for place in here})
        if link != LOOPBACK:
            calibration = extended(calibration, {"links": [link], "workers": counts, "seconds": [LINK * seconds]})
        for count in counts:
            of_count = [place for place in here if place.cell.workers == count]
            stored.save(calibration, KEPT)
            measured = measure(of_count, link, count, ENGINES * seconds)
            here_and_now = [row for row in (compared(calibration, place, measured) for place in of_count) if row]
            for row in here_and_now:
                print(line(row), flush=True)
            rows += here_and_now
    return rows


def line(row: ComparedCell) -> str:
    return (
        f"{row.place.name:<44}{row.measured * 1e3:>10.1f}{row.predicted.seconds * 1e3:>11.1f}{row.error:>8.1%}"
        f"{row.twice:>8.1%}{row.pace:>7.2f}"
    )


def right_order(rows: Sequence[ComparedCell]) -> tuple[int, int]:
    """Return how many pairs of strategies differ by more than 5 % in the same place, and how many are in order."""
    places: dict[tuple, list[ComparedCell]] = {}
    for row in rows:
        cell = row.place.cell
        places.setdefault((row.place.link, cell.model, cell.workers, cell.batch), []).append(row)
    pairs = [pair for group in places.values() for pair in combinations(group, 2)]
    apart = [(a, b) for a, b in pairs if max(a.measured, b.measured) > (1 + DIFFERENT) * min(a.measured, b.measured)]
    right = sum((a.measured < b.measured) == (a.predicted.seconds < b.predicted.seconds) for a, b in apart)
    return len(apart), right


def reason(row: ComparedCell) -> str:
    """Why a prediction may be wrong: what the step consists of, and what was extrapolated."""
    part, seconds = max(row.predicted.parts.items(), key=lambda item: item[1])
    share = seconds / row.predicted.seconds
    notes = "; ".join(row.predicted.notes) or "nothing was extrapolated"
    return f"{part} is {share:.0%} of the predicted step; {notes}; the cell's own A/A error is {row.twice:.1%}"


def summary(rows: Sequence[ComparedCell]) -> dict[str, Any]:
    """The figures of all rows."""
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    pairs, right = right_order(rows)
    holds = statistics.fmean(errors) <= MEAN and all(abs(row.error) <= row.allowed for row in rows)
    return {
        "cells": len(rows),
        "mean_error": statistics.fmean(errors),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "above_their_limit": sum(abs(row.error) > row.allowed for row in rows),
        "worst": worst.place.name,
        "reason": reason(worst),
        "mean_a_a_error": statistics.fmean(row.twice for row in rows),
        "pairs": pairs,
        "in_order": right,
        "holds": holds and (not pairs or right >= ORDER * pairs),
    }


def quick_places() -> list[Place]:
    """Three cells on loopback, in seconds."""
    return [Place(Cell(name, "gpt2-tiny", 2, 2, LENGTH), LOOPBACK) for name in ("ddp", "own_overlap", "own_zero2")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60, help="so many are drawn (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help="unit of time: 3 for a link, 6 for computing and for each launch (8)",
    )
    parser.add_argument("--full", action="store_true", help="all cells")
    parser.add_argument("--quick", action="store_true", help="three cells, nothing is judged")
    arguments = parser.parse_args()
    if arguments.cells < 1:
        raise InputError(f"--cells: expected 1 or more, got {arguments.cells}")
    places = all_places() if arguments.full else draw(arguments.cells, arguments.seed)
    seconds = arguments.seconds
    if arguments.quick:
        places, seconds = quick_places(), 0.5
    rows = compare(places, seconds)
    found = summary(rows)
    print(
        f"\n{found['cells']} cells: mean error {found['mean_error']:.1%}, median {found['median_error']:.1%}, largest "
        f"{found['largest_error']:.1%}; A/A {found['mean_a_a_error']:.1%} in the mean; {found['in_order']} of "
        f"{found['pairs']} pairs in the right order; worst: {found['worst']}: {found['reason']}"
    )
    cells = [
        {**asdict(row.place.cell), "link": row.place.link, "measured_s": row.measured, "error": row.error,
         "predicted_s": row.predicted.seconds, "a_a_error": row.twice, "pace": row.pace,
         "parts_s": row.predicted.parts} for row in rows
    ]  # fmt: skip
    print(json.dumps({**found, "rows": cells, "environment": environment()}))
    sys.exit(0 if found["holds"] or arguments.quick else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
