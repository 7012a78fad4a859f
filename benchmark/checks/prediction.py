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
runs three cells on loopback and judges nothing. The last line is one JSON object.
"""

import argparse
import hashlib
import json
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.calibrate import calibrated, execute, together
from benchmark.calibrate import parse as parse_calibration
from benchmark.cost import calibration as stored
from benchmark.cost.architecture import describe
from benchmark.cost.calibration import LOOPBACK, Calibration, EngineTimes
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import Links, moved
from benchmark.cost.measuring.plan import CalibrationPlan, Turn
from benchmark.cost.predict_step import Prediction, Surroundings, predict
from benchmark.engines.operators import compile_operators
from benchmark.measure.machine import environment
from benchmark.strategies import STRATEGIES
from cluster.emulate import bits_per_second
from common.errors import InputError, exit_on_input_error

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
MEAN, LARGEST, OF_NAIVE = 0.08, 0.20, 0.5


@dataclass(frozen=True)
class Place:
    """A cell and its link."""

    cell: Cell
    link: str

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{cell.strategy}, {cell.model}, {cell.workers} x {cell.batch}, {self.link}"

    @property
    def new(self) -> list[str]:
        """What of this place is never calibrated."""
        values = {**asdict(self.cell), "link": self.link}
        return [name for name, never in NEW.items() if values[name] in never]


@dataclass(frozen=True)
class ComparedCell:
    """A place, in seconds: measured (both times together), predicted, naive; `twice`: the two apart, relative."""

    place: Place
    measured: float
    twice: float
    predicted: Prediction
    naive: float

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured - 1

    @property
    def naive_error(self) -> float:
        return self.naive / self.measured - 1


def all_places() -> list[Place]:
    """Every cell that can run."""
    places = []
    strategies, models, workers, links = (KNOWN[name] + NEW[name] for name in KNOWN)
    for link, count, model, batch, strategy in (
        (k, w, m, b, s) for k in links for w in workers for m in models for b in BATCHES for s in strategies
    ):
        cuts = STRATEGIES[strategy].cuts
        if cuts and (model.startswith("t5") or (cuts == "tensor" and describe(model, LENGTH).n_heads % count)):
            continue  # only GPT-2 is cut, and each worker needs as many of its heads
        places.append(Place(Cell(strategy, model, count, batch, LENGTH), link))
    return places


def draw(count: int, seed: object) -> list[Place]:
    """Draw so many places, as many of each link and number of workers as can be."""
    generator = random.Random(str(seed))
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in all_places():
        groups.setdefault((place.link, place.cell.workers), []).append(place)
    for group in groups.values():
        generator.shuffle(group)
    places: list[Place] = []
    while len(places) < count and any(groups.values()):
        for group in groups.values():
            places += [group.pop()] if group and len(places) < count else []
    return places


def state_of_the_model() -> str:
    """The hash of all files that predictions are made by."""
    texts = (file.read_bytes() for file in sorted(Path(stored.__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def measure(places: Sequence[Place], link: str, workers: int, seconds: float) -> list[EngineTimes]:
    """Run the places, for so many seconds in all; return the times of all engines."""
    times = []
    for labels in (groups := together(list(dict.fromkeys(place.cell.strategy for place in places)), workers)):
        turns = turns_of(places, labels)
        plan = CalibrationPlan(link=link, turns=turns, seconds=seconds / len(groups) / len(turns))
        entries = execute(plan, workers, ["--length", str(LENGTH)])["engines"]
        times += [stored.READ["engines"](entry) for entry in entries]
    return times


def turns_of(places: Sequence[Place], labels: Sequence[str]) -> list[Turn]:
    """What is resident together: of one model, all places with one of these strategies, each twice."""
    cells = [place.cell for place in places if place.cell.strategy in labels]
    again = [(c.model, (label, c.batch)) for c in cells for label in (c.strategy, f"{c.strategy} again")]
    return [Turn(model, [e for m, e in again if m == model]) for model in dict.fromkeys(cell.model for cell in cells)]


def compared(calibration: Calibration, place: Place, measured: Sequence[EngineTimes]) -> ComparedCell | None:
    """Predict a place from the calibration alone; None if it cannot run here."""
    cell = place.cell
    took = {(entry.strategy, entry.batch): entry.seconds for entry in measured if entry.model == cell.model}
    first, again = (took.get((name, cell.batch)) for name in (cell.strategy, f"{cell.strategy} again"))
    if first is None or again is None:
        return None
    prediction = predict(calibration, cell, Surroundings(None if place.link == LOOPBACK else place.link))
    naive_seconds = naive(calibration, place, prediction)
    return ComparedCell(place, (first + again) / 2, abs(again / first - 1), prediction, naive_seconds)


def naive(calibration: Calibration, place: Place, prediction: Prediction) -> float:
    """The nearest calibrated step, times examples and parameters, and every message one after the other."""
    cell = place.cell
    near = min(
        calibration.profiles,
        key=lambda p: (p.model != cell.model, abs(p.workers - cell.workers), abs(p.batch - cell.batch)),
    )
    size = describe(cell.model, LENGTH).elements / describe(near.model, near.length).elements
    links = Links(calibration)
    latency, large = links.transfer("hop", 4, 2).latency, 2**24
    rate = moved("all_reduce", large, 2) / links.transfer("all_reduce", large, 2).flow
    if place.link != LOOPBACK:
        rate = bits_per_second(place.link) / 8
    messages = sum(calls for calls, _ in prediction.sent.values())
    return near.seconds * cell.batch / near.batch * size + messages * latency + prediction.sent_bytes / rate


def calibrate(places: Sequence[Place], seconds: float) -> Calibration:
    """Calibrate what these places are predicted from, afresh."""
    cells = [{**asdict(place.cell), "link": place.link} for place in places]
    needed = {
        name: [value for value in values if any(cell[name] in (value, *NEW[name]) for cell in cells)]
        for name, values in KNOWN.items()
    }
    compute = {
        "models": needed["model"], "workers": [1, *needed["workers"]], "strategies": needed["strategy"],
        "batches": CALIBRATED, "engine_batch": [4], "length": [LENGTH], "seconds": [COMPUTE * seconds],
    }  # fmt: skip
    compile_operators([*needed["strategy"], *(place.cell.strategy for place in places)], no_cuda=True)
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


def compare(places: Sequence[Place], seconds: float) -> list[ComparedCell]:
    """Calibrate, then measure, link by link; prints each row as soon as it is there."""
    calibration = calibrate(places, seconds)
    stored.save(calibration, KEPT)
    heads = f"{'measured':>10}{'predicted':>11}{'error':>8}{'naive':>8}{'A/A':>8}"
    print(f"{'strategy, model, workers x batch, link':<44}{heads}  never calibrated")
    rows = []
    for link, count in dict.fromkeys((place.link, place.cell.workers) for place in places):
        here = [place for place in places if (place.link, place.cell.workers) == (link, count)]
        measured = measure(here, link, count, ENGINES * seconds)
        new_rows = [row for row in (compared(calibration, place, measured) for place in here) if row]
        for row in new_rows:
            times = f"{row.measured * 1e3:>10.1f}{row.predicted.seconds * 1e3:>11.1f}"
            errors = f"{row.error:>8.1%}{row.naive_error:>8.0%}{row.twice:>8.1%}"
            print(f"{row.place.name:<44}{times}{errors}  {', '.join(row.place.new)}", flush=True)
        rows += new_rows
    return rows


def errors(rows: Sequence[ComparedCell]) -> dict[str, Any]:
    """Mean, median and largest error, and the naive ones."""
    model_errors, naive_errors = ([abs(getattr(row, name)) for row in rows] for name in ("error", "naive_error"))
    return {
        "cells": len(rows),
        "mean_error": statistics.fmean(model_errors),
        "median_error": statistics.median(model_errors),
        "largest_error": max(model_errors),
        "naive_mean_error": statistics.fmean(naive_errors),
        "mean_a_a_error": statistics.fmean(row.twice for row in rows),
    }


def summary(rows: Sequence[ComparedCell]) -> dict[str, Any]:
    """The figures of all rows, and of those with something that was never calibrated."""
    figures, worst = errors(rows), max(rows, key=lambda row: abs(row.error))
    parts = {f"another {name}": [row for row in rows if name in row.place.new] for name in NEW}
    parts["all of it calibrated"] = [row for row in rows if not row.place.new]
    part, seconds = max(worst.predicted.parts.items(), key=lambda item: item[1])
    good = figures["mean_error"] <= min(MEAN, OF_NAIVE * figures["naive_mean_error"])
    return {
        **figures,
        "by_what_is_new": {name: errors(part) for name, part in parts.items() if part},
        "worst": f"{worst.place.name}: {part} is {seconds / worst.predicted.seconds:.0%} of the predicted step",
        "holds": good and figures["largest_error"] <= LARGEST,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60, help="so many are drawn (60)")
    parser.add_argument("--seconds", type=float, default=2.0, help="unit: 18 for computing, 6 for a launch (2)")
    parser.add_argument("--quick", action="store_true", help="three cells, nothing is judged")
    arguments = parser.parse_args()
    if arguments.cells < 1:
        raise InputError(f"--cells: expected 1 or more, got {arguments.cells}")
    state = state_of_the_model()
    places = draw(arguments.cells, state)
    if arguments.quick:
        places = [Place(Cell(name, "gpt2-tiny", 2, 2, LENGTH), LOOPBACK) for name in QUICK]
    rows = compare(places, 0.5 if arguments.quick else arguments.seconds)
    result = summary(rows)
    print(f"\n{'':<24}{'cells':>6}{'mean':>8}{'median':>8}{'largest':>9}{'naive':>8}{'A/A':>8}")
    for name, part in ({"all": result} | result["by_what_is_new"]).items():
        figures = f"{part['mean_error']:>8.1%}{part['median_error']:>8.1%}{part['largest_error']:>9.1%}"
        simple = f"{part['naive_mean_error']:>8.1%}{part['mean_a_a_error']:>8.1%}"
        print(f"{name:<24}{part['cells']:>6}{figures}{simple}")
    print(f"worst: {result['worst']}")
    cells = [
        {**asdict(row.place.cell), "link": row.place.link, "measured_s": row.measured, "error": row.error,
         "naive_error": row.naive_error, "predicted_s": row.predicted.seconds, "a_a_error": row.twice,
         "parts_s": row.predicted.parts, "notes": row.predicted.notes} for row in rows
    ]  # fmt: skip
    print(json.dumps({**result, "state_of_the_model": state, "rows": cells, "environment": environment()}))
    sys.exit(0 if result["holds"] or arguments.quick else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
