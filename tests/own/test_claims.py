"""Measurements behind the READMEs; staff/tests/test_documented_commands.py runs benchmark.checks.claims as a whole."""

import json

import pytest

from benchmark.checks.activation_memory import measure
from benchmark.checks.check import SkippedError, check_parser, run_parts
from benchmark.checks.network import beside_b15, time_messages
from benchmark.checks.ranks import on_ranks


@pytest.mark.parametrize(
    ("rows", "code", "shown"),
    [
        ([{"of": "a", "ratio": 1.0, "holds": True}, {"of": "b", "ratio": 2.0, "holds": False}], 1, "2  <-- outside"),
        ([{"what": "ddp", "ms": [12.5, None, None]}, {"share": "thread", "of it": 0.001}], 0, "  12.500 [-]"),
        (SkippedError("there are no nodes"), 0, "there are no nodes"),
    ],
)
def test_a_check_holds_if_all_of_its_rows_do_and_its_figures_are_the_last_line(rows, code, shown, monkeypatch, capsys):
    def part(flags):
        if isinstance(rows, SkippedError):
            raise rows
        return rows

    monkeypatch.setattr("sys.argv", ["check", "--only", "one", "--quick"])
    with pytest.raises(SystemExit) as ended:
        run_parts(check_parser("check", "about"), {"one": part, "other": lambda flags: 1 / 0})

    *lines, figures = capsys.readouterr().out.splitlines()
    assert ended.value.code == code
    assert shown in "\n".join(lines)
    assert json.loads(figures)["one"] == ([{"skipped": shown}] if isinstance(rows, SkippedError) else rows)


def test_of_each_pattern_b_15_gets_the_latency_that_its_messages_have():
    measured = {"message": 0.021, "hop": 0.0105, "gather": 0.0215, "scatter": 0.0215, "gather + scatter": 0.022}

    rows = beside_b15(4, measured | {"all_reduce": 0.126})

    assert [row["b.15"] for row in rows] == pytest.approx([0.042, 0.021, 0.126])
    assert [row["measured"] for row in rows] == pytest.approx([0.043, 0.022, 0.126])


@pytest.mark.proof
def test_gather_and_scatter_wait_for_less_than_the_ring_on_links_with_a_delay():
    try:
        times = on_ranks(time_messages, 3, delay_ms=20.0, rounds=2)[0]
    except SkippedError as reason:
        pytest.skip(str(reason))

    # 20 ms one way: no operation can be faster, however fast the machine is, and a busy one only adds to it.
    assert times["message"] > 0.038 and times["hop"] > 0.018
    assert times["all_reduce"] > 4 * 0.038
    assert times["gather + scatter"] < times["all_reduce"]


@pytest.mark.proof
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow_and_gpipe_keeps_all():
    rows = measure(2, [3])

    assert {(row["schedule"], row["stage"]): row["alive"] for row in rows} == {
        ("gpipe", 0): 3,
        ("gpipe", 1): 3,
        ("1f1b", 0): 2,
        ("1f1b", 1): 1,
    }
    assert all(row["holds"] for row in rows), rows
