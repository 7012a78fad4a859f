"""Makes a class to try the grader on: right, wrong, unfinished and broken hand-ins, as folders and zips of all sorts.

    python -m staff.proofs.class_of_submissions --size 40 --out class
    python -m staff.grade class/submissions/* --out graded --jobs 2

    python -m staff.proofs.class_check class graded

The same seed makes the same class. DIR/class.json says what each submission is, and what its report must say.
"""

import argparse
import io
import json
import random
import stat
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from course.table import Course, load_course
from staff.grade.submissions import clean_files
from staff.handout.regions import strip
from staff.proofs.attack_bank import hand_in
from staff.proofs.attack_bank import load as load_attacks
from staff.proofs.bank import Entry, apply, copy_tree, load_bank

Files = dict[str, bytes]  # name -> content
Made = tuple[Files, list[str], dict[str, list[str]]]  # files, what to note about them, what the report must say


def solved_files(course: Course, entries: Sequence[Entry] = (), without: Sequence[str] = ()) -> Files:
    """What a student hands in who has written the solution, changed by `entries`, but for the regions `without`."""
    keep = set(course.regions) - set(without)
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for entry in entries:
            apply(entry, Path(folder))
        return {
            file: strip((Path(folder) / file).read_text(encoding="utf-8"), file, course.readme, keep).encode()
            for file in clean_files()
            if file.endswith(".py") and course.may_student_change(file)
        }


class Class:
    """Draws one submission after the other; each kind returns its files, a note, and what is expected of them."""

    def __init__(self, seed: int) -> None:
        self.draw, self.course, self.bank = random.Random(seed), load_course(), load_bank()
        self.attacks = [attack for attack in load_attacks() if attack.code and "@" not in attack.code]

    def right(self) -> Made:
        return solved_files(self.course), [], {}

    def variant(self) -> Made:
        return self._with_entries("variants", 2)

    def wrong(self) -> Made:
        return self._with_entries("mistakes", self.draw.randint(1, 4))

    def unfinished(self) -> Made:
        """Solved up to some region and no further."""
        regions = list(self.course.regions)
        without = regions[self.draw.randrange(len(regions)) :]
        return solved_files(self.course, without=without), [f"without {', '.join(without)}"], {"open": without}

    def untouched(self) -> Made:
        regions = list(self.course.regions)
        return solved_files(self.course, without=regions), [], {"open": regions}

    def attack(self) -> Made:
        """An attack of the bank, in the midst of the solution."""
        attack = self.draw.choice(self.attacks)
        with tempfile.TemporaryDirectory() as folder:
            hand_in(attack, Path(folder), {})
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            mine = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        expects = {"fails": [attack.test.rpartition("::")[2]] * (attack.wants == "points"), "files": sorted(mine)}
        return solved_files(self.course) | mine, [attack.what], expects

    def _with_entries(self, kind: str, count: int) -> Made:
        """Entries of different files, so that they fit together."""
        by_file: dict[str, list[Entry]] = {}
        for entry in self.bank:
            if entry.kind == kind:
                by_file.setdefault(entry.file, []).append(entry)
        files = self.draw.sample(sorted(by_file), min(count, len(by_file)))
        entries = [self.draw.choice(by_file[file]) for file in files]
        fails = sorted({test for entry in entries for test in entry.fails})
        return solved_files(self.course, entries), [str(entry) for entry in entries], {"fails": fails}


MIX: tuple[tuple[str, float], ...] = (
    ("wrong", 0.45), ("variant", 0.1), ("unfinished", 0.15), ("right", 0.075), ("untouched", 0.025),
    ("attack", 0.1), ("broken", 0.1),
)  # fmt: skip


def shares(size: int) -> list[str]:
    """The kinds of a class of `size`, by largest remainder, so that every kind is there as soon as it can be."""
    counts = {kind: int(share * size) for kind, share in MIX}
    rest = sorted(MIX, key=lambda pair: counts[pair[0]] - pair[1] * size)
    for kind, _ in rest[: size - sum(counts.values())]:
        counts[kind] += 1
    return [kind for kind, count in counts.items() for _ in range(count)]


