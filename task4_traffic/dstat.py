"""Reads the CSV files of `dstat`, `dool` and `pcp dstat` (option --output).

Converts them to samples like those that counters.py takes from the kernel.

A file holds one or several runs, because all three tools append to an existing file. A run has lines of description, a
line of groups ("net/eth0"), a line of names ("recv"), and one row per second. A row holds *rates*: means over the time
since the previous row. The tool, its version and its options say whether these are bytes or bits per second. None of
the tools includes `lo` in net/total. dstat's first row does not belong to the run: its interval begins when the machine
started.
"""

import contextlib
import csv
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from common.errors import InputError
from task4_traffic.sample import Sample

DATES = ("%d %b %Y %H:%M:%S", "%Y-%m-%d %H:%M:%S")
TITLE = re.compile(r"(dstat|dool|pcp-dstat) (\S+) CSV output", re.IGNORECASE)
UNITS = {"bytes": 1.0, "bits": 1 / 8}  # bytes in one unit
DOOL_WRITES_BITS = (1, 3)  # since this version; earlier ones write bytes even with --bits


class DstatRow(NamedTuple):
    """A line of values, with its number in the file."""

    line: int
    values: list[str]


@dataclass
class ToolRun:
    """One run of the tool in a file."""

    tool: str = ""  # dstat, dool or pcp-dstat; "" if no title line came before the run
    version: str = ""
    command: str = ""
    date: datetime | None = None
    groups: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[DstatRow] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """Return the words of the command line, without the name of the program."""
        words = shlex.split(self.command) if self.command.count('"') % 2 == 0 else self.command.split()
        return words[1:]

    @property
    def seconds_per_row(self) -> float:
        """Return the delay on the command line: the last word, or the one before it if the row count is last."""
        numbers: list[float] = []
        for word in reversed(self.words):
            if not re.fullmatch(r"\d+(\.\d+)?", word):
                break
            numbers.insert(0, float(word))
        return numbers[0] if numbers and numbers[0] > 0 else 1.0

    @property
    def unit(self) -> str | None:
        """Return "bytes" or "bits"; None if the file does not say which tool wrote the run."""
        if self.tool in ("dstat", "pcp-dstat"):
            return "bytes"  # their --bits changes what is shown, not what is written
        if self.tool != "dool":
            return None
        if tuple(int(number) for number in re.findall(r"\d+", self.version)[:2]) < DOOL_WRITES_BITS:
            return "bytes"
        unit = "bits"
        for word in self.words:  # the last of these options counts; dool accepts them shortened: --byte
            if word == "--dstat" or (len(word) > 4 and "--bytes".startswith(word)):
                unit = "bytes"
            elif len(word) > 3 and "--bits".startswith(word):
                unit = "bits"
        return unit


