"""Writes the result of a pytest run of the graders: report.json, and a table of points at the end.

report.json exists from the start, with every test that is to come, and is written again after each of them: a grader
that is killed leaves the points that were earned until then.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.paths import atomic_write
from course.table import Course, score_of
from grader.ranks.outcome import Result
from grader.tampering import Flag
from grader.verdicts import Verdict

PENDING = "timed out"  # what becomes of a test that is never reached
NOT_REACHED = "the grading ended before this test was reached"
MAX_FLAGS = 200
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, in Python's own messages
LONGEST_TEXT = 6000  # characters of a cause, or of what was observed
MOST_PRINTED = 20_000  # characters of what a rank printed that are kept to be shown
LONGEST_OUTPUT = 4000  # characters of a rank's stdout or stderr that are kept: the last ones, which show an error


@dataclass
class Entry:
    """One graded test: its points, and the fields of its verdict, which are empty if it passed (see verdicts.py)."""

    id: str
    task: str
    region: str
    status: str
    points: int = 0
    max_points: int = 0
    cause: str = ""
    observed: str = ""
    kind: str = ""
    seed: int | None = None
    first: str = ""  # the region that must pass first, if one must:
    #     its own        `follows`: another test of this region says what is wrong
    #     another one    `waits` if the test ran all the same and has something to say; else that region is not written

    def take(self, verdict: Verdict | None) -> None:
        """Take over the fields of a verdict; None of a test that has passed.

        A verdict that has neither a kind nor a cause is of one kind with those of the test's other cases.
        """
        self.status = verdict.status if verdict else "passed"
        verdict = verdict or Verdict()
        self.seed, self.first = verdict.seed, verdict.first
        self.cause, self.observed = clip(verdict.cause), clip(verdict.observed)
        self.kind = clip(verdict.kind) or self.cause or function_of(self.id)

    @property
    def follows(self) -> bool:
        """Return whether the test only waits for the others of its own region."""
        return self.first == self.region

    @property
    def text(self) -> str:
        """Return the cause, then what was observed; where nothing could be, which region is not written yet."""
        if self.first and not self.cause:
            return self.observed or (
                f"depends on region {self.first}, which is not written yet in a file that this test runs: solve "
                f"{self.first} first; if it is solved in an earlier task, `python submit.py carry` copies your lines"
            )
        return "\n".join(filter(None, (self.cause, self.observed)))

    @property
    def message(self) -> str:
        """Return all of it in words, for readers of report.json who need no fields."""
        text = self.text
        if self.waits:
            text = f"depends on region {self.first}, which does not pass yet. Observed: {text}"
        again = f" (inputs drawn with seed {self.seed}; use --seed {self.seed} to repeat them)"
        return text if self.seed is None else f"{text}{again}"

    @property
    def waits(self) -> bool:
        """Return whether the test ran, but another region must pass before anybody can judge it."""
        return self.first not in ("", self.region) and bool(self.cause or self.observed)


def function_of(test: str) -> str:
    """Return the name of a test's function: its id without the file and the case."""
    return test.rpartition("::")[2].partition("[")[0]


def clip(text: str) -> str:
    """Make a text fit to be shown: not too long, valid UTF-8 whatever names a student's code has, and the same in every
    run: no addresses of objects."""
    text = ADDRESS.sub("", text)
    short = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
    return short.encode(errors="replace").decode()


def as_dict(entries: Iterable[Entry], bonus_regions: Collection[str] = ()) -> dict:
    """Return the content of report.json. Points of bonus lessons are not part of the score."""
    tests = [asdict(entry) | {"message": entry.message} for entry in entries]
    return {"tests": tests, **score_of(tests, bonus_regions)}


