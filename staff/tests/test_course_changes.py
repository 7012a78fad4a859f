"""A course is changed in course.toml alone: handout, graders and READMEs follow."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.handout.assemble import assemble


@pytest.fixture
def tree(tmp_path):
    """A copy of what git tracks, whose course.toml may be changed."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file() and not name.startswith(("benchmark/", "tests/own/", "docs/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def change(tree, change_text):
    path = tree / "course.toml"
    path.write_text(change_text(path.read_text(encoding="utf-8")), encoding="utf-8")


def without(text, *headings):
    """The table without some of its sections, such as [tasks.4]."""
    for heading in headings:
        text, count = re.subn(rf"\n\[{re.escape(heading)}\]\n.*?(?=\n\[|\n# )", "\n", text, flags=re.DOTALL)
        assert count == 1, heading
    return text


def with_points(text, **points):
    for region, number in points.items():
        heading = f'[regions."{region.replace("_", ".")}"]'
        begin = text.index(heading)
        text = text[:begin] + re.sub(r"points = \d+", f"points = {number}", text[begin:], count=1)
    return text


@pytest.mark.medium
def test_points_that_are_exchanged_are_those_of_the_handout_and_of_its_graders(tree):
    change(tree, lambda text: with_points(text, **{"1.2": 5, "1.3": 2}))  # 3 and 4 before: 100 in all

    readme = assemble(tree).files["README.md"].decode()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "task1", "--report", tree / "report.json"],
        cwd=tree, capture_output=True, text=True,
    )  # fmt: skip

    assert "| 1.2 | backward | task1_single/run_glue.py | 5 |" in readme
    assert "| 1.3 | optimizer step | task1_single/run_glue.py | 2 |" in readme
    tests = json.loads((tree / "report.json").read_text())["tests"]
    most = {
        id: sum(test["max_points"] for test in tests if test["region"] == id) for id in ("1.1", "1.2", "1.3", "1.4")
    }
    assert most == {"1.1": 3, "1.2": 5, "1.3": 2, "1.4": 3}, done.stdout


@pytest.mark.medium
def test_without_task_4_the_pipeline_and_the_bonus_neither_folders_nor_tests_nor_rows_ship(tree):
    dropped = {id for id, row in load_course().regions.items() if row.task in ("4", "p", "b")}
    rest = 100 - sum(row.points for id, row in load_course().regions.items() if row.task in ("4", "p"))

    def drop(text):
        text = without(text, "tasks.4", "tasks.p", "tasks.b", *[f'regions."{id}"' for id in dropped])
        return text.replace("total = 100 ", f"total = {rest} ").replace("bonus = 50 ", "bonus = 0 ")

    change(tree, drop)

    handout = assemble(tree)

    assert "\n".join(handout.problems) == ""
    assert set(handout.given) <= dropped and "p.2" in handout.given  # its file belongs to common/
    assert not [
        name for name in handout.files if re.match(r"(task4_traffic|pipeline|beyond)/|tests/(task4|beyond)/", name)
    ]
    schedule = handout.files["common/schedule.py"].decode()
    assert "TODO" not in schedule and "NotImplementedError" not in schedule
    table = handout.files["README.md"].decode().split("## Regions and points")[1]
    assert "| 4.1 |" not in table and "| p.1 |" not in table and "b.16" not in table.split("\n## ")[0]
    assert f"| | total | | {rest} |" in table


def test_a_region_without_a_test_is_named(tree):
    change(tree, lambda text: text.replace('[regions."1.2"]', '[regions."1.9"]').replace('"1.2"', '"1.9"'))

    problems = assemble(tree).problems

    assert any("region 1.9 has no graded test in tests/" in problem for problem in problems)
