"""Puts a student's files over a clean tree: only those that course.toml lets a student change, under our names.

The clean tree is the handout's: what a student did not hand in is unsolved, and no solution lies where a rank could
read it.
"""

import hashlib
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError
from common.paths import ROOT
from course.table import Course, files_matching, load_course
from staff.grade.gradescope_export import METADATA, exported
from staff.grade.unpack import ARCHIVES
from staff.handout.regions import for_students

LONGEST_NAME = 80  # characters; at most twice as many bytes
OF_A_STUDENT = re.compile(r"(?P<who>.+?_\d+)_(\d+|assignsubmission_file)_(?P<file>.+)")
CODE = (".py", ".ipynb")


@dataclass(frozen=True)
class Submission:
    """What was handed in, the name under which its results are kept, and when it was handed in, if a table says so.

    `beside`: the student's other files in the download of a platform.
    """

    name: str
    path: Path
    submitted: str = ""
    beside: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What student and staff should know about the files beside it."""
        return [f"also handed in, and not part of this: {', '.join(self.beside)}"] if self.beside else []


def name_all(paths: Sequence[Path], kept: Mapping[str, str] | None = None) -> list[Submission]:
    """A name for each submission, unlike all others: that of its folder or zip, longer where two would be equal.

    `kept`: names under which results are kept already -> the original name of the hand-in, which alone may have it.

    What is added depends on the path alone, so the same hand-in has the same name in every run over this class. A path
    that is given twice is one submission. Of the files of one student in a download, only archives are hand-ins.
    """
    paths = list(dict.fromkeys(Path(os.path.abspath(path)) for path in paths if path.name != METADATA))
    of_student = _of_student(paths)
    with_archive = {of_student[path][0] for path in paths if path in of_student and _is_archive(path)}
    paths = [path for path in paths if _is_archive(path) or of_student.get(path, ("",))[0] not in with_archive]
    originals = [original_name(path) for path in paths]
    names = list(map(_clean, originals))
    owners = {_same_file(name): owner for name, owner in (kept or {}).items()}
    for attempt in itertools.count():  # until all differ: somebody may have chosen the very name that another one gets
        count = Counter(map(_same_file, names))
        taken = [
            count[_same_file(name)] > 1 or owners.get(_same_file(name), original) != original
            for name, original in zip(names, originals, strict=True)
        ]
        if not any(taken):
            break
        names = [
            _longer_name(name, path, attempt) if is_taken else name
            for name, path, is_taken in zip(names, paths, taken, strict=True)
        ]
    times = [entry.submitted if (entry := exported(path)) else "" for path in paths]
    beside = [
        tuple(file for other, (who, file) in of_student.items() if other != path and who == of_student[path][0])
        if path in of_student and _is_archive(path)
        else ()
        for path in paths
    ]
    return [Submission(*fields) for fields in zip(names, paths, times, beside, strict=True)]


def _longer_name(name: str, path: Path, attempt: int) -> str:
    """Put the folder above in front; where that was not enough, add a digest of the file's name, then of the path."""
    if attempt == 0:
        return _clean(f"{path.parent.name}-{name}")
    return f"{name}-{_short_digest(path.name if attempt == 1 else str(path))}"


def _of_student(paths: Sequence[Path]) -> dict[Path, tuple[str, str]]:
    """Return whose each file of a download is, and what the student called it: Canvas writes
    `byronada_LATE_4711_88217_hw.zip`, Moodle without folders `Ada Byron_4711_assignsubmission_file_hw.zip`."""
    names = {path: OF_A_STUDENT.fullmatch(path.name) for path in paths}
    return {path: (f"{path.parent}/{match['who']}", match["file"]) for path, match in names.items() if match}


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES)


def original_name(path: Path) -> str:
    """What the student called a hand-in, without an archive's suffix; in Gradescope's export, with its people's ids."""
    suffix = next((suffix for suffix in ARCHIVES if path.name.lower().endswith(suffix)), "")
    entry = exported(path)
    return "-".join([*(entry.ids if entry else ()), path.name[: len(path.name) - len(suffix)]])


def _clean(name: str) -> str:
    """A name that any file system, table and page can take."""
    text = unicodedata.normalize("NFC", os.fsencode(name).decode("utf-8", "replace"))
    text = re.sub(r"[^\w.@+-]+", "_", text)[:LONGEST_NAME].encode()[: 2 * LONGEST_NAME].decode(errors="ignore")
    return text.strip(".") or "unnamed"


def _same_file(name: str) -> str:
    """Equal for names that some file systems take for one."""
    return unicodedata.normalize("NFKC", name).casefold()


def _short_digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]


