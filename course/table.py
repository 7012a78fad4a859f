"""Reads course.toml, the one table an instructor edits, and says in one line each what is wrong with it.

Its first lines choose among the rows below: tasks, bonus lessons, points. A region of the rows that is not chosen is
given out solved. The student version of course.toml has no staff tables; everything about them is then empty.
"""

import fnmatch
import itertools
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_origin

from common.errors import InputError
from common.paths import ROOT

STEPS_OF_A_HINT = 3
CARRIED = ("warning", "points")
_TABLES = ("task", "regions", "imports", "handout")
Row = TypeVar("Row")
NOT_GRADED_HERE = "not graded here"  # status of a test that needs what this machine does not have


@dataclass(frozen=True)
class Task:
    """One part of the course; `submitted_as` is the folder name that hand-ins use. Of a bonus task, the regions are on
    top of the total, except those that the course grades."""

    id: str
    title: str
    folder: str
    submitted_as: str
    readme: str
    tests: tuple[str, ...]
    marker: str
    bonus: bool = False
    whole: tuple[str, ...] = ()  # test files that run whole scripts: not opened for one region alone


@dataclass(frozen=True, kw_only=True)
class RegionRow:
    """One region: its home file, integer points, the regions it directly builds on, its tests, the page that explains
    it, and three hints."""

    id: str
    task: str
    title: str
    file: str
    points: int
    bonus: bool = False  # on top of the total
    needs: tuple[str, ...] = ()
    tests: tuple[str, ...]
    marker: str
    readme: str
    hints: tuple[str, ...]


@dataclass(frozen=True)
class HandoutRules:
    """The files that ship: glob patterns, and files that ship under another name."""

    ships: tuple[str, ...] = ()
    renames: dict[str, str] = field(default_factory=dict)
    common_lines: tuple[str, ...] = ()
    taught_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Course:
    """The whole table. `imports` maps a file pattern to the modules that files of this name may import; `dropped` has
    the regions of the rows that this course leaves out."""

    name: str = "cos598d"
    title: str = ""
    total: int
    bonus: int = 0
    graded: tuple[str, ...] = ()
    due: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Task]
    regions: dict[str, RegionRow]
    dropped: dict[str, RegionRow] = field(default_factory=dict)
    may_change: tuple[str, ...]
    imports: dict[str, tuple[str, ...]]
    handout: HandoutRules
    hidden: dict[str, Any] = field(default_factory=dict)
    carried: str = CARRIED[0]  # what broken copies of regions in later scripts cost: "warning" (nothing) or "points"

    @property
    def bonus_regions(self) -> frozenset[str]:
        """The regions whose points come on top of the total."""
        return frozenset(region.id for region in self.regions.values() if region.bonus)

    @property
    def bonus_tasks(self) -> frozenset[str]:
        """The tasks all of whose points come on top of the total."""
        return frozenset(self.tasks) - {region.task for region in self.regions.values() if not region.bonus}

    @property
    def ships(self) -> tuple[str, ...]:
        """Patterns of the files that students get: what [handout] lists, and each task's folder and test files."""
        patterns = [*self.handout.ships]
        for task in self.tasks.values():
            patterns.append(f"{task.folder}/*")
            for file in (*task.tests, *task.whole):
                folder = file.rpartition("/")[0]  # beside a test file in a folder of its own stands what it shares
                patterns.append(file if folder == "tests" else f"{folder}/*.py")
        return tuple(dict.fromkeys(patterns))

    def readme(self, region_id: str) -> str:
        """The page that explains a region."""
        return self.regions[region_id].readme

    def may_student_change(self, file: str) -> bool:
        """Return whether a submission's version of this file replaces ours; `*` in a pattern crosses folders."""
        parts = Path(file).parts
        return ".." not in parts and any(fnmatch.fnmatchcase(file, pattern) for pattern in self.may_change)

    def allowed_imports(self, file: str) -> tuple[str, ...] | None:
        """Modules that a file may import, their submodules included; None where the course sets no limit."""
        rows = (modules for pattern, modules in self.imports.items() if fnmatch.fnmatchcase(file, pattern))
        return next(rows, None)

    def all_needs(self, region_id: str, *more: str) -> tuple[str, ...]:
        """`more`, and every region that these build on, directly or not, in the table's order. What the
        course leaves out is given out solved, and so not among them."""
        todo, needs = [*self.regions[region_id].needs, *more], set[str]()
        while todo:
            need = todo.pop()
            if need in self.regions and need not in needs:
                needs.add(need)
                todo += self.regions[need].needs
        return tuple(other for other in self.regions if other in needs)

    def in_order_of_needs(self) -> list[str]:
        """All regions in the table's order, but each after those that it builds on."""
        order: dict[str, None] = {}

        def place(region_id: str) -> None:
            for need in self.regions[region_id].needs:
                place(need)
            order.setdefault(region_id)

        for region_id in self.regions:
            place(region_id)
        return list(order)


