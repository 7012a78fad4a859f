"""Graders that compare a whole script on several workers with the same script on one: losses, metrics, weights."""

import pytest

from grader.call_checks import must_be_own_calls
from grader.checks import whole_scripts
from grader.checks.training import ddp
from tests.gradients.test_averaging import BY_HAND

graded = pytest.mark.graded


def by_hand(grade, result):
    must_be_own_calls(grade, result, BY_HAND)


@graded("2a.3", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task2a_trains_like_one_worker(grade):
    whole_scripts.check_ladder(grade, by_hand)


@graded("2b.1", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task2b_trains_like_one_worker(grade):
    whole_scripts.check_ladder(grade, by_hand)


@graded("3.1", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task3_trains_like_one_worker(grade):
    whole_scripts.check_ladder(grade, ddp.must_be_run_by_reducer)
