"""Honest hand-ins of a generated class get the marks they deserve: all, none, or what their mistakes leave."""

import pytest

from course.table import load_course
from staff.proofs.harmful_class import Honest, complaints

COURSE = load_course()
TESTS = {"test_load": "1.1", "test_backward": "1.2", "test_step": "1.3", "test_gather": "2a.3", "test_p": "p.2"}


def report(**statuses):
    """Every test passed but those named."""
    return [
        {"id": f"tests/test_x.py::{name}", "region": region, "points": 2 * (name not in statuses),
         "status": statuses.get(name, "passed")}
        for name, region in TESTS.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    "hand_in, tests",
    [
        (Honest({}), report()),
        (Honest({}, fails=("test_backward",)), report(test_backward="wrong", test_step="skipped")),
        (Honest({}, open=("p.2",)), report(test_p="not attempted")),
        (Honest({}, fails=("test_elsewhere",)), report()),  # of a class where only some tests are run
    ],
)
def test_a_report_that_fits_the_hand_in_is_no_complaint(hand_in, tests):
    assert complaints(hand_in, tests, COURSE) == []


@pytest.mark.parametrize(
    "hand_in, tests, complaint",
    [
        (Honest({}), report(test_p="wrong"), "test_p: expected passed, got wrong"),
        (Honest({}), report(test_p="skipped"), "test_p: expected passed, got skipped"),
        (Honest({}, fails=("test_backward",)), report(), "test_backward: expected failed, got passed"),
        (Honest({}, fails=("test_backward",)), report(test_backward="wrong", test_p="wrong"), "test_p: expected pass"),
        (Honest({}, open=("p.2",)), report(), "expected no point for region p.2"),
    ],
)
def test_a_report_that_does_not_fit_is_said(hand_in, tests, complaint):
    assert any(complaint in said for said in complaints(hand_in, tests, COURSE))