def load_course(path: Path = ROOT / "course.toml") -> Course:
    """Read and check the table.

    Raises:
        InputError: the file is missing or does not parse; a key is missing, unknown or of the wrong type; or the first
            of the contradictions that `read_course` finds.
    """
    course, contradictions = read_course(path)
    if contradictions:
        raise InputError(contradictions[0])
    return course


def read_course(path: Path) -> tuple[Course, list[str]]:
    """Read the table; return it with every contradiction in it, a line each. Raises InputError if it cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: expected the course's table as TOML, got {error}") from error
    parts = {key: _value(table.pop(key, {}), dict, f"{path.name}.{key}") for key in _TABLES}
    chosen = _value(table.pop("tasks", None), tuple[str, ...], f"{path.name}.tasks")
    tasks = {id: _read(Task, row, f'{path.name}: task."{id}"', id=id) for id, row in parts["task"].items()}
    rows = {id: _region(id, row, tasks, f'{path.name}: regions."{id}"') for id, row in parts["regions"].items()}
    course = _read(
        Course,
        table,
        path.name,
        tasks=tasks,
        regions=rows,
        dropped={},
        imports={
            pattern: _value(names, tuple[str, ...], f"imports.{pattern}") for pattern, names in parts["imports"].items()
        },
        handout=_read(HandoutRules, parts["handout"], f"{path.name}: handout"),
    )
    contradictions = _contradictions(course, chosen, path.name)
    if not contradictions:
        course = _choose(course, chosen)
        contradictions = _contradictions_of_points(course, path.name)
    return course, contradictions


def _choose(course: Course, chosen: Collection[str]) -> Course:
    """The course with the tasks and lessons that it is to have, and their points."""
    kept = {
        row.id: replace(row, bonus=row.bonus and row.id not in course.graded)
        for row in course.regions.values()
        if row.id in course.graded or (course.bonus > 0 if row.bonus else row.task in chosen)
    }

    def needs(id: str) -> list[str]:
        """What a region builds on; in place of one that is left out, what that one builds on."""
        nearest = [[need] if need in kept else needs(need) for need in course.regions[id].needs]
        return list(dict.fromkeys(itertools.chain.from_iterable(nearest)))

    kept = {id: replace(row, needs=tuple(needs(id))) for id, row in kept.items()}
    required = {id: row.points for id, row in kept.items() if not row.bonus}
    extra = {id: row.points for id, row in kept.items() if row.bonus}
    points = scaled(required, course.total) | scaled(extra, min(course.bonus, sum(extra.values())))
    tasks = {id: task for id, task in course.tasks.items() if id in {row.task for row in kept.values()}}
    folders = {task.folder for task in course.tasks.values()} - {task.folder for task in tasks.values()}
    return replace(
        course,
        tasks=tasks,
        regions={id: replace(row, points=points[id]) for id, row in kept.items()},
        dropped={id: row for id, row in course.regions.items() if id not in kept},
        may_change=tuple(name for name in course.may_change if name.partition("/")[0] not in folders),
    )


def scaled(points: Mapping[str, int], total: int) -> dict[str, int]:
    """Return points of the same proportions that add up to `total`: rounded down, and what remains goes to the largest
    remainders, the earlier of equal ones."""
    whole = sum(points.values()) or 1
    rounded = {id: share * total // whole for id, share in points.items()}
    by_remainder = sorted(points, key=lambda id: -(points[id] * total % whole))
    for id in by_remainder[: total - sum(rounded.values())]:
        rounded[id] += 1
    return rounded


def _read(kind: type[Row], table: object, where: str, **known: Any) -> Row:
    """Return a `kind` whose fields are those that are `known`, and keys of a TOML table: any other key is misspelt."""
    values = _value(table, dict, where)
    wanted = {field.name: field for field in fields(kind) if field.name not in known}  # type: ignore[arg-type]
    for name, entry in wanted.items():
        if name in values or (entry.default is MISSING and entry.default_factory is MISSING):
            known[name] = _value(values.get(name), entry.type, f"{where}.{name}")
    if unknown := values.keys() - wanted.keys():
        raise InputError(f"{where}: unknown key {min(unknown)!r}; see the comments in course.toml")
    return kind(**known)


def _value(value: Any, kind: Any, where: str) -> Any:
    """Return a value of a TOML table if it is of this type; a list of texts becomes a tuple."""
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise InputError(f"{where}: expected a list of texts, got {value!r}")
        return tuple(value)
    plain = get_origin(kind) or kind
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise InputError(f"{where}: expected {plain.__name__}, got {value!r}")
    return value


def _region(id: str, row: object, tasks: dict[str, Task], where: str) -> RegionRow:
    task = tasks.get(id.split(".")[0])
    if task is None:
        raise InputError(f"{where}: expected an id that begins with a task, one of {', '.join(tasks)}, and a dot")
    of_task = {"tests": list(task.tests), "marker": task.marker, "bonus": task.bonus, "readme": task.readme}
    region = _read(RegionRow, of_task | _value(row, dict, where), where, id=id, task=task.id)
    if region.points < 1:
        raise InputError(f"{where}.points: expected at least 1, got {region.points}")
    if len(set(region.hints)) != STEPS_OF_A_HINT:
        raise InputError(f"{where}.hints: expected {STEPS_OF_A_HINT} different hints, got {len(set(region.hints))}")
    return region


def _contradictions(course: Course, chosen: Sequence[str], where: str) -> list[str]:
    """What does not fit together in the rows, and in what the first lines choose of them."""
    return list(map(f"{where}: {{}}".format, (*_wrong_choices(course, chosen), *_wrong_rows(course))))


def _wrong_choices(course: Course, chosen: Sequence[str]) -> Iterator[str]:
    known = f"one of {', '.join(course.tasks)}"
    if not re.fullmatch("[a-z][a-z0-9]*", course.name):
        yield f"name: expected small letters and digits, got {course.name!r}"
    if course.carried not in CARRIED:
        yield f"carried: expected one of {', '.join(CARRIED)}, got {course.carried!r}"
    for id in chosen:
        if id not in course.tasks:
            yield f"tasks: expected {known}, got {id!r}"
        elif course.tasks[id].bonus and course.bonus < 1:
            yield f"tasks names {id!r}, but bonus = {course.bonus}; give the bonus its points, or leave {id!r} out"
    if not any(not course.tasks[id].bonus for id in chosen if id in course.tasks):
        yield f"tasks: expected at least one task whose points are in the total, got {', '.join(chosen) or 'none'}"
    for id in course.graded:
        if id not in course.regions:
            yield f"graded: expected regions of bonus lessons, got {id!r}, which is not in the table"
        elif not course.regions[id].bonus:
            yield f"graded: region {id} is no bonus lesson; it counts if its task is in `tasks`"
    if course.total < 1 or course.bonus < 0:
        yield f"expected a total of at least 1 and a bonus of at least 0, got {course.total} and {course.bonus}"
    for id, date in course.due.items():
        if id not in course.tasks:
            yield f"due: expected {known}, got {id!r}"
        elif not course.tasks[id].bonus and id not in chosen:
            yield f"due.{id}: the task is not in `tasks`; remove the date, or add the task"
        if not isinstance(date, datetime) or date.tzinfo is None:
            yield f"due.{id}: expected a time with its zone, such as 2026-02-13T23:59:00-05:00; got {date}"


def _wrong_rows(course: Course) -> Iterator[str]:
    for region in course.regions.values():
        if unknown := set(region.needs) - set(course.regions):
            yield f"region {region.id} needs {min(unknown)}, which is not in the table; fix `needs`"
        if region.id in course.all_needs(region.id):
            yield f"region {region.id} needs itself in a circle; fix `needs`"
        if not course.may_student_change(region.file):
            yield f"region {region.id} is in {region.file}, which may_change does not list"


def _contradictions_of_points(course: Course, where: str) -> list[str]:
    none = [region for region in course.regions.values() if region.points < 1]
    key = {True: "bonus", False: "total"}
    return [
        f"{where}: {key[row.bonus]} = {getattr(course, key[row.bonus])} leaves no point for region {row.id}; raise it"
        for row in none
    ]


def score_of(tests: Iterable[Mapping[str, Any]], bonus_regions: Collection[str]) -> dict[str, int]:
    """Return the sums of graded tests: score and max_score, with bonus tests also bonus and max_bonus, and the points
    that could not be graded on this machine, if there are any, as not_graded_here."""
    sums = {"score": 0, "max_score": 0}
    for test in tests:
        got, most = ("bonus", "max_bonus") if test["region"] in bonus_regions else ("score", "max_score")
        sums[got] = sums.get(got, 0) + test["points"]
        sums[most] = sums.get(most, 0) + test["max_points"]
        if test.get("status") == NOT_GRADED_HERE:
            sums["not_graded_here"] = sums.get("not_graded_here", 0) + test["max_points"]
    return sums


def score_in_words(report: Mapping[str, Any]) -> str:
    """Return "96 of 100 points", the bonus points apart from them, how many points were not graded here, and whether
    hidden tests give more."""
    bonus = f" and {report['bonus']} of {report['max_bonus']} bonus points" if report.get("max_bonus") else ""
    missing = f", {report['not_graded_here']} not graded here" if report.get("not_graded_here") else ""
    hidden = "; hidden tests give the rest" if report.get("hidden") else ""
    return f"{report['score']} of {report['max_score']} points{bonus}{missing}{hidden}"


def files_matching(root: Path, patterns: Iterable[str]) -> list[str]:
    """Files under `root` that the glob patterns name, sorted, relative, without caches.

    Raises:
        InputError: a pattern that matches nothing, or a link.
    """
    files: set[str] = set()
    for pattern in patterns:
        paths = [path for path in root.glob(pattern) if path.is_symlink() or path.is_file()]
        if not paths:
            raise InputError(f"course.toml: the pattern {pattern!r} matches no file; fix it or add the file")
        for path in paths:
            if path.is_symlink():
                raise InputError(
                    f"{path.relative_to(root)}: expected a plain file, got a link; put the file itself there"
                )
        files.update(path.relative_to(root).as_posix() for path in paths if "__pycache__" not in path.parts)
    return sorted(files)