def as_zip(files: Files, above: str = "") -> bytes:
    """A zip, with a folder around everything if one is named."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            opened.writestr(f"{above}{name}", content)
    return packed.getvalue()


def course_names(files: Files, course: Course) -> Files:
    """The files in the folders that the course's text names: task2a, task2b, task3."""
    names = {task.folder: task.submitted_as for task in course.tasks.values()}
    return {"/".join([names.get(top, top), rest]): content for name, content in files.items()
            for top, _, rest in [name.partition("/")]}  # fmt: skip


def write(files: Files, path: Path, form: str, course: Course) -> None:
    """Put a submission down as a folder or as one of the zips that students make."""
    if form == "folder":
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return
    above, extra = "", Files()
    if form == "zip of a folder, made on a Mac":
        above, extra = "my hand in/", {f"../__MACOSX/{name}": b"\0\5\26\7" for name in files}
        extra = {name.removeprefix("../"): content for name, content in extra.items()}
    if form == "zip with the course's folder names":
        files = course_names(files, course)
    path.with_suffix(".zip").write_bytes(as_zip(files | extra, above))


FORMS = ("folder", "zip", "zip of a folder, made on a Mac", "zip with the course's folder names")


def truncated(files: Files) -> bytes:
    packed = as_zip(files)
    return packed[: len(packed) // 2]


def leading_out(files: Files) -> bytes:
    return as_zip(files | {"../../outside.py": b"pass\n"})


def linked(files: Files) -> bytes:
    packed = io.BytesIO(as_zip(files))
    with zipfile.ZipFile(packed, "a") as opened:
        link = zipfile.ZipInfo("task1_single/passwords.txt")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        opened.writestr(link, "/etc/passwd")
    return packed.getvalue()


BROKEN: dict[str, Callable[[Files], bytes]] = {
    "a truncated zip": truncated,
    "a text called .zip": lambda files: b"I will hand in tomorrow.\n",
    "a name that leads out": leading_out,
    "an empty zip": lambda files: as_zip({}),
    "a link to a file of the machine": linked,
    "nothing of the course": lambda files: as_zip({"essay.txt": b"words\n" * 1000}),
}


def make(size: int, out: Path, seed: int) -> dict[str, dict]:
    """Write the class; returns name -> kind, form and notes."""
    made: dict[str, dict] = {}
    group = Class(seed)
    kinds = shares(size)
    group.draw.shuffle(kinds)
    folder = out / "submissions"
    folder.mkdir(parents=True)
    for number, kind in enumerate(kinds, start=1):
        name = f"student{number:02}"
        if kind == "broken":
            form = list(BROKEN)[sum(row["kind"] == "broken" for row in made.values()) % len(BROKEN)]
            (folder / f"{name}.zip").write_bytes(BROKEN[form](solved_files(group.course)))
            notes: list[str] = []
            expects: dict[str, list[str]] = {}
        else:
            files, notes, expects = getattr(group, kind)()
            form = group.draw.choice(FORMS)
            write(files, folder / name, form, group.course)
        made[name] = {"kind": kind, "form": form, "notes": notes, "expects": expects}
    with atomic_write(out / "class.json") as file:
        json.dump(made, file, indent=1)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=40, help="number of submissions (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--seed", type=int, default=1, help="seed for choosing them (%(default)s)")
    options = parser.parse_args(argv)
    if options.out.exists():
        raise InputError(f"--out {options.out}: this folder exists already; choose a new one")
    made = make(options.size, options.out, options.seed)
    for name, row in made.items():
        print(f"{name}  {row['kind']:11} {row['form']}  {'; '.join(row['notes'])}".rstrip())
    print(json.dumps({"submissions": len(made), "kinds": Counter(row["kind"] for row in made.values())}))


if __name__ == "__main__":
    exit_on_input_error(main)
