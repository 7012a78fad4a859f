"""The given lines of the split and of the schedule; their regions are graded in tests/pipeline/."""

import pytest
from torch import nn

from common import schedule
from common.errors import InputError
from common.grid import draw_schedule
from common.paths import ROOT
from pipeline import pipe
from pipeline.partition import _retrieve_device, _split_module


class Residual(nn.Sequential):
    """It has a forward of its own, so it stays whole."""

    def forward(self, x):
        return x + super().forward(x)


def test_a_sequential_with_a_forward_of_its_own_stays_whole():
    plain, residual = nn.Linear(2, 2), Residual(nn.Linear(2, 2))

    partitions, _ = _split_module(nn.Sequential(nn.Sequential(plain, residual)))

    assert [list(partition) for partition in partitions] == [[plain, residual]]


def test_a_layer_on_two_devices_is_refused():
    layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])

    with pytest.raises(InputError, match="one device, got ModuleList on cpu, meta"):
        _retrieve_device(layer)


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
