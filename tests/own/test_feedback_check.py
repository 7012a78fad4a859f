"""benchmark.checks.feedback measures and judges. What it finds is for a quiet machine, and not for a test."""

import json
import subprocess
import sys

import pytest

from benchmark.checks import feedback
from common.paths import ROOT
from course.table import load_course

MET = {
    "regions": {"p.2": {"handout": 3.9, "repository": 4.9}},
    "commands": {"-m cluster.launch --help": 0.4},
    "task_scripts": {"task1_single/run_glue.py --help": 1.2},
    "loops": {"p.4": 24.0},
}


@pytest.mark.medium
def test_the_quick_check_tries_a_region_in_both_places_and_two_commands(monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(feedback, "solved_handout", lambda folder: folder / "handout")
    monkeypatch.setattr(feedback, "seconds", lambda command, folder, _: tried.append((command, folder)) or 0.3)

    with pytest.raises(SystemExit) as end:
        feedback.main(["--quick"])

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    folders = [folder.name for command, folder in tried if "pytest" in command]
    assert (end.value.code, folders) == (0, ["handout", ROOT.name, ROOT.name])  # the third is the loop
    assert list(figures["loops"]) == ["p.2"]
    assert len(figures["commands"]) == len(figures["task_scripts"]) == 3
    assert sum(command == feedback.IMPORTS for command, _ in tried) == 3


@pytest.mark.proof
def test_the_quick_check_runs_a_region_and_two_commands_and_exits_by_its_goals():
    command = [sys.executable, "-m", "benchmark.checks.feedback", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])

    assert list(figures["regions"]) == list(figures["loops"]) == ["p.2"]
    assert len(figures["commands"]) == len(figures["task_scripts"]) == 3
    assert done.returncode == (0 if all(figures["met"].values()) else 1)


@pytest.mark.proof
def test_the_quick_check_of_watch_saves_a_region_twice_and_is_judged_by_its_goal():
    command = [sys.executable, "-m", "benchmark.checks.feedback", "--watch", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])

    assert (figures["saves"], list(figures["watch"]), list(figures["met"])) == (2, ["p.4"], ["watch"])
    assert done.returncode == (0 if figures["watch"]["p.4"]["seconds"] <= 1.5 else 1)


def test_one_region_of_each_task_is_graded():
    course = load_course()

    assert [course.regions[region].task for region in feedback.REGIONS] == list(course.tasks)


@pytest.mark.parametrize(
    ("goal", "late"),
    [
        ("handout", {"regions": {"p.2": {"handout": 4.1, "repository": 4.9}}}),
        ("repository", {"regions": {"p.2": {"handout": 3.9, "repository": 5.1}}}),
        ("commands", {"commands": {"-m cluster.launch --help": 0.6}}),
        ("task_scripts", {"task_scripts": {"task1_single/run_glue.py --help": 1.4}}),
        ("loops", {"loops": {"p.4": 26.0}}),
    ],
)
def test_each_goal_is_judged_alone(goal, late):
    assert all(feedback.verdicts(MET).values())
    assert [name for name, met in feedback.verdicts(MET | late).items() if not met] == [goal]


def test_a_command_that_ends_otherwise_than_expected_is_not_timed(tmp_path):
    with pytest.raises(RuntimeError, match="exit code 3"):
        feedback.seconds([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, [0])
