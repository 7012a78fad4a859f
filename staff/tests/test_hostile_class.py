"""A class in which most hand-ins are hostile: the honest ones are graded as if they were alone."""

import pytest

from staff.grade import result_store
from staff.proofs import harmful_class
from staff.proofs.attack_bank import TARGET, VICTIM
from staff.proofs.harmful_class import TEXTS, grade, harm, harmful, honest


def test_an_honest_hand_in_that_gets_other_points_than_alone_is_named(tmp_path):
    for folder, points in (("alone", 2), ("out", 1)):
        report = {"submission": "all", "score": points, "max_score": 2, "tests": [{"id": "test_a", "points": points}]}
        result_store.keep(tmp_path / folder, report, {"output": {}}, "")
    (tmp_path / "out/gradebook.csv").write_text("submission\nall\n")

    problems = harm(tmp_path / "out", tmp_path / "alone", ["all"], 1)

    assert problems == ["all was graded otherwise than alone: test_a: expected 2, got 1", "the solution lacks points"]


@pytest.mark.proof
def test_hostile_names_and_answers_change_nothing_for_honest_hand_ins(tmp_path):
    folder = tmp_path / "in"
    good = honest(folder, seed=1)
    grade([folder / name for name in good], tmp_path / "alone", [TARGET, VICTIM])
    texts = dict.fromkeys(("gradebook.csv.zip", "alice smith.zip", "alice_smith.zip"), "\n")
    count = len(good) + harmful(folder, texts | {"long answer.zip": TEXTS["long answer.zip"]})

    grade(folder.iterdir(), tmp_path / "out", [TARGET, VICTIM])

    assert harm(tmp_path / "out", tmp_path / "alone", good, count) == []


@pytest.mark.slow
def test_a_class_with_every_harmful_hand_in_does_no_harm(tmp_path):
    with pytest.raises(SystemExit) as end:
        harmful_class.main(["--out", str(tmp_path / "out")])

    assert end.value.code == 0
