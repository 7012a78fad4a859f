"""submit.py without the environment: what needs it says so in one line, and the rest works."""

import subprocess
import sys

import pytest

from common.paths import ROOT

STUDENT = ["--netid", "ab1234", "--name", "First Last"]


def run(*words):
    command = [sys.executable, "-S", *words]  # -S: without the packages that are installed
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["report", *STUDENT, "--runs", "runs"],
        ["pack", *STUDENT],
        ["pack", *STUDENT, "--runs", "runs", "--out", "/tmp/never_written.zip", "--no-grading"],
    ],
)
def test_a_command_that_needs_packages_says_how_to_activate_the_environment(words):
    done = run("submit.py", *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a Python with torch") and done.stderr.count("\n") == 1


def test_carry_and_help_work_with_the_standard_library_alone():
    from_help, from_carry = run("submit.py", "--help"), run("submit.py", "carry", "--into", "task9")

    assert from_help.returncode == 0 and "carry" in from_help.stdout
    assert from_carry.stderr.startswith("error: expected a task, one of task1")


def test_a_python_that_is_too_old_for_the_course_is_named():
    old = "import sys, runpy; sys.modules['tomllib'] = None; runpy.run_path('submit.py', run_name='__main__')"

    done = run("-c", old)

    assert done.returncode == 2
    assert done.stderr.startswith("error: expected a Python with torch") and done.stderr.count("\n") == 1
