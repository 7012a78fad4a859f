"""Reads files of `dstat --output` and `dool --output`.

Converts them to samples like those that counters.py takes from the kernel.

Such a file holds one or several runs, one after the other, because both tools append. A run has lines of description, a
line of groups ("net/eth0"), a line of names ("recv"), and one row per second. A row holds *rates*: means over the time
since the previous row. dstat writes bytes per second; dool writes bits per second unless you pass --bytes. Neither
includes `lo` in net/total. dstat's first row does not belong to the run: its interval begins when the machine started.
"""

import contextlib
import csv
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from common.errors import InputError
from task4_traffic.counters import Sample

DATES = ("%d %b %Y %H:%M:%S", "%Y-%m-%d %H:%M:%S")


@dataclass
class ToolRun:
    """One run of the tool in a file."""

    tool: str  # dstat or dool
    command: str = ""
    date: datetime | None = None
    groups: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    @property
    def seconds_per_row(self) -> float:
        """Return the delay on the command line: the last word, or the one before it if the row count is last."""
        words = shlex.split(self.command) if self.command.count('"') % 2 == 0 else self.command.split()
        numbers: list[float] = []
        for word in reversed(words[1:]):
            if not re.fullmatch(r"\d+(\.\d+)?", word):
                break
            numbers.insert(0, float(word))
        return numbers[0] if numbers and numbers[0] > 0 else 1.0

    @property
    def bytes_per_unit(self) -> float:
        in_bits = self.tool == "dool" and "--bytes" not in self.command.split()
        return 1 / 8 if in_bits else 1.0


def read_dstat(path: Path, interface: str = "total") -> list[list[Sample]]:
    """Return the samples of every run in the file that has rows; rates are multiplied by their time and added up.

    Raises:
        InputError: the file is not from dstat or dool, or it has no column for the interface.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a file of dstat --output or dool --output") from None
    runs = [run for run in split_runs(text) if run.rows]
    if not runs:
        raise InputError(f"{path}: expected rows of dstat --output or dool --output, got none")
    return [samples(run, interface, path) for run in runs]


def split_runs(text: str) -> Iterator[ToolRun]:
    """Cut a file into its runs. An incomplete row (the tool was killed while it wrote) is left out."""
    run: ToolRun | None = None
    for row in csv.reader(text.splitlines()):
        first = row[0] if row else ""
        if title := re.match(r"(dstat|dool) \S+ CSV output", first, re.IGNORECASE):
            if run:
                yield run
            run = ToolRun(title[1].lower())
        elif run is None or not row or first in ("Author:", "Host:"):
            continue
        elif first == "Cmdline:":
            run.command = row[1]
            run.date = _parse(row[-1]) if "Date:" in row else None
        elif not run.groups:
            run.groups = [group or "" for group in row]
        elif not run.names:
            run.names = row
        elif len(row) == len(run.names):
            run.rows.append(row)
    if run:
        yield run


def samples(run: ToolRun, interface: str, path: Path) -> list[Sample]:
    """Return counters as the kernel would have shown them at the time of every row; they are 0 at the first row."""
    received, sent = columns(run, interface, path)
    times = row_times(run)
    readings = [Sample(times[0], 0, 0)]
    totals = [0.0, 0.0]
    for row, begin, end in zip(run.rows[1:], times, times[1:], strict=False):
        for k, column in enumerate((received, sent)):
            totals[k] += float(row[column]) * run.bytes_per_unit * (end - begin)
        readings.append(Sample(end, round(totals[0]), round(totals[1])))
    return readings


def columns(run: ToolRun, interface: str, path: Path) -> tuple[int, int]:
    """Return the columns that hold the interface's rates. A group's name is only above its first column."""
    groups, current = [], ""
    for group in run.groups:
        current = group or current
        groups.append(current)
    groups += [current] * (len(run.names) - len(groups))
    known = list(dict.fromkeys(group for group in groups if group.startswith("net/")))
    places = [place for place, group in enumerate(groups) if group == f"net/{interface}"]
    by_name = {run.names[place].rpartition(":")[2]: place for place in places if place < len(run.names)}
    if not {"recv", "send"} <= set(by_name):
        has = ", ".join(group.removeprefix("net/") for group in known) or "no network at all (start it with --net)"
        raise InputError(f"{path}: expected the interface {interface!r} in it, got {has}")
    return by_name["recv"], by_name["send"]


def row_times(run: ToolRun) -> list[float]:
    """Return the time of every row, in seconds since 1970.

    Rows are evenly spaced: the header has the date of the first one, the command line the delay. With a column `epoch`,
    the first time comes from there, and so does one that shows that rows are missing. Otherwise the column is not used:
    it has whole seconds, and sometimes skips a second and writes the next one twice (44, 45, 47, 47).
    """
    delay = run.seconds_per_row
    if "epoch" not in run.names:
        start = run.date.timestamp() if run.date else 0.0
        return [start + delay * n for n in range(len(run.rows))]
    place = run.names.index("epoch")
    clock = [float(row[place]) for row in run.rows]
    times = [clock[0]]
    for shown in clock[1:]:
        even = times[-1] + delay
        times.append(shown if shown - even > max(1.5, 0.5 * delay) else even)
    return times


def _parse(text: str) -> datetime | None:
    text = re.sub(r" [A-Z]{2,5}$", "", text.strip())  # remove the name of the time zone: times are this machine's own
    for form in DATES:
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, form)
    return None
