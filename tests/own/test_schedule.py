"""A schedule as a drawing and as a command; what the region computes is graded in tests/pipeline/test_schedule.py."""

import subprocess
import sys

from common.grid import draw_schedule
from common.paths import ROOT
from common.schedule import _clock_cycles
from pipeline import pipe


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
