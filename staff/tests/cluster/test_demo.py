"""Where `make demo` runs: on emulated nodes, or on loopback with one line that says what it cannot show."""

from cluster.demo.ladder import ON_NODES, Rung, demo_flags, times
from common.timeline.boxes import shortest_step
from staff.tests.common.made_timelines import after_backward, during_backward


def test_the_demo_runs_on_emulated_nodes_where_there_are_some(capsys):
    assert demo_flags("")[: len(ON_NODES)] == list(ON_NODES)
    assert capsys.readouterr().out == ""


def test_elsewhere_the_demo_stays_on_this_machine_and_says_in_one_line_what_it_cannot_show(capsys):
    assert demo_flags("unshare not found: sudo apt-get install util-linux") == []

    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert "cannot show what bytes cost: unshare not found" in output


def test_the_demo_says_where_the_time_of_a_step_goes():
    rows = [
        Rung(name, [], None, 0.1, 0, 0, made) for name, made in (("2b", after_backward()), ("3 DDP", during_backward()))
    ]

    lines = times(rows).split("\n")

    assert lines[1].split()[-6:] == ["computing", "data", "exposed", "waiting", "other", "(hidden)"]
    assert lines[2].split() == ["2b", "75.0", "4.0", "30.0", "15.0", "1.0", "0.0"]
    assert lines[3].split() == ["3", "DDP", "70.0", "0.0", "10.0", "0.0", "0.0", "30.0"]


def test_the_demo_shows_one_step_of_each_task_from_its_beginning():
    shown = shortest_step(after_backward(steps=3))

    assert {step.number for step in shown.steps} == {2} and min(step.start for step in shown.steps) == 0
    assert len(shown.boxes) == 4 * 6
