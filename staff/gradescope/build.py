"""Builds the zip that Gradescope takes: the graders, the hidden tests, and the handout's files without a solution.

    python -m staff.gradescope.build [--out dist/autograder.zip]

No solution is in it, so none can be read where students' code runs. Built again, every byte is the same.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
from pathlib import Path

from common.errors import exit_on_input_error
from common.paths import ROOT
from course.table import files_matching, load_course
from course.zip_files import write_zip
from staff.grade.submissions import clean_files
from staff.handout.imported import with_imports

SCRIPTS = ("setup.sh", "run_autograder", "autograder.py")  # at the root of the zip
OTHERS = ("grader/**/*.py", "course/*.py", "tests/conftest.py", "pyproject.toml",
          "requirements.txt", "constraints.txt", "install.py",
          "staff/grade/*.py", "staff/grade/templates/*", "staff/gradescope/*.py", "staff/handout/regions.py",
          "staff/hidden/*", "staff/sandbox/*.py")  # fmt: skip


def contents() -> dict[str, bytes]:
    """Name in the zip -> content."""
    files = clean_files()
    files["course.toml"] = (ROOT / "course.toml").read_bytes()  # with the staff's part: it names the hidden tests
    tests = [pattern for pattern in load_course().ships if pattern.startswith("tests/")]
    others = with_imports(ROOT, files_matching(ROOT, [*OTHERS, *tests]))
    files |= {name: (ROOT / name).read_bytes() for name in others if name not in files}
    files |= {name: (ROOT / "staff/gradescope" / name).read_bytes() for name in SCRIPTS}
    return dict(sorted(files.items()))


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