def tree_patterns(course: Course) -> list[str]:
    """What the graders look for in a tree; they read the table of the course, with its hints, in the repository."""
    return ["common/**/*.py", *(f"{task.folder}/*.py" for task in course.tasks.values())]


def clean_files(root: Path = ROOT, solved: Collection[str] = ()) -> dict[str, bytes]:
    """The clean tree: name -> content, with the regions `solved` as a student would have written them. Where the source
    is a handout already (an autograder), it is taken as it is."""
    course = load_course(root / "course.toml")
    files = files_matching(root, tree_patterns(course))
    return {file: for_students((root / file).read_bytes(), file, course, solved) for file in files}


def choose(folder: Path, course: Course) -> tuple[dict[str, bytes], list[str]]:
    """The files of a folder that course.toml lets a student change, under our names; what the student should know about
    the others.

    Raises:
        InputError: it has no file of the course.
    """
    paths = sorted(path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    base = _base(paths, course)
    our_names = {name: task.folder for task in course.tasks.values() for name in (task.folder, task.submitted_as)}
    files: dict[str, bytes] = {}
    notes = []
    names = []
    elsewhere = []
    for parts in paths:
        if parts[: len(base)] != base:
            elsewhere += ["/".join(parts)] * parts[-1].endswith(CODE)
            continue
        top, *rest = parts[len(base) :]
        name = "/".join([our_names.get(top.lower(), top), *rest])
        names.append(name)
        if name in files:
            notes.append(f"{'/'.join(parts)} was ignored because {name} was also submitted")
        elif rest and course.may_student_change(name):
            files[name] = folder.joinpath(*parts).read_bytes()
        elif name.endswith(CODE) and not (ROOT / name).exists():  # other files of the handout need no word
            elsewhere.append("/".join(parts))
    if not files:
        folders = ", ".join(f"{task.submitted_as} or {task.folder}" for task in list(course.tasks.values())[:2])
        got = _some(["/".join(parts) for parts in paths]) or "no file"
        raise InputError(f"expected the folders of the course ({folders}, ...), got {got}; put them into one zip")
    if elsewhere:
        notes.append(f"ignored, since it is in no folder of the course that can be changed: {_some(elsewhere)}")
    return files, notes + missing_lessons(names, course)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def missing_lessons(names: Sequence[str], course: Course) -> list[str]:
    """Return a note for each lesson's file that is missing from a folder that was handed in, and what is there instead.

    `names` are the files of a hand-in, under our names of the folders.
    """
    notes = []
    for file in dict.fromkeys(region.file for region in course.regions.values()):
        folder, _, lesson = file.rpartition("/")
        in_folder = [name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == folder]
        regions = ", ".join(region.id for region in course.regions.values() if region.file == file)
        note = f"{file} is missing, so its regions ({regions}) count as unsolved"
        deeper = [name for name in names if name.startswith(f"{folder}/") and name.endswith(f"/{lesson}")]
        if file not in names and deeper:
            notes.append(f"{note}; is it {deeper[0]!r}? Move it to {folder}")
        if file in names or not in_folder or deeper:
            continue
        # Other capitals, a number or another suffix may follow the name, but no letter.
        alike = re.compile(re.escape(lesson.removesuffix(".py")) + r"(?![a-z])")
        instead = [name for name in in_folder if alike.match(name.casefold()) or name.endswith(".ipynb")]
        if instead:
            verb = "Export it as" if instead[0].endswith(".ipynb") else "Rename it to"
            note += f"; is it {', '.join(map(repr, instead[:2]))}? {verb} {lesson}"
        notes.append(note)
    return notes


def _base(paths: Iterable[tuple[str, ...]], course: Course) -> tuple[str, ...]:
    """The folder in which most of the course's folders lie: a zip often holds one folder that holds them all."""
    course_folders = {name for task in course.tasks.values() for name in (task.folder, task.submitted_as)} | {"common"}
    inside: dict[tuple[str, ...], set[str]] = {}
    for parts in paths:
        for depth, part in enumerate(parts[:-1]):
            if part in course_folders or part.lower() in course_folders:
                inside.setdefault(parts[:depth], set()).add(part)
    return max(inside, key=lambda base: (len(inside[base]), -len(base), base), default=())


def write_tree(clean: dict[str, bytes], handed_in: dict[str, bytes], tree: Path) -> None:
    """The clean tree with the student's files over it. Real copies: a link would let one student write in all trees.

    Raises:
        InputError: a folder that is handed in where the course has a file.
    """
    try:
        write_files(clean | handed_in, tree)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        name = Path(error.filename).relative_to(tree)
        raise InputError(f"{name}: expected a file of the course, got a folder; see the handout's tree") from error


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files (name -> content) below a folder, with the folders that they are in."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
