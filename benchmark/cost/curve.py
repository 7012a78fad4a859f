"""Predictions along one axis: speed-up and efficiency, where the curve bends, and what takes longest there."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.cost.calibration import Calibration
from benchmark.cost.cell import Cell
from benchmark.cost.predict_step import Prediction, Surroundings, predict
from benchmark.cost.programs.writer import check
from cluster.emulate import bits_per_second
from common.errors import InputError
from common.figures import COLOURS, figure

AXES = ("workers", "rate", "batch")
STRAIGHT = 0.02  # a curve that is nowhere farther from a straight line, in powers of ten, does not bend
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

    @property
    def largest(self) -> tuple[str, float]:
        """Return the largest part of the step, and its share."""
        assert self.prediction is not None
        name, seconds = max(self.prediction.parts.items(), key=lambda part: part[1])
        return name, seconds / self.prediction.seconds


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


def at(axis: str, place: str, cell: Cell, where: Surroundings) -> tuple[Cell, Surroundings, float]:
    """Return cell and surroundings at a place of the axis, and the place as a number."""
    if axis == "rate":
        return cell, replace(where, rate=place), bits_per_second(place) / 1e6
    return replace(cell, **{axis: int(place)}), where, float(place)  # type: ignore[arg-type]


def curve(calibration: Calibration, cell: Cell, where: Surroundings, axis: str, places: list[str]) -> list[Point]:
    """Return the points; speed-up is the throughput over that of one worker without any framework."""
    points = []
    for place in places:
        here, there, value = at(axis, place, cell, where)
        check(here)
        alone = replace(here, strategy="single", workers=1)
        one = predict(calibration, alone, Surroundings(cores=there.cores, memory=ENDLESS)).examples_per_second
        try:
            prediction = predict(calibration, here, there)
        except InputError as error:
            reason = "does not fit" if "does not fit" in str(error) else str(error)
            points.append(Point(place, value, None, reason))
            continue
        speedup = prediction.examples_per_second / one
        points.append(Point(place, value, prediction, "", speedup, speedup / here.workers))
    return points


def bend(points: list[Point]) -> Point | None:
    """Return the point that is farthest from the straight line between the ends, both axes logarithmic; or None.

    Points of which only a range is known do not count.
    """
    known = [point for point in points if point.prediction and not point.prediction.is_range]
    if len(known) < 3:
        return None
    xs, ys = (
        [math.log10(value) for value in values] for values in zip(*((p.value, p.speedup) for p in known), strict=True)
    )
    slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
    apart = [abs(y - ys[0] - slope * (x - xs[0])) for x, y in zip(xs, ys, strict=True)]
    farthest = max(range(len(known)), key=lambda i: apart[i])
    return known[farthest] if apart[farthest] > STRAIGHT else None


def sentence(axis: str, points: list[Point]) -> str:
    """Say in one sentence where the curve bends, and why."""
    name = {"workers": "workers", "rate": "for each link", "batch": "examples of a worker"}[axis]
    bent = bend(points)
    if bent is None:
        return f"The speed-up does not bend along {axis}."
    part, share = bent.largest
    assert bent.prediction is not None
    return (
        f"The speed-up bends at {bent.label} {name}: there the largest part of a step is {part}, "
        f"{share:.0%} of {bent.prediction.seconds * 1e3:.1f} ms."
    )


def rows(points: list[Point]) -> list[dict[str, Any]]:
    """Return the figures of the points."""
    entries: list[dict[str, Any]] = []
    for point in points:
        row: dict[str, Any] = {"at": point.label, **(point.prediction.times() if point.prediction else {})}
        if point.prediction is None:
            row["outcome"] = point.reason
        elif point.prediction.is_range:
            row["outcome"] = "{:.0f} to {:.0f} ms".format(*row["step_ms_range"])
        else:
            name, share = point.largest
            row |= {"speedup": point.speedup, "efficiency": point.efficiency, "largest_part": name, "its_share": share}
            row["range"] = "calibrated" if point.prediction.is_calibrated else "extrapolated"
        entries.append(row)
    return entries


def table(axis: str, points: list[Point]) -> str:
    head = ("ms per step", "examples/s", "speed-up", "efficiency", "largest part")
    lines = [f"{axis:>10}" + "".join(f"{word:>14}" for word in head)]
    for row in rows(points):
        if "outcome" in row:
            lines.append(f"{row['at']:>10}  {row['outcome']}")
            continue
        largest = f"{row['largest_part']} {row['its_share']:.0%}"
        lines.append(
            f"{row['at']:>10}{row['step_ms']:>14.1f}{row['examples_per_second']:>14.1f}{row['speedup']:>14.2f}"
            f"{row['efficiency']:>14.3f}{largest:>20}  {row['range']}"
        )
    return "\n".join([*lines, sentence(axis, points)])


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
