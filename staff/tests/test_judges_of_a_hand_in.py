"""Whoever grades a folder with pytest has the graders of this repository judge it, whatever that folder brings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.grade.submissions import clean_files, write_files

TEST = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
BROUGHT = ("conftest.py", "tests/conftest.py", "grader/__init__.py", "grader/plugin.py", "sitecustomize.py")
SETTINGS = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--seed 1"\n'


@pytest.fixture
def hand_in(tmp_path: Path) -> Path:
    """An unsolved tree with graders of its own, each of which says that it was run."""
    brought = {name: f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n".encode() for name in BROUGHT}
    write_files(clean_files() | brought | {"pyproject.toml": SETTINGS.encode()}, tmp_path / "in")
    return tmp_path / "in"


def grade(report: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "--report", str(report), TEST]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.medium
def test_the_graders_and_settings_of_a_hand_in_are_not_used(hand_in, tmp_path):
    grade(tmp_path / "report.json", f"--tree={hand_in}")

    (test,) = json.loads((tmp_path / "report.json").read_text())["tests"]
    assert test["status"] == "not attempted" and not (tmp_path / "ran").exists()


def test_the_form_that_pytest_takes_for_a_folder_of_tests_grades_nothing(hand_in, tmp_path):
    process = grade(tmp_path / "report.json", "--tree", str(hand_in))

    assert process.returncode != 0 and "expected one word, --tree=" in process.stdout + process.stderr
    assert not (tmp_path / "report.json").exists() and "grader" not in (tmp_path / "ran").read_text()
