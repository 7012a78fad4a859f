"""Questions on a student's own runs, to ask in person: drawn from the code, records and timelines of a hand-in.

    python -m staff.questions submissions/ab12.zip              # a sheet with the answers and where to see them
    python -m staff.questions submissions/* --out sheets        # a file for each
    python -m staff.questions submissions/ab12.zip --count 5 --seed retake

The same hand-in, count and seed give the same questions. What a student answered to `submit.py questions` comes below.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
from pathlib import Path

from common.errors import exit_on_input_error
from common.paths import atomic_write
from course.table import load_course
from handin.own_run_questions import draw
from handin.quiz import COUNT
from staff.reports.handed_in import HandedIn, unpacked


def sheet(hand_in: HandedIn, count: int, seed: str) -> str:
    """Return the questions in Markdown, the answer first in bold."""
    text = f"# Questions for {hand_in.name}\n\n"
    if not (questions := draw(hand_in.subject, count, seed or hand_in.name)):
        text += "No question can be asked: it has no records of runs.\n"
    text += "".join(f"- {line}\n" for line in hand_in.problems)
    for number, question in enumerate(questions, start=1):
        wrong = " · ".join(choice for choice in question.choices if choice != question.answer)
        text += f"{number}. {question.text}\n   **{question.answer}** ({question.where}); not {wrong}\n"
    if at_home := hand_in.answered_at_home():
        text += "\n## Answered at home\n\n"
    for question, given, is_right in at_home:
        text += f"- {question.text} {given or 'no answer'}: {'right' if is_right else f'expected {question.answer}'}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.questions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a folder or an archive")
    parser.add_argument("--count", type=int, default=COUNT, help="questions for each (%(default)s)")
    parser.add_argument("--seed", default="", help="another draw (default: the name of the hand-in)")
    parser.add_argument("--out", type=Path, help="folder for a file each (default: print)")
    arguments = parser.parse_args()
    with unpacked(arguments.submissions, load_course()) as hand_ins:
        for hand_in in hand_ins:
            text = sheet(hand_in, arguments.count, arguments.seed)
            if arguments.out is None:
                print(text)
            else:
                with atomic_write(arguments.out / f"{hand_in.name}_questions.md") as file:
                    file.write(text)


if __name__ == "__main__":
    exit_on_input_error(main)