def entries_of(tests: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return the graded tests of a report.json."""
    names = [field.name for field in fields(Entry)]
    return [Entry(**{name: test[name] for name in names}) for test in tests]


class Report:
    """report.json while the tests run; with an empty path nothing is written.

    Beside the tests it has `output`: for each test that did not pass, what the ranks of its last run printed and how
    they ended. `flags` lists what looks like tampering; it takes no points, and is for instructors.
    `warnings` tells the student what costs no points.
    """

    def __init__(self, path: str | Path, bonus_regions: Collection[str] = ()) -> None:
        self.path = path
        self.bonus_regions = bonus_regions
        self.entries: dict[str, Entry] = {}
        self.output: dict[str, list[dict]] = {}
        self.printed: dict[str, dict[int, str]] = {}  # test that did not pass -> rank -> the beginning of its stdout
        self.flags: list[Flag] = []  # what to look at by hand
        self.warnings: list[str] = []

    def expect(self, entries: Iterable[Entry]) -> None:
        """Take the tests that are to come."""
        self.entries = {entry.id: entry for entry in entries}
        self._write()

    def add(self, entry: Entry, run: Result | None) -> None:
        """Take a test that has run, and the last run of ranks it looked at."""
        self.entries[entry.id] = entry
        if run and entry.status != "passed":
            self.output[entry.id] = output_of(run)
            self.printed[entry.id] = {
                rank.rank: rank.stdout[:MOST_PRINTED] for rank in run.ranks if rank.stdout.strip()
            }
        self._write()

    def warn(self, *words: str) -> None:
        """Note what costs no points by itself, each once."""
        self.warnings += [word for word in dict.fromkeys(words) if word not in self.warnings]
        self._write()

    def _write(self) -> None:
        if self.path and (self.entries or self.warnings):
            with atomic_write(self.path) as file:
                flags = [flag._asdict() for flag in self.flags]
                more = {"output": self.output, "flags": flags, "warnings": self.warnings}
                content = as_dict(self.entries.values(), self.bonus_regions) | more
                json.dump(content, file, indent=1)  # ASCII: what a student prints need not be valid UTF-8


def output_of(run: Result) -> list[dict]:
    """Say how each rank of a run ended, with the last of what it printed."""
    return [
        {
            "rank": rank.rank,
            "ended": f"{rank.outcome} at {rank.where}" if rank.where else rank.outcome,
            "stdout": rank.stdout[-LONGEST_OUTPUT:],
            "stderr": rank.stderr[-LONGEST_OUTPUT:],
        }
        for rank in run.ranks
    ]


def render(entries: list[Entry], course: Course) -> list[str]:
    """Return a table: a line for each graded region, a sum for each task, and a separate sum of bonus points."""
    lines = []
    for task in course.tasks.values():
        of_task = [entry for entry in entries if entry.task == task.id]
        if not of_task:
            continue
        lines.append(f"{'task ' + task.id:10} {task.title:48} {_points(of_task):>8}")
        graded = {entry.region for entry in of_task}
        for region in (id for id in course.regions if id in graded):
            of_region = [entry for entry in of_task if entry.region == region]
            failed = dict.fromkeys(entry.status for entry in of_region if entry.status != "passed")
            lines.append(
                f"  {region:8} {course.regions[region].title:48} {_points(of_region):>8}  {', '.join(failed)}".rstrip()
            )
    counted = [entry for entry in entries if entry.region not in course.bonus_regions]
    extra = [entry for entry in entries if entry.region in course.bonus_regions]
    if counted:
        lines.append(f"{'total':10} {'':48} {_points(counted):>8}")
    if extra:
        lines.append(f"{'bonus':10} {'on top of the total':48} {_points(extra):>8}")
    return lines


def points_elsewhere(entries: Iterable[Entry], course: Course) -> dict[str, int]:
    """Return region -> points of its tests that are in files which this run has not opened."""
    shown: dict[str, int] = {}
    for entry in entries:
        shown[entry.region] = shown.get(entry.region, 0) + entry.max_points
    return {
        id: course.regions[id].points - points for id, points in shown.items() if points < course.regions[id].points
    }


def _points(entries: list[Entry]) -> str:
    return f"{sum(entry.points for entry in entries)}/{sum(entry.max_points for entry in entries)}"
