"""Builds the zip that Gradescope takes: the graders, the hidden tests, and the handout's files without a solution.

    python -m staff.gradescope.build [--out dist/autograder.zip]

No solution is in it, so none can be read where students' code runs. Built again, every byte is the same.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from common.errors import exit_on_input_error
from common.paths import ROOT
from course.table import files_matching, load_course
from course.zip_files import write_zip
from grader import imports
from staff.grade.hand_ins import grader_files
from staff.grade.submissions import clean_files

STARTED = (
    "staff.gradescope.gradescope_run",
    "staff.gradescope.classroom50",
    "staff.sandbox.__main__",
    "staff.sandbox.supervisor",
    "staff.sandbox.confine",
)
SCRIPTS = ("setup.sh", "run_autograder", "autograder.py")  # at the root of the zip
OTHERS = ("grader/**/*.py", "course/*.py", "tests/conftest.py", "pyproject.toml",
          "requirements.txt", "constraints.txt", "install.py",
          "staff/grade/templates/*", "staff/hidden/*")  # fmt: skip


def contents() -> dict[str, bytes]:
    """Name in the zip -> content."""
    files = clean_files()
    files["course.toml"] = (ROOT / "course.toml").read_bytes()  # with the staff's part: it names the hidden tests
    tests = [pattern for pattern in load_course().ships if pattern.startswith("tests/")]
    others = [
        *files_matching(ROOT, [*OTHERS, *tests]),
        *grader_files(),
        *(f for module in STARTED for f in imported(module)),
    ]
    files |= {name: (ROOT / name).read_bytes() for name in others if name not in files}
    files |= {name: (ROOT / "staff/gradescope" / name).read_bytes() for name in SCRIPTS}
    return dict(sorted(files.items()))


def imported(module: str, seen: Iterable[str] = ()) -> list[str]:
    """The file of a module of ours, and of all that it imports, functions included."""
    file = f"{module.replace('.', '/')}.py"
    if file in seen or not (ROOT / file).is_file():
        return []
    found = [file]
    for _, name in imports.imported(ROOT / file, file):
        found += imported(name, [*seen, *found])
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "autograder.zip", help="zip to write (%(default)s)")
    out = parser.parse_args().out
    files = contents()
    write_zip(files, out)
    total = load_course().total
    print(f"{out}: {len(files)} files; set the assignment to {total} points")
    print(json.dumps({"files": len(files), "bytes": out.stat().st_size, "points": total}))


if __name__ == "__main__":
    exit_on_input_error(main)
