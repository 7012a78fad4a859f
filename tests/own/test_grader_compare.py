"""The engine's comparisons: what counts as right, which known mistake is named, and what is said where none fits."""

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance, close, difference, matches, same_numbers
from grader.compare import Expected, check, with_inputs
from grader.verdicts import Wrong

MEAN = np.array([[2.0, 4.0], [6.0, 8.0]])


class FakeGrade:
    """Fails as a Grade does, without a seed."""

    def fail(self, message):
        raise Wrong(message)


def message_of(got, expected, where="on rank {rank}, "):
    with pytest.raises(Wrong) as failure:
        check(FakeGrade(), where, got, expected)
    return str(failure.value)


def table(value, ranks=(0, 1), names=("parameter 0", "parameter 1"), **mistakes):
    return {
        (rank, name): Expected(value + 10 * (name == "parameter 1"), **mistakes) for rank in ranks for name in names
    }


def test_values_as_expected_pass():
    expected = table(MEAN) | {(0, "dtype"): Expected("float32"), (0, "frozen"): Expected(None)}
    check(FakeGrade(), "", {key: one.value for key, one in expected.items()}, expected)


@pytest.mark.parametrize("got", [None, "text", np.zeros(3), np.full((2, 2), np.nan), np.full((2, 2), np.inf)])
def test_nothing_another_shape_and_numbers_that_are_not_finite_are_close_to_nothing(got):
    assert not close(got, MEAN)


def test_nothing_is_close_to_numbers_whose_norm_is_infinite():
    assert not close(np.zeros(2), np.array([np.inf, 1.0]))


def test_a_limit_for_each_element_is_kept_element_by_element():
    limit = np.array([[0.0, 1.0], [0.0, 0.0]])

    assert close(MEAN + limit, MEAN, Tolerance(limit=limit))
    assert not close(MEAN + 0.5, MEAN, Tolerance(limit=limit))


def test_a_number_of_numpy_is_compared_within_the_tolerance_and_both_are_shown():
    check(FakeGrade(), "", {"mean": np.float64(1 / 3)}, {"mean": Expected(np.float32(1 / 3))})

    assert "expected 0.5, got 1" in message_of({"mean": np.asarray(1.0)}, {"mean": Expected(np.float32(0.5))}, "")


def test_a_value_of_another_type_is_not_equal():
    assert "expected True, got 1" in message_of({"flag": 1}, {"flag": Expected(True)}, "")


def test_the_first_mistake_that_leaves_the_value_is_named():
    expected = {"sum": Expected(MEAN, mistakes={"it is zero": MEAN * 0, "it is doubled": MEAN * 2, "again": MEAN * 2})}

    assert message_of({"sum": MEAN * 2}, expected, "").startswith("it is doubled\nsum (2, 2): expected [2 4 6 8]")


def test_a_mistake_that_leaves_nothing_is_named():
    assert message_of({"sum": None}, {"sum": Expected(MEAN, mistakes={"it is gone": None})}, "").startswith(
        "it is gone\n"
    )


def test_a_mistake_that_leaves_infinities_at_their_places_is_named():
    left = np.array([[np.inf, 4.0], [np.nan, 8.0]])

    assert matches(left, left.copy())
    assert not matches(left, np.array([[np.inf, 4.0], [6.0, 8.0]]))


def test_a_function_gives_the_value_of_a_mistake_when_it_is_needed():
    mistakes = with_inputs({"never": lambda array: 1 / 0, "it is doubled": lambda array: 2 * array}, MEAN)

    assert Expected(MEAN, mistakes=mistakes).explained_by("it is doubled", MEAN * 2)


def test_a_mistake_that_spares_a_tensor_says_which_ones_are_wrong():
    expected = table(MEAN, mistakes={"it is zero": MEAN * 0})
    got = {key: one.value for key, one in expected.items()} | {
        (0, "parameter 1"): MEAN * 0,
        (1, "parameter 1"): MEAN * 0,
    }

    assert message_of(got, expected).startswith("it is zero; from parameter 1 on: does something end the loop early")


def test_a_mistake_that_spares_rank_0_says_so():
    expected = table(MEAN, mistakes={"it is zero": MEAN * 0})
    got = {(rank, name): one.value if rank == 0 else MEAN * 0 for (rank, name), one in expected.items()}

    assert message_of(got, expected).startswith("it is zero; only on ranks other than 0\non rank 1, parameter 0")


def test_a_mistake_of_the_whole_table_is_not_named_where_a_right_value_contradicts_it():
    everywhere = {"nothing was done": MEAN * 0}
    expected = table(MEAN, everywhere=everywhere)
    all_zero = dict.fromkeys(expected, MEAN * 0)
    one_zero = {key: one.value for key, one in expected.items()} | {(0, "parameter 1"): MEAN * 0}

    assert message_of(all_zero, expected).startswith("nothing was done")
    assert "nothing was done" not in message_of(one_zero, expected)


def test_where_no_mistake_fits_one_factor_is_named():
    expected = table(MEAN)

    assert "0.375 times what is expected" in message_of(
        {key: one.value * 0.375 for key, one in expected.items()}, expected
    )


def test_where_no_mistake_fits_swapped_values_are_named():
    expected = table(MEAN)
    other = {"parameter 0": "parameter 1", "parameter 1": "parameter 0"}
    got = {(rank, name): expected[rank, other[name]].value for rank, name in expected}

    assert "each has the value of another one" in message_of(got, expected)


def test_where_no_mistake_fits_results_that_differ_between_ranks_are_named():
    expected = table(MEAN)
    got = {(rank, name): np.arange(4.0).reshape(2, 2) ** (rank + 2) for rank, name in expected}

    assert message_of(got, expected).startswith("the workers have different results")


def test_a_lesson_s_own_message_replaces_the_general_ones():
    expected = {"sum": Expected(MEAN, "the messages are wrong")}

    assert message_of({"sum": MEAN * 0.375}, expected, "").startswith("the messages are wrong\nsum")


def test_a_message_shows_the_values_at_their_places_and_braces_of_a_value_stay():
    message = message_of({"dtype": "{got}"}, {"dtype": Expected("float32", "got {got}, expected {expected}")}, "")

    assert message == "got {got}, expected float32"


def test_the_places_that_differ_are_shown():
    got = MEAN.copy()
    got[1, 0] = 7

    assert difference("sum", got, MEAN) == "sum (2, 2) at [1, 0]: expected [6], got [7] (off by 1 at most)"


def test_numbers_in_another_order_with_zeros_between_are_the_same_up_to_a_factor():
    assert same_numbers([np.array([8.0, 0.0, 2.0]), np.array([4.0])], [np.array([1.0, 2.0, 4.0])])
    assert not same_numbers([np.array([8.0, 2.0, 5.0])], [np.array([1.0, 2.0, 4.0])])


def test_exact_values_allow_no_rounding():
    assert not close(MEAN + 1e-12, MEAN, EXACT)
