"""What a student reads after a mistake is counted as a terminal shows it, and every mistake of the list exists."""

import pytest

from course.table import load_course
from staff.proofs import feedback_lines
from staff.proofs.bank import load_bank
from staff.proofs.feedback_lines import FREQUENT, line_of_the_cause, seen_by_a_student


def test_every_frequent_mistake_is_in_the_bank_with_its_region():
    bank = {(entry.bank, entry.name): entry for entry in load_bank()}

    assert len(FREQUENT) == 20
    for file, name, region in FREQUENT:
        assert (file, name) in bank
        assert region in load_course().regions


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["one", "the Cause"], 2),
        (["x" * 250, "the cause"], 4),  # the first line takes three on the screen
        (["x" * 150 + "the cause"], 2),
        (["", "the cause"], 2),
        (["nothing"], 0),
    ],
)
def test_the_line_of_the_cause_is_counted_as_on_a_screen_of_100_columns(lines, found):
    assert line_of_the_cause(lines, ["the cause"], width=100) == found


@pytest.mark.proof
def test_a_student_reads_the_cause_of_a_forgotten_division_at_once():
    name = "never divides: the sum instead of the mean"
    entry = next(entry for entry in load_bank() if (entry.bank, entry.name) == ("task2b_glue", name))

    lines = seen_by_a_student(entry, "2b.1")

    words = [word for test in entry.fails.values() for word in test]
    assert 0 < line_of_the_cause(lines, words, width=100) <= feedback_lines.LIMIT