def read_dstat(path: Path, interface: str = "total", unit: str | None = None) -> list[list[Sample]]:
    """Return the samples of every run in the file that has rows; rates are multiplied by their time and added up.

    Args:
        path: a file that dstat, dool or pcp dstat wrote with --output.
        interface: whose columns are read.
        unit: "bytes" or "bits", if the file does not say it or if you know better.

    Raises:
        InputError: the file is from another program, has a row that cannot be read, has no column for the interface,
            or does not say its unit.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a file of dstat --output or dool --output") from None
    runs = [run for run in split_runs(text) if run.rows]
    if not runs:
        raise InputError(f"{path}: expected rows of dstat --output or dool --output, got none")
    return [samples(run, interface, path, unit) for run in runs]


def split_runs(text: str) -> Iterator[ToolRun]:
    """Cut a file into its runs, each of which begins with a line `Host:`; a tool that appends writes no title.

    A last row that is too short is left out: the tool was stopped while it wrote.
    """
    tool, version = "", ""
    run: ToolRun | None = None
    for number, line in enumerate(text.splitlines(), 1):
        row = next(csv.reader([line]), [])
        first = row[0].strip() if row else ""
        if title := TITLE.match(first):
            tool, version = title[1].lower(), title[2]
        elif first == "Host:":
            if run:
                yield _without_cut_row(run)
            run = ToolRun(tool, version)
        elif run is None or not any(row) or first == "Author:":
            continue
        elif first == "Cmdline:":
            run.command = row[1]
            run.date = _parse(row[-1]) if "Date:" in row else None
        elif not run.groups:
            run.groups = row
        elif not run.names:
            run.names = row
        else:
            run.rows.append(DstatRow(number, row))
    if run:
        yield _without_cut_row(run)


def samples(run: ToolRun, interface: str, path: Path, unit: str | None = None) -> list[Sample]:
    """Return counters as the kernel would have shown them at the time of every row; they are 0 at the first row."""
    unit = unit or run.unit
    if not unit:
        raise InputError(
            f"{path}: expected a first line such as 'dool 1.3.4 CSV output', got none before line {run.rows[0].line}; "
            "without it the unit is not known: pass --unit bytes or --unit bits"
        )
    received, sent = columns(run, interface, path)
    times = row_times(run, path)
    readings = [Sample(times[0], 0, 0)]
    totals = [0.0, 0.0]
    for row, begin, end in zip(run.rows[1:], times, times[1:], strict=False):
        for k, column in enumerate((received, sent)):
            totals[k] += number_in(row, column, run, path) * UNITS[unit] * (end - begin)
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
    by_name = {
        name.rpartition(":")[2]: column
        for column, (group, name) in enumerate(zip(groups, run.names, strict=False))
        if group == f"net/{interface}"
    }
    if not {"recv", "send"} <= set(by_name):
        has = ", ".join(group.removeprefix("net/") for group in known) or "no network at all (start it with --net)"
        # pcp dstat writes the names that fit into the terminal, and all values.
        narrow = "; the terminal was too narrow for more names" if len(run.rows[0].values) > len(run.names) else ""
        raise InputError(f"{path}: expected the interface {interface!r} in it, got {has}{narrow}")
    return by_name["recv"], by_name["send"]


def number_in(row: DstatRow, column: int, run: ToolRun, path: Path) -> float:
    """Return the value of a column. Raises InputError, with the line, if the row does not fit its names."""
    longer_is_fine = run.tool == "pcp-dstat"  # see `columns`
    if len(row.values) < len(run.names) or (len(row.values) > len(run.names) and not longer_is_fine):
        raise InputError(
            f"{path}, line {row.line}: expected {len(run.names)} values, one for each name, got {len(row.values)}; "
            "remove the line, or record again without commas in the time format"
        )
    with contextlib.suppress(ValueError):
        value = float(row.values[column])
        if math.isfinite(value) and value >= 0:
            return value
    raise InputError(f"{path}, line {row.line}: expected a number for {run.names[column]}, got {row.values[column]!r}")


def row_times(run: ToolRun, path: Path) -> list[float]:
    """Return the time of every row, in seconds since 1970.

    Rows are evenly spaced: the header has the date of the first one, the command line the delay. With a column `epoch`,
    the first time comes from there, and so does one that shows that rows are missing. Otherwise the column is not used:
    it has whole seconds, and sometimes skips a second and writes the next one twice (44, 45, 47, 47).
    """
    delay = run.seconds_per_row
    if "epoch" not in run.names:
        start = run.date.timestamp() if run.date else 0.0
        return [start + delay * n for n in range(len(run.rows))]
    column = run.names.index("epoch")
    clock = [number_in(row, column, run, path) for row in run.rows]
    times = [clock[0]]
    for shown in clock[1:]:
        even = times[-1] + delay
        times.append(shown if shown - even > max(1.5, 0.5 * delay) else even)
    return times


def _without_cut_row(run: ToolRun) -> ToolRun:
    if run.rows and len(run.rows[-1].values) < len(run.names):
        run.rows.pop()
    return run


def _parse(text: str) -> datetime | None:
    text = re.sub(r" [A-Z]{2,5}$", "", text.strip())  # remove the name of the time zone: times are this machine's own
    for form in DATES:
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, form)
    return None
