"""The people of a course: reads roster.csv, and writes grades.csv, which has a row for each of them.

    id,name,partners,due,extension,submitted
    ab1234,Ada Byron,cd5678,2026-02-13T23:59:00-05:00,,2026-02-14T09:30:00-05:00
    cd5678,Carl Dai,,,2026-02-20T23:59:00-05:00,

Only `id` must be there: whatever the names of hand-ins contain, such as NetIDs or a platform's numbers. A hand-in
belongs to those whose ids are in its name; of ids in each other, to the longest. One without an id belongs to the
person with whose name it begins, as Canvas ("byronada_4711_...") and Moodle ("Ada Byron_4711_...") write it. Who has
none gets a partner's. `submitted` is the platform's own time, which Gradescope's export has anyway. The date that
counts and the time after it are shown; nothing is deducted.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

from common.errors import InputError
from staff.grade.gradebook import GradedHandIn, write_table
from staff.grade.texts import safe_cell

POINTS = ("score", "max_score", "bonus", "max_bonus", "report", "max_report")
UNREADABLE = "it cannot be read: see gradebook.csv"
HEAD = ("id", "name", *POINTS, "hand-in", "due", "late", "notes")


@dataclass(frozen=True)
class Person:
    """A row of roster.csv. `partners` is a list of ids with blanks between them."""

    id: str
    name: str = ""
    partners: str = ""
    due: str = ""
    extension: str = ""
    submitted: str = ""

    @property
    def counts(self) -> str:
        """The date that counts."""
        return self.extension or self.due

    def late(self, submitted: str) -> str:
        """Return the time after the date that counts, such as "1 d 2 h"; empty if it is not known, or in time.

        `submitted` is the time of the hand-in, where a platform's export has it.
        """
        submitted = self.submitted or submitted
        if not self.counts or not submitted:
            return ""
        after = datetime.fromisoformat(submitted) - datetime.fromisoformat(self.counts)
        hours = math.ceil(after.total_seconds() / 3600)
        return f"{hours // 24} d {hours % 24} h" if hours > 0 else ""


def read_roster(path: Path) -> list[Person]:
    """Return the rows of a roster.

    Raises:
        InputError: no table with a column `id`, an unknown column, an id that is missing or there twice, a partner who
            is nobody's id, or a date without a time zone.
    """
    known = [field.name for field in fields(Person)]
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), restkey="more"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: expected a table in UTF-8, with commas between its columns; got {error}") from None
    if strange := {key for row in rows for key in row} - {*known}:
        raise InputError(f"{path}: unknown column {min(strange)!r}; expected some of {', '.join(known)}")
    people = [Person(**{key: (value or "").strip() for key, value in row.items()}) for row in rows if "id" in row]
    ids = [person.id for person in people]
    if not people or "" in ids or len(set(map(str.casefold, ids))) < len(ids):
        raise InputError(f"{path}: expected a column id with another id in each row, got {', '.join(ids) or 'none'}")
    for person in people:
        if others := set(person.partners.split()) - {*ids}:
            raise InputError(f"{path}: {person.id} has the partner {min(others)}, which is no id in this table")
        for date in filter(None, (person.due, person.extension, person.submitted)):
            _check_date(date, f"{path}: {person.id}")
    return people


def _check_date(date: str, where: str) -> None:
    try:
        has_zone = datetime.fromisoformat(date).tzinfo is not None
    except ValueError:
        has_zone = False
    if not has_zone:
        raise InputError(f"{where}: expected a time with its zone, such as 2026-02-13T23:59:00-05:00; got {date!r}")


def write_grades(path: Path, people: Sequence[Person], rows: Sequence[GradedHandIn]) -> None:
    """Write a row for each person, and then one for each hand-in that is nobody's."""
    own = {person.id: [row for row in rows if person.id in owners(row.name, people)] for person in people}
    lines = [_line(person, own, people) for person in people]
    write_table(path, HEAD, [*lines, *_of_nobody(rows, people)])


def owners(hand_in: str, people: Sequence[Person]) -> set[str]:
    """Return the ids of those whose hand-in this is by its name."""
    found = [
        (person.id, *match.span())
        for person in people
        for match in re.finditer(rf"(?<![^\W_]){re.escape(person.id)}(?![^\W_])", hand_in, re.IGNORECASE)
    ]

    def is_part_of_another_id(start: int, end: int) -> bool:
        return any(begin <= start and end <= stop and stop - begin > end - start for _, begin, stop in found)

    ids = {id for id, *span in found if not is_part_of_another_id(*span)}
    begins = "".join(re.findall(r"^\D+", _plain(hand_in)))
    by_name = {person.id for person in people if {begins, begins.removesuffix("late")} & _names(person)}
    return ids or (by_name if len(by_name) == 1 else set())  # two people of one name: nothing is guessed


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _names(person: Person) -> set[str]:
    """A name with its last word last, first, or in front of a comma as in a list, without what is between the words."""
    words = person.name.replace(",", " ").split()
    return {_plain("".join(order)) for order in (words, words[-1:] + words[:-1], words[1:] + words[:1]) if words}


def coverage(people: Sequence[Person], hand_ins: Sequence[str]) -> str:
    """Return a line that names those without a hand-in, their own or a partner's, and hand-ins that are nobody's."""
    own = {name: owners(name, people) for name in hand_ins}
    with_one = set[str]().union(*own.values())
    without = [person.id for person in people if not {person.id, *_partners(person, people)} & with_one]
    nobodys = [name for name, ids in own.items() if not ids]
    return f"roster: without a hand-in: {_named(without)}; hand-ins of nobody in it: {_named(nobodys)}"


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else "none"


def _partners(person: Person, people: Sequence[Person]) -> set[str]:
    return {*person.partners.split(), *(other.id for other in people if person.id in other.partners.split())}


def _line(person: Person, own: dict[str, list[GradedHandIn]], people: Sequence[Person]) -> list[str | float]:
    partners = _partners(person, people)
    theirs = [row for id in sorted(partners) for row in own[id]]
    hand_ins = own[person.id] or theirs
    best = max(hand_ins, key=lambda row: row.report["score"] + row.report.get("bonus", 0), default=None)
    notes = [f"with {' '.join(sorted(partners))}"] if partners else []
    names = list(dict.fromkeys(row.name for row in (*own[person.id], *theirs)))
    notes += [f"the best of {', '.join(row.name for row in hand_ins)}"] if len(hand_ins) > 1 else []
    notes += ["partners have other hand-ins"] if own[person.id] and len(names) > len(own[person.id]) else []
    notes += ["extension"] if person.extension else []
    notes += [UNREADABLE] if best and best.run.get("unreadable") else []
    notes += ["Canvas says late"] if best and re.search(r"_LATE_\d", best.name) else []
    if best is None:
        result: list[str | float] = [*[""] * len(POINTS), "", person.counts, ""]
        notes = ["no hand-in", *notes]
    else:
        late = person.late(best.run.get("submitted", ""))
        result = [*_points(best), safe_cell(best.name), person.counts, late]
    return [safe_cell(person.id), safe_cell(person.name), *result, safe_cell("; ".join(notes))]


def _points(row: GradedHandIn) -> list[float | str]:
    return [*(int(row.report.get(key, 0)) for key in POINTS[:4]), *row.of_report]


def _of_nobody(rows: Sequence[GradedHandIn], people: Sequence[Person]) -> Iterator[list[str | float]]:
    for row in rows:
        if not owners(row.name, people):
            yield ["", "", *_points(row), safe_cell(row.name), "", "", "no id of the roster is in its name"]
