"""What comes up while the report is written, and what figures have to pass before the report believes them."""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.workers.processor import disturbance, other_programs
from handin.records import ITERATIONS, Run, differences

BLOCK = 5
NOT_OF_TIMES = ("dropout", "learning rate", "steps of the schedule", "workers")  # two times may differ in these


@dataclass
class Findings:
    """missing: what is missing, and the command that makes it."""

    missing: list[tuple[str, str]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def miss(self, what: str, command: str) -> None:
        self.missing.append((what, command))

    def doubt(self, text: str) -> None:
        if text not in self.doubts:
            self.doubts.append(text)


@dataclass(frozen=True)
class MeasuredRun:
    """A mean and its error; None: it is of one value, so nobody knows."""

    mean: float
    error: float | None


def text(measured: MeasuredRun | None, digits: int) -> str:
    """Return a cell of a table, such as "0.1000 ± 0.0002", which is not broken into two lines."""
    if measured is None:
        return "–"
    deviation = "" if measured.error is None else f"\u00a0±\u00a0{measured.error:.{digits}f}"
    return f"{measured.mean:.{digits}f}{deviation}"


def table(head: str, rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown. head: the columns' names, separated as they will be: "task | workers"."""
    if not rows:
        return "No run.\n\n"
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in [head, " | ".join("---" for _ in head.split(" | ")), *lines]) + "\n\n"


def iteration_time(run: Run) -> MeasuredRun | None:
    """Return the mean seconds of iterations 2 to 40 with its standard error; None if there are none.

    The error is that of the means of blocks of iterations. Neighbours are alike, since whatever else the machine does
    takes longer than one iteration: single iterations would promise too much.
    """
    seconds = run.seconds[1:ITERATIONS]
    blocks = [statistics.fmean(seconds[i : i + BLOCK]) for i in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    error = statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None
    return MeasuredRun(statistics.fmean(seconds), error) if seconds else None


def check_time(run: Run, findings: Findings, least: int = ITERATIONS) -> None:
    """Doubt the times of a run with fewer than `least` iterations, or during which other programs were busy."""
    if len(run.seconds) < least:
        findings.doubt(f"{run.name}: only {len(run.seconds)} iterations; the course asks for {least}")
    on_one = len(run.machines) == 1 and len(run.records) == run.workers  # a machine sees only its own programs
    if on_one and (warning := disturbance(other_programs([record["processor"] for record in run.records]))):
        findings.doubt(f"{run.name}: {warning}; run it again")


def cores(run: Run) -> float:
    """Return how many cores the workers of a run shared; infinite where this is not known, as on GPUs."""
    if len(run.machines) > 1 or run.setting["device"] != "cpu":
        return math.inf
    return run.records[0]["host"].get("cores") or math.inf


def check_comparable(
    findings: Findings, what: str, one: dict, other: dict, but: Collection[str] = NOT_OF_TIMES
) -> bool:
    """Return whether two settings are the same, apart from `but`; if not, say why `what` cannot be compared."""
    if reasons := differences(one, other, but):
        findings.doubt(f"{what} cannot be compared: {'; '.join(reasons)}")
    return not reasons


def ratio(
    findings: Findings, what: str, top: MeasuredRun, bottom: MeasuredRun, bound: float = math.inf, of: str = ""
) -> list[str]:
    """Return two cells: top / bottom, and a note on it. bound: the largest ratio that is possible, given by `of`."""
    value, note = top.mean / bottom.mean, ""
    noise = 2 * math.hypot(top.error, bottom.error) if top.error is not None and bottom.error is not None else -1
    if value > bound:
        note = f"above {of}, {bound:.4g}"
        findings.doubt(f"{what} is {value:.2f}, {note}: one of the two runs was disturbed, or did different work")
    elif abs(top.mean - bottom.mean) <= noise:
        note = "within the noise"
        findings.doubt(f"{what} is {value:.2f}, {note}: do not call one of the two faster")
    return [f"{value:.2f}", note]
