"""A command that is started without the environment says in one line how to activate it, and the rest works."""

import subprocess
import sys

import pytest

from common.paths import ROOT

STARTED_BY_US = {  # never by a person
    "benchmark/checks/ranks.py",
    "benchmark/measured_costs.py",
    "cluster/cloudlab_profile.py",
    "staff/gradescope/autograder.py",
    "staff/gradescope/classroom50.py",
    "staff/gradescope/gradescope_run.py",
    "staff/sandbox/supervisor.py",
}
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("task*", "pipeline", "beyond")
    for path in ROOT.glob(f"{folder}/run_*.py")
)


STUDENT = "--netid ab1234 --name Ada_Lovelace"
OLD_PYTHON = "import sys, runpy; sys.modules['tomllib'] = None; runpy.run_path('submit.py', run_name='__main__')"


def without_packages(*words):
    return subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [[script] for script in (*SCRIPTS, "task4_traffic/expected.py", "task4_traffic/compare.py", "cluster/hello.py")]
    + [["submit.py", *words.split()] for words in ("report", f"pack {STUDENT} --out /tmp/never_written.zip")]
    + [["-c", OLD_PYTHON]],
)
def test_without_torch_a_command_says_how_to_activate_the_environment(words):
    done = without_packages(*words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a Python with torch") and done.stderr.count("\n") == 1
    assert "run `source .venv/bin/activate` first" in done.stderr


def test_carry_works_with_the_standard_library_alone():
    assert without_packages("submit.py", "carry", "--into", "task9").stderr.startswith("error: expected a task, one of")


def commands() -> list[str]:
    """Every file that can be started, but for task scripts."""
    folders = ("benchmark", "cluster", "common", "grader", "staff")
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py"))]
    names = {path.relative_to(ROOT).as_posix() for path in files if '__name__ == "__main__"' in path.read_text()}
    return sorted(name for name in names - STARTED_BY_US if not name.startswith("staff/tests/"))


@pytest.mark.parametrize("command", commands())
def test_without_the_environment_no_command_ends_with_the_name_of_a_missing_module(command):
    words = [command] if "/" not in command else ["-m", command[:-3].replace("/", ".").removesuffix(".__main__")]

    assert "ModuleNotFoundError" not in without_packages(*words, "--help").stderr
