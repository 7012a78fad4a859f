"""Chooses what a student reads after a grading: each region's most telling verdict in full, the others in a line.

A mistake often fails several tests of a region. The verdict that names the cause comes first; tests that found the same
are listed by name, and vaguer verdicts are cut short.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from course.table import Course
from grader.report import Entry

PRINTED, ALL_PRINTED, LINE = 8, 200, 160  # lines of what a rank printed: usually, with --prints all; characters of one
Printed = Mapping[str, Mapping[int, str]]  # test -> rank -> text
SHORT = 200  # characters of a message that is not the first of its region
# The most telling first.
RANKING = ("wrong", "crashed", "deadlocked", "timed out", "skipped", "not graded here", "not attempted")


def messages(
    entries: Sequence[Entry],
    course: Course,
    printed: Printed | None = None,
    all_ranks: bool = False,
    names: bool = True,
) -> list[str]:
    """Return the lines for all regions that were attempted and have not passed, in the order in which regions build on
    each other. Regions that nobody has begun have none: the table says so. `names`: with the names of the tests."""
    lines: list[str] = []
    for region in course.in_order_of_needs():
        of_this = [entry for entry in entries if entry.region == region]
        failed = [entry for entry in of_this if tells(entry)]
        if failed:
            got, most = sum(entry.points for entry in of_this), sum(entry.max_points for entry in of_this)
            row = course.regions[region]
            lines.append(f"{region} {row.title}: {got}/{most} points ({row.file})")
            lines += of_region(failed, names)
            lines += prints([entry.id for entry in sorted(failed, key=_rank)], printed or {}, all_ranks)
    return [*lines, *(seed_line(entries) if names else [])]


def seed_line(entries: Iterable[Entry]) -> list[str]:
    """Return a line with the seed that the inputs of these tests were drawn with; none if no verdict has one."""
    seeds = {entry.seed: str(entry.seed) for entry in entries if entry.seed is not None}
    if not seeds:
        return []
    again = next(iter(seeds.values())) if len(seeds) == 1 else "N"
    return [f"inputs were drawn with seed {', '.join(seeds.values())}; use --seed {again} to repeat them"]


def prints(tests: Iterable[str], printed: Printed, all_ranks: bool) -> list[str]:
    """Return the output of the first of these tests that printed: rank 0's alone, unless all ranks are asked for."""
    by_rank = next((printed[test] for test in tests if printed.get(test)), {})
    lines = []
    for rank, text in sorted(by_rank.items()):
        if rank == 0 or all_ranks:
            printed_lines = text.rstrip("\n").split("\n")
            lines.append(f"  rank {rank} printed:")
            most = ALL_PRINTED if all_ranks else PRINTED
            lines += [f"    {line if len(line) <= LINE else f'{line[:LINE]} ...'}" for line in printed_lines[:most]]
            if len(printed_lines) > most:
                more = "" if all_ranks else "; use --prints all to see more"
                lines.append(f"    ... {len(printed_lines) - most} more lines{more}")
    if by_rank and not all_ranks and set(by_rank) != {0}:
        lines.append("  other ranks also printed; use --prints all to see it")
    return lines


def of_region(failed: Iterable[Entry], names: bool = True) -> list[str]:
    """Return one region's messages: the most telling in full, each other in one line with the test that says it."""
    lines: list[str] = []
    for number, (first, *rest) in enumerate(by_kind(failed)):
        text = in_a_line(first) if number else in_full(first)
        text += f" [{name(first)}]" if number and names else ""
        lines += textwrap.indent(text, "  ").splitlines()
        if rest and names:
            lines.append(f"    same cause: {', '.join(map(name, rest))}")
    return lines


def by_kind(failed: Iterable[Entry]) -> list[list[Entry]]:
    """Group the failed tests of one region by the mistake that they found, the most telling group first."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(failed, key=_rank):
        groups.setdefault(entry.kind, []).append(entry)
    return list(groups.values())


def in_full(entry: Entry) -> str:
    """Return a failure in words; for a test that waits for another region, which one it is."""
    if entry.waits:
        return f"{entry.region} depends on {entry.first}; observed so far: {entry.text}"
    return f"{entry.status}: {entry.text}"


def in_a_line(entry: Entry) -> str:
    """Return a failure in words, shortened to one line."""
    return textwrap.shorten("; ".join(map(str.strip, in_full(entry).split("\n"))), SHORT, placeholder=" ...")


def tells(entry: Entry) -> bool:
    """Return whether a test has something to say: attempted, not passed, and not only waiting for the others."""
    return entry.status not in ("passed", "not attempted") and not entry.follows


def name(entry: Entry) -> str:
    """Return a test's name without its file."""
    return entry.id.rpartition("::")[2]


def _rank(entry: Entry) -> tuple[bool, bool, int]:
    """Return a sort key: judged before not judged, then those that name a cause, then by status."""
    judged = entry.status in RANKING[: RANKING.index("skipped")]
    return not judged, not entry.cause, RANKING.index(entry.status)
