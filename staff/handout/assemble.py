"""Build the students' handout from the one solved source; refuse to build one that reveals a solution.

    python -m staff.handout [--out dist/handout]
    python -m staff.handout --solved        # dist/solutions: after the deadline

Only files that course.toml lists ship. Builds are reproducible: order, times and modes are fixed. An existing output
folder is replaced only if it is an unchanged handout (its manifest lists every file), so no work is ever lost.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import re
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError
from common.paths import ROOT
from common.script_defaults import read_script_defaults
from course.graded_tests import graded_tests
from course.manifest import code_digest, version_of
from course.table import Course, files_matching, load_course
from course.zip_files import mode_of, write_zip
from staff.handout.dead_ends import Follower, dead_ends
from staff.handout.imported import with_imports
from staff.handout.leaks import find_leaks
from staff.handout.points import with_points
from staff.handout.regions import Region, find_regions, for_students

MANIFEST = ".handout.json"
OUR_NAME = re.compile(rb"(?:cos598d|COS598D)(?![a-z0-9])")  # in the source, whatever course.toml calls the course
_SECONDS = 1577836800  # of every file in the folder: the time in zips, see zip_files
_REMAKEABLE = {"__pycache__", ".pytest_cache", ".cache"}  # what running the handout leaves in it


@dataclass(frozen=True)
class Handout:
    """A handout in memory: name -> content, and every reason not to give it out."""

    files: dict[str, bytes]
    regions: list[Region]
    problems: list[str]
    given_solved: list[str]  # ids in the files that the course does not have: they are given out solved
    code: dict[str, str]  # name -> digest of the code, of Python files that students may change


def assemble(root: Path, solved: bool = False) -> Handout:
    """Make the handout of a source tree without writing anything; a `solved` one has all solutions where students would
    have written them, to give out after the deadline."""
    course = load_course(root / "course.toml")
    read_script_defaults(course.scripts)  # raises InputError
    names = _names(root, course)
    contents = {source: (root / source).read_bytes() for source in names}
    programs = {source: content.decode() for source, content in contents.items() if source.endswith(".py")}
    all_regions = [region for source, text in programs.items() for region in find_regions(text, source)]
    regions = [region for region in all_regions if region.id in course.regions]
    given = {region.id: region.file for region in reversed(all_regions) if course.is_given_solved(region.id)}
    follower = Follower(
        course,
        files={*names.values()},
        source={path.relative_to(root).as_posix() for path in root.glob("[!.]*/**/*.*")},
        solved=given,
    )
    files = {}
    for source, name in names.items():
        content = for_students(contents[source], source, course, course.regions if solved else ())
        if source == "README.md" and course.title:
            content = re.sub(rb"\A# .*", f"# {course.title}: an assignment".encode(), content)
        if source.endswith(".md"):
            text = with_points(content.decode(), course, given)
            content = follower.follow(text, source).encode()
        files[name] = renamed(content, course)
    given_solved = [id for id in course.dropped if id in given]
    problems = _misplaced(course, regions, files)
    pages = {name: content.decode() for name, content in files.items() if name.endswith(".md")}
    problems += dead_ends(pages, files, course)
    graded = {test.region for test in graded_tests(root, course).values()}
    problems += [
        f"course.toml: region {id} has no graded test in {', '.join(row.tests)}; write one, or fix `tests`"
        for id, row in course.regions.items()
        if id not in graded
    ]
    problems += [] if solved else find_leaks(files, regions, course)
    may_change = [name for name in files if name.endswith(".py") and course.may_student_change(name)]
    code = {name: code_digest(files[name]) for name in may_change}
    return Handout(files, regions, problems, given_solved, code)


def renamed(content: bytes, course: Course) -> bytes:
    """A file of the handout with the course's name where the source has its own: in TODO lines, texts, environment
    variables. Our graders keep theirs, and read the TODO lines of any name."""
    return OUR_NAME.sub(lambda ours: (course.name if ours[0].islower() else course.name.upper()).encode(), content)


def _names(root: Path, course: Course) -> dict[str, str]:
    """Source file -> name in the handout, sorted by name, without the pages of lessons that the course leaves out."""
    pages = {row.readme for row in course.dropped.values()} - {row.readme for row in course.regions.values()}
    names = {file: file for file in with_imports(root, files_matching(root, course.ships)) if file not in pages}
    names |= {files_matching(root, [source])[0]: name for source, name in course.handout.renames.items()}
    if len(set(names.values())) < len(names):
        raise InputError("course.toml: handout.renames maps two files to one name; fix it")
    return dict(sorted(names.items(), key=lambda pair: pair[1]))


def _misplaced(course: Course, regions: list[Region], files: dict[str, bytes]) -> list[str]:
    """What ships and must not, and regions that are not where course.toml has them."""
    closed = ["staff/*", ".git/*", "benchmark/*"]  # the benchmark has a training loop and engines: solutions
    problems = [
        f"{name}: must not ship (it matches {pattern}); fix [handout] in course.toml"
        for name in files
        for pattern in closed
        if fnmatch.fnmatchcase(name, pattern)
    ]
    places = {(region.id, region.file) for region in regions}
    problems += [
        f"{row.file}: course.toml places region {row.id} here, but the file does not contain it; fix one of them"
        for row in course.regions.values()
        if (row.id, row.file) not in places
    ]
    return problems


def write(handout: Handout, out: Path) -> Path:
    """Write the folder `out` and the zip beside it; an earlier untouched handout there is replaced. Returns the zip.

    Raises:
        InputError: the handout has problems, or something stands there that is not ours to delete.
    """
    if handout.problems:
        raise InputError(f"the handout has {len(handout.problems)} problem(s), the first: {handout.problems[0]}")
    archive = make_room(out)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in handout.files.items()}
    manifest = json.dumps({"format": 1, "files": digests, "code": handout.code}, indent=1) + "\n"
    files = handout.files | {MANIFEST: manifest.encode()}
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        _write_folder(files, new)
        if out.exists():
            out.rename(old)
        new.rename(out)
    readme_first = {name: files[name] for name in sorted(files, key=lambda name: (name != "README.md", name))}
    write_zip(readme_first, archive, folder=out.name)
    return archive


def make_room(out: Path) -> Path:
    """Make the folder that `out` is to be in; returns the zip's path. Raises InputError as `write` does."""
    archive = out.with_name(f"{out.name}.zip")
    _refuse_foreign_folder(out)
    _refuse_foreign_zip(archive, out.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    return archive


def _refuse_foreign_folder(out: Path) -> None:
    if not out.exists() and not out.is_symlink():
        return
    advice = "move it away, or choose another --out"
    manifest = out / MANIFEST
    if out.is_symlink() or not manifest.is_file():
        raise InputError(f"{out}: expected nothing or an earlier handout, got something else; {advice}")
    try:
        digests = dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{manifest}: expected the manifest of a handout, got something else; {advice}") from error
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name == MANIFEST or _REMAKEABLE & set(Path(name).parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or digests.get(name) != hashlib.sha256(path.read_bytes()).hexdigest():
            raise InputError(f"{path}: was added or changed since the handout was built; {advice}")


def _refuse_foreign_zip(archive: Path, folder: str) -> None:
    if not archive.exists() and not archive.is_symlink():
        return
    if not archive.is_symlink() and zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            if f"{folder}/{MANIFEST}" in opened.namelist():
                return
    raise InputError(f"{archive}: expected nothing or an earlier handout, got something else; move it away")


def _write_folder(files: dict[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode_of(content))
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (_SECONDS, _SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.handout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder to build, NAME.zip next to it (dist/handout, dist/solutions)")
    parser.add_argument("--solved", action="store_true", help="with all solutions, to give out after the deadline")
    arguments = parser.parse_args()
    arguments.out = arguments.out or ROOT / "dist" / ("solutions" if arguments.solved else "handout")
    make_room(arguments.out)  # a wrong path is told at once, and not after the seconds that assembling takes
    handout = assemble(ROOT, arguments.solved)
    for problem in handout.problems:
        print("-", problem, file=sys.stderr)
    archive = write(handout, arguments.out)
    summary = {
        "files": len(handout.files),
        "regions": len({region.id for region in handout.regions}),
        "version": version_of(handout.code),
        "bytes": sum(map(len, handout.files.values())),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    if handout.given_solved:
        print(f"given out solved, since course.toml does not have them: {', '.join(handout.given_solved)}")
    regions = f"{summary['regions']} regions {'solved' if arguments.solved else 'to solve'}"
    print(f"{arguments.out} and {archive.name}: {summary['files']} files, {regions}, version {summary['version']}")
    print(json.dumps(summary))
