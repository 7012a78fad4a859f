"""Graders of the grid: which ranks form a group, how groups are made, and GPT-2 on three grids of four ranks."""

import pytest

from grader.checks.beyond.grid import groups, training

graded = pytest.mark.graded


@graded("b.14")
def test_a_group_has_the_ranks_that_differ_along_its_axis(grade):
    grade.imports_only_allowed(groups.FILE)
    groups.check_members(grade)


@graded("b.14")
def test_all_ranks_make_all_groups_in_one_order_and_keep_their_own(grade):
    groups.check_groups(grade)


@graded("b.14", needs=["b.12", "b.13"])
def test_gpt2_on_a_grid_trains_as_on_one_worker(grade):
    for sizes in training.PLACES:
        training.check(grade, sizes)
