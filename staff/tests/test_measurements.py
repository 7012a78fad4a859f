"""Times that several hand-ins share: found in what the course's programs write, listed without a judgement."""

import json
from pathlib import Path

from common.course import load_course
from staff import pages
from staff.apart import run_apart
from staff.gradebook import Row
from staff.measurements import Shared, measured, shared

TIMES = ["a=0.123456", "a=0.223456", "a=0.323456"]


def test_times_of_records_and_of_the_report_are_found(tmp_path):
    record = {"iterations": [{"loss": 0.6931471805, "seconds": 0.1234567}], "training_time": 12.5000004, "rank": 0}
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/rank0.json").write_text(json.dumps(record))
    (tmp_path / "report.md").write_text("| 2a | 0.4321\u00a0±\u00a00.0021 |\n")

    assert measured(tmp_path) == ["0.4321 ± 0.0021", "seconds=0.123457", "training_time=12.500000"]


def test_a_loss_a_rounded_time_and_a_readme_of_ours_are_no_measurements(tmp_path):
    (tmp_path / "rank0.json").write_text('{"loss": 0.69314718, "join_seconds": 120.0, "seconds": 0.25}')
    (tmp_path / "README.md").write_text("0.4321 ± 0.0021")

    assert measured(tmp_path) == []


def test_hand_ins_that_share_measurements_are_a_group():
    found = shared({"ann": TIMES, "bob": TIMES, "cy": ["a=0.999999"]})

    assert found == [Shared(("ann", "bob"), 3, "a=0.123456")]


def test_one_equal_time_can_be_a_coincidence():
    assert shared({"ann": TIMES[:1], "bob": TIMES[:1]}) == []


def test_the_overview_lists_them_and_accuses_nobody():
    report = {"score": 0, "max_score": 2, "tests": [], "environment": {}, "sandbox": {}}
    run = {"notes": [], "unreadable": False, "output": {}, "measured": TIMES}
    rows = [Row(report | {"submission": name}, run) for name in ("ann", "bob")]

    page = pages.class_page(rows, load_course(), "")

    assert "ann, bob" in page and "a=0.123456" in page
    assert not any(word in page.lower() for word in ("cheat", "plagiar", "copied", "fraud"))


def test_text_of_any_kind_is_searched_before_the_deadline(tmp_path):
    for number, piece in enumerate(('"', '"seconds', '"seconds": 1', "1.000", "1.0000 ± ", "second" * 10)):
        Path(tmp_path / f"{number}.json").write_text(piece * (3_000_000 // len(piece)))

    run_apart(measured, tmp_path, seconds=100)
