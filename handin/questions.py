"""Reads the questions of the report from questions.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from course.table import Course


@dataclass(frozen=True)
class Question:
    """One question; questions.toml says what its fields are."""

    section: str
    name: str
    text: str
    task: str = ""


def questions_of(course: Course) -> list[Question]:
    """Return the questions on the tasks that a course has."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["question"]
    questions = [Question(**{**row, "text": " ".join(row["text"].split())}) for row in rows]
    return [question for question in questions if not question.task or question.task in course.tasks]
