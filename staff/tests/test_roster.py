"""roster.csv and grades.csv: everybody has a row, partners share a hand-in, and nothing is guessed in silence."""

import csv
from pathlib import Path

import pytest

from common.errors import InputError
from staff.grade.roster import coverage, owners, read_roster, write_grades
from staff.tests.rows import entry, row

ROSTER = """id,name,partners,due,extension,submitted
ab_12,Ada Byron,cd34,2026-02-13T23:59:00-05:00,,2026-02-15T07:10:00+01:00
cd34,Carl Dai,,,2026-02-20T23:59:00-05:00,2026-02-15T07:10:00+01:00
m.muster,Muster,,,,2026-02-15T07:10:00+01:00
m.muster-b,Müller,,,,
1007,,,,,
"""


def roster(folder: Path, text: str) -> Path:
    (folder / "roster.csv").write_text(text, encoding="utf-8")
    return folder / "roster.csv"


@pytest.mark.parametrize(
    "hand_in, ids",
    [
        ("ab_12", {"ab_12"}),
        ("AB_12_homework", {"ab_12"}),
        ("ab_123", set()),
        ("xcd34", set()),
        ("ab_12-cd34", {"ab_12", "cd34"}),
        ("m.muster-b_late", {"m.muster-b"}),
        ("m.muster-m.muster-b", {"m.muster", "m.muster-b"}),
        ("m.muster_1007_assignsubmission_file", {"m.muster", "1007"}),
        ("dai_carl_cd34_88217_hand-in-2", {"cd34"}),
        ("10071", set()),
    ],
)
def test_a_hand_in_belongs_to_those_whose_whole_ids_are_in_its_name(tmp_path, hand_in, ids):
    assert owners(hand_in, read_roster(roster(tmp_path, ROSTER))) == ids


@pytest.mark.parametrize(
    ("hand_ins", "said"),
    [
        (["cd34_hw", "m.muster-m.muster-b-1007"], "without a hand-in: none; hand-ins of nobody in it: none"),
        (["hw1", "ab_12"], "a hand-in: 3 (m.muster, m.muster-b, 1007); hand-ins of nobody in it: 1 (hw1)"),
        ([f"hw{i}-{i}" for i in range(9)], "in it: 9 (hw0-0, hw1-1, hw2-2, hw3-3, hw4-4, ...)"),
    ],
)
def test_a_line_names_who_has_no_hand_in_and_what_is_nobodys(tmp_path, hand_ins, said):
    assert coverage(read_roster(roster(tmp_path, ROSTER)), hand_ins).endswith(said)


def test_everybody_has_a_row_partners_share_a_hand_in_and_strangers_are_named(tmp_path):
    points = {"ab_12": 4, "m.muster": 2, "m.muster_second": 3, "who": 1}
    rows = [row(entry("2b.1", "passed", most=most), name=name) for name, most in points.items()]

    write_grades(tmp_path / "grades.csv", read_roster(roster(tmp_path, ROSTER)), rows)

    lines = list(csv.DictReader((tmp_path / "grades.csv").read_text(encoding="utf-8").splitlines()))
    assert [(line["id"], line["score"], line["hand-in"], line["notes"]) for line in lines] == [
        ("ab_12", "4", "ab_12", "with cd34"),
        ("cd34", "4", "ab_12", "with ab_12; extension"),
        ("m.muster", "3", "m.muster_second", "the best of m.muster, m.muster_second"),
        ("m.muster-b", "", "", "no hand-in"),
        ("1007", "", "", "no hand-in"),
        ("", "1", "who", "no id of the roster is in its name"),
    ]
    assert [line["late"] for line in lines] == ["1 d 2 h", "", "", "", "", ""]
    assert [line["due"] for line in lines[:2]] == ["2026-02-13T23:59:00-05:00", "2026-02-20T23:59:00-05:00"]


def test_partners_with_two_hand_ins_each_have_their_own_and_it_is_said(tmp_path):
    rows = [row(entry("2b.1", "passed", most=most), name=name) for name, most in (("ab_12", 4), ("cd34", 2))]

    write_grades(tmp_path / "grades.csv", read_roster(roster(tmp_path, ROSTER)), rows)

    lines = list(csv.DictReader((tmp_path / "grades.csv").read_text(encoding="utf-8").splitlines()))
    assert [line["score"] for line in lines[:2]] == ["4", "2"]
    assert all("partners have other hand-ins" in line["notes"] for line in lines[:2])


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "expected a column id"),
        ("name\nAda\n", "expected a column id"),
        ("id\na\n\nA\n", "expected a column id with another id in each row"),
        ("id,nmae\na,Ada\n", "unknown column 'nmae'"),
        ("id,partners\na,b\n", "has the partner b, which is no id"),
        ("id,due\na,2026-02-13T23:59:00\n", "expected a time with its zone"),
        ("id,extension\na,soon\n", "expected a time with its zone"),
        ("id,name\na,Ada,Byron\n", "unknown column 'more'"),
    ],
)
def test_what_is_wrong_with_a_roster_is_said_in_a_line(tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        read_roster(roster(tmp_path, text))
