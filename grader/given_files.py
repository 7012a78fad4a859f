"""Tells which files of a tree are as the course gave them out."""

from hashlib import sha256
from pathlib import Path

from common.paths import ROOT
from course.manifest import code_digest, read_manifest
from course.table import Course
from grader.wire.values import Fields


def is_given(tree: Path, file: str) -> bool:
    """Return whether a file of the tree is as it was given out: equal to the course's copy, or to its digest in the
    handout's manifest. Comments, empty lines and line ends may differ in a file that students may change."""
    content = (tree / file).read_bytes()
    if tree.resolve() != ROOT:
        course_copy = (ROOT / file).read_bytes() if (ROOT / file).is_file() else None
        return course_copy is not None and (content == course_copy or code_digest(content) == code_digest(course_copy))
    given_out = read_manifest(ROOT)
    if not given_out or given_out["files"].get(file) == sha256(content).hexdigest():
        return True
    return given_out["code"].get(file) == code_digest(content)


def given_common(tree: Path, course: Course) -> Fields | None:
    """Return the tree, and a digest of its common/ that tells this state from a later one; None if a file is missing or
    changed, so that each rank imports it."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "common").rglob("*.py"))
    files = [file for file in paths if not course.may_student_change(file)]
    try:
        if not all(is_given(tree, file) for file in files):
            return None
        contents = b"\0".join((tree / file).read_bytes() for file in files)
    except OSError:
        return None
    return {"tree": str(tree.resolve()), "digest": sha256(contents).hexdigest()}
