"""submit.py report: the parts of a step and the pictures of runs with --timeline; what cannot be used is named."""

import json
from dataclasses import asdict, replace

import pytest

from common.timeline.parts import parts
from common.timeline.picture import draw
from common.timeline.trace import write_trace
from tests.own.made_timelines import after_backward
from tests.own.run_records import change, read_report, section, write_run

TASK = "task2b_allreduce"


@pytest.fixture
def folder(tmp_path):
    """A run of 2b on four workers with its timeline."""
    folder = write_run(tmp_path / "runs" / TASK, TASK, 4)
    made = after_backward()
    for rank in range(4):
        rows = [asdict(row) for row in parts(made) if row.rank == rank]
        change(folder / f"rank{rank}.json", timeline={"run": made.run, "clock_error": 0.0, "steps": rows})
    write_trace(made, folder / "timeline.json")
    draw(made, folder / "timeline.png")
    return folder


def read(folder):
    """The section's text, doubts about timelines, and what is missing."""
    text, findings = read_report(folder.parents[1])
    doubts = [doubt for doubt in findings.doubts if "timeline" in doubt]
    return section(text, "Who computes, who sends, who waits"), doubts, findings.missing


def test_every_rank_has_its_parts_and_the_picture_is_shown(folder):
    text, doubts, missing = read(folder)

    assert "| 2b | 2 | 90.0 | 4.0 | 30.0 | 0.0 | 1.0 | 0.0 | tiny-bert-v2 | `runs/task2b_allreduce` |" in text
    assert "| 2b | 0 | 70.0 | 4.0 | 30.0 | 20.0 | 1.0 | 0.0 |" in text
    assert "![2b: who computes, sends and waits](figures/timeline_task2b.png)" in text
    assert doubts == []
    assert ("the timeline of 2a", "make demo") in missing
    assert not any("ZeRO-3" in what or what == "the timeline of 2b" for what, _ in missing)


def cut_off(folder):
    (folder / "timeline.json").write_text((folder / "timeline.json").read_text()[:-100])


def of_another_run(folder):
    write_trace(replace(after_backward(), run="another"), folder / "timeline.json")


def of_two_runs(folder):
    change(folder / "rank2.json", timeline={"run": "another"})


def of_another_version(folder):
    record = json.loads((folder / "rank1.json").read_text())
    record["timeline"]["steps"][0].pop("waiting")
    (folder / "rank1.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    "damage, expected",
    [
        (cut_off, "runs/task2b_allreduce: timeline.json: expected a whole trace, but it is cut off"),
        (of_another_run, "timeline.json belongs to another run than the records; run it again with --timeline"),
        (of_two_runs, "the timeline in rank2.json belongs to another run than that of rank 0; run it again"),
        (of_another_version, "rank1.json has no usable timeline.steps[0].waiting: written by another version"),
    ],
)
def test_a_timeline_that_is_damaged_or_of_another_run_is_one_line(folder, damage, expected):
    damage(folder)

    text, (doubt,), _ = read(folder)

    assert "\nNo run with --timeline.\n" in text
    assert expected in doubt


def test_a_run_without_the_flag_is_missing_and_not_doubtful(folder):
    for rank in range(4):
        record = json.loads((folder / f"rank{rank}.json").read_text()) | {"timeline": None}
        (folder / f"rank{rank}.json").write_text(json.dumps(record))

    text, doubts, missing = read(folder)

    assert "\nNo run with --timeline.\n" in text and doubts == []
    assert ("the timeline of 2b", "make demo") in missing
