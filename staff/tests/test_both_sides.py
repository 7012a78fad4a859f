"""The handout from both sides: what is open is not attempted, what is solved passes, and nothing else changes."""

import random

import pytest

from course.table import load_course
from staff.grade.hand_ins import grader_files
from staff.grade.submissions import clean_files, write_files
from staff.proofs.grading_pool import Test as Grader
from staff.proofs.grading_pool import collect, grade

COURSE = load_course()
ALL = set(COURSE.regions)


def needs_to_count(test: Grader, tests: dict[str, Grader]) -> set[str]:
    """Return every other region that a test builds on; one of absence needs what the others of its region need."""
    needs = set(COURSE.all_needs(test.region, *test.needs)) - {test.region}
    if test.absence:
        others = (other for other in tests.values() if other.region == test.region and not other.absence)
        needs = needs.union(*(needs_to_count(other, tests) for other in others))
    return needs


def unexpected(solved: set[str], tests: dict[str, Grader], statuses: dict[str, str]) -> list[str]:
    """Return the tests whose status is not what it must be while only these regions are solved."""
    wrong = []
    for name, test in tests.items():
        expected = ["not attempted"]
        if test.region in solved:
            expected = ["passed"] if needs_to_count(test, tests) <= solved else ["passed", "skipped"]
        if statuses.get(name) not in expected:
            wrong.append(f"{name} [{test.region}]: expected {' or '.join(expected)}, got {statuses.get(name)}")
    return wrong


def check(region: str, folder) -> None:
    tests, _ = collect()
    builds_on = {region}.union(*(needs_to_count(test, tests) for test in tests.values() if test.region == region))
    for side, solved in (("open", ALL - {region}), ("solved", builds_on)):
        write_files(clean_files(solved=solved), folder / side)

        statuses = grade(folder / side, grader_files(), 1).statuses
        assert unexpected(solved, tests, statuses) == [], f"{region} {side}"


@pytest.mark.proof
def test_a_drawn_region_from_both_sides(tmp_path):
    check(random.choice(sorted(ALL)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("region", sorted(ALL))
def test_every_region_from_both_sides(region, tmp_path):
    check(region, tmp_path)


@pytest.mark.medium
def test_the_untouched_handout_earns_no_point_and_every_test_says_so(tmp_path):
    write_files(clean_files(), tmp_path)

    graded = grade(tmp_path, grader_files(), 1)

    assert set(graded.statuses.values()) == {"not attempted"}
    assert graded.points_lost == {id: row.points for id, row in COURSE.regions.items()}


@pytest.mark.slow
@pytest.mark.parametrize("body", ["pass", "return None", "..."])
def test_a_statement_that_does_nothing_in_every_region_earns_no_point(tmp_path, body):
    for name, content in clean_files().items():
        lines = [line.replace("raise NotImplementedError", f"{body}  # ") for line in content.decode().split("\n")]
        write_files({name: "\n".join(lines).encode()}, tmp_path)

    assert grade(tmp_path, grader_files(), 1).points_lost == {id: row.points for id, row in COURSE.regions.items()}
