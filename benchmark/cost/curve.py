"""Predictions along one axis: speed-up and efficiency, and what takes longest at each place."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.cost.calibration import Calibration
from benchmark.cost.cell import Cell
from benchmark.cost.predict_step import Prediction, predict
from benchmark.cost.programs.program import check
from benchmark.measure.output import rows_table
from cluster.emulate import bits_per_second
from common.errors import InputError
from common.figures import COLOURS, figure

AXES = ("workers", "rate", "batch")
ENDLESS = 1e18  # bytes: the one worker that others are compared with may be larger than any machine


@dataclass(frozen=True)
class Point:
    """One place of a curve. label: as it was asked for; value: a number for the axis. Without a prediction: why not."""

    label: str
    value: float
    prediction: Prediction | None
    reason: str = ""
    speedup: float = 0.0
    efficiency: float = 0.0


def read_axis(text: str) -> tuple[str, list[str]]:
    """Return the axis and its places from words such as workers=1..4096 or rate=100mbit,1gbit; raises InputError."""
    axis, _, places = text.partition("=")
    if axis not in AXES or not places:
        raise InputError(f"--sweep: expected workers=1..4096, rate=100mbit,1gbit or batch=1..128; got {text!r}")
    span = re.fullmatch(r"(\d+)\.\.(\d+)", places)
    if span and axis != "rate":
        first, last = int(span[1]), int(span[2])
        if not 1 <= first <= last:
            raise InputError(f"--sweep {axis}: expected a range that rises from 1 or more, got {places}")
        doubled = [first * 2**i for i in range(64) if first * 2**i < last]
        return axis, [str(number) for number in [*doubled, last]]
    labels = places.split(",")
    for place in labels:
        if axis == "rate":
            bits_per_second(place)
        elif not place.isdecimal() or int(place) < 1:
            raise InputError(f"--sweep {axis}: expected numbers from 1 on, or a range such as 1..128; got {place!r}")
    return axis, labels


def at(axis: str, place: str, cell: Cell) -> tuple[Cell, float]:
    """Return the cell at a place of the axis, and the place as a number."""
    if axis == "rate":
        return replace(cell, rate=place), bits_per_second(place) / 1e6
    return replace(cell, **{axis: int(place)}), float(place)  # type: ignore[arg-type]


def curve(calibration: Calibration, cell: Cell, axis: str, places: list[str]) -> list[Point]:
    """Return the points; speed-up is the throughput over that of one worker without any framework."""
    points = []
    for place in places:
        here, value = at(axis, place, cell)
        check(here)
        alone = replace(here, strategy="single", workers=1, rate=None, latency=0.0, memory=ENDLESS)
        one = predict(calibration, alone).examples_per_second
        try:
            prediction = predict(calibration, here)
        except InputError as error:
            reason = "does not fit" if "does not fit" in str(error) else str(error)
            points.append(Point(place, value, None, reason))
            continue
        speedup = prediction.examples_per_second / one
        points.append(Point(place, value, prediction, "", speedup, speedup / here.workers))
    return points


def rows(points: list[Point]) -> list[dict[str, Any]]:
    """Return the figures of the points."""
    entries: list[dict[str, Any]] = []
    for point in points:
        if point.prediction is None:
            entries.append({"at": point.label, "outcome": point.reason})
            continue
        row = {"at": point.label, **point.prediction.times()}
        if point.prediction.is_range:
            row["outcome"] = "{:.0f} to {:.0f} ms".format(*row["step_ms_range"])
        else:
            name, seconds = max(point.prediction.parts.items(), key=lambda part: part[1])
            row |= {"speedup": point.speedup, "efficiency": point.efficiency}
            row |= {"largest_part": name, "its_share": seconds / point.prediction.seconds}
            row["range"] = "calibrated" if point.prediction.is_calibrated else "extrapolated"
        entries.append(row)
    return entries


def table(points: list[Point]) -> str:
    """For people."""
    return rows_table({name: row[name] for name in row if name != "step_ms_range"} for row in rows(points))


def draw(axis: str, points: list[Point], title: str, path: Path) -> None:
    """Draw both curves: the calibrated range is shaded, beyond it they are dashed, and a range is a coloured band."""
    predicted = [(point, point.prediction) for point in points if point.prediction is not None]
    xs = [point.value for point, _ in predicted]
    solid = [point.value for point, prediction in predicted if prediction.is_calibrated]
    unit = {"workers": "workers", "rate": "rate of a link (Mbit/s)", "batch": "examples of a worker"}[axis]
    with figure(path) as axes:
        for label, name, colour in (("speed-up", "speedup", COLOURS[0]), ("efficiency", "efficiency", COLOURS[1])):
            ys = [getattr(point, name) for point, _ in predicted]
            best = [y * prediction.seconds / prediction.least for y, (_, prediction) in zip(ys, predicted, strict=True)]
            axes.plot(xs, ys, "--", color=colour, marker=".")
            axes.fill_between(xs, ys, best, color=colour, alpha=0.2, linewidth=0)
            axes.plot(solid, [y for x, y in zip(xs, ys, strict=True) if x in solid], color=colour, label=label)
        if solid:
            axes.axvspan(min(solid), max(solid), color="#DDDDDD", label="calibrated", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel(unit)
        axes.set_title(title)
        axes.legend(frameon=False)
