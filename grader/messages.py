"""What a student reads after a grading: for each region its most telling message in full, the others in a line.

A mistake often fails several tests of a region. The message that names the cause comes first; tests that say the same
are listed by name, and vaguer messages are cut short.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from course.table import Course
from grader.report import Entry

SEED = re.compile(r" \(inputs drawn with seed (\d+); --seed \d+ draws them again\)")
NUMBERS = re.compile(r"[-+]?\d[\d.,e+-]*")
WAITS = re.compile(r"builds on region (\S+), which is not passed yet\. What was seen: ", re.DOTALL)
PRINTED, LINE = 8, 160  # lines of what a rank printed, and characters of one
Printed = Mapping[str, Mapping[int, str]]  # test -> rank -> text
SHORT = 110  # characters of a message that is not the first of its region
RANKING = ("wrong", "crashed", "deadlocked", "timed out", "skipped", "not attempted")  # the most telling first
CAUSE = re.compile(r"\?|: (did|does|do|is|are|use|call|put|give|take|set|store|divide|each|every|only)\b")


def messages(
    entries: Sequence[Entry], course: Course, printed: Printed | None = None, all_ranks: bool = False
) -> list[str]:
    """The lines for all regions that were attempted and have not passed, in the order in which regions build on each
    other. None for regions that nobody has begun: the table says so."""
    lines: list[str] = []
    for region in course.in_order_of_needs():
        mine = [entry for entry in entries if entry.region == region]
        failed = [entry for entry in mine if entry.status not in ("passed", "not attempted") and not _follows(entry)]
        if failed:
            got, most = sum(entry.points for entry in mine), sum(entry.max_points for entry in mine)
            row = course.regions[region]
            lines.append(f"{region} {row.title}: {got} of {most} points ({row.file})")
            lines += of_region(region, failed)
            lines += prints([entry.id for entry in sorted(failed, key=_rank)], printed or {}, all_ranks)
    if seeds := dict.fromkeys(found[1] for entry in entries if (found := SEED.search(entry.message))):
        lines.append(f"inputs drawn with seed {', '.join(seeds)}; --seed draws them again")
    return lines


def prints(tests: Iterable[str], printed: Printed, all_ranks: bool) -> list[str]:
    """What the ranks printed in the first of these tests in which one did: rank 0 alone, unless all are asked for."""
    by_rank = next((printed[test] for test in tests if printed.get(test)), {})
    lines = []
    for rank, text in sorted(by_rank.items()):
        if rank == 0 or all_ranks:
            said = text.rstrip("\n").split("\n")
            lines.append(f"  rank {rank} printed:")
            lines += [f"    {line[:LINE]}" for line in said[:PRINTED]]
            if len(said) > PRINTED:
                lines.append(f"    ... {len(said) - PRINTED} more lines")
    if by_rank and not all_ranks and set(by_rank) != {0}:
        lines.append("  other ranks printed as well: --prints all shows them")
    return lines


def of_region(region: str, failed: Iterable[Entry]) -> list[str]:
    """One region's messages, the most telling in full and the others in a line each, with the tests that say them."""
    tests: dict[str, list[Entry]] = {}
    for entry in sorted(failed, key=_rank):
        tests.setdefault(NUMBERS.sub("#", entry.message.splitlines()[0]), []).append(entry)
    lines: list[str] = []
    for number, entries in enumerate(tests.values()):
        first, *rest = entries
        text = _waits(region, _without_seed(first)) or f"{first.status}: {_without_seed(first)}"
        if number:
            text = f"{textwrap.shorten(text, SHORT, placeholder=' ...')} [{_name(first)}]"
        lines += textwrap.indent(text, "  ").splitlines()
        if rest:
            lines.append(f"    the same: {', '.join(_name(entry) for entry in rest)}")
    return lines


def _follows(entry: Entry) -> bool:
    """Whether the test only waits for the others of its region: the table says so."""
    return entry.message.startswith("not counted: this test counts when")


def _rank(entry: Entry) -> tuple[int, bool]:
    return RANKING.index(entry.status) if entry.status in RANKING else 0, not CAUSE.search(entry.message)


def _without_seed(entry: Entry) -> str:
    return SEED.sub("", entry.message)


def _waits(region: str, message: str) -> str:
    """`p.3 waits for p.1; seen so far: ...` for a test that builds on a region that has not passed; "" for others."""
    found = WAITS.match(message)
    return f"{region} waits for {found[1]}; seen so far: {message[found.end() :]}" if found else ""


def _name(entry: Entry) -> str:
    return entry.id.rpartition("::")[2]
