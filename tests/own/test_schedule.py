"""Our own tests of common/schedule.py and common/grid.py."""

import subprocess
import sys

import pytest

from common.grid import draw_schedule
from common.paths import ROOT
from common.schedule import _clock_cycles
from pipeline import pipe

SIZES = [(m, n) for m in range(1, 9) for n in range(1, 9)]


def test_four_micro_batches_on_three_partitions_look_like_the_drawing():
    schedule = [sorted(cycle) for cycle in _clock_cycles(4, 3)]

    assert schedule == [
        [(0, 0)],
        [(0, 1), (1, 0)],
        [(0, 2), (1, 1), (2, 0)],
        [(1, 2), (2, 1), (3, 0)],
        [(2, 2), (3, 1)],
        [(3, 2)],
    ]


@pytest.mark.parametrize("m, n", SIZES)
def test_every_micro_batch_visits_every_partition_once_and_one_cycle_after_the_other(m, n):
    clock_of = {}
    for clock, cycle in enumerate(_clock_cycles(m, n)):
        for pair in cycle:
            assert pair not in clock_of
            clock_of[pair] = clock

    assert clock_of == {(i, j): i + j for i in range(m) for j in range(n)}


@pytest.mark.parametrize("m, n", SIZES)
def test_no_cycle_is_idle_and_no_partition_is_asked_twice_in_one(m, n):
    cycles = list(_clock_cycles(m, n))

    assert len(cycles) == m + n - 1
    for cycle in cycles:
        partitions = [j for _, j in cycle]
        assert cycle
        assert len(partitions) == len(set(partitions))


def test_the_schedule_can_be_imported_from_the_pipe():
    assert pipe._clock_cycles is _clock_cycles


def test_a_schedule_is_drawn_with_partitions_down_and_clocks_across():
    assert draw_schedule(_clock_cycles(3, 2)) == (
        "clock        0  1  2  3\npartition 0  0  1  2  .\npartition 1  .  0  1  2"
    )


def test_a_broken_schedule_is_drawn_too_and_the_bad_cells_are_marked():
    broken = [[(0, 0), (1, 0)], [], [(0, 1)]]

    lines = draw_schedule(broken, marked=[(0, 0), (3, 1)]).splitlines()

    assert [line.split() for line in lines] == [
        ["clock", "0", "1", "2", "3"],
        ["partition", "0", "0,1!", ".", ".", "."],
        ["partition", "1", ".", ".", "0", ".!"],
    ]


def test_an_empty_schedule_is_drawn_as_an_empty_grid():
    assert draw_schedule([]) == "clock"


def test_the_command_draws_the_grid_that_the_file_shows():
    done = subprocess.run(
        [sys.executable, "-m", "common.schedule", "4", "3"], cwd=ROOT, capture_output=True, text=True, check=True
    )

    drawing = [line.strip() for line in (ROOT / "common/schedule.py").read_text().splitlines()[4:8]]
    assert done.stdout.splitlines() == drawing


def test_the_command_says_what_it_expects():
    done = subprocess.run(
        [sys.executable, "-m", "common.schedule", "four"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "expected two whole numbers" in done.stderr
