"""Where `make demo` runs: on emulated nodes, or on loopback with one line that says what it cannot show."""

from cluster.ladder import ON_NODES, demo_flags


def test_the_demo_runs_on_emulated_nodes_where_there_are_some(capsys):
    assert demo_flags("")[: len(ON_NODES)] == list(ON_NODES)
    assert capsys.readouterr().out == ""


def test_elsewhere_the_demo_stays_on_this_machine_and_says_in_one_line_what_it_cannot_show(capsys):
    assert demo_flags("unshare not found: sudo apt-get install util-linux") == []

    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "cannot show what bytes cost: unshare not found" in said
