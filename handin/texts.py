"""Reads the texts of the report, its sections and its questions, from report.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from course.table import Course


@dataclass(frozen=True)
class Question:
    """A question. A student's answer is found again by `name`."""

    section: str
    name: str
    text: str
    task: str = ""


@dataclass(frozen=True)
class Section:
    """A section: measurements, what explains them, and below them questions."""

    key: str
    heading: str
    questions: list[Question]
    tasks: tuple[str, ...] = ()
    explained: str = ""


def sections_of(course: Course) -> list[Section]:
    """Return the sections and questions on the tasks that a course has."""
    texts = tomllib.loads(Path(__file__).with_name("report.toml").read_text(encoding="utf-8"))
    questions = [Question(**row) for row in texts["question"] if row.get("task", "") in {"", *course.tasks}]
    sections = [
        Section(key, questions=[question for question in questions if question.section == key], **row)
        for key, row in texts["section"].items()
    ]
    return [section for section in sections if not section.tasks or set(section.tasks) & course.tasks.keys()]
