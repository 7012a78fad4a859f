"""The engine's comparisons: what counts as right, which known mistake is named, and what is said where none fits."""

import numpy as np
import pytest

from common.paths import ROOT
from grader.arithmetic import EXACT, Tolerance, close, difference, matches, same_numbers
from grader.compare import Expected, check, with_inputs
from grader.verdicts import Wrong
from staff.tests.grader.inline_student import view_of

MEAN = np.array([[2.0, 4.0], [6.0, 8.0]])
GRADE = view_of(ROOT, "2a.3")


def message_of(got, expected, where=""):
    """The message, "" if all is right."""
    try:
        check(GRADE, where, got, expected)
    except Wrong as failure:
        return str(failure)
    return ""


# --- what is close ---


LIMIT = np.array([[0.0, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize(("got", "expected", "tolerance", "is_close"), [
    (MEAN * (1 + 1e-6), MEAN, Tolerance(), True),
    (None, MEAN, Tolerance(), False),
    ("text", MEAN, Tolerance(), False),
    (np.zeros(3), MEAN, Tolerance(), False),
    (np.full((2, 2), np.nan), MEAN, Tolerance(), False),
    (np.full((2, 2), np.inf), MEAN, Tolerance(), False),
    (np.zeros(2), np.array([np.inf, 1.0]), Tolerance(), False),  # whose norm is infinite
    (np.array([np.inf, np.nan, 1.0]), np.array([np.inf, np.nan, 1.0]), Tolerance(), True),  # both are right there
    (np.array([np.inf, np.nan, 2.0]), np.array([np.inf, np.nan, 1.0]), Tolerance(), False),
    (np.array([-np.inf, 1.0]), np.array([np.inf, 1.0]), Tolerance(limit=np.array([np.inf, 0.1])), False),
    (np.zeros(2), np.full(2, 1e200), Tolerance(1.0), False),
    (np.zeros(2), np.ones(2), Tolerance(float("inf")), False),
    (MEAN + LIMIT, MEAN, Tolerance(limit=LIMIT), True),  # a limit for each element
    (MEAN + 0.5, MEAN, Tolerance(limit=LIMIT), False),
    (MEAN + 1e-12, MEAN, EXACT, False),
])  # fmt: skip
def test_what_is_close(got, expected, tolerance, is_close):
    assert close(got, expected, tolerance) is is_close


INFINITE = np.array([[np.inf, 4.0], [np.nan, 8.0]])


@pytest.mark.parametrize(("got", "expected", "words"), [
    (MEAN, Expected(MEAN), ""),
    ("float32", Expected("float32"), ""),
    (None, Expected(None), ""),
    (np.float64(1 / 3), Expected(np.float32(1 / 3)), ""),
    (np.asarray(1.0), Expected(np.float32(0.5)), "value is 2.000 times what is expected\nvalue: expected 0.5, got 1"),
    (1, Expected(True), "value: expected True, got 1"),  # of another type
    (MEAN * 0.375, Expected(MEAN, "the messages are wrong"), "the messages are wrong\nvalue"),
    ("{got}", Expected("float32", "got {got}, expected {expected}"), "got {got}, expected float32"),
    (MEAN * 2, Expected(MEAN, mistakes={"zero": MEAN * 0, "double": MEAN * 2, "again": MEAN * 2}), "double\nvalue"),
    (None, Expected(MEAN, mistakes={"{name} is gone": None}), "value is gone\n"),
    (INFINITE, Expected(MEAN, mistakes={"divided by zero": INFINITE.copy()}), "divided by zero\n"),
    (MEAN * 2, Expected(MEAN, mistakes=with_inputs({"doubled": lambda x: 2 * x, "never": lambda x: 1 / 0 * x}, MEAN)),
     "doubled\n"),
    (MEAN * 1.001, Expected(MEAN), "value (2, 2): expected"),  # nearly 1: no factor, but rounding
])  # fmt: skip
def test_a_wrong_value_is_told_with_its_cause(got, expected, words):
    message = message_of({"value": got}, {"value": expected})

    assert message.startswith(words) and bool(message) == bool(words)


def test_the_places_that_differ_are_shown():
    got = MEAN.copy()
    got[1, 0] = 7

    assert difference("sum", got, MEAN) == "sum (2, 2) at [1, 0]: expected [6], got [7] (off by 1 at most)"


def test_numbers_in_another_order_with_zeros_between_are_the_same_up_to_a_factor():
    assert same_numbers([np.array([8.0, 0.0, 2.0]), np.array([4.0])], [np.array([1.0, 2.0, 4.0])])
    assert not same_numbers([np.array([8.0, 2.0, 5.0])], [np.array([1.0, 2.0, 4.0])])
    assert not matches(INFINITE, np.array([[np.inf, 4.0], [6.0, 8.0]]))


# --- the values of several ranks and parameters ---


FIRST, SECOND = "parameter 0", "parameter 1"
RIGHT = {(rank, name): MEAN + 10 * k for rank in (0, 1) for k, name in enumerate((FIRST, SECOND))}
ZERO, NOTHING = {"mistakes": {"{name} is zero": MEAN * 0}}, {"everywhere": {"nothing was done": MEAN * 0}}


@pytest.mark.parametrize(("known", "wrong", "words"), [
    (ZERO, lambda rank, name, right: right if name == FIRST else MEAN * 0,
     "parameter 1 is zero; from parameter 1 on: does"),
    (ZERO, lambda rank, name, right: right * rank,
     "parameter 0 is zero; only on rank 0\non rank 0, parameter 0"),
    (ZERO, lambda rank, name, right: right * (1 - rank),
     "parameter 0 is zero; only on ranks other than 0\non rank 1"),
    (NOTHING, lambda rank, name, right: MEAN * 0, "nothing was done"),
    # a mistake of the whole table is not named where a right value contradicts it
    (NOTHING, lambda rank, name, right: right if name == FIRST else MEAN * 0, "parameter 1 is 0.000 times what is"),
    ({}, lambda rank, name, right: right * 0.375, "parameter 0 is 0.375 times what is expected\n"),
    ({}, lambda rank, name, right: RIGHT[rank, SECOND if name == FIRST else FIRST], "each has the value of another"),
    ({}, lambda rank, name, right: np.arange(4.0).reshape(2, 2) ** (rank + 2), "the workers have different results"),
])  # fmt: skip
def test_a_mistake_is_named_with_what_it_spares_and_what_is_common_where_none_fits(known, wrong, words):
    expected = {key: Expected(right, **known) for key, right in RIGHT.items()}

    message = message_of({key: wrong(*key, right) for key, right in RIGHT.items()}, expected, "on rank {rank}, ")

    assert message.startswith(words)
