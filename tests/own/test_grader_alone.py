"""The graders know no lesson: they grade another course, of which they get the table and the tests."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

from common.paths import ROOT
from course.table import load_course

LIBRARIES = (
    "common/__init__.py",
    "common/errors.py",
    "common/paths.py",
)  # what grader/ and course/ import beside torch
COURSE = """
total = 5
bonus = 0
may_change = ["lesson/*"]

[imports]
"lesson/*.py" = ["torch"]

[tasks.x]
title = "Invented"
folder = "lesson"
submitted_as = "lesson"
readme = "README.md"
tests = ["tests/test_scale.py", "tests/test_share.py"]
marker = "invented"

[regions."x.1"]
title = "scale"
file = "lesson/tensors.py"
points = 2
hints = ["one", "two", "three"]

[regions."x.2"]
title = "share"
file = "lesson/tensors.py"
points = 3
needs = ["x.1"]
hints = ["one", "two", "three"]
"""
SETTINGS = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n'
LESSON = """
import torch.distributed as dist

def scale(tensor, world_size):
    # TODO(cos598d) x.1: multiply
    raise NotImplementedError("TODO x.1: multiply")
    # END TODO x.1

def share(model):
    # TODO(cos598d) x.2: add up the gradients
    raise NotImplementedError("TODO x.2: add up the gradients")
    # END TODO x.2
"""
TEST_OF_SHARE = """
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grader.call_checks import must_use
from grader.compare import Expected, check
from grader.in_rank import in_rank, run
from grader.wire import drawn

graded = pytest.mark.graded
CRASHES = {"has no attribute 'gradient'": "the gradient of a parameter is called grad"}


@in_rank
def share(context: Context, lesson: Any, inputs: Any) -> Any:
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = inputs
    lesson.share(model)
    return {"gradient": copy_of(model.weight.grad)}


@graded("x.2")
def test_every_rank_has_the_sum(grade):
    inputs = [drawn.generator(grade.seed, rank).normal(size=(1, 3)).astype("float32") for rank in range(2)]
    result = run(grade, share, inputs)
    must_use(grade, result, {"all_reduce"})
    for rank, got in enumerate(result.values):
        own = {"nothing was added: call all_reduce": inputs[rank]}
        check(grade, f"rank {rank}: ", got, {"gradient": Expected(np.sum(inputs, axis=0), mistakes=own)}, result)
"""
RIGHT = ("return tensor * world_size", "dist.all_reduce(model.weight.grad)")


@pytest.fixture
def course(tmp_path):
    """A folder with the graders, an invented course, and two test files; the first is that of grader/README.md."""
    unused = shutil.ignore_patterns("__pycache__")
    for name in ("grader", "course"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unused)
    example = re.search(r"```python\n(.*?)```", (ROOT / "grader/README.md").read_text(), re.DOTALL)
    files = {name: (ROOT / name).read_text() for name in (*LIBRARIES, "tests/conftest.py")}
    files |= {"course.toml": COURSE, "pyproject.toml": SETTINGS, "lesson/tensors.py": LESSON}
    files |= {"tests/test_scale.py": example[1], "tests/test_share.py": TEST_OF_SHARE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def grade(folder, *bodies):
    """Grade the lesson with these lines in its two regions; return status and message of each region's test."""
    text = LESSON
    for placeholder, body in zip(re.findall(r"raise .*", LESSON), bodies, strict=False):
        text = text.replace(placeholder, body)
    (folder / "lesson/tensors.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--report", "report.json", "-p", "no:cacheprovider", "tests"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    return report["score"], {test["region"]: (test["status"], test["message"]) for test in report["tests"]}


@pytest.mark.medium
def test_another_course_is_graded_by_the_same_graders(course):
    score, tests = grade(course, *RIGHT)
    assert score == 5, tests

    score, tests = grade(course, "return tensor / world_size", "dist.all_reduce(model.weight.gradient)")
    assert score == 0
    assert tests["x.1"][0] == "wrong"
    assert tests["x.1"][1].startswith("it is divided: multiply by world_size\nrank 0 of 3: result")
    assert "depends on region x.1" in tests["x.2"][1]
    assert "the gradient of a parameter is called grad\nranks 0-1 raised AttributeError" in tests["x.2"][1]

    score, tests = grade(course)
    assert (score, tests["x.1"][0], tests["x.2"][0]) == (0, "not attempted", "not attempted")


def names_of_lessons():
    """Return what only a lesson of this course can mean: its regions, files, and functions with a region in them."""
    table, names = load_course(), set[str]()
    for id, row in table.regions.items():
        names |= {id, row.file, *row.tests}
        lines = (ROOT / row.file).read_text().splitlines()
        regions = [number for number, line in enumerate(lines, 1) if "TODO(cos598d)" in line]
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef) and any(node.lineno < number <= node.end_lineno for number in regions):
                names.add(node.name)
    of_torch = {name for name in names if hasattr(dist, name)}
    return {name for name in names - of_torch if re.search(r"[._]", name.strip("_"))}


def test_the_graders_name_no_region_and_no_lesson():
    names = "|".join(map(re.escape, sorted(names_of_lessons())))
    pattern = re.compile(rf"(?<![\w.])(?:{names})(?![\w.])")
    named = {
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in sorted((ROOT / "grader").rglob("*.py"))
        for found in pattern.finditer(path.read_text())
    }  # fmt: skip

    assert len(names_of_lessons()) > 60
    assert named == set()
