"""`submit.py questions`: asks questions on the student's own runs, once, within a time, and writes down the answers.

report/questions.json is packed. Whoever grades draws the same questions from the archive's records, and compares.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import InputError
from common.paths import atomic_write
from course.table import Course
from handin.own_run_questions import OwnRunQuestion, Subject, draw
from handin.records import find_runs
from handin.terminal import read_line

FILE = "questions.json"
COUNT, MINUTES = 4, 10.0


def subject_of(tree: Path, course: Course) -> Subject:
    """Return what the questions of a student's folder are about."""
    files = dict.fromkeys(region.file for region in course.regions.values())
    code = {file: (tree / file).read_text("utf-8", "replace") for file in files if (tree / file).is_file()}
    return Subject(code, find_runs(tree / "runs", tree / "submit_figures"))


def ask(
    tree: Path,
    course: Course,
    read: Callable[[str], str] = read_line,
    clock: Callable[[], float] = time.monotonic,
    seed: str = "",
) -> list[str]:
    """Ask, and return the lines to show at the end. The seed is drawn, unless it is given.

    Raises:
        InputError: the questions were asked before, or there is no run to ask about.
    """
    path = tree / "report" / FILE
    if path.exists():
        raise InputError(f"{path.relative_to(tree)}: you have answered the questions; they are asked once")
    seed = seed or secrets.token_hex(8)
    questions = draw(subject_of(tree, course), COUNT, seed)
    if not questions:
        raise InputError("there is no run to ask about; run the tasks first (handin/README.md lists the runs)")
    read(f"{len(questions)} questions on your own runs, {MINUTES:g} minutes, once. Press Enter to begin. ")
    begin, answers = clock(), list[dict[str, object]]()
    for number, question in enumerate(questions, start=1):
        # Before each question, so that stopping the program does not give another draw.
        _keep(path, seed, len(questions), answers)
        answers.append({"given": read(f"\n{number}. {shown(question)}\n> "), "seconds": round(clock() - begin, 1)})
    _keep(path, seed, len(questions), answers)
    return ["", f"answers: {path.relative_to(tree)}; `python submit.py pack` puts them into the archive"]


def _keep(path: Path, seed: str, count: int, answers: Sequence[dict[str, object]]) -> None:
    with atomic_write(path) as file:
        json.dump({"seed": seed, "count": count, "answers": answers}, file, indent=1)


def shown(question: OwnRunQuestion) -> str:
    letters = "abcdefgh"
    choices = "".join(f"\n   {letters[i]}) {choice}" for i, choice in enumerate(question.choices))
    return f"{question.text} (a letter, or a number)\n   see {question.where}{choices}"


def check(subject: Subject, content: str) -> list[tuple[OwnRunQuestion, str, bool]]:
    """Return each question of questions.json, what was answered, and whether it is right and was in time."""
    asked = json.loads(content)
    questions: Sequence[OwnRunQuestion] = draw(subject, int(asked["count"]), str(asked["seed"]))
    given = [(str(of["given"]), of["seconds"] <= 60 * MINUTES) for of in asked["answers"]]
    given += [("", False)] * (len(questions) - len(given))
    return [(of, text, in_time and of.is_right(text)) for of, (text, in_time) in zip(questions, given, strict=False)]
