"""A schedule as a drawing and as a command; what the region computes is graded in tests/pipeline/test_schedule.py."""

import pytest

from common import schedule
from common.errors import InputError
from common.grid import draw_schedule
from common.paths import ROOT
from pipeline import pipe


def test_the_schedule_can_be_imported_from_the_pipe():
    assert pipe._clock_cycles is schedule._clock_cycles


def test_a_broken_schedule_is_drawn_too_and_the_bad_cells_are_marked():
    broken = [[(0, 0), (1, 0)], [], [(0, 1)]]

    lines = draw_schedule(broken, marked=[(0, 0), (3, 1)]).splitlines()

    assert [line.split() for line in lines] == [
        ["clock", "0", "1", "2", "3"],
        ["partition", "0", "0,1!", ".", ".", "."],
        ["partition", "1", ".", ".", "0", ".!"],
    ]
    assert draw_schedule([]) == "clock"


def test_the_command_draws_the_grid_that_the_file_shows(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["schedule.py", "4", "3"])

    schedule.main()

    drawing = [line.strip() for line in (ROOT / "common/schedule.py").read_text().splitlines()[4:8]]
    assert capsys.readouterr().out.splitlines() == drawing


def test_the_command_says_what_it_expects(monkeypatch):
    monkeypatch.setattr("sys.argv", ["schedule.py", "four"])

    with pytest.raises(InputError, match="expected two whole numbers"):
        schedule.main()
