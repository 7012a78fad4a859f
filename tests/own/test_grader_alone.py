"""The graders know no lesson: they grade another course, of which they get the table and the tests."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT

# What grader/ and course/ import beside torch.
LIBRARIES = (
    "common/__init__.py",
    "common/errors.py",
    "common/paths.py",
)
COURSE = """
total = 2
bonus = 0
may_change = ["lesson/*"]

[imports]
"lesson/*.py" = ["torch"]

[tasks.x]
title = "Invented"
folder = "lesson"
submitted_as = "lesson"
readme = "README.md"
tests = ["tests/test_scale.py"]
marker = "invented"

[regions."x.1"]
title = "scale"
file = "lesson/tensors.py"
points = 2
hints = ["one", "two", "three"]
"""
SETTINGS = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n'
LESSON = """
def scale(tensor, world_size):
    # TODO(cos598d) x.1: multiply
    {body}
    # END TODO x.1
"""


@pytest.fixture
def course(tmp_path):
    """A folder with the graders, an invented course, and the test file of grader/README.md."""
    for name in ("grader", "course"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    example = re.search(r"```python\n(.*?)```", (ROOT / "grader/README.md").read_text(), re.DOTALL)
    files = {name: (ROOT / name).read_text() for name in (*LIBRARIES, "tests/conftest.py")}
    files |= {"course.toml": COURSE, "pyproject.toml": SETTINGS, "tests/test_scale.py": example[1]}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lesson").mkdir()
    return tmp_path


@pytest.mark.parametrize(("body", "points", "message"), [
    pytest.param("return tensor * world_size", 2, "", marks=pytest.mark.proof),
    pytest.param(
        "return tensor / world_size", 0, "result is divided: multiply by world_size\nrank 0 of 3: result",
        marks=pytest.mark.medium,
    ),
])  # fmt: skip
def test_another_course_is_graded_by_the_same_graders(course, body, points, message):
    (course / "lesson/tensors.py").write_text(LESSON.format(body=body))
    command = [sys.executable, "-m", "pytest", "-q", "--report", "report.json", "-p", "no:cacheprovider", "tests"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((course / "report.json").read_text())
    assert (report["score"], report["max_score"]) == (points, 2)
    assert [test["message"].startswith(message) for test in report["tests"]] == [True]
