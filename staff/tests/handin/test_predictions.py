"""submit.py predict: numbers are asked for once, and shown beside what real runs have measured."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course.table import load_course
from handin.predictions import asked
from handin.report import build_report

pytestmark = pytest.mark.medium
COURSE = load_course()


def predict(tree: Path, task: str, numbers: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "submit.py", "predict", task], cwd=tree, input=numbers, capture_output=True, text=True
    )


def test_every_task_asks_for_two_or_three_numbers():
    assert {task: len(asked(COURSE, task)) in (2, 3) for task in COURSE.tasks} == dict.fromkeys(COURSE.tasks, True)


def test_a_prediction_is_kept_with_its_time_and_shown_beside_what_was_measured(student, tmp_path):
    shutil.copytree(student, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "runs/task3_ddp").glob("rank*.json"):  # as if it had run later
        path.write_text(json.dumps(json.loads(path.read_text()) | {"begun": "2999-01-01T00:00:00+00:00"}))
    (tmp_path / "runs/task4_traffic").rename(tmp_path / "task4_traffic_elsewhere")

    wrong = predict(tmp_path, "task3_ddp", "much\n")
    first = predict(tmp_path, "3", "2\n4\n")
    again = predict(tmp_path, "3", "")
    predict(tmp_path, "2b", "0.5\n1.5\n")
    predict(tmp_path, "4", "41\n100\n")

    assert wrong.returncode == 2 and "expected a number" in wrong.stderr
    lines = [line for line in first.stdout.splitlines() if "prediction: " in line]
    assert len(lines) == 2 and lines[0].endswith(again.stdout.splitlines()[0])
    report = build_report(tmp_path, COURSE)
    text = report.markdown.read_text()
    mean = [
        sum(step["seconds"] for step in json.loads((tmp_path / f"runs/{run}/rank0.json").read_text())["iterations"][1:])
        for run in ("task1_single", "task2b_allreduce", "task3_ddp")
    ]
    calls = re.search(r"\| calls of all_reduce .* \| 4 on [\d: -]+ \| (\S+) \| (\S+) \|", text)
    assert calls and float(calls[2]) == pytest.approx(
        float(calls[1]) / 4, abs=0.01
    )  # of one run, which is the later one
    row = re.search(r"\| time of 2b over that of DDP \| 1.5 on .* \| (\S+) \| (\S+), measured before", text)
    assert row and float(row[1]) == pytest.approx(mean[1] / mean[2], rel=1e-3)
    assert float(row[2]) == pytest.approx(float(row[1]) / 1.5, abs=0.01)
    assert "| 41 on " in text and "not measured yet" in text and len(report.predicted) == 6


@pytest.mark.parametrize("words", ["predict 2b", "questions"])
def test_where_nobody_can_answer_a_command_that_asks_ends_with_one_line(student, words):
    command = [sys.executable, "submit.py", *words.split()]

    done = subprocess.run(command, cwd=student, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    assert done.returncode == 2 and "terminal" in done.stderr and done.stderr.count("\n") == 1, done.stderr
