"""Questions on own runs: computed from records, different for different runs; without the records, one guesses."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from common.paths import ROOT
from course.table import load_course
from handin.own_run_questions import OwnRunQuestion, draw
from handin.quiz import ask, subject_of
from handin.records import find_runs
from staff.reports.handed_in import unpacked

pytestmark = pytest.mark.medium
COURSE = load_course()


def drawn(tree: Path, seeds: int = 12) -> list[OwnRunQuestion]:
    subject = subject_of(tree, COURSE)
    return [question for seed in range(seeds) for question in draw(subject, 100, str(seed))]


def of(record: dict[str, Any], step: str) -> dict[str, Any]:
    return next(row for row in record["timeline"]["steps"] if f"step {row['step']}:" in step)


def without_first(records: list[dict[str, Any]]) -> list[float]:
    return [1e3 * step["seconds"] for step in records[0]["iterations"][1:]]


def waiting(records: list[dict[str, Any]], text: str) -> float:
    rank = int(text.split("does rank ")[1].split(" ")[0])
    return 1e3 * of(records[rank], text)["waiting"]


def batch_loss(records: list[dict[str, Any]], text: str) -> float:
    number = int(re.findall(r"iteration (\d+)", text)[0])
    return fmean(record["iterations"][number - 1]["loss"] for record in records)


BY_HAND: dict[str, Callable[[list[dict[str, Any]], str], float | int]] = {
    "mean_time": lambda records, text: fmean(without_first(records)),
    "slowest_iteration": lambda records, text: without_first(records).index(max(without_first(records))) + 2,
    "wait_of_a_rank": waiting,
    "loss_of_the_batch": batch_loss,
    "forgotten_division": lambda records, text: len(records) * batch_loss(records, text),
    "processor_use": lambda records, text: records[0]["processor"]["own"] / records[0]["processor"]["seconds"],
}


def test_answers_are_those_of_the_records_and_there_are_twenty_kinds(student):
    questions = drawn(student, 40)
    runs = {run.name: run for run in find_runs(student / "runs", student).found}

    assert len({question.kind for question in questions}) >= 20
    assert {question.kind for question in questions} > BY_HAND.keys()
    for question in questions:
        assert question.answer in question.choices and len(set(question.choices)) == len(question.choices) > 1
        if question.kind in BY_HAND:
            records = runs[question.text.split("`")[1]].records
            words = [word for word in question.answer.split() if word[0].isdigit()]
            assert float(words[0]) == pytest.approx(BY_HAND[question.kind](records, question.text), rel=6e-3), question


def test_equal_code_and_other_runs_give_other_answers(student, tmp_path):
    shutil.copytree(student, tmp_path / "other", dirs_exist_ok=True)
    for path in (tmp_path / "other/runs").rglob("rank*.json"):
        record = json.loads(path.read_text())
        for step in record["iterations"]:
            step["seconds"] *= random.Random(str(path)).uniform(2, 3)
        path.write_text(json.dumps(record))

    of_one, of_other = (
        {question.text: question.answer for question in drawn(tree, 3) if question.kind in ("mean_time", "speed_up")}
        for tree in (student, tmp_path / "other")
    )

    same = of_one.keys() & of_other.keys()
    assert same and not [text for text in same if of_one[text] == of_other[text]]


def test_who_takes_the_kth_smallest_number_each_time_only_guesses(student):
    right, count = Counter[int](), 0
    for question in drawn(student, 60):
        if question.answer[0].isdigit() and len(question.choices) == 4:
            count += 1
            right[sorted(question.choices, key=lambda choice: float(choice.split()[0])).index(question.answer)] += 1

    assert count > 300 and max(right.values()) / count < 0.4, right


def test_no_number_has_a_fixed_proportion_to_the_answer_and_nobody_guesses_between_two(student):
    proportions = Counter[float]()
    for question in drawn(student, 60):
        assert len(question.choices) > 2 or question.answer.startswith(("rank", "line")), question
        if question.kind in ("mean_time", "wait_of_a_rank", "exposed_communication"):
            answer, *others = (float(choice.split()[0]) for choice in (question.answer, *question.choices))
            proportions.update(round(other / answer, 2) for other in others if other != answer)

    assert proportions.total() > 200 and max(proportions.values()) < 0.2 * proportions.total(), proportions


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("rank 2", ["2", "rank 2", "Rank 2", "b", "B)"], ["3", "a", "rank", "", "2.05"]),
        ("12.5 ms", ["12.5", "12,4 ms", "12.5ms", "b."], ["14 ms", "11.9", "125", "?"]),
        ("backward", ["backward", "b"], ["2", "forward"]),
    ],
)
def test_an_answer_may_be_a_letter_a_number_or_the_words(answer, right, wrong):
    question = OwnRunQuestion("kind", "?", ("first", answer, "third"), answer, "there")

    assert [given for given in right if not question.is_right(given)] == []
    assert [given for given in wrong if question.is_right(given)] == []


def test_asked_once_on_the_students_machine_within_a_time_and_graded_by_the_records(student, tmp_path):
    shutil.copytree(student, tmp_path, dirs_exist_ok=True)
    right = [question.answer for question in draw(subject_of(tmp_path, COURSE), 4, "5eed")]
    typed, seconds = iter(["", *right[:3], "z"]), iter([0.0, 10.0, 20.0, 700.0, 710.0])

    ask(tmp_path, COURSE, lambda prompt: next(typed), lambda: next(seconds), seed="5eed")

    again = subprocess.run([sys.executable, "submit.py", "questions"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and "they are asked once" in again.stderr
    with unpacked([tmp_path], COURSE) as (hand_in,):
        rows = hand_in.answered_at_home()
        points = hand_in.own_run_points(replace(COURSE, own_run_points=10))
    # The third answer came after the time, and the last is wrong.
    assert [is_right for *_, is_right in rows] == [True, True, False, False]
    assert points == 5.0 and COURSE.own_run_points == 0
    sheet = subprocess.run(
        [sys.executable, "-m", "staff.questions", tmp_path, "--count", "5"], cwd=ROOT, capture_output=True, text=True
    )
    (tmp_path / "cut.zip").write_bytes(b"PK")
    empty = subprocess.run(
        [sys.executable, "-m", "staff.questions", tmp_path / "cut.zip"], cwd=ROOT, capture_output=True, text=True
    )
    assert "No question can be asked" in empty.stdout and "got a damaged zip" in empty.stdout
    assert sheet.stdout.count("; not ") == 5 and "## Answered at home" in sheet.stdout, sheet.stderr
