"""`submit.py predict TASK`: numbers that a student expects before the first long run, kept with the time.

The report shows them beside what was measured. They give no points, so a surprise costs nothing.
"""

import json
import math
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from common.errors import InputError
from common.paths import atomic_write
from course.table import Course
from handin.carry import find_task
from handin.findings import table
from handin.own_figures import OwnFigure, describe, in_words, own_figures
from handin.records import find_runs
from handin.terminal import read_line

FILE = "predictions.json"
Predictions = dict[str, tuple[float, str]]  # name of an own figure -> value, when it was predicted


def asked(course: Course, task: str) -> list[str]:
    """Return the own figures that a task asks to predict."""
    rows = tomllib.loads(Path(__file__).with_name("report.toml").read_text(encoding="utf-8"))["predict"]
    return rows.get(find_task(course, task).id, [])


def read_predictions(folder: Path) -> Predictions:
    """Return what is kept in report/. Raises InputError if it is damaged."""
    path = folder / FILE
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: (float(row["value"]), str(datetime.fromisoformat(row["time"]))) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path.name} is damaged ({error!r}); delete it, and predict again") from None


def predict(tree: Path, course: Course, task: str, read: Callable[[str], str] = read_line) -> list[str]:
    """Ask for the numbers of a task that are not predicted yet; return the lines to show. The first answer is kept."""
    folder, names = tree / "report", asked(course, task)
    kept = read_predictions(folder)
    for name in names:
        if name in kept:
            continue
        answer = read(f"{describe(name, with_unit=True)}? ")
        try:
            value = float(answer.replace(",", "."))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError("expected a number, such as 1.5; run the command again")
        kept[name] = (value, datetime.now(UTC).isoformat(timespec="seconds"))
        with atomic_write(folder / FILE) as file:
            json.dump({name: {"value": value, "time": time} for name, (value, time) in kept.items()}, file, indent=1)
    figures = own_figures(find_runs(tree / "runs", tree / "submit_figures"))
    return in_lines({name: kept[name] for name in names}, figures)


def in_lines(predictions: Predictions, figures: dict[str, OwnFigure]) -> list[str]:
    """Return a line for each prediction."""
    return [f"prediction: {' | '.join(row)}" for row in _rows(predictions, figures)]


def in_table(predictions: Predictions, figures: dict[str, OwnFigure]) -> str:
    """Return the predictions beside what was measured, for the report."""
    return (
        table("figure | predicted | measured | measured / predicted", _rows(predictions, figures))
        if predictions
        else ""
    )


def _rows(predictions: Predictions, figures: dict[str, OwnFigure]) -> list[list[str]]:
    rows = []
    for name, (value, time) in predictions.items():
        cells = ["not measured yet", ""]
        if figure := figures.get(name):
            factor = f"{figure.value / value:.2f}" if value else "–"
            begun = [str(run.records[0].get("begun", "")) for run in figure.runs]
            was_first = any(when and datetime.fromisoformat(when) < datetime.fromisoformat(time) for when in begun)
            cells = [in_words(figure), f"{factor}{', measured before it was predicted' if was_first else ''}"]
        rows.append([describe(name), f"{value:.4g} on {time[:16].replace('T', ' ')}", *cells])
    return rows
