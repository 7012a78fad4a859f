"""Graders of the ring: an all_reduce made of send and recv."""

import pytest

from grader.checks.beyond import ring

graded = pytest.mark.graded


@graded("b.1", points=1)
def test_reduce_scatter_leaves_the_sum_of_its_own_chunk_on_each_rank(grade):
    for world_size in (3, 2, 4):
        ring.check_sums(grade, world_size, ring.EVEN)


@graded("b.1", points=1)
def test_reduce_scatter_takes_any_length_and_dtype_and_one_rank(grade):
    ring.check_sums(grade, 4, ring.PLAIN)
    ring.check_sums(grade, 3, ring.ODD)
    ring.check_sums(grade, 2, ring.LARGE)
    ring.check_sums(grade, 1, ring.PLAIN)


@graded("b.1", points=1)
def test_each_round_of_reduce_scatter_sends_one_chunk_to_the_right(grade):
    ring.check_rounds_of_sums(grade)


@graded("b.1", points=1, absence=True)
def test_the_ring_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(ring.FILE)


@graded("b.2", points=1)
def test_all_gather_copies_every_rank_s_own_chunk_to_all(grade):
    ring.check_gathered(grade, 3, ring.EVEN)
    ring.check_rounds_of_copies(grade)
    ring.check_gathered(grade, 3, ring.ODD)
    ring.check_gathered(grade, 2, ring.LARGE)
    ring.check_gathered(grade, 1, ring.PLAIN)


@graded("b.2", points=1, needs=["b.1"])
def test_the_whole_ring_averages_gradients_for_as_few_bytes_as_can_be(grade):
    ring.check_whole(grade)
