"""What the layout promises, computed from the code."""

import json
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.proofs.code_measures import cycles, main, measure

pytestmark = pytest.mark.medium

SIDES = ("grader/checks/", "grader/probes/")  # a check, a probe and what they grade have one name
FIXED = {
    "arguments": "the flags of task scripts, and of the benchmark",
    "compare": "commands that readers know, of the benchmark and of task 4; and what the graders do with values",
    "grid": "a lesson, and what common/schedule.py imports, which students hand in",
}


@pytest.fixture(scope="module")
def measured():
    return measure(ROOT)


def test_no_modules_import_each_other_in_a_circle(measured):
    assert measured.cycles == []


def test_at_most_two_classes_share_a_name(measured):
    assert {name: files for name, files in measured.class_names.items() if len(files) > 2} == {}


def test_modules_share_a_name_only_as_a_lesson_its_check_and_its_probe(measured):
    unexplained = {}
    for name, files in measured.module_names.items():
        places = [next((side for side in SIDES if file.startswith(side)), "elsewhere") for file in files]
        if len(set(places)) < len(places) and name not in FIXED:
            unexplained[name] = files
    assert unexplained == {}


def test_a_circle_of_imports_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_what_is_counted_is_what_is_there(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/first.py").write_text("from typing import Any\n\n\nclass Run:\n    x: Any\n")
    (tmp_path / "one/second.py").write_text("import one.first\n\n\nclass Run:\n    pass\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text("import one.first\n")

    found = measure(tmp_path)

    assert found.packages == {"one": (2, 10)}
    assert found.class_names == {"Run": ["one/first.py", "one/second.py"]}
    assert found.uses_of_any == 1


def test_the_command_prints_its_figures(tmp_path, capsys):
    (tmp_path / "course.toml").write_text("")
    (tmp_path / "one.py").write_text("x = 1\n")

    main([str(tmp_path)])

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lines"] == 1
