"""Files of the course that a student has not changed are compiled once, before ranks are forked."""

import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT

pytestmark = pytest.mark.medium

RANK = """
import importlib.machinery, sys
from grader.inside.bytecode import CompiledFiles, LESSONS

tree = sys.argv[1]
compiled = CompiledFiles({root!r})
compiled.compile(LESSONS)
compiled.serve(tree)
sys.path.insert(0, tree)


def compiles(loader, data, path, **options):
    raise SystemExit(f"compiled again: {{path}}")


importlib.machinery.SourceFileLoader.source_to_code = compiles
import beyond.ring
import beyond.one_f_one_b
print(beyond.ring.__file__, beyond.one_f_one_b.__file__)
"""


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "beyond", tmp_path / "beyond", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def imported(tree):
    command = [sys.executable, "-c", RANK.format(root=str(ROOT)), str(tree)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_lessons_that_are_equal_to_the_courses_are_not_compiled_in_a_rank(tree):
    assert imported(tree).split() == [str(tree / "beyond/ring.py"), str(tree / "beyond/one_f_one_b.py")]


def test_a_lesson_that_differs_by_one_byte_is_the_students_own(tree):
    path = tree / "beyond/one_f_one_b.py"
    path.write_text(path.read_text() + "#")

    assert imported(tree) == f"compiled again: {path}\n"
