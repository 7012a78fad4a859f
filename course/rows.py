"""What course.toml holds: tasks, regions, what ships, and the course that they make."""

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CARRIED = ("warning", "points")


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
    the regions of the rows that this course does not have. Of these, `left_out` are lessons of a task that it has, and
    no other region builds on them: they could give away the lessons that remain. The others are given out solved."""

    name: str = "cos598d"
    title: str = ""
    total: int
    bonus: int = 0
    graded: tuple[str, ...] = ()
    own_run_points: int = 0  # beside the total, with those of the report
    due: dict[str, Any] = field(default_factory=dict)
    scripts: dict[str, Any] = field(default_factory=dict)  # common/script_defaults.py reads and checks them
    tasks: dict[str, Task]
    regions: dict[str, RegionRow]
    dropped: dict[str, RegionRow] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
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

    def is_given_solved(self, region_id: str) -> bool:
        """Return whether students get these lines solved, in the files of their handout that have them."""
        return region_id not in self.regions and region_id not in self.left_out

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
