"""Reads course.toml, the one table an instructor edits, and says in one line each what is wrong with it.

Its first lines choose among the rows below: tasks, bonus lessons, points. A region of the rows that is not chosen is
given out solved. The student version of course.toml has no staff tables; everything about them is then empty.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin

from common.errors import InputError
from common.paths import ROOT
from course import choices
from course.rows import Course, HandoutRules, RegionRow, Task

STEPS_OF_A_HINT = 3
_TABLES = ("task", "regions", "imports", "handout")
Row = TypeVar("Row")
NOT_GRADED_HERE = "not graded here"  # status of a test that needs what this machine does not have


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
        left_out=frozenset(),
        imports={
            pattern: _value(names, tuple[str, ...], f"imports.{pattern}") for pattern, names in parts["imports"].items()
        },
        handout=_read(HandoutRules, parts["handout"], f"{path.name}: handout"),
    )
    contradictions = choices.contradictions(course, chosen, path.name)
    if not contradictions:
        course = choices.choose(course, chosen)
        contradictions = choices.without_points(course, path.name)
    return course, contradictions


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


def score_in_words(report: Mapping[str, object]) -> str:
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
