"""A class in which most hand-ins are hostile: the honest ones are graded as if they were alone, in every run."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.grade import result_store
from staff.proofs import harmful_class
from staff.proofs.attack_bank import TARGET, VICTIM
from staff.proofs.harmful_class import FEW, TEXTS, grade, harm, harmful, honest

TESTS = [TARGET, VICTIM]


def kill_after(out: Path, count: int, process: subprocess.Popen) -> None:
    while process.poll() is None and len(list(out.glob("hand_ins/*/report.json"))) < count:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check(tmp_path: Path, texts: list[str], restart: bool) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    good = honest(folder, seed=1)
    grade([folder / name for name in good], tmp_path / "alone", TESTS)
    count = len(good) + harmful(folder, texts)
    if restart:
        words = harmful_class.command(folder.iterdir(), out, TESTS)
        kill_after(out, 5, subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE))

    figures = grade(folder.iterdir(), out, TESTS)

    assert (figures["submissions"], figures["not_graded"]) == (count, 0)
    assert harm(out, tmp_path / "alone", good, count) == []
    assert (figures["kept"] >= 5) == restart


def test_an_honest_hand_in_that_gets_other_points_than_alone_is_named(tmp_path):
    for folder, points in (("alone", 2), ("out", 1)):
        report = {"submission": "all", "score": points, "max_score": 2, "tests": [{"id": "test_a", "points": points}]}
        result_store.keep(tmp_path / folder, report, {"output": {}}, "")
    (tmp_path / "out/gradebook.csv").write_text("submission\nall\n")

    problems = harm(tmp_path / "out", tmp_path / "alone", ["all"], 1)

    assert problems == ["all was graded otherwise than alone: test_a: expected 2, got 1", "the solution lacks points"]


@pytest.mark.proof
def test_hostile_names_and_answers_change_nothing_for_honest_hand_ins(tmp_path):
    check(tmp_path, list(FEW), restart=False)


@pytest.mark.slow
def test_a_class_of_twenty_with_every_kind_of_hostile_hand_in_is_graded_and_can_be_restarted(tmp_path):
    check(tmp_path, list(TEXTS), restart=True)
