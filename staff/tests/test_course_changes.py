"""A course is changed in course.toml alone: handout, graders and READMEs follow."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from common.paths import ROOT
from course.table import load_course
from staff.grade.submissions import clean_files
from staff.handout.assemble import assemble
from staff.tests.handouts import copied

COURSE = load_course()


@pytest.fixture
def tree(tmp_path):
    """A copy of what git tracks, whose course.toml may be changed."""
    return copied(tmp_path)


def change(tree, change_text):
    path = tree / "course.toml"
    path.write_text(change_text(path.read_text(encoding="utf-8")), encoding="utf-8")


def without(text, *headings):
    """The table without some of its sections, such as [tasks.4]."""
    for heading in headings:
        text, count = re.subn(rf"\n\[{re.escape(heading)}\]\n.*?(?=\n\[|\n# )", "\n", text, flags=re.DOTALL)
        assert count == 1, heading
    return text


def rows(path, heading):
    """The cells of the first table under a heading of a README, without its first two lines."""
    section = (ROOT / path).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_tables_of_regions_are_that_of_the_course():
    bonus = str(sum(region.points for region in COURSE.regions.values() if region.task in COURSE.bonus_tasks))
    *table, total, of_bonus = rows("README.md", "Regions and points")
    *of_beyond, sum_of_beyond = rows("beyond/README.md", "The regions")

    assert [total[-1], of_bonus[-1], sum_of_beyond[-1]] == [str(COURSE.total), bonus, bonus]
    documented = [(id, file, points) for id, _, file, points in [*table, *of_beyond]]
    assert documented == [(region.id, region.file, str(region.points)) for region in COURSE.regions.values()]


def test_make_demo_runs_the_same_command_in_the_handout():
    """The README describes one demo to both, so both Makefiles must run it."""
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in ("Makefile", "staff/handout/files/Makefile")]

    one, other = (re.findall(r"^demo: setup\n\t(.*)$", text, re.MULTILINE) for text in texts)
    assert one and one == other


@pytest.mark.medium
def test_points_that_are_exchanged_are_those_of_the_handout_and_of_its_graders(tree):
    def exchange(text):  # 100 points in all, as before
        for region, before, after in (("1.2", 3, 5), ("1.3", 4, 2)):
            head, section, tail = text.partition(f'[regions."{region}"]')
            text = head + section + tail.replace(f"points = {before}", f"points = {after}", 1)
        return text

    change(tree, exchange)

    readme = assemble(tree).files["README.md"].decode()
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "task1", "--report", "report.json"]
    subprocess.run(collect, cwd=tree, capture_output=True, check=True)

    assert "| 1.2 | backward | task1_single/run_glue.py | 5 |" in readme
    most = Counter[str]()
    for test in json.loads((tree / "report.json").read_text())["tests"]:
        most[test["region"]] += test["max_points"]
    assert most == {"1.1": 3, "1.2": 5, "1.3": 2, "1.4": 3}


@pytest.mark.medium
def test_without_task_4_the_pipeline_and_the_bonus_neither_folders_nor_tests_nor_rows_ship(tree):
    dropped = {id for id, row in COURSE.regions.items() if row.task in ("4", "p", "b")}
    rest = 100 - sum(row.points for row in COURSE.regions.values() if row.task in ("4", "p"))

    def drop(text):
        text = without(text, "tasks.4", "tasks.p", "tasks.b", *[f'regions."{id}"' for id in dropped])
        return text.replace("total = 100 ", f"total = {rest} ").replace("bonus = 50 ", "bonus = 0 ")

    change(tree, drop)

    handout = assemble(tree)

    assert "\n".join(handout.problems) == ""
    assert set(handout.given_solved) <= dropped and "p.2" in handout.given_solved  # its file belongs to common/
    assert not [name for name in handout.files if re.match(r"(tests/)?(task4\w*|pipeline|beyond)/", name)]
    schedule = handout.files["common/schedule.py"].decode()
    assert "TODO" not in schedule and "NotImplementedError" not in schedule
    assert clean_files(tree)["common/schedule.py"].decode() == schedule  # the graders lay hand-ins over the same
    table = handout.files["README.md"].decode().split("## Regions and points")[1]
    assert "| 4.1 |" not in table and "| p.1 |" not in table and "b.16" not in table.split("\n## ")[0]
    assert f"| | total | | {rest} |" in table


def test_a_region_without_a_test_is_named(tree):
    change(tree, lambda text: text.replace('[regions."1.2"]', '[regions."1.9"]').replace('"1.2"', '"1.9"'))

    problems = assemble(tree).problems

    assert any("region 1.9 has no graded test in tests/" in problem for problem in problems)
