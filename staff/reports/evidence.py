"""Compares what a report claims with the records in the archive, and says what does not fit. It takes no points.

A student has their own machine, so all of this can be forged with enough care. What is found is a reason to ask.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common.record import code_digest, with_fingerprint
from common.workers.processor import disturbance, other_programs
from course.table import Course
from handin.findings import Findings, check_comparable, cores, iteration_time
from handin.records import DAMAGED, Run
from handin.report import measurements, sections_of
from handin.words import SECTION, is_unchanged_outside
from staff.reports.handed_in import HandedIn

ROW_OF_RUN = re.compile(r"^\| .*`([^`|]+)` \|$", re.MULTILINE)
FASTER = 1.25  # than the cores allow: other programs may have slowed down the run that it is compared with
NOT_FROM_RECORDS_ALONE = {"traffic"}  # its table has what the student's expected.py computes


def what_does_not_fit(hand_in: HandedIn, others: Sequence[HandedIn], course: Course) -> list[str]:
    """Return a line for each contradiction; `others` are the hand-ins of the class."""
    found = [*hand_in.problems, *hand_in.runs.unusable]
    checks = [_claims(hand_in, course), *(_of_run(run, hand_in, others) for run in hand_in.runs.found)]
    for check in [*checks, _too_fast(hand_in)]:
        try:
            found += check
        except DAMAGED as error:
            found.append(f"a record cannot be compared ({error!r})")
    return list(dict.fromkeys(found))


def _claims(hand_in: HandedIn, course: Course) -> Iterator[str]:
    """Compare the report's tables with those that the records give."""
    if hand_in.report and not is_unchanged_outside(hand_in.report):
        yield "report.md was edited outside of the answers after it was built"
    names = {run.name for run in hand_in.runs.found}
    rows = {row[0]: row[1] for row in ROW_OF_RUN.finditer(SECTION.sub("", hand_in.report))}
    for name in sorted({*rows.values()} - names):
        yield f"missing: the report has numbers of the run {name}, and the archive has no record of it"
    with TemporaryDirectory() as scratch:
        parts = [part for part in sections_of(course) if part.key not in NOT_FROM_RECORDS_ALONE]
        computed = "".join(measurements(part, hand_in.runs, Findings(), Path(scratch)) for part in parts)
    kinds = {run.name: run.kind for run in hand_in.runs.found}
    for row, name in rows.items():
        if name in names and kinds[name] != "task4" and row not in computed:
            right = [line[0] for line in ROW_OF_RUN.finditer(computed) if line[1] == name]
            like = [line for line in right if line.split("|")[1:2] == row.split("|")[1:2]]
            yield f"the report says {row}; the records give {' or '.join(like or right) or 'no such row'}"


def _of_run(run: Run, hand_in: HandedIn, others: Sequence[HandedIn]) -> Iterator[str]:
    """Check each record of a run: edited, another student's, made with other code."""
    yield from (f"{run.name}: {problem}" for problem in run.problems)
    for record in run.records:
        whole = {key: record[key] for key in record if key != "losses"}  # which read_run adds
        if "fingerprint" not in whole:
            yield f"{run.name}: rank{record['rank']}.json has no fingerprint"
        elif with_fingerprint(whole)["fingerprint"] != whole["fingerprint"]:
            yield f"{run.name}: rank{record['rank']}.json was edited after the run"
        for other in others:
            theirs = [_times(of) for their in other.runs.found for of in their.records if other is not hand_in]
            if _times(record) in theirs:
                yield f"{run.name}: rank{record['rank']}.json has the same times as a record of {other.name}"
    for file, digest in run.records[0].get("code", {}).items():
        own = hand_in.code.get(file)
        if own is not None and code_digest(own) != digest:
            whose = [of.name for of in others if of.code.get(file) and code_digest(of.code[file]) == digest]
            of_whom = f": it is that of {', '.join(whose)}" if whose else ""
            yield f"{run.name}: made with another {file} than the one in the archive{of_whom}"


def _times(record: dict) -> list[float]:
    return [step["seconds"] for step in record["iterations"]]


def _too_fast(hand_in: HandedIn) -> Iterator[str]:
    """Find runs that the cores of their machine do not allow."""
    for run in hand_in.runs.found:
        for record in run.records:
            used, limit = record["processor"]["own"], record["processor"]["seconds"] * cores(run)
            if used > 1.05 * limit or sum(_times(record)) > 1.05 * record["processor"]["seconds"]:
                what = "more processor time, or longer steps, than its run had"
                yield f"impossible: {run.name}: rank {record['rank']} has {what}"
    for one in hand_in.runs.of("task1")[:1]:
        for kind in ("task2a", "task2b", "task3"):
            for run in hand_in.runs.of(kind)[:1]:
                alone, time, bound = iteration_time(one), iteration_time(run), min(run.workers, cores(run))
                fair = check_comparable(Findings(), "", one.setting, run.setting)
                if fair and alone and time and alone.mean / time.mean > FASTER * bound:
                    factor = f"{alone.mean / time.mean:.2f} times as fast as {one.name} on {bound} cores"
                    said = disturbance(other_programs([record["processor"] for record in one.records]))
                    busy = f" (its record says: {said.removeprefix('disturbed: ')})" if said else ""
                    yield f"impossible, unless {one.name} was disturbed{busy}: {run.name} is {factor}"
