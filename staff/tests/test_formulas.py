"""Formulas of solutions in code that ships: found under other names and in other orders, in code and not in prose."""

import pytest

from staff.handout.formulas import leaked_formulas
from staff.handout.regions import find_regions

SOLVED = """
def moved(size, world_size):
    # TODO(cos598d) 4.2: bytes (1 line)
    # BEGIN SOLUTION 4.2
    return 2 * (world_size - 1) * size / world_size
    # END SOLUTION 4.2


def iterations(examples, batch, world_size):
    # TODO(cos598d) 4.2: batches (2 lines)
    # BEGIN SOLUTION 4.2
    share = math.ceil(examples / world_size)
    return math.ceil(share / batch)
    # END SOLUTION 4.2


def partners(world_size, rank, size):
    # TODO(cos598d) 4.2: partners (1 line)
    # BEGIN SOLUTION 4.2
    return size * (world_size - 1 if rank == 0 else 1)
    # END SOLUTION 4.2
"""
REGIONS = find_regions(SOLVED, "task4/expected.py")


@pytest.mark.parametrize(
    "code",
    [
        "right = 2 * (n - 1) * size / n",
        "ring = 2 * (n - 1) / n * sizes['all_reduce']",
        "ring = S * 2 - 2 * S / n",
        "def f(a, b):\n    part = (a - 1) / a\n    return 2 * part * b",
        "def f(a, b):\n    each = b / a\n    rounds = 2 * (a - 1)\n    return rounds * each",
        "mbits = 2 * (n - 1) / n * megabytes * 8 / min(seconds)",
        "steps = ceil(ceil(train / n) / b)",
        "steps = math.ceil(train / (n * b))",
        "if steps != -(-e // (b * n)):\n    pass",
        "right = size * (n - 1 if rank == 0 else 1)",
        "right = (1 if rank else n - 1) * size",
        "right = size * (1 if r != 0 else n - 1)",
    ],
)
def test_a_solutions_formula_is_found_whatever_its_names_and_order(code):
    assert leaked_formulas({"tests/task4/test_expected.py": code}, REGIONS)


@pytest.mark.parametrize(
    "code",
    [
        '"""A ring sends 2 * (n - 1) * size / n bytes."""',
        "# 2 * (n - 1) * size / n",
        "right = (n - 1) * size / n",
        "right = 2 * (n + 1) * size / n",
        "time = 2 * (n - 1) * latency + size / rate",
        "right = size * 1440 // 840",
        "steps = len(loader) * epochs",
        "area = a * b + c",
        "x = [] if rank == 0 else [1] * (n - 1)",
        "def f(",
    ],
)
def test_prose_other_formulas_and_literal_cases_are_no_leaks(code):
    assert leaked_formulas({"tests/task4/test_expected.py": code}, REGIONS) == []


def test_a_leak_is_named_with_its_line_its_region_and_its_text():
    text = "one = 1\nright = 2 * (n - 1) * size / n\n"

    assert leaked_formulas({"tests/task4/test_expected.py": text, "README.md": text}, REGIONS) == [
        "tests/task4/test_expected.py:2: the formula of solution 4.2 is computed here: right = 2 * (n - 1) * size / n"
    ]


def test_a_name_that_is_assigned_from_itself_ends():
    assert leaked_formulas({"a.py": "def f(a, b):\n    a = a * b + a / b - 1\n    return a * a * b"}, REGIONS) == []
