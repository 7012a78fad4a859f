"""Tests that only show that something is not there: they run last in their region, and count beside passed ones."""

import json
import shutil

import pytest

from common.paths import ROOT
from tests.own.started_processes import run

GRADERS = """
import pytest

graded = pytest.mark.graded

@graded("1.1", absence=True)
def test_nothing_is_imported(): pass

@graded("1.1", weight=2)
def test_the_model_is_loaded(): assert {loaded}

@graded("1.2", absence=True)
def test_nothing_is_sent(): assert {silent}

@graded("1.2", weight=2)
def test_backward_runs(): pass
"""


@pytest.fixture
def grade(tmp_path):
    """Run these graders with the real plugin; returns the report's tests by name, in the order in which they ran."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\npytest_plugins = ['grader.plugin']\n"
    )

    def graded(*words, **values):
        (tmp_path / "test_a.py").write_text(GRADERS.format(**{"loaded": True, "silent": True} | values))
        done = run("-m", "pytest", "-q", "--report", "report.json", *words, "test_a.py", cwd=tmp_path)
        tests = json.loads((tmp_path / "report.json").read_text())["tests"]
        return {test["id"].rpartition("::")[2]: test for test in tests}, done.stdout

    return graded


@pytest.mark.medium
def test_a_test_of_absence_gives_nothing_while_another_test_of_its_region_fails(grade):
    tests, shown = grade(loaded=False)

    assert (tests["test_nothing_is_imported"]["status"], tests["test_nothing_is_imported"]["points"]) == ("skipped", 0)
    assert tests["test_nothing_is_imported"]["message"] == (
        "not counted yet: this test counts only when the other tests of region 1.1 pass; test_the_model_is_loaded has "
        "not passed"
    )
    assert tests["test_nothing_is_sent"]["status"] == "passed", "the other region's tests pass"
    assert "3/6" in shown


@pytest.mark.medium
def test_a_test_of_absence_runs_after_the_others_of_its_region_and_counts_with_them(grade):
    tests, _ = grade()

    assert list(tests) == [
        "test_the_model_is_loaded", "test_nothing_is_imported", "test_backward_runs", "test_nothing_is_sent",
    ]  # fmt: skip
    assert {test["status"] for test in tests.values()} == {"passed"}


@pytest.mark.medium
def test_what_a_test_of_absence_finds_is_said_even_where_it_cannot_count(grade):
    tests, _ = grade(silent=False)

    assert tests["test_nothing_is_sent"]["status"] == "crashed"
    assert tests["test_backward_runs"]["points"] == 2, "and it does not take the other tests' points"


NESTED = """
for micro_batch in range(num_batches):
    for partition in range(num_partitions):
        yield [(micro_batch, partition)]
"""


@pytest.mark.medium
def test_two_nested_loops_name_every_pair_once_and_earn_nothing(tmp_path):
    for folder in ("common", "pipeline"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path, mark = tmp_path / "common/schedule.py", "# {} SOLUTION p.2\n"
    before, _, rest = path.read_text().partition(mark.format("BEGIN"))
    indent = before.rpartition("\n")[2]
    body = "".join(f"{indent}{line}\n" for line in NESTED.strip().splitlines())
    path.write_text(f"{before}\n{body}{rest.partition(mark.format('END'))[2]}")

    run("-m", "pytest", "-q", f"--tree={tmp_path}", "--report", tmp_path / "r.json", "--region", "p.2", "tests/")

    tests = json.loads((tmp_path / "r.json").read_text())["tests"]
    assert len(tests) == 5
    assert {test["status"] for test in tests} == {"skipped", "wrong"}
    assert sum(test["points"] for test in tests) == 0
