"""Chooses what a student reads after a grading: each region's most telling message in full, the others in a line.

A mistake often fails several tests of a region. The message that names the cause comes first; tests that say the same
are listed by name, and vaguer messages are cut short.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from course.table import Course
from grader.report import Entry

SEED = re.compile(r" \(inputs drawn with seed (\d+); use --seed \d+ to repeat them\)")
NUMBERS = re.compile(r"[-+]?\d[\d.,e+-]*")
ONE_RANK = re.compile(r"\branks? #(?:, #)* (call|join|wait)s?\b")
WAITS = re.compile(r"depends on region (\S+), which does not pass yet\. Observed: ", re.DOTALL)
PRINTED, ALL_PRINTED, LINE = 8, 200, 160  # lines of what a rank printed: usually, with --prints all; characters of one
Printed = Mapping[str, Mapping[int, str]]  # test -> rank -> text
SHORT = 200  # characters of a message that is not the first of its region
# The most telling first.
RANKING = ("wrong", "crashed", "deadlocked", "timed out", "skipped", "not graded here", "not attempted")
CAUSE = re.compile(
    r"\?|: (add|all|append|average|build|call|check|convert|create|did|divide|do|does|each|every|fine-tune|give|is|are|"
    r"keep|leave|let|limit|make|only|pass|put|record|remove|return|seed|send|set|shuffle|start|store|"
    r"take|the first time|train|use|wait|wrap)\b"
)


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
    """Return a line with the seed that the inputs of these tests were drawn with; none if no message has one."""
    seeds = dict.fromkeys(match[1] for entry in entries if (match := SEED.search(entry.message)))
    if not seeds:
        return []
    again = next(iter(seeds)) if len(seeds) == 1 else "N"
    return [f"inputs were drawn with seed {', '.join(seeds)}; use --seed {again} to repeat them"]


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
    for number, (first, *rest) in enumerate(by_reason(failed)):
        text = in_a_line(first) if number else in_full(first)
        text += f" [{name(first)}]" if number and names else ""
        lines += textwrap.indent(text, "  ").splitlines()
        if rest and names:
            lines.append(f"    same cause: {', '.join(map(name, rest))}")
    return lines


def by_reason(failed: Iterable[Entry]) -> list[list[Entry]]:
    """Group the failed tests of one region whose messages differ only in numbers, the most telling group first.

    A message that other messages repeat within their own text is the cause.
    """
    groups: dict[str, list[Entry]] = {}
    entries = list(failed)
    words = {entry.id: waits_for(entry)[1].strip() for entry in entries}
    repeated = {id: sum(text in other and text != other for other in words.values()) for id, text in words.items()}
    for entry in sorted(entries, key=lambda entry: (-repeated[entry.id], *_rank(entry))):
        groups.setdefault(reason(entry), []).append(entry)
    return list(groups.values())


def reason(entry: Entry) -> str:
    """Return the first line of a message without what differs between runs: numbers, and how many ranks it is about."""
    return ONE_RANK.sub(r"rank # \1", NUMBERS.sub("#", entry.message.partition("\n")[0]))


def in_full(entry: Entry) -> str:
    """Return a failure's status and message; for a test that waits for another region, which one it is."""
    need, message = waits_for(entry)
    return f"{entry.region} depends on {need}; observed so far: {message}" if need else f"{entry.status}: {message}"


def in_a_line(entry: Entry) -> str:
    """Return a failure's status and message, shortened to one line."""
    return textwrap.shorten(re.sub(r"\n\s*", "; ", in_full(entry)), SHORT, placeholder=" ...")


def waits_for(entry: Entry) -> tuple[str, str]:
    """Return the region that a test waits for, "" for none, and its message without that and without the seed."""
    message = SEED.sub("", entry.message)
    match = WAITS.match(message)
    return (match[1], message[match.end() :]) if match else ("", message)


def tells(entry: Entry) -> bool:
    """Return whether a test has something to say: attempted, not passed, and not only waiting for the others."""
    return entry.status not in ("passed", "not attempted") and not follows(entry)


def follows(entry: Entry) -> bool:
    """Return whether the test only waits for the others of its region."""
    return entry.message.startswith("not counted yet: this test counts only when")


def name(entry: Entry) -> str:
    """Return a test's name without its file."""
    return entry.id.rpartition("::")[2]


def _rank(entry: Entry) -> tuple[bool, bool, int]:
    """Return a sort key: judged before not judged, then a first line that names the cause, then by status."""
    judged = entry.status in RANKING[: RANKING.index("skipped")]
    cause = CAUSE.search(entry.message.partition("\n")[0])
    return not judged, not cause, RANKING.index(entry.status) if entry.status in RANKING else 0
